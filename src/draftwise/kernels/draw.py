"""Drawing a token from many, in one pass over their weights. Knows weights and keys; sampling.py has its plain version."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.kernels.loader import loaded


def first_arrival(weights: Tensor, tokens: Tensor | None, key: int, *, lib: ctypes.CDLL | None = None) -> int | None:
    """The token that arrives first, as sampling.py defines it by `key`; None where no compiled kernel serves the weights.

    weights: float32, one of them positive. tokens: int64, what they are of; None: 0 and up. To the bit what torch finds.
    """
    lib = lib or loaded()
    if lib is None or weights.dtype != torch.float32 or weights.device.type != "cpu" or not weights.is_contiguous():
        return None
    draw = lib.draftwise_first_arrival
    draw.restype = ctypes.c_int64
    pointer = None if tokens is None else tokens.data_ptr()
    assert tokens is None or tokens.is_contiguous()
    found: int = draw(
        ctypes.c_void_p(weights.data_ptr()), ctypes.c_void_p(pointer), ctypes.c_int64(len(weights)), ctypes.c_uint64(key)
    )
    assert found >= 0, "a draw from weights that are all zero"
    return found
