"""Trees of guesses, grown level by level from the distributions of whatever drafts them.

Knows how tokens are drawn so that each verify rule stays exact, and which nodes deserve children; knows no model, no cache.

What may depend on what: a node drawn from q is never left out for its own value, so everything about it (that there is one,
how many siblings) is settled before it is drawn. Its value may decide on what hangs below it. Chosen nodes, and any under
`match`, are ranked and left out freely. docs/lossless.md has the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Seq
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftwise.drafters.averages import Rates, level
from draftwise.drafters.shapes import Place, Shape, best_counts
from draftwise.kernels import largest
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Drawn, Limit

DRAWS = ("without", "with", "chosen")
"""How `rejection` and `block` get several children: drawn without or with replacement, or the likeliest."""

class Guesses(NamedTuple):
    """Children of one node, likeliest or first drawn first. Confidences are for ranking; what they are worth is learnt.

    A drawn token's confidence looks at q alone, never at the token.
    """

    tokens: list[int]
    confidences: list[float]
    drawn: Drawn
    q: Tensor | None = None


def manner(seq: Sequence, draws: str) -> Drawn:
    """How guesses for a request come about: CHOSEN, SHARED_NOISE, or CHAIN for all that is drawn from q."""
    if seq.params.temperature == 0:
        return Drawn.CHOSEN
    if seq.request.verify == "match":
        return Drawn.SHARED_NOISE
    return Drawn.CHOSEN if draws == "chosen" else Drawn.CHAIN


def guess(
    seq: Sequence, logits_V: Tensor, path: Seq[int], *, count: int, parent: int = -1, draws: str = "without", drafter: int = 0
) -> Guesses:
    """Up to `count` children after `path` from a draft's logits there, float32 [vocab], drawn as the request's rule allows.

    Greedy: the likeliest. `match`: the first arrivals under the noise that the target's token will be drawn with. Else as
    `draws` says. `parent` and `drafter` key the draws: no two parents of a step may share both.
    """
    noise, depth, how = seq.noise(), len(path), manner(seq, draws)
    if seq.params.temperature == 0:
        return Guesses(*seq.likeliest(logits_V, path, count), how)
    if how is Drawn.SHARED_NOISE:
        # an arrival much earlier than the others stays the first under a target that differs a little
        arrivals = seq.shared_arrivals(logits_V, path, max(count + 1, 4))
        speeds = [1 / max(time, 1e-30) for time, _ in arrivals]
        total = sum(speeds)
        return Guesses([token for _, token in arrivals[:count]], [speed / total for speed in speeds[:count]], how)
    q_V = seq.distribution(logits_V, path)
    if how is Drawn.CHOSEN:
        (chances,), (ids,) = largest(q_V[None], count)
        kept = int((chances > 0).sum())
        return Guesses(ids[:kept].tolist(), chances[:kept].tolist(), how)
    if count == 1:
        tokens, how = [noise.draft(q_V, depth, parent=parent, drafter=drafter)], Drawn.CHAIN
    elif draws == "with":
        tokens = [noise.draft(q_V, depth, parent=parent, candidate=i, drafter=drafter) for i in range(count)]
        how = Drawn.WITH_REPLACEMENT
    else:
        tokens = noise.draft_distinct(q_V, depth, count, parent=parent, drafter=drafter)
        how = Drawn.WITHOUT_REPLACEMENT
    return Guesses(tokens, [float(q_V.max())] * len(tokens), how, q_V)


FIRST, NEXT = 0.6, 0.3
"""A guess at how often the first of several children is right, and each further one against the one before it."""


def rank_rates(odds: Rates, how: Drawn, count: int) -> list[float]:
    """How often the child of each rank is right once its parent was, as `Tree.learn` found for this manner of guessing."""
    return [odds.rate((how, rank), FIRST * NEXT**rank) for rank in range(count)]


class Plan(Protocol):
    """Which nodes of a tree get children, and how many; asked before these are drawn."""

    def children(self, tree: Tree, node: int) -> int: ...

    def expand(self, tree: Tree, newest: list[int]) -> list[int]:
        """Those of the newest level whose children are wanted."""


class Tree:
    """One request's draft under way. `survival` estimates per node that it and all above it are right.

    odds: what was learnt of guesses like these, by `learn`. drafter: the place among the engine's drafters.
    """

    def __init__(
        self, seq: Sequence, limit: Limit, plan: Plan, odds: Rates, *, draws: str = "without", drafter: int = 0
    ) -> None:
        self.seq, self.limit, self.plan, self.odds, self.draws, self.drafter = seq, limit, plan, odds, draws, drafter
        self.manner = manner(seq, draws)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.places: list[Place] = []
        self.confidence: list[float] = []
        self.survival: list[float] = []
        self._drawn: list[Drawn] = []
        self._q: list[Tensor] = []
        self._q_row: list[int] = []
        self._newest: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sampled(self) -> bool:
        """True where nodes are drawn from q, so that each must be verified."""
        return self.manner is Drawn.CHAIN

    @property
    def depth(self) -> int:
        """Levels grown, the first one included even where it came out empty."""
        return len(self.places[-1]) if self.places else 1

    def place(self, node: int) -> Place:
        return self.places[node] if node >= 0 else ()

    def reach(self, node: int) -> float:
        """The estimated chance that everything down to `node` is right."""
        return self.survival[node] if node >= 0 else 1.0

    def best(self, nodes: Seq[int], count: int, least_confidence: float) -> list[int]:
        """The `count` of these nodes that most likely survive, in the order they were grown; none of too little confidence."""
        sure = [node for node in nodes if self.confidence[node] >= least_confidence]
        return sorted(sorted(sure, key=lambda node: (-self.survival[node], node))[:count])

    def path(self, node: int) -> list[int]:
        """The tokens down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def guess(self, node: int, logits_V: Tensor, count: int) -> Guesses:
        """Children of `node`; see the function of this name."""
        path = self.path(node)
        return guess(self.seq, logits_V, path, count=count, parent=node, draws=self.draws, drafter=self.drafter)

    def branch(self, node: int, logits_V: Tensor) -> None:
        """Give `node` its children (-1: the first level), from the draft's logits after it."""
        count = self.plan.children(self, node)
        if count < 1:
            return
        try:
            found = self.guess(node, logits_V, count)
        except ValueError:  # the request forbids every token that the draft knows
            return
        self._add(node, found)

    def follow(self, guesses: Iterable[tuple[int, float]]) -> None:
        """Take in a chain that was grown elsewhere by this tree's rule: tokens and their confidences."""
        for token, confidence in guesses:
            self._add(len(self) - 1, Guesses([token], [confidence], self.manner))

    def _add(self, node: int, found: Guesses) -> None:
        for rank, (token, confidence) in enumerate(zip(found.tokens, found.confidences, strict=True)):
            self._newest.append(len(self))
            self.tokens.append(token)
            self.parents.append(node)
            self.places.append((*self.place(node), rank))
            self.confidence.append(confidence)
            self.survival.append(self.reach(node) * self._rate(rank, confidence))
            self._drawn.append(found.drawn)
            self._q_row.append(len(self._q) if found.q is not None else -1)
        if found.q is not None:
            self._q.append(found.q)

    def frontier(self) -> list[int]:
        """Nodes whose children come next; none when the tree is done."""
        newest, self._newest = self._newest, []
        if not newest or len(self.places[newest[0]]) >= self.limit.depth:
            return []
        return self.plan.expand(self, newest)

    def whole(self) -> Draft:
        """Every node that was grown."""
        if not self.tokens:
            return NO_DRAFT
        return Draft(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            drawn=tuple(self._drawn),
            q=torch.stack(self._q) if self._q else None,
            q_row=tuple(self._q_row) if self._q else (),
            survival=tuple(self.survival),
        )

    def draft(self) -> Draft:
        """The nodes to verify: all where they were drawn from q, else the most that the limit allows, likeliest first."""
        if self.sampled:
            assert len(self) <= self.limit.nodes
            return self.whole()
        whole = self.whole()
        if len(self) <= self.limit.nodes:
            return whole
        order = sorted(range(len(self)), key=lambda node: (-self.survival[node], node))
        return whole.only(sorted(order[: self.limit.nodes]))

    def learn(self, emitted: Seq[int]) -> list[int]:
        """Take in which guesses came true, verified or not, as the emitted tokens tell; the nodes that spell them."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        path: list[int] = []
        for token in emitted:
            children = below.get(path[-1] if path else -1, [])
            right = next((child for child in children if self.tokens[child] == token), None)
            for child in children:
                rank = self.places[child][-1]
                self.odds.learn((self.manner, rank), child == right)
                self.odds.learn((self.manner, rank, level(self.confidence[child])), child == right)
            if right is None:
                break
            path.append(right)
        return path

    def _rate(self, rank: int, confidence: float) -> float:
        prior = FIRST * NEXT**rank if self.sampled else confidence
        return self.odds.rate((self.manner, rank, level(confidence)), prior)


class Fixed:
    """A shape that was settled beforehand."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def children(self, tree: Tree, node: int) -> int:
        return self.shape.get(tree.place(node), 0)

    def expand(self, tree: Tree, newest: list[int]) -> list[int]:
        return [node for node in newest if self.children(tree, node)]


