"""What each kernel computes, in plain torch: the definition that the tests hold the C++ to. Legend as in packed.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dequantise(values_OI: Tensor, scales_OG: Tensor, minima_OG: Tensor | None, *, group: int) -> Tensor:
    """value * scale + minimum, float32 [out, in]; group 0 means one scale a row."""
    inputs = values_OI.shape[1]

    def spread(per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(group, dim=1)[:, :inputs] if group else per_group

    weight = values_OI.float() * spread(scales_OG)
    return weight if minima_OG is None else weight + spread(minima_OG)


def round_bytes(x_NI: Tensor) -> Tensor:
    """Rows as products of bytes see them, float32: integers from -127 to 127 times a scale for each 32 inputs."""
    inputs = x_NI.shape[1]
    padded = F.pad(x_NI.float(), (0, -inputs % 32))
    groups = padded.view(len(padded), -1, 32)
    most = groups.abs().amax(-1, keepdim=True)
    factor = torch.full_like(most, 127.0) / most  # 127 / most would be 127 times a rounded 1 / most
    rounded = (groups * factor).round().nan_to_num()
    seen: Tensor = (rounded * (most / 127)).flatten(1)[:, :inputs]
    return seen


def matmul(x_NI: Tensor, weight_OI: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T in float64, rounded to `out_dtype` once."""
    return (x_NI.double() @ weight_OI.double().T).to(out_dtype or x_NI.dtype)
