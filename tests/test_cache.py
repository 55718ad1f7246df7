"""The cache against a list: random staging, commits, discards and frees, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from draftwise.cache import PAGE, CacheFull, KVCache
from draftwise.types import Feed


def cache(rows: int = 64 * PAGE) -> KVCache:
    return KVCache(layers=2, kv_heads=2, head_dim=4, capacity=rows)


def write(made: KVCache, batch, numbers: list[int]) -> None:
    """Every layer, head and channel of a row holds its own number."""
    k = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 2, 4)
    for layer in range(2):
        made.stage(layer, batch, k + layer, -k - layer)


def committed(made: KVCache, slot: int, layer: int) -> list[int]:
    length = made.length(slot)
    if not length:
        return []
    made.pack([Feed.chain(slot, [0])])
    batch_span = next(iter(made.pack([Feed.chain(slot, [0], 0)]).spans))
    k, v = made.view(layer, batch_span)
    made.discard(slot)
    assert torch.equal(k[:, :length], -v[:, :length])
    assert bool((k[:, :length] == k[:1, :length, :1]).all())
    return [int(number) - layer for number in k[0, :length, 0].tolist()]


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed):
    chance = random.Random(seed)
    made = cache()
    kept: dict[int, list[int]] = {}
    number = 0
    for _ in range(120):
        action = chance.random()
        if len(kept) < 3 or action < 0.1:
            kept[made.alloc()] = []
        elif action < 0.2 and len(kept) > 3:
            slot = chance.choice(list(kept))
            made.free(slot)
            del kept[slot]
        else:
            chosen = chance.sample(list(kept), chance.randint(1, min(3, len(kept))))
            staged: dict[int, tuple[list[int], list[int]]] = {slot: ([], []) for slot in chosen}
            for _ in range(chance.randint(1, 3)):  # rows pile up over several passes
                feeds, numbers = [], []
                for slot in chosen:
                    values, parents = staged[slot]
                    count = chance.randint(1, 9)
                    new = [chance.randrange(-1, len(parents) + i) for i in range(count)]
                    feeds.append(Feed(slot, [1] * count, new))
                    fresh = list(range(number, number + count))
                    number += count
                    values += fresh
                    parents += new
                    numbers += fresh
                write(made, made.pack(feeds), numbers)
            for slot in chosen:
                values, parents = staged[slot]
                if chance.random() < 0.2:
                    made.discard(slot)
                    continue
                node, way = chance.randrange(len(parents)), []
                while node >= 0:
                    way.append(node)
                    node = parents[node]
                made.commit(slot, way[::-1])
                kept[slot] += [values[node] for node in way[::-1]]
        for slot, values in kept.items():
            assert made.length(slot) == len(values) and made.staged(slot) == 0
            assert committed(made, slot, 0) == committed(made, slot, 1) == values
        used = sum(-(-len(values) // PAGE) for values in kept.values())
        assert made.free_rows == (made.pages - used) * PAGE


def test_positions_follow_depth_and_rows_see_their_ancestors():
    made = cache()
    slot = made.alloc()
    write(made, made.pack([Feed.chain(slot, [5, 6, 7])]), [1, 2, 3])
    made.commit(slot, [0, 1, 2])
    batch = made.pack([Feed(slot, [10, 11, 12, 13], [-1, 0, 0, 2])])
    assert batch.positions_N.tolist() == [3, 4, 4, 5]
    tree = batch.trees[0]
    assert tree is not None
    assert tree.visible.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]
    again = made.pack([Feed(slot, [14], [3])])
    assert again.positions_N.tolist() == [6]
    assert again.trees[0].visible.tolist() == [[True, False, True, True, True]]


def test_a_full_cache_says_so_and_changes_nothing():
    made = cache(4 * PAGE)
    first, second = made.alloc(), made.alloc()
    write(made, made.pack([Feed.chain(first, [1] * 40)]), list(range(40)))
    made.commit(first, range(40))
    with pytest.raises(CacheFull):
        made.pack([Feed.chain(second, [1] * 10), Feed.chain(first, [1] * 10)])
    assert made.staged(first) == made.staged(second) == 0 and made.free_rows == PAGE
    assert committed(made, first, 0) == list(range(40))
    write(made, made.pack([Feed.chain(second, [1] * 16)]), list(range(16)))
    made.free(first)
    assert made.free_rows == 3 * PAGE


def test_only_a_path_can_be_committed():
    made = cache()
    slot = made.alloc()
    made.pack([Feed(slot, [1, 2, 3], [-1, -1, 0])])
    with pytest.raises(AssertionError, match="not a path"):
        made.commit(slot, [0, 1])


def test_a_slot_alone_keeps_its_pages_side_by_side():
    made = cache()
    slots = [made.alloc() for _ in range(2)]
    for _ in range(20):
        for slot in slots:
            made.pack([Feed.chain(slot, [1] * 7)])
            made.commit(slot, range(7))
    for slot in slots:
        table = made.block_table(slot)
        assert table == tuple(range(table[0], table[0] + len(table)))
