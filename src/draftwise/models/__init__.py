"""Models: one file an architecture, named after its `model_type`; anything else runs through transformers.py."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module

import torch

from draftwise.checkpoint import Checkpoint
from draftwise.models.base import Model, WeightSource
from draftwise.models.linear import WeightKind

SHARED = ("anatomy", "base", "convert", "fused", "layers", "linear", "load", "loader", "rows", "transformers")
"""The files that are no architecture."""


def native_architectures() -> list[str]:
    """The architectures that have a file here."""
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name not in SHARED)


def native_builder(architecture: str) -> Callable[[WeightSource, WeightKind, torch.device], Model] | None:
    """`build` of the file named after the architecture; None where there is no such file."""
    if architecture not in native_architectures():
        return None
    builder: Callable[[WeightSource, WeightKind, torch.device], Model] = import_module(f"{__name__}.{architecture}").build
    return builder


def load_model(checkpoint: Checkpoint, kind: WeightKind, device: torch.device) -> Model:
    """The checkpoint's model by the file of its architecture, or by the universal backend. Raises ValueError by name."""
    native = native_builder(checkpoint.config.architecture)
    if native is not None and checkpoint.quantization is None:
        return native(checkpoint, kind, device)
    universal = import_module(f"{__name__}.transformers")
    model: Model = universal.build(checkpoint, kind, device)
    return model