class Beam:
    """The `width` likeliest nodes of each level get `width` children each, for as long as a level is worth its pass.

    Of all that was grown the likeliest are kept: EAGLE-2, Li et al. 2024, arXiv 2406.16858. Width 1 is a chain that ends
    when it grows unsure. least_confidence: a node drafted with less gets no children. Not for nodes drawn from q.
    """

    def __init__(self, width: int, *, least_confidence: float = 0.0) -> None:
        self.width, self.least_confidence = width, least_confidence

    def children(self, tree: Tree, node: int) -> int:
        return self.width

    def expand(self, tree: Tree, newest: list[int]) -> list[int]:
        assert not tree.sampled
        best = tree.best(newest, self.width, self.least_confidence)
        price = tree.limit.node_price
        if len(tree) >= tree.limit.nodes:  # a further node takes the place of the least of the best so far
            price = max(price, sorted(tree.survival)[-tree.limit.nodes])
        rates = rank_rates(tree.odds, tree.manner, self.width)
        gain = sum(max(tree.survival[node] * rate - price, 0.0) for node in best for rate in rates)
        return best if gain > tree.limit.level_price else []


class Replanned:
    """The best shape by rank, settled anew at each level by how sure the draft was of the nodes above it.

    For nodes drawn from q, all of which are kept: what was drawn decides only on what is drawn below. Width and
    least_confidence as of Beam.
    """

    def __init__(self, width: int, *, least_confidence: float = 0.0) -> None:
        self.width, self.least_confidence = width, least_confidence
        self._counts: dict[int, int] = {}

    def children(self, tree: Tree, node: int) -> int:
        if node < 0:
            self._settle(tree, [-1])
        return self._counts[node]

    def expand(self, tree: Tree, newest: list[int]) -> list[int]:
        best = tree.best(newest, self.width, self.least_confidence)
        self._settle(tree, best)
        return [node for node in best if self._counts[node]]

    def _settle(self, tree: Tree, nodes: list[int]) -> None:
        limit = tree.limit
        left = limit._replace(nodes=limit.nodes - len(tree), depth=limit.depth - len(tree.place(nodes[0])) if nodes else 0)
        counts = best_counts([tree.reach(node) for node in nodes], rank_rates(tree.odds, tree.manner, self.width), left)
        self._counts = dict(zip(nodes, counts, strict=True))


def grow(
    trees: Seq[Tree], logits_NV: Iterable[Tensor], expand: Callable[[list[list[int]]], Iterable[Tensor]]
) -> None:
    """Grow all trees together, a level a call.

    logits_NV: the draft's logits after each tree's root. expand(frontiers): runs the draft on each tree's nodes and gives
    the logits after them, [nodes of all trees, vocab], in that order.
    """
    for tree, logits_V in zip(trees, logits_NV, strict=True):
        tree.branch(-1, logits_V)
    while any(frontiers := [tree.frontier() for tree in trees]):
        rows = iter(expand(frontiers))
        for tree, nodes in zip(trees, frontiers, strict=True):
            for node in nodes:
                tree.branch(node, next(rows))
