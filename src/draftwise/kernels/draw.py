"""Drawing a token from many, in one pass over them. Knows weights, logits and keys; sampling.py has the plain version."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwise.kernels.loader import loaded


def draw(logits_V: Tensor, temperature: float, key: int, *, lib: ctypes.CDLL | None = None) -> int | None:
    """The token that arrives first by weights exp(logit / temperature), the largest at temperature 0.

    None where no compiled kernel serves the logits, or they hold a NaN, an infinity, or nothing above minus infinity.
    """
    served = _serving(logits_V, lib)
    if served is None:
        return None
    found: int = served.draftwise_draw(_address(logits_V), len(logits_V), ctypes.c_float(temperature), ctypes.c_uint64(key))
    return found if found >= 0 else None


def first_arrival(weights: Tensor, tokens: Tensor | None, key: int, *, lib: ctypes.CDLL | None = None) -> int | None:
    """The token that arrives first; None where no compiled kernel serves the weights. To the bit what torch finds.

    weights: float32, one of them positive. tokens: int64, what they are of; None: 0 and up.
    """
    served = _serving(weights, lib)
    if served is None:
        return None
    assert tokens is None or tokens.is_contiguous()
    found: int = served.draftwise_first_arrival(_address(weights), _address(tokens), len(weights), ctypes.c_uint64(key))
    assert found >= 0, "a draw from weights that are all zero"
    return found


def _serving(values: Tensor, lib: ctypes.CDLL | None) -> ctypes.CDLL | None:
    return (lib or loaded()) if values.is_cpu and values.dtype == torch.float32 and values.is_contiguous() else None


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
