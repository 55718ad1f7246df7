"""What the engine asks of a model. Knows passes and hidden states; knows nothing of drafts or of sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.checkpoint import Quantized
from draftwise.types import Batch, Hidden, ModelConfig, Tap


class WeightSource(Protocol):
    """Where weights come from, under their Hugging Face names: a checkpoint, or tensors in memory."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> frozenset[str]: ...

    def tensor(self, name: str) -> Tensor | Quantized: ...


class Model(Protocol):
    """A decoder-only language model on packed passes over a staged cache."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype  # of hidden states and of the cache
    weights: str  # a line for people: the kinds of weight, and what was rounded
    weight_bytes: int  # read by a pass of one row
    row_report: list[tuple[str, int, int, str]]  # kernel, inputs, outputs, what its row rule says

    def forward(self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = ()) -> Hidden:
        """Run the packed rows, staging their keys and values. Taps as in types.Tap."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's rows for final hidden states [n, width]: float32 [n, vocab_size], before any warping."""

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of this model's shape with room for `capacity` rows."""

    def subset(self, layers: Sequence[int]) -> Model:
        """The same weights with only `layers`, each keeping its place in the cache."""
