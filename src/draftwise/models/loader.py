"""Weights of a source turned into products, tables and vectors, in the kind asked for.

Knows Hugging Face names and weight kinds; knows nothing of how a layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.checkpoint import Quantized, cache_dir
from draftwise.models.base import WeightSource
from draftwise.models.linear import Compiled, Embedding, Linear, RowRules, WeightKind, activations, make_linear, pack, stack


class Loader:
    """Weights of a source turned into what layers compute with, on one device and in one kind."""

    def __init__(self, source: WeightSource, kind: WeightKind, device: torch.device) -> None:
        self.source, self.kind, self.device = source, kind, device
        self.names = source.names()
        self.store = packed_store(source, kind, device)
        self.rules = RowRules()
        self.linears: list[Linear] = []

    def vector(self, name: str) -> Tensor | None:
        """A norm's weight or a bias in the activations' dtype; None where the checkpoint has none."""
        if name not in self.names:
            return None
        vector = self.source.tensor(name)
        return (vector.dequantize() if isinstance(vector, Quantized) else vector).to(self.device, self.kind.dtype)

    def weight(self, name: str) -> Tensor:
        """A tensor as the checkpoint has it, in float32."""
        tensor = self.source.tensor(name)
        return tensor.dequantize() if isinstance(tensor, Quantized) else tensor.float()

    def norm(self, name: str) -> Tensor:
        vector = self.vector(name)
        if vector is None:
            raise ValueError(f"the checkpoint has no tensor {name!r}")
        return vector

    def linear(self, name: str) -> Linear:
        """The product of one named projection."""
        return self.stacked(name)[0]

    def stacked(self, *names: str) -> list[Linear]:
        """One product for all the names where their kinds allow, else one each; from the store where it has them."""
        joined = "+".join(names)
        biases = [bias for name in names if (bias := self.vector(f"{name}.bias")) is not None]
        bias_M = torch.cat(biases) if biases else None
        kept = self.store.get(joined) if self.store is not None else None
        if kept is not None:
            return [self.settle(Compiled(kept, bias_M, self.kind))]
        apart = len(names) > 1 and self.store is not None and all(name in self.store for name in names)
        weight = None if apart else stack([self.source.tensor(f"{name}.weight") for name in names])
        if weight is None:
            return [self.linear(name) for name in names]
        linear = make_linear(weight, bias_M, self.kind, self.device)
        if self.store is not None and isinstance(linear, Compiled):
            self.store.put(joined, linear.packed)
        return [self.settle(linear)]

    def embedding(self, name: str) -> Embedding:
        """The table of a name; blocks stay blocks, whatever the products' kind: a row looked up is the same."""
        return Embedding(self.source.tensor(f"{name}.weight"), self.kind.dtype, self.device)

    def packed_table(self, name: str) -> kernels.Packed:
        """The table of a name as the compiled kernels read it."""
        kept = self.store.get(f"{name} table") if self.store is not None else None
        if kept is not None:
            return kept
        packed = pack(self.source.tensor(f"{name}.weight"), WeightKind(self.kind.dtype))
        if self.store is not None:
            self.store.put(f"{name} table", packed)
        return packed

    def head(self, embedding: Embedding) -> Linear:
        """The product of the head; a tied one shares the table's memory where kinds allow."""
        if "lm_head.weight" in self.names:
            return self.linear("lm_head")
        if self.kind.quantize or isinstance(embedding.table, Quantized):
            return self.linear("model.embed_tokens")
        return self.settle(make_linear(embedding.table, None, self.kind, self.device))

    def save(self) -> None:
        """Keep what was packed for the next start."""
        if self.store is not None:
            self.store.save()

    def settle(self, linear: Linear) -> Linear:
        self.rules.settle(linear, self.kind.dtype, self.device)
        self.linears.append(linear)
        return linear


def packed_store(source: WeightSource, kind: WeightKind, device: torch.device) -> kernels.PackedStore | None:
    """Where quantised matrices of a checkpoint are kept as the compiled kernels read them; None where that saves nothing."""
    quantised = kind.quantize is not None or (kind.keep_blocks and getattr(source, "format", "") == "gguf")
    if not quantised or not kind.runs_compiled(device) or not hasattr(source, "fingerprint"):
        return None
    name = f"{source.fingerprint}-{kind.quantize or 'blocks'}-{kernels.layout_key()}.bin"
    return kernels.PackedStore(cache_dir() / "packed" / name)


def describe(linears: Sequence[Linear], head: Linear) -> str:
    """The kinds of weight in use and what they round, for people."""
    kinds = {linear.kind for linear in linears if linear is not head}
    text = f"{' and '.join(sorted(kinds))}, head {head.kind}{activations(linears)}"
    worst = max(linears, key=lambda linear: linear.rounding)
    if worst.rounding > 1e-4:
        text += f"; torch's kernels round the file's scales: weights differ by up to {worst.rounding:.2%}"
    return text
