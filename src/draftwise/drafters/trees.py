"""How a drafter's trees look, as its users choose it: a chain, a fixed tree, the best shape by rank, or by confidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from draftwise.drafters.averages import Rates
from draftwise.drafters.growth import DRAWS, Beam, Fixed, Plan, Replanned, Tree, manner, rank_rates
from draftwise.drafters.shapes import Place, best_shape, levels, parse_places, parse_widths
from draftwise.sequence import Sequence
from draftwise.types import Drawn, Limit

KINDS = ("chain", "sequoia", "dynamic")
MOST_NODES = 63
MOST_SIBLINGS = 8
"""Of a Sequoia tree."""
HELP = (
    "chain; widths by depth, such as 4,2,1; ranks by place, such as '0 0.0 0.1 1'; sequoia (best shape by rank); "
    "dynamic (by confidence)"
)


@dataclass(frozen=True, slots=True)
class Trees:
    """The options of a drafter that grows trees. Raises ValueError naming what is wrong."""

    max_tokens: int = field(default=8, metadata={"help": "deepest draft, in tokens"})
    tree: str = field(default="chain", metadata={"help": HELP})
    max_nodes: int = field(default=16, metadata={"help": "most nodes of a sequoia or dynamic tree"})
    beam: int = field(default=4, metadata={"help": "nodes that a dynamic tree expands at each depth, and children of each"})
    draws: str = field(
        default="without",
        metadata={"help": "how rejection and block get siblings: drawn without or with replacement, or chosen"},
    )
    min_confidence: float = field(
        default=0.0, metadata={"help": "end a branch after a token drafted with less confidence than this (0: never)"}
    )

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_nodes", "beam"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence is {self.min_confidence}; it must lie between 0 and 1")
        if self.draws not in DRAWS:
            raise ValueError(f"draws is {self.draws!r}; it must be one of: {', '.join(DRAWS)}")
        if self.most_read > MOST_NODES:
            raise ValueError(f"tree {self.tree!r} may grow {self.most_read} nodes a step; make it smaller, up to {MOST_NODES}")

    @property
    def fixed(self) -> FixedTree | None:
        """The tree, where it is fixed."""
        return None if self.tree in KINDS else _parse(self.tree)

    @property
    def depth(self) -> int:
        """Of the deepest tree."""
        return self.fixed.depth if self.fixed else self.max_tokens

    @property
    def most_read(self) -> int:
        """Nodes of one tree that are grown, and at most read by the drafter to grow further, in a step."""
        if self.fixed:
            return self.fixed.nodes
        return {"chain": self.max_tokens, "sequoia": self.max_nodes, "dynamic": self.beam * self.max_tokens}[self.tree]

    def start(self, seq: Sequence, limit: Limit, odds: Rates, *, drafter: int, kind: type[Tree] = Tree) -> Tree:
        """A tree for a request within `limit`, ready to grow. `odds` is what its trees taught so far."""
        limit = limit._replace(depth=min(limit.depth, self.depth))
        if self.tree == "chain":
            limit = limit._replace(nodes=min(limit.nodes, limit.depth))
        elif not self.fixed:
            limit = limit._replace(nodes=min(limit.nodes, self.max_nodes))
        how = manner(seq, self.draws)
        plan: Plan
        if self.tree in ("chain", "dynamic"):
            level_by_level = Replanned if how is Drawn.CHAIN else Beam
            plan = level_by_level(1 if self.tree == "chain" else self.beam, least_confidence=self.min_confidence)
        else:
            tree = self.fixed or FixedTree.of((MOST_SIBLINGS,) * limit.depth)
            plan = Fixed(best_shape(rank_rates(odds, how, tree.siblings), limit, tree.children))
        return kind(seq, limit, plan, odds, draws=self.draws, drafter=drafter)


class FixedTree(NamedTuple):
    """A tree as settled by its user: the most children at each place, and its size."""

    children: Callable[[Place], int]
    depth: int
    nodes: int
    siblings: int

    @staticmethod
    def of(widths: Seq[int]) -> FixedTree:
        """The tree with widths[d] children at each node of depth d."""
        return FixedTree(levels(widths), len(widths), sum(accumulate(widths, mul)), max(widths))


@cache
def _parse(text: str) -> FixedTree:
    try:
        if not set(". ") & set(text):
            return FixedTree.of(parse_widths(text))
        shape = parse_places(text)
    except ValueError as error:
        raise ValueError(f"tree {error}; it may also be one of: {', '.join(KINDS)}") from None
    return FixedTree(
        lambda place: shape.get(place, 0), 1 + max(map(len, shape)), sum(shape.values()), max(shape.values())
    )


CHAIN = Trees()
