"""The block kinds of GGUF files, taken apart into whole numbers, scales and minima without rounding anything.

Knows byte layouts; knows nothing of files, names or models. Legend: B blocks, R rows, C columns, G groups of a row.
Source of the layouts: ggml-common.h of llama.cpp; the tests hold every kind to `gguf.quants.dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes: TypeAlias = NDArray[np.uint8]


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
    unpack: Callable[[Bytes], _Blocks] | None = None
    bits: int = 8
    group: int = 32


class _Blocks(NamedTuple):
    values: NDArray[np.uint8] | NDArray[np.int8]  # [B, size]
    scales: NDArray[np.float32]  # [B, groups of a block]
    minima: NDArray[np.float32] | None = None


def unpack(kind: BlockKind, raw_RX: Tensor) -> Quantized:
    """Take rows of blocks apart. raw_RX: uint8 [out, bytes of a row].

    numpy does the work, on one core and without holding Python's lock: several tensors can be unpacked at once.
    """
    assert kind.unpack is not None
    rows = raw_RX.shape[0]
    blocks = kind.unpack(raw_RX.numpy().reshape(-1, kind.nbytes))
    return Quantized(
        values=torch.from_numpy(blocks.values.reshape(rows, -1)),
        scales=torch.from_numpy(blocks.scales.reshape(rows, -1)),
        minima=None if blocks.minima is None else torch.from_numpy(blocks.minima.reshape(rows, -1)),
        bits=kind.bits,
        group=kind.group,
        kind=kind.name,
    )


def _cut(raw_BX: Bytes, start: int, stop: int) -> Bytes:
    """Some bytes of every block, side by side: uint8 [B, stop - start]."""
    # copied as one opaque item a block, many times faster than byte by byte
    item = np.dtype({"names": ["x"], "formats": [f"V{stop - start}"], "offsets": [start], "itemsize": raw_BX.shape[1]})
    items: NDArray[np.void] = raw_BX.view(item)["x"].copy()
    return items.view(np.uint8)


def _float16(raw_BX: Bytes, start: int) -> NDArray[np.float32]:
    """The half-precision number at byte `start` of each block, as float32 [B, 1]."""
    return _cut(raw_BX, start, start + 2).view("<f2").astype(np.float32)


def _fields(packed_BX: Bytes, *, width: int, run: int) -> Bytes:
    """Bit fields of `width` bits, lowest first: each run of bytes gives a run of its first fields, then its second, …

    packed_BX: uint8 [B, n]; returns uint8 [B, n * 8 / width].
    """
    fields, item = 8 // width, f"V{run}"
    out = np.empty((packed_BX.size // run, fields), item)
    for i in range(fields):
        field = packed_BX >> np.uint8(i * width)
        field &= np.uint8((1 << width) - 1)
        out[:, i] = field.view(item).ravel()
    return out.view(np.uint8).reshape(len(packed_BX), -1)


def _bits(packed_BX: Bytes) -> Bytes:
    """The bits of each block's bytes, lowest first: uint8 [B, n] to [B, 8 n]."""
    return np.unpackbits(packed_BX.ravel(), bitorder="little").reshape(len(packed_BX), -1)


def _above(low_BX: Bytes, high_BX: Bytes) -> NDArray[np.int8]:
    """Numbers of 4 low bits and the higher ones, made in place."""
    high_BX <<= np.uint8(4)
    low_BX |= high_BX
    return low_BX.view(np.int8)


def _q4_0(raw: Bytes) -> _Blocks:
    scale = _float16(raw, 0)
    return _Blocks(_fields(_cut(raw, 2, 18), width=4, run=16), scale, -8 * scale)


def _q4_1(raw: Bytes) -> _Blocks:
    return _Blocks(_fields(_cut(raw, 4, 20), width=4, run=16), _float16(raw, 0), _float16(raw, 2))


def _q5_0(raw: Bytes) -> _Blocks:
    values = _above(_fields(_cut(raw, 6, 22), width=4, run=16), _bits(_cut(raw, 2, 6)))
    values -= np.int8(16)
    return _Blocks(values, _float16(raw, 0))


def _q5_1(raw: Bytes) -> _Blocks:
    values = _above(_fields(_cut(raw, 8, 24), width=4, run=16), _bits(_cut(raw, 4, 8)))
    return _Blocks(values, _float16(raw, 0), _float16(raw, 2))


def _q8_0(raw: Bytes) -> _Blocks:
    return _Blocks(_cut(raw, 2, 34).view(np.int8), _float16(raw, 0))


def _two_level(raw: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minima of the eight groups of a Q4_K or Q5_K block: 6-bit numbers times two half-precision ones."""
    low, high, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([low & 63, rest & 15 | low >> 2 & 48], axis=1)
    minima = np.concatenate([high & 63, rest >> 4 | high >> 2 & 48], axis=1)
    return _float16(raw, 0) * scales, -(_float16(raw, 2) * minima)


def _q4_k(raw: Bytes) -> _Blocks:
    return _Blocks(_fields(_cut(raw, 16, 144), width=4, run=32), *_two_level(raw))


def _q5_k(raw: Bytes) -> _Blocks:
    values = _above(_fields(_cut(raw, 48, 176), width=4, run=32), _fields(_cut(raw, 16, 48), width=1, run=32))
    return _Blocks(values, *_two_level(raw))


def _q6_k(raw: Bytes) -> _Blocks:
    values = _above(_fields(_cut(raw, 0, 128), width=4, run=64), _fields(_cut(raw, 128, 192), width=2, run=32))
    values -= np.int8(32)
    return _Blocks(values, _float16(raw, 208) * _cut(raw, 192, 208).view(np.int8))


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
