"""The block kinds of GGUF files, taken apart into whole numbers, scales and minima without rounding anything.

Knows byte layouts; knows nothing of files, names or models. Legend: B blocks, R rows, C columns, G groups of a row.
Source of the layouts: ggml-common.h of llama.cpp; the tests hold every kind to `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight matrix as its file's blocks: weight = value * scale + minimum, with one scale (and minimum) a group.

    values: [out, in]; uint8 in 0..15 where `bits` is 4, int8 where it is 8. scales, minima: float32 [out, in / group];
    minima is None where the kind has none. `kind` is the file's own name for it, such as "Q4_K".
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    bits: int
    group: int
    kind: str

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [out, in], computed in float32 and rounded once to `dtype`."""
        rows, columns = self.shape
        weight = self.values.view(rows, -1, self.group).float() * self.scales[..., None]
        if self.minima is not None:
            weight += self.minima[..., None]
        return weight.view(rows, columns).to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of some rows, as an embedding looks them up. ids: int64 [n]; returns float32 [n, in]."""
        minima = None if self.minima is None else self.minima[ids]
        return replace(self, values=self.values[ids], scales=self.scales[ids], minima=minima).dequantize()


class BlockKind(NamedTuple):
    """A storage kind: `size` weights share `nbytes` bytes. Exactly one of dtype (plain numbers) and unpack is set."""

    name: str
    size: int
    nbytes: int
    dtype: torch.dtype | None = None
    unpack: Callable[[Tensor], _Blocks] | None = None
    bits: int = 8
    group: int = 32


class _Blocks(NamedTuple):
    values: Tensor  # [B, size]
    scales: Tensor  # [B, groups of a block]
    minima: Tensor | None = None


def unpack(kind: BlockKind, raw_RX: Tensor) -> Quantized:
    """Take rows of blocks apart. raw_RX: uint8 [out, bytes of a row]."""
    assert kind.unpack is not None
    rows = raw_RX.shape[0]
    blocks = kind.unpack(raw_RX.reshape(-1, kind.nbytes))
    return Quantized(
        values=blocks.values.view(rows, -1),
        scales=blocks.scales.reshape(rows, -1),
        minima=None if blocks.minima is None else blocks.minima.reshape(rows, -1),
        bits=kind.bits,
        group=kind.group,
        kind=kind.name,
    )


def _float16(raw_BX: Tensor, start: int) -> Tensor:
    """The half-precision number at byte `start` of each block, as float32 [B, 1]."""
    return raw_BX[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(raw_BX: Tensor, *, width: int, run: int) -> Tensor:
    """Bit fields of `width` bits, lowest first: each run of bytes gives a run of its first fields, then its second, …

    raw_BX: uint8 [B, n]; returns uint8 [B, n * 8 / width].
    """
    blocks, count = raw_BX.shape
    fields = 8 // width
    out = torch.empty(blocks, count // run, fields, run, dtype=torch.uint8)
    runs = raw_BX.reshape(blocks, count // run, run)
    for i in range(fields):
        torch.bitwise_right_shift(runs, i * width, out=out[:, :, i])
    return out.bitwise_and_((1 << width) - 1).view(blocks, -1)


def _bits(raw_BX: Tensor) -> Tensor:
    """The 32 bits of four bytes, lowest first: uint8 [B, 4] to [B, 32]."""
    return (raw_BX[:, :, None] >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).view(-1, 32)


def _q4_0(raw: Tensor) -> _Blocks:
    scale = _float16(raw, 0)
    return _Blocks(_fields(raw[:, 2:], width=4, run=16), scale, -8 * scale)


def _q4_1(raw: Tensor) -> _Blocks:
    return _Blocks(_fields(raw[:, 4:], width=4, run=16), _float16(raw, 0), _float16(raw, 2))


def _q5_0(raw: Tensor) -> _Blocks:
    values = _fields(raw[:, 6:], width=4, run=16) | _bits(raw[:, 2:6]) << 4
    return _Blocks(values.view(torch.int8).sub_(16), _float16(raw, 0))


def _q5_1(raw: Tensor) -> _Blocks:
    values = _fields(raw[:, 8:], width=4, run=16) | _bits(raw[:, 4:8]) << 4
    return _Blocks(values.view(torch.int8), _float16(raw, 0), _float16(raw, 2))


def _q8_0(raw: Tensor) -> _Blocks:
    return _Blocks(raw[:, 2:].contiguous().view(torch.int8), _float16(raw, 0))


def _two_level(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight groups of a Q4_K or Q5_K block: 6-bit numbers times two half-precision ones."""
    low, high, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat([low & 63, rest & 15 | low >> 2 & 48], dim=1)
    minima = torch.cat([high & 63, rest >> 4 | high >> 2 & 48], dim=1)
    return _float16(raw, 0) * scales, -(_float16(raw, 2) * minima)


def _q4_k(raw: Tensor) -> _Blocks:
    return _Blocks(_fields(raw[:, 16:], width=4, run=32), *_two_level(raw))


def _q5_k(raw: Tensor) -> _Blocks:
    values = _fields(raw[:, 48:], width=4, run=32) | _fields(raw[:, 16:48], width=1, run=32) << 4
    return _Blocks(values.view(torch.int8), *_two_level(raw))


def _q6_k(raw: Tensor) -> _Blocks:
    values = _fields(raw[:, :128], width=4, run=64) | _fields(raw[:, 128:192], width=2, run=32) << 4
    scales = _float16(raw, 208) * raw[:, 192:208].contiguous().view(torch.int8)
    return _Blocks(values.view(torch.int8).sub_(32), scales)


KINDS: dict[int, BlockKind] = {
    0: BlockKind("F32", 1, 4, dtype=torch.float32),
    1: BlockKind("F16", 1, 2, dtype=torch.float16),
    2: BlockKind("Q4_0", 32, 18, unpack=_q4_0, bits=4),
    3: BlockKind("Q4_1", 32, 20, unpack=_q4_1, bits=4),
    6: BlockKind("Q5_0", 32, 22, unpack=_q5_0),
    7: BlockKind("Q5_1", 32, 24, unpack=_q5_1),
    8: BlockKind("Q8_0", 32, 34, unpack=_q8_0),
    12: BlockKind("Q4_K", 256, 144, unpack=_q4_k, bits=4),
    13: BlockKind("Q5_K", 256, 176, unpack=_q5_k),
    14: BlockKind("Q6_K", 256, 210, unpack=_q6_k, group=16),
    30: BlockKind("BF16", 1, 2, dtype=torch.bfloat16),
}
"""The kinds that are read, by their number in the file format."""

OTHER_KINDS = (
    {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
    | {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"}
    | {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
)
"""The names of kinds that are not read, for the message that says so."""
