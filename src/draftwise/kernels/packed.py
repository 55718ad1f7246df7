"""Weights laid out for the kernels, and products with them.

Knows the C structs; knows nothing of models. Legend: N rows, O outputs, I inputs, G groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.kernels.loader import library

KINDS = ("int4", "int6", "int8", "bf16", "fp32")
SCALES = ("none", "half", "two-level", "float")


class WeightsStruct(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("row_minimum", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("tile_bytes", ctypes.c_int64),
        ("out", ctypes.c_int32),
        ("in_", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("scale", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("has_minimum", ctypes.c_int32),
        ("base", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("as_bytes", ctypes.c_int32),
        ("lookup", ctypes.c_uint16 * 64),
    ]


class SourceStruct(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "scales", "minima", "dense", "dense16")]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight matrix [out, in] as the kernels read it: w = integer * scale + minimum, or dense; nothing is rounded.

    kind: one of KINDS. scale: how scales are stored, one of SCALES. The tensors own the memory that `struct` points at.
    """

    lib: ctypes.CDLL
    struct: WeightsStruct
    tensors: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.struct.out, self.struct.in_

    @property
    def kind(self) -> str:
        return KINDS[self.struct.kind]

    @property
    def scale(self) -> str:
        return SCALES[self.struct.scale]

    @property
    def nbytes(self) -> int:
        """Bytes read by a pass."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def with_bias(self, bias_O: Tensor) -> Packed:
        """The same weights and a bias, kept in float32, that products add."""
        bias = _padded(bias_O.float(), self.struct.out)
        struct = WeightsStruct.from_buffer_copy(self.struct)
        struct.bias = bias.data_ptr()
        return Packed(self.lib, struct, (*self.tensors, bias))

    def in_bytes(self, wanted: bool = True) -> Packed:
        """The same weights, for products with activations rounded to 8 bits, a scale for each 32 inputs of a row.

        The same as it was where weights are no integers; ignored where activations are float32, or the machine has no
        product of bytes.
        """
        struct = WeightsStruct.from_buffer_copy(self.struct)
        struct.as_bytes = wanted and self.kind.startswith("int")
        return Packed(self.lib, struct, self.tensors)

    @property
    def multiplies_bytes(self) -> bool:
        """True for weights `in_bytes` on a machine that has such products."""
        return bool(self.struct.as_bytes and self.lib.draftwise_has_bytes())

    def part(self, start: int, stop: int) -> Packed:
        """Outputs [start, stop) of the same memory; start must be a multiple of 16."""
        assert start % 16 == 0 and 0 <= start < stop <= self.struct.out
        struct = WeightsStruct.from_buffer_copy(self.struct)
        struct.out = stop - start
        struct.data += start // 16 * struct.tile_bytes
        for vector in ("row_scale", "row_minimum", "bias"):
            if getattr(struct, vector):
                setattr(struct, vector, getattr(struct, vector) + 4 * start)
        return Packed(self.lib, struct, self.tensors)

    def on(self, lib: ctypes.CDLL) -> Packed:
        """The same memory, computed with by another instruction set's kernels."""
        return Packed(lib, self.struct, self.tensors)

    def rows(self, ids_N: Tensor) -> Tensor:
        """The weights of outputs `ids_N` (int64), float32 [N, in]: an embedding look-up."""
        ids_N = ids_N.contiguous()
        out = torch.empty(len(ids_N), self.struct.in_)
        self.lib.draftwise_unpack_rows(ctypes.byref(self.struct), _address(ids_N), ctypes.c_int64(len(ids_N)), _address(out))
        return out

    def dense(self) -> Tensor:
        """The whole matrix, float32 [out, in]."""
        return self.rows(torch.arange(self.struct.out))


