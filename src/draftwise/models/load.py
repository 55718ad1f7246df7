"""From a checkpoint and what a user asked of its weights to a model in memory, if it fits."""

from __future__ import annotations

import torch

from draftwise.checkpoint import Checkpoint, check_memory, memory_needed
from draftwise.models import load_model
from draftwise.models.base import Model
from draftwise.models.linear import DTYPES, WeightKind

QUANTIZED_BITS = {"int4": 5.0, "int8": 9.0}  # scales included
ACTIVATIONS = ("int8", "float")


def weight_kind(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    activations: str = "int8",
    compiled: bool = True,
) -> WeightKind:
    """What the weights become. By default a file's blocks stay and a folder's numbers keep their type.

    activations: "int8" or "float", see WeightKind.round_activations.

    Raises ValueError naming the choices.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of: {', '.join(DTYPES)}")
    if quantize is not None and quantize not in QUANTIZED_BITS:
        raise ValueError(f"quantize is {quantize!r}; it must be one of: {', '.join(QUANTIZED_BITS)}")
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations is {activations!r}; it must be one of: {', '.join(ACTIVATIONS)}")
    rounds = activations == "int8"
    if dtype is not None:
        return WeightKind(DTYPES[dtype], quantize, keep_blocks=False, compiled=compiled, round_activations=rounds)
    if checkpoint.format == "gguf" or quantize:
        return WeightKind(torch.bfloat16, quantize, compiled=compiled, round_activations=rounds)
    raw = checkpoint.config.raw
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    kept = getattr(torch, name) if name in ("float32", "bfloat16", "float16") else torch.float32
    return WeightKind(kept, compiled=compiled, round_activations=rounds)


def read_model(
    checkpoint: Checkpoint,
    *,
    dtype: str | None,
    quantize: str | None,
    device: torch.device,
    cache_rows: int,
    activations: str = "int8",
    compiled: bool = True,
) -> Model:
    """Load the weights as asked. Raises ValueError, before reading any, where they and the cache do not fit in memory."""
    kind = weight_kind(checkpoint, dtype=dtype, quantize=quantize, activations=activations, compiled=compiled)
    bits = QUANTIZED_BITS[quantize] if quantize else None if kind.keep_blocks else 8.0 * kind.dtype.itemsize
    needed = memory_needed(checkpoint, bits, cache_rows=cache_rows, cache_bytes=kind.dtype.itemsize)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    check_memory(f"{checkpoint.source} with a cache of {cache_rows} tokens", needed, free)
    return load_model(checkpoint, kind, device)
