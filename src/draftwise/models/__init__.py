"""Models: one file an architecture, named after its `model_type`; anything else runs through transformers.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module

import torch

from draftwise.checkpoint import Checkpoint
from draftwise.models.base import Model, WeightSource
from draftwise.models.linear import WeightKind

SHARED = ("anatomy", "base", "convert", "layers", "linear", "load", "rows", "transformers")


def native_builder(architecture: str) -> Callable[[WeightSource, WeightKind, torch.device], Model] | None:
    """`build` of the file named after the architecture; None where there is no such file."""
    name = f"{__name__}.{architecture}"
    if architecture in SHARED or not architecture.isidentifier() or importlib.util.find_spec(name) is None:
        return None
    builder: Callable[[WeightSource, WeightKind, torch.device], Model] = import_module(name).build
    return builder


def load_model(checkpoint: Checkpoint, kind: WeightKind, device: torch.device) -> Model:
    """The checkpoint's model by the file of its architecture, or by the universal backend. Raises ValueError by name."""
    native = native_builder(checkpoint.config.architecture)
    if native is not None and checkpoint.quantization is None:
        return native(checkpoint, kind, device)
    universal = import_module(f"{__name__}.transformers")
    model: Model = universal.build(checkpoint, kind, device)
    return model
