"""What each kernel computes, in plain torch: the definition that the tests hold the C++ to. Legend as in packed.py."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantise(values_OI: Tensor, scales_OG: Tensor, minima_OG: Tensor | None, *, group: int) -> Tensor:
    """value * scale + minimum, float32 [out, in]; group 0 means one scale a row."""
    inputs = values_OI.shape[1]

    def spread(per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(group, dim=1)[:, :inputs] if group else per_group

    weight = values_OI.float() * spread(scales_OG)
    return weight if minima_OG is None else weight + spread(minima_OG)


def matmul(x_NI: Tensor, weight_OI: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T in float64, rounded to `out_dtype` once."""
    return (x_NI.double() @ weight_OI.double().T).to(out_dtype or x_NI.dtype)