def memory(nbytes: int) -> Tensor:
    """Bytes not yet touched, uint8 [nbytes], on huge pages where the system grants them: small ones slow reading down."""
    page = 1 << 21
    if nbytes < page or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    region = mmap.mmap(-1, nbytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % page
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE, start, nbytes // page * page)
    return whole[start : start + nbytes]


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _library(lib: ctypes.CDLL | None) -> ctypes.CDLL:
    lib = lib or library()
    assert lib is not None, "ask available() first"
    return lib


def _pack(source: SourceStruct, out: int, inputs: int, group: int, lib: ctypes.CDLL | None) -> Packed:
    lib = _library(lib)
    struct = WeightsStruct(out=out, in_=inputs, group=group)
    lib.draftwise_plan(ctypes.byref(struct), ctypes.byref(source))
    data = memory(-(-out // 16) * struct.tile_bytes)
    lib.draftwise_fill(ctypes.byref(struct), ctypes.byref(source), _address(data))
    struct.data = data.data_ptr()
    return Packed(lib, struct, (data,))


def _padded(values: Tensor, out: int) -> Tensor:
    whole = torch.zeros(-(-out // 16) * 16)
    whole[:out] = values.reshape(out)
    return whole


def pack_int(
    values_OI: Tensor, scales_OG: Tensor, minima_OG: Tensor | None = None, *, group: int, lib: ctypes.CDLL | None = None
) -> Packed:
    """Integers of 4, 6 or 8 bits (the narrowest that holds them) with a scale, and perhaps a minimum, per group.

    values_OI: int8, or uint8 below 128. scales_OG, minima_OG: float32 [O, I / group], or [O, 1] with group 0 (one a row).
    w = value * scale + minimum. Raises ValueError on other shapes, types or groups.
    """
    out, inputs = values_OI.shape
    if values_OI.dtype not in (torch.int8, torch.uint8) or (values_OI.dtype == torch.uint8 and bool((values_OI > 127).any())):
        raise ValueError(f"values are {values_OI.dtype}; they must be int8, or uint8 below 128")
    if group not in (0, 16, 32):
        raise ValueError(f"the group is {group}; it must be 16, 32, or 0 for one scale a row")
    groups = -(-inputs // group) if group else 1
    for name, tensor in (("scales", scales_OG), ("minima", minima_OG)):
        if tensor is not None and (tensor.shape != (out, groups) or tensor.dtype != torch.float32):
            raise ValueError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}; they must be float32 {(out, groups)}")
    values, scales = values_OI.contiguous(), scales_OG.contiguous()
    minima = None if minima_OG is None else minima_OG.contiguous()
    if group:
        return _pack(SourceStruct(_address(values), _address(scales), _address(minima), None, None), out, inputs, group, lib)
    packed = _pack(SourceStruct(_address(values), None, None, None, None), out, inputs, 0, lib)
    per_row = [_padded(scales, out)] + ([_padded(minima, out)] if minima is not None else [])
    packed.struct.row_scale = per_row[0].data_ptr()
    packed.struct.row_minimum = per_row[1].data_ptr() if minima is not None else None
    return Packed(packed.lib, packed.struct, (*packed.tensors, *per_row))


def pack_int4(
    values_OI: Tensor, scales_OG: Tensor, minima_OG: Tensor | None = None, *, lib: ctypes.CDLL | None = None
) -> Packed:
    """uint8 values 0 .. 15 in groups of 32 inputs: GGUF's Q4_0, Q4_1 and Q4_K. See pack_int."""
    if values_OI.dtype != torch.uint8 or int(values_OI.max()) > 15:
        raise ValueError("values must be uint8 from 0 to 15")
    return pack_int(values_OI, scales_OG, minima_OG, group=32, lib=lib)


def pack_int8(
    values_OI: Tensor, scales_OG: Tensor, minima_OG: Tensor | None = None, *, lib: ctypes.CDLL | None = None
) -> Packed:
    """int8 values in groups of 16 or 32 inputs, or with one scale a row, as the shape of scales_OG says. See pack_int."""
    inputs, groups = values_OI.shape[1], scales_OG.shape[1]
    group = 0 if groups == 1 and inputs > 32 else next((g for g in (32, 16) if -(-inputs // g) == groups), -1)
    return pack_int(values_OI, scales_OG, minima_OG, group=group, lib=lib)


def pack_dense(weight_OI: Tensor, *, lib: ctypes.CDLL | None = None) -> Packed:
    """A float32 or bfloat16 matrix as it is."""
    out, inputs = weight_OI.shape
    weight = weight_OI.contiguous()
    if weight.dtype == torch.float32:
        return _pack(SourceStruct(None, None, None, _address(weight), None), out, inputs, 0, lib)
    if weight.dtype == torch.bfloat16:
        return _pack(SourceStruct(None, None, None, None, _address(weight)), out, inputs, 0, lib)
    raise ValueError(f"weights are {weight.dtype}; they must be float32 or bfloat16")


def matmul(
    x_NI: Tensor,
    packed: Packed,
    out_dtype: torch.dtype | None = None,
    *,
    dtype: torch.dtype | None = None,
    into_NW: Tensor | None = None,
    places_O: Tensor | None = None,
) -> Tensor:
    """x W^T, [N, out] in `out_dtype` (x's by default), added up in float32 in one order for any number of rows.

    Products are as for x in `dtype` (its own by default): bfloat16 multiplies pairs of bfloat16, or bytes for weights
    `in_bytes`, where the machine has the instruction; float32 multiplies floats. into_NW, places_O: rows that are there
    already, and where in them the outputs go, int64; these rows are returned then, [N, W].
    """
    out_dtype, dtype = out_dtype or x_NI.dtype, dtype or x_NI.dtype
    assert {x_NI.dtype, out_dtype, dtype} <= {torch.float32, torch.bfloat16}
    assert x_NI.dim() == 2 and x_NI.shape[1] == packed.struct.in_
    x_NI = x_NI.contiguous()
    y_NO = torch.empty(x_NI.shape[0], packed.struct.out, dtype=out_dtype) if into_NW is None else into_NW
    assert y_NO.dtype == out_dtype and y_NO.is_contiguous() and len(y_NO) == len(x_NI)
    assert places_O is None or (places_O.is_contiguous() and len(places_O) == packed.struct.out)
    packed.lib.draftwise_matmul(
        ctypes.byref(packed.struct),
        _address(x_NI),
        ctypes.c_int(x_NI.dtype == torch.bfloat16),
        ctypes.c_int64(len(x_NI)),
        _address(y_NO),
        ctypes.c_int(out_dtype == torch.bfloat16),
        ctypes.c_int(dtype == torch.bfloat16),
        _address(places_O),
        ctypes.c_int64(y_NO.shape[1]),
    )
    return y_NO
