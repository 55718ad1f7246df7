"""Prompt lookup: propose what followed the last few tokens when they stood in the prompt or output before.

Source: Saxena, "Prompt Lookup Decoding", 2023. Here the longest match counts, of what followed it the most frequent and then
the most recent token, looked up anew after each proposed one; the length of the match says how far to trust it.
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
    """What followed each short run of tokens: how often, and where last."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.size = 0
        self.after: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}

    def grow(self, tokens: list[int]) -> None:
        """Take in the tokens appended since the last call."""
        for place in range(max(self.size, 1), len(tokens)):
            token = tokens[place]
            for length in range(1, min(self.longest, place) + 1):
                seen = self.after.setdefault(tuple(tokens[place - length : place]), {})
                seen[token] = (seen.get(token, (0, 0))[0] + 1, place)
        self.size = len(tokens)

    def follow(self, context: list[int], shortest: int) -> tuple[int, int, bool] | None:
        """After the longest run that ends `context` and stood earlier: its length, the token that followed it most often,
        the latest where several did, and whether nothing else ever did."""
        for length in range(min(self.longest, len(context)), shortest - 1, -1):
            seen = self.after.get(tuple(context[len(context) - length :]))
            if seen:
                return length, max(seen, key=seen.__getitem__), len(seen) == 1
        return None


TRUST = (0.25, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
"""How often a proposed token is right by the length of the match before it: a guess, which a handful of trials outweighs."""
LEAST = 0.02
"""A chain ends where it would survive more seldom: no row of a pass is that cheap."""


@dataclass(slots=True)
class _State:
    index: _Index
    trust: Rates
    proposed: list[int] = field(default_factory=list)
    classes: list[tuple[int, bool, int]] = field(default_factory=list)  # of the proposed tokens, alike in trust


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
        state.proposed, state.classes, survival, chance = [], [], [], 1.0
        context = seq.tokens[-self.max_ngram :]
        while len(state.proposed) < most and chance >= LEAST:
            found = state.index.follow(context, self.min_ngram)
            if found is None:
                break
            match, token, alone = found
            state.classes.append((match, alone, min(len(state.proposed), 3)))
            chance *= state.trust.rate(state.classes[-1], TRUST[min(match, len(TRUST)) - 1])
            survival.append(chance)
            state.proposed.append(token)
            context = [*context, token][-self.max_ngram :]
        return Draft.chain(state.proposed, survival=survival) if state.proposed else NO_DRAFT

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        state = self._states.get(seq.id)
        if state is None:
            return
        # what was emitted tells whether a token was right, verified or not
        for token, kind, emitted in zip(state.proposed, state.classes, outcome.emitted, strict=False):
            state.trust.learn(kind, token == emitted)
            if token != emitted:
                break
        state.proposed = []

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)


def build(options: Options, target: Target, source: DraftSource | None) -> NgramDrafter:
    return NgramDrafter(max_ngram=options.max_ngram, min_ngram=options.min_ngram, max_tokens=options.max_tokens)
