"""A draft's chain of guesses as one call of the compiled kernels: read, guess, read the guess, while that promises to pay.

Knows the C struct; knows nothing of requests or trees. Legend: N rows, C width, W numbers that a row hands on, v tokens known.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.kernels.packed import Packed


@dataclass(frozen=True, slots=True, eq=False)
class ChainHead:
    """What turns a row into guesses. tokens_v: what the outputs of `product` are of, int64, ascending; None: 0 and up.

    vocab: ids below it may be guessed. dtype: as products with rows of this type.
    """

    product: Packed
    tokens_v: Tensor | None
    vocab: int
    dtype: torch.dtype


class Chances:
    """How often a guess is right once all above it are, by its confidence c: base + slope * c of its class.

    edges: where the next class begins; base, slope: one for each class.
    """

    def __init__(self, edges: Seq[float], base: Seq[float], slope: Seq[float]) -> None:
        assert len(base) == len(slope) == len(edges) + 1
        self.classes = len(base)
        self.edges, self.base, self.slope = ((ctypes.c_double * len(part))(*part) for part in (edges, base, slope))


class ChainRule(NamedTuple):
    """How a chain is guessed, and when it ends.

    depth: most guesses. temperature: 0 guesses the likeliest; above, what arrives first under the noise of `keys`, one for
    each guess. chances: of a guess that was made; following: of one that was not yet. The chain goes on while its last guess
    has at least `least_confidence`, and the chance of a further one exceeds node_price by more than level_price.
    """

    depth: int
    temperature: float
    keys: Seq[int]
    chances: Chances
    following: float
    least_confidence: float = 0.0
    node_price: float = 0.0
    level_price: float = 0.0


class Chained(NamedTuple):
    """handed_NW: what each row handed on, those of guesses that were not read left as they were. later: seconds that guesses
    after the first took."""

    guesses: list[tuple[int, float]]
    handed_NW: Tensor
    later: float


def guess_chain(
    lib: ctypes.CDLL,
    decoder: ctypes.c_void_p,
    given: ctypes.Structure,
    layers: int,
    handed_NW: Tensor,
    head: ChainHead,
    rule: ChainRule,
) -> Chained:
    """Run it. given: the pass over the rows of committed text; handed_NW: float32, room for these and all guesses but one."""
    depth, tokens_v = rule.depth, head.tokens_v
    assert tokens_v is None or (tokens_v.is_contiguous() and len(tokens_v) == head.product.struct.out)
    tokens, confidences = (ctypes.c_int64 * depth)(), (ctypes.c_double * depth)()
    keys = (ctypes.c_uint64 * depth)(*rule.keys) if rule.temperature > 0 else None
    known = head.product.struct.out if tokens_v is not None else min(head.product.struct.out, head.vocab)
    chain = _Chain(
        head=ctypes.addressof(head.product.struct),
        tokens=None if tokens_v is None else tokens_v.data_ptr(),
        known=known,
        as_bf16=head.dtype == torch.bfloat16,
        layers=layers,
        depth=depth,
        temperature=rule.temperature,
        keys=None if keys is None else ctypes.addressof(keys),
        edges=ctypes.addressof(rule.chances.edges),
        base=ctypes.addressof(rule.chances.base),
        slope=ctypes.addressof(rule.chances.slope),
        classes=rule.chances.classes,
        next=rule.following,
        least_confidence=rule.least_confidence,
        node_price=rule.node_price,
        level_price=rule.level_price,
        handed=handed_NW.data_ptr(),
        guesses=ctypes.addressof(tokens),
        confidences=ctypes.addressof(confidences),
    )
    made = lib.draftwise_decoder_chain(decoder, ctypes.byref(given), ctypes.byref(chain))
    return Chained(list(zip(tokens[:made], confidences[:made], strict=True)), handed_NW, chain.later)


class _Chain(ctypes.Structure):
    _fields_ = [
        ("head", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("known", "as_bf16", "layers", "depth")),
        ("temperature", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("keys", "edges", "base", "slope")),
        ("classes", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("next", "least_confidence", "node_price", "level_price")),
        *((name, ctypes.c_void_p) for name in ("handed", "guesses", "confidences")),
        ("later", ctypes.c_double),
    ]
