"""How often drafts were right: by drafter, request and depth, and by what they say of themselves.

Knows drafts and the tokens that came; knows nothing of costs. What a request taught leans on what all requests taught, which
is where a new one starts. A draft need not have been verified: the emitted tokens tell what would have come of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from draftwise.drafters.averages import Rates, level
from draftwise.drafters.base import Drafter
from draftwise.engine.merge import Merged
from draftwise.sequence import Sequence
from draftwise.types import Draft

STRETCHES = (1, 2, 4, 8)  # last depths of those between which survivals are equally to be believed
DEPTHS = 4  # acceptance is learnt for each depth up to this one, and together for all below
TOGETHER = -1  # stands before the drafters of a node where several drafts were merged
IDLE = 0.98  # share of what is known of a request's drafter that outlasts a step in which it is not asked


class Level(NamedTuple):
    """What to expect of a drafter at a depth: the chance that it is right down to there, and the nodes it has there."""

    chance: float
    nodes: float


@dataclass(slots=True, eq=False)
class _Known:
    """What one request taught."""

    right: Rates  # by drafter and depth: how often the node there was, once those above it were
    nodes: Rates  # by drafter and depth: how many there were
    sayings: Rates  # by drafter or drafters, stretch of depths and the survival they gave: how often that came true
    last: dict[int, bool] = field(default_factory=dict)  # by drafter that was asked in the last step: whether it began right


class Experience:
    """What came of drafts so far. Drafters go by their place among the engine's.

    guesses: by place the acceptance of a drafter's first token to begin with.
    """

    def __init__(self) -> None:
        self.guesses = defaultdict[int, float](lambda: Drafter.acceptance)
        self._all = _Known(Rates(weight=4.0, forget=0.98), Rates(forget=0.98), Rates(weight=8.0, forget=0.995))
        self._known: dict[int, _Known] = {}
        self._said = Rates(weight=2.0, forget=0.9)
        self._estimates = Rates(weight=20.0, forget=0.998)
        self._runs = Rates(weight=20.0, forget=0.998)
        self._apart = Rates(weight=20.0, forget=0.998)

    def outlook(self, place: int, seq: Sequence, depth: int) -> Iterator[Level]:
        """What to expect by depth of a draft that is not made yet."""
        known = self._of(seq)
        chance, right, nodes = self._run(place, known), self.guesses[place], 1.0
        for k in range(depth):
            right = known.right.rate((place, min(k, DEPTHS)), right)
            nodes = known.nodes.rate((place, min(k, DEPTHS)), nodes)
            chance = min(chance * right, 1.0)
            yield Level(chance, nodes)

    def _run(self, place: int, known: _Known) -> float:
        """How much likelier than on average it is to begin right, after what came of it last: right guesses come in runs."""
        right, said = (self._runs.rate((what, place, known.last.get(place)), 0.5) for what in ("right", "said"))
        return right / said

    def where_others_err(self, place: int) -> float:
        """How much likelier a drafter is to begin right where all others that drafted are wrong: less, since what is hard for
        one is hard for another."""
        right, said = (self._apart.rate((what, place), 0.5) for what in ("right", "said"))
        return min(right / said, 1.0)

    def learn_apart(self, place: int, seq: Sequence, right: bool) -> None:
        """Take in whether it began right in a step in which the others did not."""
        self._apart.learn(("right", place), float(right))
        self._apart.learn(("said", place), self._of(seq).right.rate((place, 0), self.guesses[place]))

    def chances(self, place: int, seq: Sequence, draft: Draft) -> list[float]:
        """Per node of a draft the chance that it is accepted: what it says, corrected by what came of such sayings."""
        if draft.survival is None:
            depths = draft.depths()
            outlook = list(self.outlook(place, seq, max(depths, default=0)))
            return [outlook[depth - 1].chance / depths.count(depth) for depth in depths]
        return self._believed(seq, draft, [(place,)] * len(draft))

    def together(self, seq: Sequence, merged: Merged) -> list[float]:
        """The same for drafts that were merged: what drafters say where others speak too is worth something else."""
        return self._believed(seq, merged.draft, [(TOGETHER, *who) for who in merged.sources])

    def sober(self, draft: Draft) -> list[float]:
        """Estimates per node, as estimates like them came true: what few observations promise most is promised too much."""
        assert draft.survival is not None
        chances: list[float] = []
        for chance, depth, parent in zip(draft.survival, draft.depths(), draft.parents, strict=True):
            kind = _kind((), depth, chance)
            right, said = (self._estimates.rate((what, kind), chance) for what in ("right", "said"))
            chance = min(chance * right / said, 1.0) if said > 0 else chance
            chances.append(min(chance, chances[parent]) if parent >= 0 else chance)
        return chances

    def learn_estimates(self, draft: Draft, verified: Draft, emitted: Seq[int]) -> None:
        """Take in what came of estimates, before `sober`."""
        assert draft.survival is not None
        path, depths = draft.follow(emitted), draft.depths()
        for node in _decided(draft, verified):
            chance = draft.survival[node]
            kind = _kind((), depths[node], chance)
            self._estimates.learn(("right", kind), node in path)
            self._estimates.learn(("said", kind), chance)

    def _believed(self, seq: Sequence, draft: Draft, sources: Seq[tuple[int, ...]]) -> list[float]:
        assert draft.survival is not None
        rates, chances = self._of(seq).sayings, list[float]()
        for who, saying, depth, parent in zip(sources, draft.survival, draft.depths(), draft.parents, strict=True):
            chance = rates.rate(_kind(who, depth, saying), saying)
            chances.append(min(chance, chances[parent]) if parent >= 0 else chance)
        return chances

    def tokens_left(self, seq: Sequence) -> float:
        """How much a request may still say, as requests do, and some way on where it said that much already."""
        said = len(seq.tokens) - seq.prompt_length
        return max(min(max(self._said.rate("tokens", 256.0) - said, 64.0), seq.room), 1.0)

    def learn(
        self, place: int, seq: Sequence, draft: Draft, verified: Draft, asked: int | None, emitted: Seq[int]
    ) -> bool:
        """Take in what came of a draft, of which `asked` levels were asked for; None: it came unasked, for nothing.

        verified: what the pass verified, of this draft and others. Returns whether the draft's first token was right.
        """
        known, path = self._of(seq), draft.follow(emitted)
        if draft.survival is not None:
            self._learn_sayings(known, draft, [(place,)] * len(draft), verified, path)
        if draft.survival is None or asked is not None:
            self._learn_depths(place, known, draft, asked, len(path), len(emitted))
        return bool(path)

    def learn_together(self, seq: Sequence, merged: Merged, verified: Draft, emitted: Seq[int]) -> None:
        """Take in what came of drafts that were merged, with what they said together."""
        sources = [(TOGETHER, *who) for who in merged.sources]
        self._learn_sayings(self._of(seq), merged.draft, sources, verified, merged.draft.follow(emitted))

    def _learn_sayings(
        self, known: _Known, draft: Draft, sources: Seq[tuple[int, ...]], verified: Draft, path: Seq[int]
    ) -> None:
        assert draft.survival is not None
        depths = draft.depths()
        for node in _decided(draft, verified):
            known.sayings.learn(_kind(sources[node], depths[node], draft.survival[node]), node in path)

    def _learn_depths(self, place: int, known: _Known, draft: Draft, asked: int | None, right: int, reached: int) -> None:
        """A draft that ended early, being unsure, counts as wrong there, and as having no node below."""
        depths = draft.depths()
        deepest = max(depths, default=0) if asked is None else asked
        if deepest and reached:
            said = known.right.rate((place, 0), self.guesses[place])
            for what, value in (("right", float(right > 0)), ("said", said)):
                self._runs.learn((what, place, known.last.get(place)), value)
            known.last[place] = right > 0
        for k in range(deepest):
            known.nodes.learn((place, min(k, DEPTHS)), depths.count(k + 1))
            if k <= right and k < reached:
                known.right.learn((place, min(k, DEPTHS)), k < right)
        for k in range(deepest, DEPTHS + 1):  # what was not tried for long is taken to be like the depth above
            known.right.fade((place, k))
            self._all.right.fade((place, k))

    def passed_over(self, place: int, seq: Sequence) -> None:
        """A drafter was not asked: what the request taught of it ages."""
        known = self._of(seq)
        known.right.fade((place, 0), IDLE)
        known.last.pop(place, None)

    def forget(self, seq: Sequence) -> None:
        """The request ended."""
        if self._known.pop(seq.id, None) is not None:
            self._said.learn("tokens", len(seq.tokens) - seq.prompt_length)

    def _of(self, seq: Sequence) -> _Known:
        if seq.id not in self._known:
            self._known[seq.id] = _Known(
                Rates(self._all.right, weight=3.0, forget=0.98, alert=0.9),
                Rates(self._all.nodes, forget=0.95),
                Rates(self._all.sayings, weight=8.0, forget=0.98),
            )
        return self._known[seq.id]


def _decided(draft: Draft, verified: Draft) -> list[int]:
    """The nodes of which a pass tells whatever comes of it: those that were verified, and those just below them.

    Others are found wrong where a text parts from the draft early, but never right: counting them would be unfair.
    """
    at = {(parent, token): node for node, (parent, token) in enumerate(zip(verified.parents, verified.tokens, strict=True))}
    places, decided = {-1: -1}, []  # of nodes among the verified ones
    for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        if parent in places:
            decided.append(node)
            if (key := (places[parent], token)) in at:
                places[node] = at[key]
    return decided


def _kind(who: tuple[int, ...], depth: int, saying: float) -> tuple[object, ...]:
    """Nodes alike in how far their drafters are to be believed: they may be right about single tokens and not about runs."""
    return who, bisect_left(STRETCHES, depth), level(saying)
