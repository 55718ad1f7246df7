"""Prompt lookup: propose what followed the last few tokens when they stood in the prompt or output before.

Source: Saxena, "Prompt Lookup Decoding", 2023. Here the longest and then the most recent match counts, and the length of
the match says how far to trust it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draftwise.drafters.averages import Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Limit, Outcome


@dataclass(frozen=True, slots=True)
class Options:
    """Options of prompt lookup."""

    max_ngram: int = field(default=8, metadata={"help": "longest run of last tokens that is looked up"})
    min_ngram: int = field(default=1, metadata={"help": "shortest match that is used"})
    max_tokens: int = field(default=16, metadata={"help": "most tokens to propose"})

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"ngram needs 1 <= min_ngram <= max_ngram; they are {self.min_ngram} and {self.max_ngram}")
        if self.max_tokens < 1:
            raise ValueError(f"ngram's max_tokens is {self.max_tokens}; it must be at least 1")


class _Index:
    """Where each short run of tokens stood last, and where it stood before that."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.size = 0
        self.ends: dict[tuple[int, ...], int] = {}
        self.earlier: dict[tuple[int, ...], int] = {}

    def grow(self, tokens: list[int]) -> None:
        """Take in the tokens appended since the last call."""
        for end in range(self.size + 1, len(tokens) + 1):
            for length in range(1, min(self.longest, end) + 1):
                run = tuple(tokens[end - length : end])
                if run in self.ends:
                    self.earlier[run] = self.ends[run]
                self.ends[run] = end
        self.size = len(tokens)

    def match(self, tokens: list[int], shortest: int) -> tuple[int, int] | None:
        """Length and end of the longest run that ends the text and stood earlier; the most recent place of it."""
        for length in range(min(self.longest, len(tokens) - 1), shortest - 1, -1):
            end = self.earlier.get(tuple(tokens[len(tokens) - length :]))
            if end is not None:
                return length, end
        return None


TRUST = (0.25, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
"""How often a proposed token is right by the length of the match before it, its accepted predecessors included: a guess,
which a handful of trials outweighs."""


@dataclass(slots=True)
class _State:
    index: _Index
    trust: Rates
    match: int = 0  # of the last proposal
    proposed: list[int] = field(default_factory=list)


class NgramDrafter(Drafter):
    """Prompt lookup over prompt and output of each request."""

    free = True

    def __init__(self, *, max_ngram: int = 8, min_ngram: int = 1, max_tokens: int = 16) -> None:
        self.max_ngram, self.min_ngram, self.max_depth = max_ngram, min_ngram, max_tokens
        self._trust = Rates(weight=6.0, forget=0.995)  # of all sequences
        self._states: dict[int, _State] = {}

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: Limit) -> Draft:
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = _State(_Index(self.max_ngram), Rates(self._trust, weight=4.0, forget=0.98))
        state.index.grow(seq.tokens)
        most = min(limit.nodes, limit.depth, self.max_depth)
        found = state.index.match(seq.tokens, self.min_ngram) if most > 0 else None
        if found is None:
            state.proposed = []
            return NO_DRAFT
        state.match, end = found
        period = len(seq.tokens) - end
        # a continuation that reaches the end of the text goes on as a loop of that period
        state.proposed = [seq.tokens[end + i % period] for i in range(most)]
        survival, chance = [], 1.0
        for depth in range(most):
            place = self._place(state.match + depth)
            chance *= state.trust.rate(place, TRUST[place])
            survival.append(chance)
        return Draft.chain(state.proposed, survival=survival)

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        state = self._states.get(seq.id)
        if state is None:
            return
        # what was emitted tells whether a token was right, verified or not
        for depth, (token, emitted) in enumerate(zip(state.proposed, outcome.emitted, strict=False)):
            state.trust.learn(self._place(state.match + depth), token == emitted)
            if token != emitted:
                break
        state.proposed = []

    def _place(self, match: int) -> int:
        return min(match, len(TRUST)) - 1

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)


def build(options: Options, target: Target, source: DraftSource | None) -> NgramDrafter:
    return NgramDrafter(max_ngram=options.max_ngram, min_ngram=options.min_ngram, max_tokens=options.max_tokens)
