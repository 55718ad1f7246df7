"""Ways to feed the same tokens to a model: one at a time, in chunks, as a tree, beside other texts, over scattered pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.cache import PAGE, KVCache
from draftwise.models.base import Model
from draftwise.types import Feed


def text(length: int, *, seed: int = 0, vocabulary: int = 300) -> list[int]:
    """Random tokens past the special ones of the tiny models."""
    generator = random.Random(seed)
    return [generator.randrange(5, vocabulary) for _ in range(length)]


def read(model: Model, cache: KVCache, slot: int, tokens: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
    """Logits [tokens, vocab] of tokens fed and committed in `chunks`, the rest at once."""
    rows, at = [], 0
    for size in [*chunks, len(tokens)]:
        chunk = tokens[at : at + size]
        if chunk:
            rows.append(model.logits(model.forward(cache.pack([Feed.chain(slot, chunk)]), cache).final))
            cache.commit(slot, range(len(chunk)))
            at += len(chunk)
    return torch.cat(rows)


def logits(model: Model, tokens: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
    """`read` in a cache of its own."""
    cache = model.new_cache(len(tokens) + PAGE)
    return read(model, cache, cache.alloc(), tokens, chunks)


def one_by_one(model: Model, tokens: Sequence[int]) -> Tensor:
    """Logits of tokens fed alone, as plain decoding does."""
    return logits(model, tokens, [1] * len(tokens))


def scattered(model: Model, rows: int) -> tuple[KVCache, int]:
    """A cache whose free pages touch nowhere, and a slot in it."""
    cache = model.new_cache(2 * (rows + 2 * PAGE))
    slots = []
    while cache.free_rows:
        slots.append(cache.alloc())
        cache.pack([Feed.chain(slots[-1], [0] * PAGE)])
        cache.commit(slots[-1], range(PAGE))
    # pages are taken from the middle of free runs, so their order is not the slots' order
    for slot in sorted(slots, key=cache.block_table)[::2]:
        cache.free(slot)
    return cache, cache.alloc()


def random_tree(nodes: int, *, seed: int = 0) -> list[int]:
    """Parents of a tree with chains, forks and several roots."""
    generator = random.Random(seed)
    return [node - 1 if node and generator.random() < 0.5 else generator.randrange(-1, node) for node in range(nodes)]


def path(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]
