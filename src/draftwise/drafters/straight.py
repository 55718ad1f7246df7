"""Chains that compiled code grows whole: for which requests it may, and what it must know to guess and stop as a tree would.

Knows trees and what their guesses taught; knows nothing of networks.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwise.drafters.averages import EDGES, Rates, level
from draftwise.drafters.growth import Beam, Tree, rank_rates
from draftwise.kernels import ChainRule, Chances
from draftwise.types import Drawn

RENEWED = 16
"""Chains after which chances are looked up anew: they move slowly, and looking takes as long as a guess does."""


@dataclass(slots=True)
class Straight:
    """What the chains of one sequence taught, as compiled code takes it."""

    odds: Rates
    _chances: Chances | None = None
    _left: int = 0

    def rule(self, tree: Tree) -> ChainRule | None:
        """How compiled code grows this tree; None where it cannot: it knows chains that end when they grow unsure, of the
        likeliest tokens or of those that share the target's noise, for requests that take a model's logits as they are.
        """
        params, plan = tree.seq.params, tree.plan
        greedy = params.temperature == 0
        if not (isinstance(plan, Beam) and plan.width == 1) or params.edits or params.truncates:
            return None
        if not greedy and tree.manner is not Drawn.SHARED_NOISE:
            return None
        noise, depth = tree.seq.noise(), min(tree.limit.depth, tree.limit.nodes)
        self._left -= 1
        if self._chances is None or self._left < 0:
            self._chances, self._left = self._learnt(tree.manner), RENEWED - 1
        return ChainRule(
            depth=depth,
            temperature=params.temperature,
            keys=() if greedy else [noise.target_key(ahead) for ahead in range(depth)],
            chances=self._chances,
            following=rank_rates(tree.odds, tree.manner, 1)[0],
            least_confidence=plan.least_confidence,
            node_price=tree.limit.node_price,
            level_price=tree.limit.level_price,
        )

    def _learnt(self, manner: Drawn) -> Chances:
        """A rate is a mean of what was seen and of the guess that one gives for it, here the confidence: linear in it."""
        keys = [(manner, 0, level(edge)) for edge in (0.0, *EDGES)]
        base = [self.odds.rate(key, 0.0) for key in keys]
        return Chances(EDGES, base, [self.odds.rate(key, 1.0) - least for key, least in zip(keys, base, strict=True)])
