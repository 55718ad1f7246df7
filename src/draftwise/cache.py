"""Keys and values of what was read: staged past the committed length by a pass, committed or dropped afterwards.

Knows rows, pages and lengths; knows nothing of tokens' meaning, models or drafts. Only this file changes a length.

A slot holds committed rows, then staged ones; staged rows form a tree and see their ancestors only:

    | committed: length(slot) | staged: fed since the last commit, numbered from 0 | free to the end of the last page |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftwise.types import Batch, Feed, Span, Tree

PAGE = 16  # rows
BLOCK = 512
"""Keys are read in whole blocks: torch's attention splits them there, so a row's additions keep one order."""


class CacheFull(RuntimeError):
    """No page is free. The scheduler keeps this from happening by asking `can_stage` first."""


@dataclass(slots=True)
class _Slot:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    parents: list[int] = field(default_factory=list)  # of the staged rows
    depths: list[int] = field(default_factory=list)  # 0 for a row that follows the last committed token

    def row(self, index: int) -> int:
        return self.pages[index // PAGE] * PAGE + index % PAGE

    def path(self, row: int) -> tuple[int, ...]:
        """The staged rows down to `row`, itself included."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = self.parents[row]
        return tuple(reversed(rows))

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))


class KVCache:
    """Keys and values of all layers in one pool of pages of 16 rows, with a block table for each slot.

    pool: [layers, 2, kv heads, rows, head dim]; index 0 of the second axis holds keys, 1 values. Adjacent pages of a
    slot are read as one view; scattered ones are gathered.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pages = -(-capacity // PAGE)
        # zeros, not empty: masked columns are multiplied by 0, and 0 times a stray NaN is NaN.
        # A block more than the pages need, so that a view may run past its slot's last page.
        self.pool = _zeros((layers, 2, kv_heads, self.pages * PAGE + BLOCK, head_dim), dtype, torch.device(device))
        self._free = [True] * self.pages
        self._free_count = self.pages
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0

    # slots

    def alloc(self) -> int:
        """A new, empty slot."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        self._slots[slot] = _Slot()
        return slot

    def free(self, slot: int) -> None:
        """Give back the slot and its pages."""
        self._release(self._slots.pop(slot).pages)

    def length(self, slot: int) -> int:
        """Committed rows of the slot."""
        return self._slots[slot].length

    def staged(self, slot: int) -> int:
        """Rows staged since the last commit or discard."""
        return len(self._slots[slot].parents)

    def block_table(self, slot: int) -> tuple[int, ...]:
        """The slot's pages, in order."""
        return tuple(self._slots[slot].pages)

    @property
    def free_rows(self) -> int:
        return self._free_count * PAGE

    def pages_to_stage(self, slot: int, rows: int) -> int:
        """Pages that `rows` more rows would take from the pool."""
        state = self._slots[slot]
        return max(0, -(-(state.length + len(state.parents) + rows) // PAGE) - len(state.pages))

    # a pass

    def pack(self, feeds: Sequence[Feed]) -> Batch:
        """Reserve staged rows for the feeds and lay them out as one pass. Raises CacheFull, changing nothing."""
        wanted = [self.pages_to_stage(feed.slot, len(feed.tokens)) for feed in feeds]
        if sum(wanted) > self._free_count:
            raise CacheFull("no free page in the key/value cache")
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        spans: list[Span] = []
        trees: list[Tree | None] = []
        for feed, pages in zip(feeds, wanted, strict=True):
            state = self._slots[feed.slot]
            start, first = len(tokens), len(state.parents)
            for _ in range(pages):
                state.pages.append(self._take(state.pages[-1] if state.pages else None))
            for parent in feed.parents:
                row = len(state.parents)
                assert -1 <= parent < row
                state.parents.append(parent)
                state.depths.append(0 if parent < 0 else state.depths[parent] + 1)
                positions.append(state.length + state.depths[row])
                rows.append(state.row(state.length + row))
            tokens.extend(feed.tokens)
            assert len(tokens) == len(positions)
            spans.append(Span(feed.slot, start, len(tokens), state.length, len(state.parents)))
            trees.append(None if state.is_chain else self._tree(state, first))
        tokens_N, positions_N, rows_N = self._indices([tokens, positions, rows]).unbind()
        return Batch(tokens_N, positions_N, rows_N, tuple(spans), tuple(trees))

    def stage(self, layer: int, batch: Batch, k_NHD: Tensor, v_NHD: Tensor) -> None:
        """Write a layer's keys and values for the rows of a pass."""
        self.pool[layer, 0].index_copy_(1, batch.rows_N, k_NHD.transpose(0, 1).to(self.pool.dtype))
        self.pool[layer, 1].index_copy_(1, batch.rows_N, v_NHD.transpose(0, 1).to(self.pool.dtype))

    def columns(self, span: Span) -> int:
        """T, the rows that `view` shows for a span: whole blocks."""
        return -(-(span.committed + span.staged) // BLOCK) * BLOCK

    def rows(self, span: Span) -> Tensor:
        """Places in the pool of a span's committed and staged rows, int64 [committed + staged]."""
        pages = self._indices(self._slots[span.slot].pages)
        rows = (pages[:, None] * PAGE + torch.arange(PAGE, device=self.pool.device)).flatten()
        return rows[: span.committed + span.staged]

    def view(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values of a span's slot, [kv heads, T, head dim]. Rows past the span's staged ones are others' or old."""
        pages, columns = self._slots[span.slot].pages, self.columns(span)
        first = pages[0] * PAGE
        if pages[-1] - pages[0] == len(pages) - 1 and pages == list(range(pages[0], pages[-1] + 1)):
            kv = self.pool[layer, :, :, first : first + columns]
        else:
            rows = self.rows(span)
            kv = self.pool[layer].index_select(2, torch.cat([rows, rows.new_zeros(columns - len(rows))]))
        return kv[0], kv[1]

    # afterwards

    def commit(self, slot: int, kept: Sequence[int]) -> None:
        """Make the staged rows `kept` real, in that order, and drop the rest. Each must follow the one before it."""
        state = self._slots[slot]
        assert all(state.parents[row] == before for row, before in zip(kept, [-1, *kept], strict=False)), "not a path"
        moved = [(row, place) for place, row in enumerate(kept) if row != place]
        if moved:
            source = self._indices([state.row(state.length + row) for row, _ in moved])
            target = self._indices([state.row(state.length + place) for _, place in moved])
            # index_select copies first, so a row is read before it is overwritten
            self.pool.index_copy_(3, target, self.pool.index_select(3, source))
        state.length += len(kept)
        self._drop_staged(state)

    def discard(self, slot: int) -> None:
        """Drop every staged row."""
        self._drop_staged(self._slots[slot])

    # inside

    def _drop_staged(self, state: _Slot) -> None:
        state.parents.clear()
        state.depths.clear()
        needed = -(-state.length // PAGE)
        self._release(state.pages[needed:])
        del state.pages[needed:]

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._free[page] = True
        self._free_count += len(pages)

    def _take(self, last: int | None) -> int:
        """The page after `last` where it is free, else one that leaves every slot room to grow."""
        page = last + 1 if last is not None and last + 1 < self.pages and self._free[last + 1] else self._roomiest()
        self._free[page] = False
        self._free_count -= 1
        return page

    def _roomiest(self) -> int:
        """A place in the widest free run: its start if nothing grows towards it, else its middle."""
        best_start, best_size, start = 0, 0, 0
        for page in range(self.pages + 1):
            if page == self.pages or not self._free[page]:
                if page - start > best_size:
                    best_start, best_size = start, page - start
                start = page + 1
        assert best_size > 0
        return best_start if best_start == 0 else best_start + best_size // 2

    def _tree(self, state: _Slot, first: int) -> Tree:
        staged = len(state.parents)
        visible = torch.eye(staged, dtype=torch.bool)
        for row, parent in enumerate(state.parents):
            if parent >= 0:
                visible[row] |= visible[parent]
        positions = self._indices([state.length + depth for depth in state.depths])
        inner = {parent for parent in state.parents[first:] if parent >= first}
        branches = tuple(state.path(row) for row in range(first, staged) if row not in inner)
        return Tree(visible[first:].to(self.pool.device), positions, branches)

    def _indices(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.pool.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU their memory is taken only where it is first written, so a large pool costs nothing until used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)).view(dtype)
