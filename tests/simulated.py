"""A target and drafters whose time is simulated and whose acceptance is given, for what the governor does with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq

from torch import Tensor

from draftwise.cache import KVCache
from draftwise.drafters.base import Drafter
from draftwise.engine.passes import CostTable
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Batch, Draft, Hidden, Limit
from table_model import TableModel


class Clock:
    """Time that passes only where something takes it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTarget(TableModel):
    """A table model whose passes take `cost` seconds of the clock, times `slow(now)`."""

    def __init__(self, clock: Clock, cost: CostTable, *, slow: Callable[[float], float] = lambda now: 1.0) -> None:
        super().__init__(24, memory=2)
        self.clock, self.cost, self.slow = clock, cost, slow
        self.sizes: list[int] = []  # rows of every pass
        self._next: dict[tuple[int, ...], int] = {}

    def forward(self, batch: Batch, cache: KVCache, taps: Seq[int | str] = ()) -> Hidden:
        self.sizes.append(len(batch))
        self.clock.now += self.cost(len(batch)) * self.slow(self.clock.now)
        return super().forward(batch, cache, taps)

    def greedy(self, tokens: Seq[int]) -> int:
        """The token that greedy decoding says next."""
        key = tuple(tokens[-self.memory :])
        if key not in self._next:
            row: Tensor = self.row(self._code(key))
            self._next[key] = int(row.argmax())
        return self._next[key]


class Known(Drafter):
    """Drafts a chain whose tokens are right with chance `right(said, depth)`, for `seconds` a token.

    said: tokens of the output so far. With `sure` it knows that chance and says so; else the draft has no survival.
    """

    max_depth = 16

    def __init__(
        self,
        target: TimedTarget,
        right: Callable[[int, int], float],
        *,
        seconds: float = 0.0,
        sure: bool = False,
        seed: int = 0,
        max_depth: int = 16,
        row_seconds: float = 0.0,
    ) -> None:
        self.target, self.right, self.seconds, self.sure = target, right, seconds, sure
        self.free = not seconds
        self.max_depth, self.row_seconds = max_depth, row_seconds
        self.random = random.Random(seed)
        self.asked: list[int] = []
        self._read: dict[int, int] = {}

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            self.asked.append(limit.depth)
            self.target.clock.now += self.seconds_to_catch_up(seq)
            self._read[seq.id] = len(seq.tokens)
            said = len(seq.tokens) - seq.prompt_length
            tokens: list[int] = []
            survival: list[float] = []
            for depth in range(min(limit.depth, limit.nodes)):
                chance = self.right(said, depth)
                expected = self.target.greedy([*seq.tokens, *tokens])
                tokens.append(expected if self.random.random() < chance else (expected + 1) % 24)
                survival.append(chance * (survival[-1] if survival else 1.0))
            drafts.append(Draft.chain(tokens, survival=survival if self.sure else None) if tokens else NO_DRAFT)
        self.target.clock.now += self.seconds * max(map(len, drafts))
        return drafts

    def seconds_per_depth(self, batch: int) -> float:
        return self.seconds

    def seconds_to_catch_up(self, seq: Sequence) -> float:
        unread = len(seq.tokens) - self._read.get(seq.id, 0)
        return unread * self.row_seconds if unread > 17 else 0.0


def oracle(alpha: float, seconds: float, cost: CostTable, *, longest: int = 16) -> float:
    """Tokens a second of the best fixed draft length, 0 included, when every token is right with chance `alpha`."""

    def rate(length: int) -> float:
        return sum(alpha**k for k in range(length + 1)) / (length * seconds + cost(length + 1))

    return max(rate(length) for length in range(longest + 1))
