"""What a draft is worth when it is served: tokens a pass, measured with the engine itself on prompts never trained on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

from draftwise.engine.llm import LLM

TEMPERATURES = (0.0, 0.8)


class Served(NamedTuple):
    """Tokens a pass of the target at each of TEMPERATURES, and the same for accepted tokens at depth one."""

    tokens_per_step: tuple[float, ...]
    first: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.tokens_per_step) / len(self.tokens_per_step)


def measure_served(
    llm: LLM, drafter: str, folder: Path, prompts: Seq[Seq[int]], *, max_tokens: int = 64, draft_tokens: int = 4
) -> Served:
    """Answer prompts with the draft of a folder, a chain of `draft_tokens` a step."""
    drafted = llm.using(f"{drafter}:{folder}", draft_tokens=draft_tokens)
    pooled = [
        LLM.pool(drafted.generate([list(prompt) for prompt in prompts], max_tokens=max_tokens, temperature=t, seed=1))
        for t in TEMPERATURES
    ]
    first = tuple((stats.conditional_acceptance or [0.0])[0] for stats in pooled)
    return Served(tuple(stats.tokens_per_step for stats in pooled), first)
