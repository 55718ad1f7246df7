"""Models: one file an architecture, named after its `model_type`; anything else runs through transformers.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module

import torch

from draftwise.models.base import Model, WeightSource
from draftwise.models.linear import WeightKind

SHARED = ("base", "layers", "linear", "rows", "transformers")


def native_builder(architecture: str) -> Callable[[WeightSource, WeightKind, torch.device], Model] | None:
    """`build` of the file named after the architecture; None where there is no such file."""
    name = f"{__name__}.{architecture}"
    if architecture in SHARED or not architecture.isidentifier() or importlib.util.find_spec(name) is None:
        return None
    builder: Callable[[WeightSource, WeightKind, torch.device], Model] = import_module(name).build
    return builder
