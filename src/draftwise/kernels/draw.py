"""Drawing tokens, and finding the largest logits, in one pass. Knows weights, logits and keys; sampling.py has it in torch."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from draftwise.kernels.loader import loaded

Arrivals = list[tuple[float, int]]


def draw(logits_V: Tensor, temperature: float, key: int, count: int = 1, *, lib: ctypes.CDLL | None = None) -> Arrivals | None:
    """The first arrivals and their times by weights exp((logit - largest) / temperature), at temperature 0 the largest.

    None where no compiled kernel serves the logits, or they hold a NaN, an infinity, or nothing above minus infinity.
    """
    served = _serving(logits_V, lib)
    if served is None:
        return None
    times, tokens = (ctypes.c_double * count)(), (ctypes.c_int64 * count)()
    size, most = ctypes.c_int64(len(logits_V)), ctypes.c_int64(count)
    temperature_, key_ = ctypes.c_float(temperature), ctypes.c_uint64(key)
    held = served.draftwise_draw(_address(logits_V), None, size, temperature_, key_, most, times, tokens)
    return list(zip(times[:held], tokens[:held], strict=True)) if held >= 0 else None


def arrivals(
    weights: Tensor, tokens: Tensor | None, key: int, count: int = 1, *, lib: ctypes.CDLL | None = None
) -> Arrivals | None:
    """The first `count` arrivals and their times; None where no compiled kernel serves the weights. As torch finds them.

    weights: float32. tokens: int64, what they are of; None: 0 and up.
    """
    served = _serving(weights, lib)
    if served is None:
        return None
    assert tokens is None or tokens.is_contiguous()
    times, found = (ctypes.c_double * count)(), (ctypes.c_int64 * count)()
    key_ = ctypes.c_uint64(key)
    held = served.draftwise_arrivals(_address(weights), _address(tokens), len(weights), key_, count, times, found)
    assert held > 0, "a draw from weights that are all zero"
    return list(zip(times[:held], found[:held], strict=True))


def largest(logits_NV: Tensor, count: int, *, lib: ctypes.CDLL | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, the largest first, and their ids, both [rows, count].

    Of equal ones the lowest ids come first where a compiled kernel serves them.
    """
    found = _largest(logits_NV, count, lib)
    return logits_NV.topk(min(count, logits_NV.shape[1])) if found is None else found


def likeliest(logits_V: Tensor, count: int, *, lib: ctypes.CDLL | None = None) -> list[tuple[int, float]] | None:
    """The ids of the `count` largest logits and what softmax gives them, in the order of `largest`; none that it gives nothing.

    None where no compiled kernel serves the logits, or they hold a NaN, an infinity, or nothing above minus infinity.
    """
    served, count = _serving(logits_V, lib), min(count, len(logits_V))
    if served is None:
        return None
    values, ids, mass = (ctypes.c_float * count)(), (ctypes.c_int64 * count)(), ctypes.c_double()
    if not served.draftwise_largest(_address(logits_V), 1, len(logits_V), count, values, ids, ctypes.byref(mass)):
        return None
    chances = [math.exp(value - values[0]) / mass.value for value in values]
    return [(token, chance) for token, chance in zip(ids, chances, strict=True) if chance > 0]


def _largest(logits_NV: Tensor, count: int, lib: ctypes.CDLL | None) -> tuple[Tensor, Tensor] | None:
    served, (rows, vocab) = _serving(logits_NV, lib), logits_NV.shape
    if served is None:
        return None
    values, ids = torch.empty(rows, min(count, vocab)), torch.empty(rows, min(count, vocab), dtype=torch.int64)
    places = map(_address, (values, ids, None))
    return (values, ids) if served.draftwise_largest(_address(logits_NV), rows, vocab, values.shape[1], *places) else None


def _serving(values: Tensor, lib: ctypes.CDLL | None) -> ctypes.CDLL | None:
    return (lib or loaded()) if values.is_cpu and values.dtype == torch.float32 and values.is_contiguous() else None


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
