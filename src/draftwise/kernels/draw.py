"""Drawing tokens, and finding the largest logits, in one pass. Knows weights, logits and keys; sampling.py has it in torch."""

from __future__ import annotations

import ctypes

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
    temperature_, key_ = ctypes.c_float(temperature), ctypes.c_uint64(key)
    held = served.draftwise_draw(_address(logits_V), len(logits_V), temperature_, key_, count, times, tokens)
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
    found = _largest(logits_NV, count, None, lib)
    return logits_NV.topk(min(count, logits_NV.shape[1])) if found is None else found


def likeliest(logits_V: Tensor, count: int, *, lib: ctypes.CDLL | None = None) -> tuple[Tensor, Tensor]:
    """What softmax gives the `count` largest logits, float64 [count], and their ids, in the order of `largest`."""
    mass = torch.empty(1, dtype=torch.float64)
    found = _largest(logits_V[None], count, mass, lib)
    if found is None:
        return logits_V.double().softmax(0).topk(min(count, len(logits_V)))
    values, ids = found[0][0], found[1][0]
    return (values - values[0]).double().exp_() / mass, ids


def _largest(
    logits_NV: Tensor, count: int, mass_N: Tensor | None, lib: ctypes.CDLL | None
) -> tuple[Tensor, Tensor] | None:
    served, (rows, vocab) = _serving(logits_NV, lib), logits_NV.shape
    if served is None:
        return None
    values, ids = torch.empty(rows, min(count, vocab)), torch.empty(rows, min(count, vocab), dtype=torch.int64)
    places = map(_address, (values, ids, mass_N))
    return (values, ids) if served.draftwise_largest(_address(logits_NV), rows, vocab, values.shape[1], *places) else None


def _serving(values: Tensor, lib: ctypes.CDLL | None) -> ctypes.CDLL | None:
    return (lib or loaded()) if values.is_cpu and values.dtype == torch.float32 and values.is_contiguous() else None


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
