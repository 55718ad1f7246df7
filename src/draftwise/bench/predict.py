"""Forecasts of what speculation gains, from acceptance, cost and the machine. Arithmetic only.

Acceptance is given by depth: acceptance[k] is the chance that token k + 1 of a draft is accepted once the k before it
were. The usual single rate α with γ drafted tokens is [α] * γ; a benchmark's conditional acceptance can be put in as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


def flat(rows: int) -> float:
    """The cost of a pass in units of a one-row pass where more rows cost nothing, as while memory is the limit."""
    return 1.0


def survival(acceptance: Sequence[float]) -> list[float]:
    """Per depth, the chance that a draft is accepted down to it: the running product."""
    chances, chance = [], 1.0
    for rate in acceptance:
        if not 0 <= rate <= 1:
            raise ValueError(f"acceptance is {rate}; it must lie between 0 and 1")
        chance *= rate
        chances.append(chance)
    return chances


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens a target pass yields, its own next token included: (1 - α^(γ+1)) / (1 - α) when every rate is α.

    Source: Leviathan et al. 2023, eq. 1. Exact for rates by depth, without independence.
    """
    return 1.0 + sum(survival(acceptance))


def speedup(acceptance: Sequence[float], cost: float, *, pass_cost: Callable[[int], float] = flat) -> float:
    """Speed against plain decoding: E / (γ c + t(γ + 1)).

    cost: c, a drafted token's time over that of a one-row target pass. pass_cost: t, of a pass of so many rows, likewise.
    Source: Leviathan et al. 2023, theorem 3.8, where t is 1.
    """
    if cost < 0:
        raise ValueError(f"cost is {cost}; it must be 0 or more")
    length = len(acceptance)
    return expected_tokens(acceptance) / (length * cost + pass_cost(length + 1))


def by_depth(rates: Sequence[float], length: int) -> list[float]:
    """Acceptance for `length` depths; the last rate given goes on."""
    return [rates[min(depth, len(rates) - 1)] for depth in range(length)]


class Best(NamedTuple):
    """A draft length and the speed-up it gives."""

    length: int
    speedup: float


def best_length(
    rates: Sequence[float], cost: float, *, longest: int = 64, pass_cost: Callable[[int], float] = flat
) -> Best:
    """The draft length, 0 included, with the highest speed-up; the shortest of equals."""
    best = Best(0, 1.0)
    for length in range(1, longest + 1):
        gain = speedup(by_depth(rates, length), cost, pass_cost=pass_cost)
        if gain > best.speedup + 1e-12:
            best = Best(length, gain)
    return best


class Roofline(NamedTuple):
    """A pass over a model's weights on a machine: it reads them once, and computes with each once a row.

    bandwidth: bytes a second read; arithmetic: operations a second; parameters: weights; bits: of one weight as stored.
    """

    bandwidth: float
    arithmetic: float
    parameters: float
    bits: float

    def seconds(self, rows: int) -> float:
        """Time of a pass of `rows` rows: max(bytes / bandwidth, 2 P n / arithmetic)."""
        return max(self.parameters * self.bits / 8 / self.bandwidth, 2 * self.parameters * rows / self.arithmetic)

    @property
    def break_even(self) -> float:
        """Rows up to which a pass costs what one row costs: (arithmetic / bandwidth) * (bytes of a weight) / 2."""
        return self.arithmetic / self.bandwidth * (self.bits / 8) / 2

    def pass_cost(self, rows: int) -> float:
        """The time of a pass over that of one row."""
        return self.seconds(rows) / self.seconds(1)


class Forecast(NamedTuple):
    """What drafts of one length bring."""

    length: int
    tokens_per_step: float
    all_accepted: float
    speedup: float


def forecasts(
    rates: Sequence[float], cost: float, *, longest: int, pass_cost: Callable[[int], float] = flat
) -> Iterator[Forecast]:
    """One forecast for every draft length from 0 to `longest`."""
    for length in range(longest + 1):
        acceptance = by_depth(rates, length)
        yield Forecast(
            length,
            expected_tokens(acceptance),
            survival(acceptance)[-1] if length else 1.0,
            speedup(acceptance, cost, pass_cost=pass_cost),
        )
