"""No drafting: every draft is empty, and decoding is plain."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Limit


@dataclass(frozen=True, slots=True)
class Options:
    """None."""


class NoDrafter(Drafter):
    free = True
    max_depth = 0

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [NO_DRAFT for _ in seqs]


def build(options: Options, target: Target, source: DraftSource | None) -> NoDrafter:
    return NoDrafter()
