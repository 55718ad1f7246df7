"""What drafting teaches, as running averages: how often a kind of guess comes true, and how long a pass takes.

Knows numbers only. Both forget, so that they follow a text or a machine that changes.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Hashable

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)


def level(confidence: float) -> int:
    """The class of a confidence between 0 and 1: guesses of one class are taken to be right equally often."""
    return bisect(EDGES, confidence)


class Rates:
    """Mean values by key, as ratios of sums that forget. A key of little evidence leans on `wider`, and that on a guess.

    `weight`: observations that the prior counts for. `forget`: what an observation still counts after the next one.
    `alert`: the same for a shorter memory; where that finds something else than chance explains, the longer one starts
    anew from it. For values between 0 and 1.
    """

    SURPRISE = 3.0  # standard deviations between the two memories

    def __init__(
        self, wider: Rates | None = None, *, weight: float = 3.0, forget: float = 0.95, alert: float | None = None
    ) -> None:
        self.wider, self.weight, self.forget, self.alert = wider, weight, forget, alert
        self._sums: dict[Hashable, tuple[float, float]] = {}  # of values, of observations
        self._late: dict[Hashable, tuple[float, float]] = {}  # the same in the shorter memory

    def rate(self, key: Hashable, guess: float) -> float:
        """The mean under `key`; `guess` where nothing is known."""
        prior = guess if self.wider is None else self.wider.rate(key, guess)
        found = self._sums.get(key)
        return prior if found is None else (found[0] + self.weight * prior) / (found[1] + self.weight)

    def learn(self, key: Hashable, value: float) -> None:
        """Count one observation, here and in what is wider."""
        self._sums[key] = _add(self._sums.get(key), value, self.forget)
        if self.alert is not None:
            self._late[key] = _add(self._late.get(key), value, self.alert)
            self._compare(key, self.alert)
        if self.wider is not None:
            self.wider.learn(key, value)

    def fade(self, key: Hashable, keep: float | None = None) -> None:
        """Let what is known of `key` here age, as by one observation unless `keep` says else: the prior counts for more."""
        if key in self._sums:
            total, count = self._sums[key]
            keep = self.forget if keep is None else keep
            self._sums[key] = total * keep, count * keep

    def _compare(self, key: Hashable, alert: float) -> None:
        (total, count), (late, latest) = self._sums[key], self._late[key]
        mean = (total + 0.5) / (count + 1)  # never quite 0 or 1
        spread = mean * (1 - mean) * (1 - alert) / (1 + alert)  # of the shorter memory's mean, when it is full
        if count > latest and abs(late / latest - total / count) > self.SURPRISE * math.sqrt(max(spread, 0.0)):
            self._sums[key] = late, latest


def _add(sums: tuple[float, float] | None, value: float, forget: float) -> tuple[float, float]:
    total, count = sums or (0.0, 0.0)
    return total * forget + value, count * forget + 1


class Pace:
    """A typical duration. Its logarithm moves by a share of each surprise, and no more for a great one, so that a hiccup
    of the machine counts little.
    """

    SHARE, MOST, FIRST = 0.1, 0.25, 5

    def __init__(self) -> None:
        self.seconds = 0.0
        """0 until something was measured."""
        self._measured = 0

    def learn(self, seconds: float) -> None:
        """Take in a measurement. Of the first few the least counts: they find everything cold."""
        if seconds <= 0:
            return
        self._measured += 1
        if self._measured <= self.FIRST:
            self.seconds = min(seconds, self.seconds or seconds)
        else:
            surprise = math.log(seconds / self.seconds)
            self.seconds *= math.exp(self.SHARE * max(-self.MOST, min(self.MOST, surprise)))


class Levels:
    """What drafting takes, level by level: the first one reads what is new, and finds the draft's weights out of reach."""

    def __init__(self) -> None:
        self._first, self._next = Pace(), Pace()

    def learn(self, begun: float, seconds: float, depth: int) -> None:
        """Take in a draft of `depth` levels: seconds until the first one could be drafted from, and in all."""
        self._first.learn(begun if depth > 1 else seconds)
        if depth > 1:
            self._next.learn((seconds - begun) / (depth - 1))

    @property
    def each(self) -> float:
        """Seconds of a level after the first, which takes no longer than that one; half of it until there was one."""
        first, following = self._first.seconds, self._next.seconds
        return min(following, first or following) if following else first / 2

    @property
    def beginning(self) -> float:
        """Seconds that the first level takes beyond those of another."""
        return max(self._first.seconds - self.each, 0.0)
