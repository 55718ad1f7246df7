"""How much to draft: the size that gives the most expected tokens a second, by measured cost and learned acceptance.

Knows times and survival chances; knows nothing of how drafts are made. A size is chosen by positions and by what was
learned before, never by a drafted token's own value, so every verify rule stays exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq


class CostTable:
    """t(n): seconds of a target pass of n rows, measured for a few n and interpolated between."""

    def __init__(self, rows: Seq[int], seconds: Seq[float]) -> None:
        self.rows, self.seconds = list(rows), [max(seconds[: i + 1]) for i in range(len(seconds))]

    def __call__(self, rows: int) -> float:
        """Linear between measured sizes, and past the last at the slope of the last two."""
        if rows in self.rows:
            return self.seconds[self.rows.index(rows)]
        place = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        low, high = self.rows[place - 1], self.rows[place]
        slope = (self.seconds[place] - self.seconds[place - 1]) / (high - low)
        return max(self.seconds[place - 1] + slope * (rows - low), self.seconds[0])


FLAT = CostTable((1, 32), (1.0, 1.0))
"""Stands in where nothing was measured: every pass costs the same."""


class Acceptance:
    """Conditional acceptance by depth of one request, as ratios of sums that forget, starting from a weak guess."""

    GUESS, WEIGHT, FORGET = 0.6, 3.0, 0.96

    def __init__(self) -> None:
        self._right: list[float] = []
        self._tried: list[float] = []

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a verified chain of depth `drafted` of which `accepted` survived."""
        for depth in range(min(drafted, accepted + 1)):
            self._reach(depth)
            self._right[depth] = self._right[depth] * self.FORGET + (depth < accepted)
            self._tried[depth] = self._tried[depth] * self.FORGET + 1

    def survival(self, depth: int) -> list[float]:
        """Per depth the chance that a node there is accepted, its ancestors included."""
        chances, chance = [], 1.0
        for level in range(depth):
            self._reach(level)
            chance *= self._right[level] / self._tried[level]
            chances.append(chance)
        return chances

    def _reach(self, depth: int) -> None:
        while len(self._tried) <= depth:
            # a depth not seen yet starts from the one above it
            guess = self._right[-1] / self._tried[-1] if self._tried else self.GUESS
            self._right.append(guess * self.WEIGHT)
            self._tried.append(self.WEIGHT)


def best_sizes(
    base_rows: int, survivals: Seq[Seq[float]], cost: CostTable, *, seconds_per_depth: float = 0.0, most_rows: int = 1 << 30
) -> list[int]:
    """Nodes to verify for each request, so that expected tokens over the step's seconds are the most.

    base_rows: rows the pass has anyway. survivals: per request its nodes' survival chances, falling. seconds_per_depth:
    time to draft one level for all. Nodes enter in order of survival; every prefix of that order is weighed, since t(n)
    climbs in steps.
    """
    nodes = sorted(
        ((chance, -depth, request) for request, chances in enumerate(survivals) for depth, chance in enumerate(chances)),
        reverse=True,
    )
    sizes = [0] * len(survivals)
    best = list(sizes)
    expected, deepest = float(len(survivals)), 0
    most = expected / cost(base_rows) if survivals else 0.0
    for count, (chance, _, request) in enumerate(nodes, 1):
        if base_rows + count > most_rows:
            break
        sizes[request] += 1
        deepest = max(deepest, sizes[request])
        expected += chance
        rate = expected / (cost(base_rows + count) + deepest * seconds_per_depth)
        if rate > most:
            most, best = rate, list(sizes)
    return best


class Governor:
    """Sizes drafts request by request, and probes now and then what does not pay: acceptance is only seen by drafting."""

    PROBE_EVERY = 24  # steps

    def __init__(self, cost: CostTable = FLAT, *, most_rows: int = 64) -> None:
        self.cost, self.most_rows = cost, most_rows
        self._acceptance: dict[int, Acceptance] = {}
        self._idle: dict[int, int] = {}

    def plan(self, base_rows: int, requests: Seq[int], depths: Seq[int], seconds_per_depth: float) -> list[int]:
        """Depths to ask of a drafter that costs `seconds_per_depth`, up to `depths`, from what each request taught."""
        survivals = [self._of(request).survival(depth) for request, depth in zip(requests, depths, strict=True)]
        return self._sizes(base_rows, requests, survivals, seconds_per_depth)

    def trim(self, base_rows: int, requests: Seq[int], survivals: Seq[Seq[float]]) -> list[int]:
        """Nodes to keep of drafts that came for nothing, by the chances they came with."""
        return self._sizes(base_rows, requests, survivals, 0.0)

    def learn(self, request: int, drafted: int, accepted: int) -> None:
        """Take in what a verification taught."""
        if drafted:
            self._of(request).learn(drafted, accepted)

    def forget(self, request: int) -> None:
        """The request ended."""
        self._acceptance.pop(request, None)
        self._idle.pop(request, None)

    def _sizes(self, base_rows: int, requests: Seq[int], survivals: Seq[Seq[float]], seconds_per_depth: float) -> list[int]:
        sizes = best_sizes(base_rows, survivals, self.cost, seconds_per_depth=seconds_per_depth, most_rows=self.most_rows)
        for place, request in enumerate(requests):
            idle = 0 if sizes[place] else self._idle.get(request, 0) + 1
            if idle > self.PROBE_EVERY and survivals[place]:
                sizes[place], idle = 1, 0
            self._idle[request] = idle
        return sizes

    def _of(self, request: int) -> Acceptance:
        return self._acceptance.setdefault(request, Acceptance())
