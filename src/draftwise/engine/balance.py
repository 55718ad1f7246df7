"""What asking drafters that cost has brought, and which of them a request goes without.

Knows tokens and requests; knows nothing of how a gain is found. Only requests that decode alone are counted.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from draftwise.drafters.averages import Rates

UPKEEP = 0.012
"""Tokens a step that a drafter costs which is told of everything and thought of now and then, asked or not."""
HOPE = 0.02
"""Tokens a step that it is believed to gain, its upkeep paid, until requests have told."""
LEAST_STEPS = 16
"""Of a request, for it to count."""
EVERY = 24
"""While a drafter does not pay for its upkeep, one request in so many has it take part, to see whether it does now."""
MOST = 4.0
"""Tokens that the time of a single step may count for, either way: a hiccup of the machine is no drafter's fault."""


@dataclass(slots=True)
class _Account:
    """Of one request: which drafters take part, its steps, and what each drafter gained."""

    takes_part: dict[int, bool] = field(default_factory=dict)
    steps: int = 0
    gained: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class Balance:
    """The books, by drafter."""

    def __init__(self) -> None:
        self._net = Rates(weight=4.0, forget=0.9)  # gained a step, of requests
        self._accounts: dict[int, _Account] = {}
        self._met = defaultdict[int, int](int)

    def takes_part(self, place: int, request: int) -> bool:
        """Whether a drafter does in a request; settled when first asked for."""
        account = self._accounts.setdefault(request, _Account())
        if place not in account.takes_part:
            self._met[place] += 1
            account.takes_part[place] = self._net.rate(place, HOPE) >= 0 or self._met[place] % EVERY == 0
        return account.takes_part[place]

    def learn(self, place: int, request: int, tokens: float, cost: float) -> None:
        """Take in the tokens that a step gained in which the drafter was asked, for a request alone, and what its time cost."""
        if request in self._accounts:
            self._accounts[request].gained[place] += tokens - max(-MOST, min(cost, MOST))

    def step(self) -> None:
        """The request that is alone decoded a step."""
        for account in self._accounts.values():
            account.steps += 1

    def forget(self, request: int) -> None:
        """The request ended."""
        account = self._accounts.pop(request, None)
        if account is None or account.steps < LEAST_STEPS:
            return
        for place, took_part in account.takes_part.items():
            if took_part:
                self._net.learn(place, account.gained[place] / account.steps - UPKEEP)
