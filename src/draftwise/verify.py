"""Accept or reject drafts. Knows probabilities; knows nothing of models, caches or text.

Every rule is lossless; docs/lossless.md has the proofs. A rule follows the draft through the target's distributions and
ends with one token of the target's own. It computes in float64 on tensors, and in any other exact numbers just as well,
so that the tests enumerate this very code in fractions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from draftwise.types import VERIFY_RULES, Draft, Drawn, Verdict

Vector = Any
"""Probabilities by token: a tensor, or a numpy array of exact numbers."""

_NO_MASS = 1e-8
"""A residual of no more mass is what rounding leaves where the draft's distribution covers the target's."""


class Randomness(Protocol):
    """What a rule asks of chance; `sampling.Noise` is the real one. Depth 0 follows the last committed token."""

    def target(self, row_V: Any, depth: int, /) -> int: ...
    def accept(self, probability: Any, depth: int, candidate: int, /) -> bool: ...
    def draw(self, weights_V: Any, depth: int, /) -> int: ...


def verify(draft: Draft, row: Callable[[int], Vector], rule: str, noise: Randomness) -> Verdict:
    """What survives of `draft`, and the target's own token after it, so that the output has the target's distribution.

    row(node): the target's warped distribution after `node` (-1: after the last committed token), float32 [vocab]; asked
    once for each visited node. Raises ValueError as `check_rule` does.
    """
    check_rule(rule, draft)
    return {"match": _match, "rejection": _rejection, "block": _block}[rule](draft, row, noise)


def check_rule(rule: str, draft: Draft) -> None:
    """Raises ValueError where `rule` cannot verify how the draft's tokens were drawn, naming what can."""
    if rule not in VERIFY_RULES:
        raise ValueError(f"verify is {rule!r}; it must be one of: {', '.join(VERIFY_RULES)}")
    if rule == "match":
        return
    only_children = set()
    for node, drawn in enumerate(draft.drawn):
        if drawn is Drawn.CHOSEN:
            continue
        if drawn is Drawn.SHARED_NOISE:
            raise ValueError(
                f"verify={rule!r} cannot verify node {node}, drawn with the noise that `match` uses; "
                f"use verify='match', or a draft that is {', '.join(d.value for d in Drawn if d is not drawn)}"
            )
        if draft.q is None or not draft.q_row or draft.q_row[node] < 0:
            raise ValueError(f"verify={rule!r} needs the q that node {node} was drawn from; add its row, or use verify='match'")
        source = draft.parents[node], draft.q_row[node]
        if drawn is Drawn.CHAIN and source in only_children:
            raise ValueError(f"node {node} is not an only child; mark it as drawn with or without replacement, or use 'match'")
        only_children.add(source)


def follow(draft: Draft, token: Callable[[int], int]) -> Verdict:
    """`match`: follow the draft for as long as it agrees with token(node), what plain sampling says after `node`.

    Source: Daliri, Musco and Suresh 2024 (arXiv 2408.07978), for drafts that share the noise.
    """
    below = _below(draft)
    node = -1
    while True:
        said = token(node)
        agreeing = [child for child in below[node] if draft.tokens[child] == said]
        if not agreeing:
            return Verdict(draft.path(node), said)
        node = agreeing[0]


def _match(draft: Draft, row: Callable[[int], Vector], noise: Randomness) -> Verdict:
    depth = {-1: 0} | dict(enumerate(draft.depths()))
    return follow(draft, lambda node: noise.target(row(node), depth[node]))


def _rejection(draft: Draft, row: Callable[[int], Vector], noise: Randomness) -> Verdict:
    """From the root down: a child is accepted with p/q, else p becomes norm([p - q]+), and its next sibling is tried.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), alg. 1; several children: SpecInfer (arXiv 2305.09781), sec. 4.3.
    """
    below = _below(draft)
    proposals = _Proposals(draft)
    node, depth = -1, 0
    while True:
        p = _wide(row(node))
        for child in below[node]:
            token = draft.tokens[child]
            q = proposals.of(child)
            if noise.accept(_ratio(p, q, token), depth, child):
                node = next(first for first in below[node] if draft.tokens[first] == token)
                depth += 1
                break
            p, _ = _after_rejection(p, q, token)
            proposals.tried(child)
        else:
            return Verdict(draft.path(node), noise.draw(p, depth))


