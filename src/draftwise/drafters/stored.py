"""Matrices of a draft as small files hold them: integers of 8 or 4 bits in groups, beside their scales.

Knows tensors by name; knows nothing of what they are for. Shapes: M outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftwise.models.linear import GROUP, quantize

SCALES, MINIMA = ".scales", ".minima"


def store(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Every matrix as int8 [M, K], or as uint8 [M, K / 2] with two values of 4 bits each, low ones first.

    NAME.scales and, for 4 bits, NAME.minima are float16 [M, G]. Vectors stay as they are.
    """
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.shape[1] % GROUP:
            kept[name] = tensor
            continue
        blocks = quantize(tensor, kind)
        kept[name + SCALES] = blocks.scales.half()
        if blocks.minima is None:
            kept[name] = blocks.values
        else:
            kept[name] = blocks.values[:, ::2] | blocks.values[:, 1::2] << 4
            kept[name + MINIMA] = blocks.minima.half()
    return kept


def expand(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of `store` in float32. Quantised again to the same kind they are what they were."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((SCALES, MINIMA)):
            continue
        scales = tensors.get(name + SCALES)
        if scales is None:
            plain[name] = tensor
            continue
        minima = tensors.get(name + MINIMA)
        if minima is not None:
            tensor = torch.stack([tensor & 15, tensor >> 4], -1).flatten(1)
        grouped_MGK = tensor.float().view(*scales.shape, -1) * scales.float()[..., None]
        if minima is not None:
            grouped_MGK += minima.float()[..., None]
        plain[name] = grouped_MGK.flatten(1)
    return plain
