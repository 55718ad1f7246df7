"""Row invariance: how many rows a kernel must be given for a row's bits not to depend on its neighbours.

A row's result must be the same whether it is decoded alone, verified among drafts or read in a prompt. Some kernels
add in another order for some row counts; padding to a multiple, or feeding tiles of one fixed size, settles most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
"""Most rows that reach a kernel at once: every count up to it is probed, so that none is left to chance."""

FEW = 16
"""Row counts up to this one are probed over many numbers."""
SAMPLES = 300_000
"""Numbers of 16 bits compared for each of them."""
MOST_ROWS = 16_384
"""Rows that they take at most, where a kernel has few outputs, such as the router of a mixture of experts."""


class RowRule(NamedTuple):
    """Pad row counts to `multiple`, and feed at most `tile` rows at a time (0: any number)."""

    multiple: int = 1
    tile: int = 0
    invariant: bool = True

    def __call__(self, kernel: Callable[[Tensor], Tensor], x_NK: Tensor) -> Tensor:
        """kernel(x) under this rule."""
        rows = x_NK.shape[0]
        if self.tile and rows > self.tile:
            return torch.cat([self(kernel, part) for part in torch.split(x_NK, self.tile)])
        short = -rows % self.multiple
        if not short:
            return kernel(x_NK)
        return kernel(torch.cat([x_NK, x_NK.new_zeros(short, x_NK.shape[1])]))[:rows]

    def describe(self) -> str:
        if not self.invariant:
            return "not row-invariant"
        how = f" with rows padded to multiples of {self.multiple}" if self.multiple > 1 else ""
        return f"row-invariant{how}" + (f" in tiles of {self.tile}" if self.tile else "")


CANDIDATES = (*(RowRule(multiple, TILE) for multiple in (1, 2, 4, 8, 16, 32, 64)), RowRule(16, 16), RowRule(1, 1))


def holds(rule: RowRule, kernel: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True when rows come out bit for bit alike for every count that a pass may have.

    Rounding to 16 bits hides another order of additions in all but about one number of ten thousand, so the counts that
    kernels treat apart, the small ones, are compared over SAMPLES numbers; the others on the first and the last rows.
    In 32 bits it shows in most numbers, and a few rows do.
    """
    generator = torch.Generator().manual_seed(0)
    outputs = kernel(torch.zeros(TILE, width, device=device, dtype=dtype)).shape[1]
    rows = min(-(-SAMPLES // outputs), MOST_ROWS) if dtype.itemsize < 4 else TILE
    x = torch.randn(-(-rows // TILE) * TILE, width, generator=generator).to(device=device, dtype=dtype)
    whole = torch.cat([rule(kernel, part) for part in torch.split(x, TILE)])
    for count in range(1, TILE + 1):
        last = len(x) - count
        starts = range(0, last + 1, count) if count <= FEW else (0, last)
        if not all(torch.equal(rule(kernel, x[at : at + count].contiguous()), whole[at : at + count]) for at in starts):
            return False
    return True


def probe(kernel: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, device: torch.device) -> RowRule:
    """The cheapest rule under which `kernel` is row-invariant; one marked not invariant where none helps."""
    for rule in CANDIDATES:
        if holds(rule, kernel, width, dtype, device):
            return rule
    return RowRule(invariant=False)
