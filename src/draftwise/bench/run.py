"""Drafters side by side: every prompt is decoded plainly and with each drafter in turn, so that all meet the same machine.

Sees the public names only. Figures come from `Stats`, pooled as ratios of sums; none is worked out here. A journal keeps
answers as they come, so that a benchmark that was cut short goes on where it stood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwise.bench.workloads import Prompt

if TYPE_CHECKING:
    from draftwise import LLM, Stats

WARM_UP = "Write the numbers from one to twenty, one after another, as words."


class Setting(NamedTuple):
    """A drafter and its options."""

    drafter: str
    options: Mapping[str, str]


PLAIN = Setting("none", {})


class Answer(NamedTuple):
    """What one setting made of one prompt, by the prompt's place among all."""

    prompt: int
    category: str
    tokens: tuple[int, ...]
    stats: Stats


@dataclass(slots=True)
class Run:
    """What one setting did, prompt by prompt."""

    setting: Setting
    answers: list[Answer] = field(default_factory=list)

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(answer.category for answer in self.answers))

    @property
    def stats(self) -> Stats:
        return pooled([answer.stats for answer in self.answers])

    def by_prompt(self, category: str | None = None) -> dict[int, Stats]:
        """The figures of each prompt over all repeats, of one category or of all."""
        groups: dict[int, list[Stats]] = {}
        for answer in self.answers:
            if category in (None, answer.category):
                groups.setdefault(answer.prompt, []).append(answer.stats)
        return {prompt: pooled(all_stats) for prompt, all_stats in groups.items()}


def pooled(all_stats: Sequence[Stats]) -> Stats:
    first, *others = all_stats
    return sum(others, start=first)


class Journal:
    """Answers in a file of JSON lines, by repeat, group of prompts and setting; its first line names the benchmark.

    Raises ValueError where the file holds another benchmark's, or none. A last line cut short is dropped.
    """

    def __init__(self, path: Path, benchmark: Mapping[str, Any]) -> None:
        from draftwise import Stats

        self.path = path
        self._held: dict[tuple[int, int, int], list[Answer]] = {}
        header = json.dumps(benchmark, sort_keys=True).encode() + b"\n"
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if not (whole.startswith(header) or header.startswith(content)):
            raise ValueError(f"{path}: holds another benchmark, or none; name another file, or delete it")
        with open(path, "ab") as file:  # what it holds is never written again, so that no cut can lose it
            file.truncate(len(whole))
            file.write(b"" if whole else header)
        for line in whole.splitlines()[1:]:
            row = json.loads(line)
            self._held[row["repeat"], row["group"], row["setting"]] = [
                Answer(prompt, category, tuple(tokens), Stats(**stats)) for prompt, category, tokens, stats in row["answers"]
            ]

    def held(self, repeat: int, group: int, setting: int) -> list[Answer] | None:
        return self._held.get((repeat, group, setting))

    def add(self, repeat: int, group: int, setting: int, answers: Sequence[Answer]) -> None:
        rows = [(answer.prompt, answer.category, answer.tokens, asdict(answer.stats)) for answer in answers]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"repeat": repeat, "group": group, "setting": setting, "answers": rows}) + "\n")


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
    journal: Journal | None = None,
    progress: Callable[[], None] = lambda: None,
    **generate: Any,
) -> list[Run]:
    """Decode every prompt with plain decoding and with each setting; the first run returned is the plain control.

    The order turns with every group of `batch` prompts, so that none is always first. Each repeat builds its drafters
    anew: one that remembers earlier requests must not meet its own output again. `drafting` goes to LLM.using (how much
    to draft, and the draft's weights), `generate` to LLM.generate. What `journal` holds is not done again.
    """
    runs = [Run(setting) for setting in (PLAIN, *settings)]
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    for again in range(repeat):
        engines = [llm.using(run.setting.drafter, options=run.setting.options, **drafting or {}) for run in runs]
        for engine in engines:
            engine.generate([WARM_UP], **generate)
        for turn, group in enumerate(groups):
            for index in _rotated(len(runs), turn + again):
                answers = journal.held(again, turn, index) if journal else None
                if answers is None:
                    results = engines[index].generate([prompt.text for prompt in group], **generate)
                    answers = [
                        Answer(turn * batch + i, prompt.category, result.tokens, result.stats)
                        for i, (prompt, result) in enumerate(zip(group, results, strict=True))
                    ]
                    if journal:
                        journal.add(again, turn, index, answers)
                runs[index].answers += answers
                progress()
    return runs


def _rotated(count: int, by: int) -> list[int]:
    return [(i + by) % count for i in range(count)]


def first_difference(runs: Sequence[Run]) -> Difference | None:
    """Where the first run that differs from the plain one, runs[0], does so first; None where all say the same."""
    for run in runs[1:]:
        for plain, drafted in zip(runs[0].answers, run.answers, strict=True):
            if plain.tokens != drafted.tokens:
                pairs = enumerate(zip_longest(plain.tokens, drafted.tokens))
                at, (expected, found) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
                return Difference(run.setting.drafter, drafted.prompt, at, expected, found)
    return None

