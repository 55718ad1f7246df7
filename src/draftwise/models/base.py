"""What the engine asks of a model. Knows passes and hidden states; knows nothing of drafts or of sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class InMemory:
    """A WeightSource of tensors at hand."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


Embed = Callable[[Tensor], Tensor]
"""From token ids [N] to rows of an embedding, [N, width]."""


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

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Rows of the embedding, [N, width] in `dtype`: what drafts borrow instead of storing it."""

    def head_rows(self, tokens_n: Tensor) -> Tensor:
        """The head's weights for these tokens, float32 [n, width], likewise. Raises ValueError where it has none."""

    def weight(self, name: str) -> Tensor:
        """A weight as the checkpoint has it, float32, under its Hugging Face name: what drafts begin with.

        Raises ValueError where the model is no plain decoder of the Llama family, or has no weight of this name.
        """

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of this model's shape with room for `capacity` rows."""

    def subset(self, attention: Collection[int], feed_forward: Collection[int] | None = None) -> Model:
        """The same weights with the attention of some layers and the feed-forward of some (None: of the same layers).

        What is left out adds nothing to the residual stream; what stays keeps its place in the cache, so that the subset
        reads rows that this model committed. Raises ValueError where a layer's parts cannot be had one without the other.
        """
