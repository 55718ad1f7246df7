"""Drafters side by side: every prompt is decoded plainly and with each drafter in turn, so that all meet the same machine.

Sees the public names only. Figures come from `Stats`, pooled as ratios of sums; none is worked out here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwise.bench.workloads import Prompt

if TYPE_CHECKING:
    from draftwise import LLM, Result, Stats

WARM_UP = "Write the numbers from one to twenty, one after another, as words."


class Setting(NamedTuple):
    """A drafter and its options."""

    drafter: str
    options: Mapping[str, str]


PLAIN = Setting("none", {})


@dataclass(slots=True)
class Run:
    """What one setting did: its pooled figures by category, and the tokens of every prompt in order."""

    setting: Setting
    by_category: dict[str, Stats] = field(default_factory=dict)
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def stats(self) -> Stats:
        first, *others = self.by_category.values()
        return sum(others, start=first)

    def add(self, category: str, result: Result) -> None:
        so_far = self.by_category.get(category)
        self.by_category[category] = result.stats if so_far is None else so_far + result.stats
        self.tokens.append(result.tokens)


class Difference(NamedTuple):
    """Where a drafter's output first parts from plain decoding. A token is None where that output had ended."""

    drafter: str
    prompt: int
    position: int
    plain: int | None
    drafted: int | None


def side_by_side(
    llm: LLM,
    settings: Sequence[Setting],
    prompts: Sequence[Prompt],
    *,
    batch: int = 1,
    repeat: int = 1,
    drafting: Mapping[str, Any] | None = None,
    progress: Callable[[], None] = lambda: None,
    **generate: Any,
) -> list[Run]:
    """Decode every prompt with plain decoding and with each setting; the first run returned is the plain control.

    The order turns with every group of `batch` prompts, so that none is always first. Each repeat builds its drafters
    anew: one that remembers earlier requests must not meet its own output again. `drafting` goes to LLM.using (how much
    to draft, and the draft's weights), `generate` to LLM.generate.
    """
    runs = [Run(setting) for setting in (PLAIN, *settings)]
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    for again in range(repeat):
        engines = [llm.using(run.setting.drafter, options=run.setting.options, **drafting or {}) for run in runs]
        for engine in engines:
            engine.generate([WARM_UP], **generate)
        for turn, group in enumerate(groups, again):
            for index in (*range(turn % len(runs), len(runs)), *range(turn % len(runs))):
                results = engines[index].generate([prompt.text for prompt in group], **generate)
                for prompt, result in zip(group, results, strict=True):
                    runs[index].add(prompt.category, result)
                progress()
    return runs


def first_difference(runs: Sequence[Run]) -> Difference | None:
    """Where the first run that differs from the plain one, runs[0], does so first; None where all say the same."""
    for run in runs[1:]:
        for index, (plain, drafted) in enumerate(zip(runs[0].tokens, run.tokens, strict=True)):
            if plain != drafted:
                pairs = enumerate(zip_longest(plain, drafted))
                at, (expected, found) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
                return Difference(run.setting.drafter, index, at, expected, found)
    return None