def _block(draft: Draft, row: Callable[[int], Vector], noise: Randomness) -> Verdict:
    """From the leaves up: a leaf is accepted with the weight of its whole path, else removed and its parent weighed anew.

    Source: traversal verification (arXiv 2505.12398); on a chain it is block verification (Sun et al. 2024,
    arXiv 2403.10444), from the last token back.
    """
    below = _below(draft)
    proposals = _Proposals(draft)
    left: dict[int, Vector] = {}  # per node the target's distribution after it, less what was removed below it
    weight: dict[int, Any] = {-1: 1}

    def target(node: int) -> Vector:
        if node not in left:
            left[node] = _wide(row(node))
        return left[node]

    walk = [-1]
    while True:
        node = walk[-1]
        if below[node]:
            child = below[node][0]
            weight[child] = min(weight[node] * _ratio(target(node), proposals.of(child), draft.tokens[child]), 1)
            walk.append(child)
        elif node < 0 or noise.accept(weight[node], len(walk) - 2, node):
            return Verdict(draft.path(node), noise.draw(target(node), len(walk) - 1))
        else:
            walk.pop()
            parent = walk[-1]
            w = weight[parent]
            left[parent], mass = _after_rejection(left[parent], proposals.of(node), draft.tokens[node], weight=w)
            if w < 1:
                weight[parent] = mass / (mass + 1 - w)
            proposals.tried(node)
            below[parent].remove(node)


def _below(draft: Draft) -> dict[int, list[int]]:
    """Per node its children in draw order, where the first of equal-token siblings has the children of all of them.

    They spell the same path, so what was drawn below any of them may be tried below the first.
    """
    below: dict[int, list[int]] = {node: [] for node in range(-1, len(draft))}
    for node, parent in enumerate(draft.parents):
        below[parent].append(node)
    nodes = [-1]
    for node in nodes:
        first: dict[int, int] = {}
        for child in below[node]:
            heir = first.setdefault(draft.tokens[child], child)
            if heir != child:
                below[heir] += below[child]
                below[child] = []
        nodes += below[node]
    return below


class _Proposals:
    """The distribution each drafted token was drawn from, given the siblings that were tried before it."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._left: dict[tuple[int, int], Vector] = {}

    def of(self, node: int) -> Vector | None:
        """q for `node`; None for a chosen token, which has all of it."""
        if self._draft.drawn[node] is Drawn.CHOSEN:
            return None
        source = self._source(node)
        if source not in self._left:
            assert self._draft.q is not None
            self._left[source] = _wide(self._draft.q[source[1]])
        return self._left[source]

    def tried(self, node: int) -> None:
        """The next sibling from the same draws cannot be this token again, where they were without replacement."""
        if self._draft.drawn[node] is Drawn.WITHOUT_REPLACEMENT:
            rest = _without(self.of(node), self._draft.tokens[node])
            mass = _number(rest.sum())
            self._left[self._source(node)] = rest / mass if mass > 0 else rest

    def _source(self, node: int) -> tuple[int, int]:
        return self._draft.parents[node], self._draft.q_row[node]


def _ratio(p: Vector, q: Vector | None, token: int) -> Any:
    """p/q of a drafted token, not capped at 1; zero where q says that it cannot have been drawn."""
    drawn = 1 if q is None else _number(q[token])
    return _number(p[token]) / drawn if drawn > 0 else 0


def _after_rejection(p: Vector, q: Vector | None, token: int, *, weight: Any = 1) -> tuple[Vector, Any]:
    """norm([weight p - q]+) and its mass before it was normalised; p itself where rounding alone left any mass."""
    residual = _without(weight * p, token) if q is None else (weight * p - q).clip(min=0)
    mass = _number(residual.sum())
    return (residual / mass if mass > _NO_MASS else p), mass


def _without(weights: Vector, token: int) -> Vector:
    rest = weights * 1  # a copy, of a tensor and of an array alike
    rest[token] = 0
    return rest


def _wide(weights: Vector) -> Vector:
    return weights.double() if isinstance(weights, Tensor) else weights


def _number(scalar: Any) -> Any:
    return scalar.item() if isinstance(scalar, Tensor) else scalar
