"""Who runs, and which rows each brings to the next pass. Knows lengths and pages; knows nothing of drafts' contents."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from draftwise.cache import PAGE, KVCache
from draftwise.sequence import Sequence


class Turn(NamedTuple):
    """A sequence's share of the next pass: the committed tokens to feed, and whether they reach its last one."""

    seq: Sequence
    slot: int
    tokens: list[int]
    complete: bool


class Scheduler:
    """First come, first served. A request starts once the cache can hold all it may ever need, so none is put back.

    A pass takes the one pending token of every decoding request, then prompt chunks up to `chunk` rows in all.
    """

    def __init__(self, cache: KVCache, *, max_batch: int, chunk: int, slack: int) -> None:
        self.cache, self.max_batch, self.chunk, self.slack = cache, max_batch, chunk, slack
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self._promised: dict[int, int] = {}  # pages

    def add(self, seq: Sequence) -> None:
        """Queue a request. Raises ValueError where the whole cache could not hold it."""
        if self._pages(seq) > self.cache.pages:
            raise ValueError(
                f"the request may need {self._pages(seq) * PAGE} rows of the key/value cache, "
                f"which has {self.cache.pages * PAGE}; lower max_tokens or load with a larger context"
            )
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Take out a request that ended, wherever it stands."""
        if self.running.pop(seq.id, None) is None:
            self.waiting.remove(seq)
            return
        assert seq.slot is not None
        self.cache.free(seq.slot)
        seq.slot = None
        del self._promised[seq.id]

    def turns(self) -> list[Turn]:
        """Admit what fits and share out the next pass; decoding requests first."""
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            if sum(self._promised.values()) + self._pages(seq) > self.cache.pages:
                break
            self.waiting.popleft()
            self._promised[seq.id] = self._pages(seq)
            self.running[seq.id] = seq
            seq.slot = self.cache.alloc()
        reading = [(seq, seq.slot, self.cache.length(seq.slot)) for seq in self.running.values() if seq.slot is not None]
        budget, turns = self.chunk, []
        for seq, slot, start in sorted(reading, key=lambda item: len(item[0].tokens) - item[2] > 1):
            missing = len(seq.tokens) - start
            count = missing if missing == 1 else min(missing, budget)
            if count:
                budget -= count
                turns.append(Turn(seq, slot, seq.tokens[start : start + count], count == missing))
        return turns

    def _pages(self, seq: Sequence) -> int:
        return -(-(len(seq.tokens) + seq.room + self.slack) // PAGE)
