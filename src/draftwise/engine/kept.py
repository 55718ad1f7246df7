"""The target's hidden states of the rows that a pass kept, cut out when a drafter asks for them. Knows tensors only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from draftwise.types import Tap


class Kept(Mapping[Tap, Tensor]):
    """Some rows of every tap."""

    def __init__(self, taps: Mapping[Tap, Tensor], rows: slice | list[int]) -> None:
        self._taps, self._rows = taps, rows

    def __getitem__(self, tap: Tap) -> Tensor:
        return self._taps[tap][self._rows]

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)
