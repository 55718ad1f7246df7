"""Matrix products with weights of every kind, each row-invariant by its row rule.

Knows weights and torch's kernels; knows nothing of layers. Shapes: N rows, K inputs, M outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.checkpoint import Quantized
from draftwise.models.rows import RowRule, probe

KINDS = ("fp32", "bf16", "fp16", "int8", "int4")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROUP = 32  # inputs that share a scale when we quantise
LEAST_SCALE = 2.0**-24  # half precision's least, for groups of zeros


@dataclass(frozen=True, slots=True)
class WeightKind:
    """What weights become: `dtype` of activations and dense weights; `quantize` "int8", "int4", or None to keep the file's.

    keep_blocks: a file's quantised blocks stay so, else they are expanded to dtype. compiled: use the C++ kernels where
    this machine has them. round_activations: they multiply quantised weights with activations of 8 bits, a scale for each 32,
    where dtype is bf16 and the machine can.
    """

    dtype: torch.dtype
    quantize: str | None = None
    keep_blocks: bool = True
    compiled: bool = True
    round_activations: bool = True

    def runs_compiled(self, device: torch.device) -> bool:
        """True where products on `device` go through the C++ kernels."""
        return self.compiled and device.type == "cpu" and self.dtype in (torch.bfloat16, torch.float32) and kernels.available()


def quantize(weight_MK: Tensor, kind: str) -> Quantized:
    """Round a weight to int4 (groups of 32, scale and minimum) or int8 (groups of 32, scale), nearest values.

    Scales are half precision's where these are near enough: fewer bytes to read.
    """
    outputs, inputs = weight_MK.shape
    if inputs % GROUP:
        raise ValueError(f"cannot quantise a weight of {inputs} inputs: it is no multiple of {GROUP}; use --dtype instead")
    groups = weight_MK.float().view(outputs, inputs // GROUP, GROUP)
    if kind == "int4":
        low, high = groups.amin(-1), groups.amax(-1)
        scales, low = _shortened(((high - low) / 15).clamp(min=LEAST_SCALE)), _shortened(low)
        values = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8)
        return Quantized(values.view(outputs, inputs), scales, low, bits=4, group=GROUP, kind="int4")
    if kind == "int8":
        scales = _shortened((groups.abs().amax(-1) / 127).clamp(min=LEAST_SCALE))
        values = (groups / scales[..., None]).round().clamp(-127, 127).to(torch.int8)
        return Quantized(values.view(outputs, inputs), scales, None, bits=8, group=GROUP, kind="int8")
    raise ValueError(f"cannot quantise to {kind!r}; choices: int8, int4")


def _shortened(factors: Tensor) -> Tensor:
    """As half precision has them, where that changes none by more than a thousandth."""
    half = factors.half().float()
    return half if bool(((half - factors).abs() <= factors.abs() * 2**-10).all()) else factors


def stack(weights: Sequence[Tensor | Quantized]) -> Tensor | Quantized | None:
    """Weights of the same inputs one above another, for one product instead of several; None where kinds differ."""
    if all(isinstance(weight, Tensor) for weight in weights):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    blocks = [weight for weight in weights if isinstance(weight, Quantized)]
    first = blocks[0]
    alike = all((b.bits, b.group, b.kind) == (first.bits, first.group, first.kind) for b in blocks)
    if len(blocks) < len(weights) or not alike:
        return None
    minima = [b.minima for b in blocks if b.minima is not None]
    return Quantized(
        torch.cat([b.values for b in blocks]),
        torch.cat([b.scales for b in blocks]),
        torch.cat(minima) if minima else None,
        bits=first.bits,
        group=first.group,
        kind=first.kind,
    )


class Linear:
    """y = x W^T + b for x [N, K], by one kernel under one row rule."""

    kind: str
    rounding = 0.0
    """Relative error (root mean square) of the weights as used against the weights as given."""

    def __init__(self, inputs: int, outputs: int, bias_M: Tensor | None) -> None:
        self.inputs, self.outputs, self.bias_M = inputs, outputs, bias_M
        self.rule = RowRule()

    def product(self, x_NK: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of weight read by a pass."""
        raise NotImplementedError

    def rows(self, ids_n: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The weights of outputs `ids_n` as they are used, float32 [n, K], whatever their kind."""
        identity_KK = torch.eye(self.inputs, dtype=dtype, device=device)
        return self.rule(self.product, identity_KK).T[ids_n].float()

    def __call__(self, x_NK: Tensor) -> Tensor:
        y_NM = self.rule(self.product, x_NK)
        return y_NM if self.bias_M is None else y_NM + self.bias_M


class Dense(Linear):
    """A weight in fp32, bf16 or fp16."""

    def __init__(self, weight_MK: Tensor, bias_M: Tensor | None) -> None:
        super().__init__(weight_MK.shape[1], weight_MK.shape[0], bias_M)
        self.weight_MK = weight_MK
        self.kind = next(name for name, dtype in DTYPES.items() if dtype == weight_MK.dtype)

    def product(self, x_NK: Tensor) -> Tensor:
        return F.linear(x_NK, self.weight_MK)

    @property
    def nbytes(self) -> int:
        return self.weight_MK.nbytes


class Int8(Linear):
    """One int8 scale an output row, by torch's weight-only kernel; grouped scales are rounded to it."""

    kind = "int8"

    def __init__(self, blocks: Quantized, bias_M: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(blocks.values.shape[1], blocks.values.shape[0], bias_M)
        weight = blocks.dequantize()
        scales = (weight.abs().amax(1) / 127).clamp(min=1e-12).to(dtype)
        self.values_MK = (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8).to(device)
        self.scales_M = scales.to(device)
        self.rounding = _relative(self.values_MK.cpu().float() * scales.float()[:, None], weight)

    def product(self, x_NK: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x_NK, self.values_MK, self.scales_M)

    @property
    def nbytes(self) -> int:
        return self.values_MK.nbytes + self.scales_M.nbytes


class Int4(Linear):
    """Four bits in groups of 32, scale and minimum in the activations' dtype, by torch's weight-only kernel."""

    kind = "int4"

    def __init__(self, blocks: Quantized, bias_M: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        assert blocks.bits == 4 and dtype != torch.float32
        super().__init__(blocks.values.shape[1], blocks.values.shape[0], bias_M)
        minima = blocks.minima if blocks.minima is not None else torch.zeros_like(blocks.scales)
        # the kernel computes (value - 8) * scale + zero
        scales, zeros = blocks.scales.to(dtype), (minima + 8 * blocks.scales).to(dtype)
        self.group = blocks.group
        self.scales_GM2 = torch.stack([scales.T, zeros.T], dim=-1).contiguous().to(device)
        if device.type == "cpu":
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(blocks.values.int(), 1)
        else:
            values = blocks.values.to(device)
            self.packed = torch.ops.aten._convert_weight_to_int4pack((values[:, ::2] << 4 | values[:, 1::2]).contiguous(), 8)
        used = blocks.values.view(*scales.shape, self.group).float() - 8
        used = used * scales.float()[..., None] + zeros.float()[..., None]
        self.rounding = _relative(used.flatten(1), blocks.dequantize())

    def product(self, x_NK: Tensor) -> Tensor:
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu if x_NK.device.type == "cpu" else torch.ops.aten._weight_int4pack_mm
        y_NM: Tensor = kernel(x_NK, self.packed, self.group, self.scales_GM2)
        return y_NM

    @property
    def nbytes(self) -> int:
        return int(self.packed.nbytes + self.scales_GM2.nbytes)


class Compiled(Linear):
    """Any kind by the C++ kernels: nothing of a file's blocks is rounded, and rows are invariant by construction."""

    def __init__(self, packed: kernels.Packed, bias_M: Tensor | None, kind: WeightKind) -> None:
        outputs, inputs = packed.shape
        super().__init__(inputs, outputs, bias_M)
        self.packed, self.kind = packed.in_bytes(kind.round_activations and kind.dtype == torch.bfloat16), packed.kind

    @property
    def rounds_rows(self) -> bool:
        """True where products round their rows to 8 bits."""
        return self.packed.multiplies_bytes

    def product(self, x_NK: Tensor) -> Tensor:
        return kernels.matmul(x_NK, self.packed)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


def activations(linears: Sequence[Linear]) -> str:
    """What follows the kinds of weights in their description where rows are rounded to meet them."""
    return ", activations int8" if any(isinstance(linear, Compiled) and linear.rounds_rows for linear in linears) else ""


def pack(weight: Tensor | Quantized, kind: WeightKind) -> kernels.Packed:
    """A weight as the compiled kernels read it, quantised or expanded first where the kind asks for that."""
    weight = as_asked(weight, kind)
    if isinstance(weight, Tensor):
        return kernels.pack_dense(weight.to(kind.dtype))
    return kernels.pack_int(weight.values, weight.scales, weight.minima, group=weight.group)


def as_asked(weight: Tensor | Quantized, kind: WeightKind) -> Tensor | Quantized:
    """The weight quantised, expanded or left alone, as the kind says."""
    if isinstance(weight, Quantized) and (not kind.keep_blocks or kind.quantize):
        weight = weight.dequantize()
    return quantize(weight, kind.quantize) if isinstance(weight, Tensor) and kind.quantize else weight


def make_linear(weight: Tensor | Quantized, bias_M: Tensor | None, kind: WeightKind, device: torch.device) -> Linear:
    """The product for a weight as the checkpoint has it, in the kind asked for, with its row rule probed."""
    bias_M = bias_M.to(device, kind.dtype) if bias_M is not None else None
    if kind.runs_compiled(device):
        return Compiled(pack(weight, kind), bias_M, kind)
    weight = as_asked(weight, kind)
    if isinstance(weight, Tensor):
        return Dense(weight.to(device, kind.dtype), bias_M)
    if weight.bits == 4 and kind.dtype != torch.float32 and weight.values.shape[0] % 16 == 0:
        return Int4(weight, bias_M, kind.dtype, device)
    if weight.bits == 8:
        return Int8(weight, bias_M, kind.dtype, device)
    return Dense(weight.dequantize(kind.dtype).to(device), bias_M)


class RowRules:
    """Row rules of the kernels on this machine, each probed once a shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], RowRule] = {}

    def settle(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """Give the product its rule."""
        if isinstance(linear, Compiled):
            self._known[(f"compiled {linear.kind}", linear.inputs, linear.outputs)] = linear.rule
            return
        key = (f"{type(linear).__name__} {dtype}", linear.inputs, linear.outputs)
        if key not in self._known:
            self._known[key] = probe(linear.product, linear.inputs, dtype, device)
        linear.rule = self._known[key]

    def report(self) -> list[tuple[str, int, int, str]]:
        """Kernel, inputs, outputs and what the probe found, for people."""
        return [(*key, rule.describe()) for key, rule in sorted(self._known.items())]


class Embedding:
    """Rows of a table, dense or quantised, in the activations' dtype."""

    def __init__(self, table: Tensor | Quantized, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.table = table.to(device, dtype) if isinstance(table, Tensor) else table

    def __call__(self, tokens_N: Tensor) -> Tensor:
        if isinstance(self.table, Tensor):
            return F.embedding(tokens_N, self.table)
        return self.table.rows(tokens_N.cpu()).to(self.device, self.dtype)


def _relative(used: Tensor, given: Tensor) -> float:
    return float((used - given).norm() / given.norm().clamp(min=1e-30))
