"""How often drafts were right: by drafter, request and depth, and by what they say of themselves.

Knows drafts and the tokens that came; knows nothing of costs. What a request taught leans on what all requests taught, which
is where a new one starts. A draft need not have been verified: the emitted tokens tell what would have come of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from draftwise.drafters.averages import Rates, level
from draftwise.sequence import Sequence
from draftwise.types import Draft

GUESS = 0.6  # acceptance of a drafter of which nothing is known
DEPTHS = 4  # acceptance is learnt for each depth up to this one, and together for all below
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
    sayings: Rates  # by drafter and what it said: how often that came true


class Experience:
    """What came of drafts so far. Drafters go by their place among the engine's."""

    def __init__(self) -> None:
        self._all = _Known(Rates(weight=4.0, forget=0.98), Rates(forget=0.98), Rates(weight=8.0, forget=0.995))
        self._known: dict[int, _Known] = {}
        self._said = Rates(weight=2.0, forget=0.9)

    def outlook(self, place: int, seq: Sequence, depth: int) -> list[Level]:
        """What to expect by depth of a draft that is not made yet."""
        known = self._of(seq)
        outlook, chance, right, nodes = [], 1.0, GUESS, 1.0
        for k in range(depth):
            right = known.right.rate((place, min(k, DEPTHS)), right)
            nodes = known.nodes.rate((place, min(k, DEPTHS)), nodes)
            chance *= right
            outlook.append(Level(chance, nodes))
        return outlook

    def chances(self, place: int, seq: Sequence, draft: Draft) -> list[float]:
        """Per node of a draft the chance that it is accepted: what it says, corrected by what came of such sayings."""
        chances: list[float] = []
        if draft.survival is None:
            depths = draft.depths()
            outlook = self.outlook(place, seq, max(depths, default=0))
            return [outlook[depth - 1].chance / depths.count(depth) for depth in depths]
        rates = self._of(seq).sayings
        for saying, parent in zip(_sayings(draft.survival, draft), draft.parents, strict=True):
            above = chances[parent] if parent >= 0 else 1.0
            chances.append(above * rates.rate((place, level(saying)), saying))
        return chances

    def tokens_left(self, seq: Sequence) -> float:
        """How much a request may still say, as requests do, and some way on where it said that much already."""
        said = len(seq.tokens) - seq.prompt_length
        return max(min(max(self._said.rate("tokens", 256.0) - said, 64.0), seq.room), 1.0)

    def learn(self, place: int, seq: Sequence, draft: Draft, asked: int | None, emitted: Seq[int]) -> bool:
        """Take in what came of a draft, of which `asked` levels were asked for; None: it came unasked, for nothing.

        Returns whether its first token was right.
        """
        known, path = self._of(seq), draft.follow(emitted)
        if draft.survival is not None:
            reached = {-1: 0} | {node: depth for depth, node in enumerate(path, 1)}  # nodes after which a token came
            for node, saying in enumerate(_sayings(draft.survival, draft)):
                if reached.get(draft.parents[node], len(emitted)) < len(emitted):
                    known.sayings.learn((place, level(saying)), node in reached)
        if draft.survival is None or asked is not None:
            self._learn_depths(place, known, draft, asked, len(path), len(emitted))
        return bool(path)

    def _learn_depths(self, place: int, known: _Known, draft: Draft, asked: int | None, right: int, reached: int) -> None:
        """A draft that ended early, being unsure, counts as wrong there, and as having no node below."""
        depths = draft.depths()
        deepest = max(depths, default=0) if asked is None else asked
        for k in range(deepest):
            known.nodes.learn((place, min(k, DEPTHS)), depths.count(k + 1))
            if k <= right and k < reached:
                known.right.learn((place, min(k, DEPTHS)), k < right)
        for k in range(deepest, DEPTHS + 1):  # what was not tried for long is taken to be like the depth above
            known.right.fade((place, k))
            self._all.right.fade((place, k))

    def passed_over(self, place: int, seq: Sequence) -> None:
        """A drafter was not asked: what the request taught of it ages."""
        self._of(seq).right.fade((place, 0), IDLE)

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


def _sayings(survival: Seq[float], draft: Draft) -> list[float]:
    """Per node the chance that a draft gives it once its parent was right."""
    above = [survival[parent] if parent >= 0 else 1.0 for parent in draft.parents]
    return [min(said / before, 1.0) if before > 0 else 0.0 for said, before in zip(survival, above, strict=True)]
