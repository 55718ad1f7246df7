"""Prompt lookup: propose what followed the last few tokens when they stood in the prompt or output before.

Source: Saxena, "Prompt Lookup Decoding", 2023. Here every run that ends the text counts, the longest most: each says what
followed it before, and how often, and so how far to trust a token. Looked up anew after each proposed one. The estimate is
that of text compression by partial matching (Cleary and Witten 1984), with one constant for what is seen for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Limit


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


DOUBT = 5.0
"""What a shorter run says counts as so many sightings after a longer one. By this a token seen once, alone, after a run of 1,
2, 4 or 8 tokens is right in 17, 31, 52 or 77 of 100 cases; what else a request is like is the governor's to learn."""
LATEST = 16
"""Places of a pair of tokens that are looked at."""


class _Index:
    """What followed each token, how often, and where each pair of tokens stood."""

    def __init__(self) -> None:
        self.size = 0
        self.after: dict[int, dict[int, int]] = {}  # the latest follower last
        self.seen: dict[int, int] = {}  # followers in all
        self.places: dict[tuple[int, int], list[int]] = {}  # of the token after the pair

    def grow(self, tokens: list[int]) -> None:
        """Take in the tokens appended since the last call."""
        for place in range(max(self.size, 1), len(tokens)):
            last, token = tokens[place - 1], tokens[place]
            after = self.after.setdefault(last, {})
            after[token] = after.pop(token, 0) + 1
            self.seen[last] = self.seen.get(last, 0) + 1
            if place > 1:
                self.places.setdefault((tokens[place - 2], last), []).append(place)
        self.size = len(tokens)

    def guess(self, tokens: list[int], end: list[int], shortest: int, longest: int) -> tuple[int, float] | None:
        """The likeliest token after `end`, which goes on from `tokens`, and its chance; None where nothing stood before it.

        Each run that ends `end` and stood earlier, from one token up to `longest`, corrects what the shorter ones say by
        what followed it.
        """
        after = self.after.get(end[-1])
        if after is None:
            return None
        whole = self.seen[end[-1]] + DOUBT
        places = self.places.get((end[-2], end[-1])) if longest > 1 and len(end) > 1 else None
        if not places:
            token = max(reversed(after), key=after.__getitem__)
            return (token, after[token] / whole) if shortest < 2 else None
        runs = [(_run(tokens, place, end, longest), tokens[place]) for place in places[-LATEST:]]
        deepest, _ = max(runs)
        if deepest < shortest:
            return None
        best, most = -1, 0.0
        for token in dict.fromkeys(token for _, token in reversed(runs)):
            chance = after[token] / whole
            for length in range(2, deepest + 1):
                followers = [follower for run, follower in runs if run >= length]
                chance = (followers.count(token) + DOUBT * chance) / (len(followers) + DOUBT)
            if chance > most:
                best, most = token, chance
        return best, most


def _run(tokens: list[int], place: int, end: list[int], longest: int) -> int:
    """How many tokens before `place`, two at least, are the last ones of `end`."""
    longest, length = min(longest, place, len(end)), 2
    while length < longest and tokens[place - 1 - length] == end[-1 - length]:
        length += 1
    return length


class NgramDrafter(Drafter):
    """Prompt lookup over prompt and output of each request."""

    free = True

    def __init__(self, *, max_ngram: int = 8, min_ngram: int = 1, max_tokens: int = 16) -> None:
        self.max_ngram, self.min_ngram, self.max_depth = max_ngram, min_ngram, max_tokens
        self._indices: dict[int, _Index] = {}

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: Limit) -> Draft:
        index = self._indices.setdefault(seq.id, _Index())
        index.grow(seq.tokens)
        most = min(limit.nodes, limit.depth, self.max_depth)
        end, chance = seq.tokens[-self.max_ngram :], 1.0
        known = len(end)
        survival: list[float] = []
        while len(survival) < most and chance >= limit.node_price:
            guess = index.guess(seq.tokens, end, self.min_ngram, self.max_ngram)
            if guess is None:
                break
            token, right = guess
            chance *= right
            survival.append(chance)
            end.append(token)
        return Draft.chain(end[known:], survival=survival) if survival else NO_DRAFT

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq.id, None)


def build(options: Options, target: Target, source: DraftSource | None) -> NgramDrafter:
    return NgramDrafter(max_ngram=options.max_ngram, min_ngram=options.min_ngram, max_tokens=options.max_tokens)
