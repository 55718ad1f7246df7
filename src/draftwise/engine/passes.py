"""What a target pass of n rows takes: a table measured once, corrected by the passes that are run.

Knows rows and seconds only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq
from itertools import accumulate

from draftwise.drafters.averages import Pace


class CostTable:
    """t(n): seconds of a target pass of n rows, measured for a few n and interpolated between."""

    def __init__(self, rows: Seq[int], seconds: Seq[float]) -> None:
        self.rows, self.seconds = list(rows), list(accumulate(seconds, max))
        self._found: dict[float, float] = {}  # asked for many times a step

    def __call__(self, rows: float) -> float:
        """Linear between measured sizes, and past the last at the slope of the last two."""
        seconds = self._found.get(rows)
        if seconds is None:
            seconds = self._found[rows] = self._between(rows)
        return seconds

    def _between(self, rows: float) -> float:
        place = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        low, high = self.rows[place - 1], self.rows[place]
        slope = (self.seconds[place] - self.seconds[place - 1]) / (high - low)
        return max(self.seconds[place - 1] + slope * (rows - low), self.seconds[0])


FLAT = CostTable((1, 32), (1.0, 1.0))
"""Stands in where nothing was measured: every pass costs the same."""


class PassTimes:
    """t(n) as it is now: a table, times how slow the machine is today, times what is learnt of its shape.

    The shape is corrected by pairs of passes of different size that ran one after the other, so that a machine which gets
    busy makes all sizes slower and none in particular; no pair counts for much, however far off it is.
    """

    SHARE, MOST = 0.05, 0.2

    def __init__(self, table: CostTable) -> None:
        self._measured = self._shaped = table
        self._slowness = Pace()  # over the shaped table
        self._off = [0.0] * len(table.rows)  # what is added to the logarithm of each measured time
        self._last: tuple[int, float] | None = None

    def __call__(self, rows: float) -> float:
        """Seconds of a pass of so many rows, on average where that is no whole number."""
        return self._shaped(rows) * (self._slowness.seconds or 1.0)

    @property
    def known(self) -> bool:
        """True once a pass has told how slow the machine is."""
        return self._slowness.seconds > 0

    def learn(self, rows: int, seconds: float) -> None:
        """Take in a pass that ran."""
        if seconds <= 0:
            return
        self._slowness.learn(seconds / self._shaped(rows))
        if self._last is not None and self._last[0] != rows:
            before, took = self._last
            surprise = math.log(seconds / took) - math.log(self._shaped(rows) / self._shaped(before))
            step = self.SHARE * max(-self.MOST, min(self.MOST, surprise)) / 2
            self._shift(rows, step)
            self._shift(before, -step)
            times = [time * math.exp(off) for time, off in zip(self._measured.seconds, self._off, strict=True)]
            self._shaped = CostTable(self._measured.rows, times)
        self._last = rows, seconds

    def _shift(self, rows: int, step: float) -> None:
        """Move the measured sizes next to `rows`, each by its share."""
        sizes = self._measured.rows
        place = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        low, high = sizes[place - 1], sizes[place]
        share = min(max((rows - low) / (high - low), 0.0), 1.0)
        self._off[place - 1] += (1 - share) * step
        self._off[place] += share * step
