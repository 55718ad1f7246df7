"""The Llama family's decoder as one call of the compiled CPU kernels; llama.py is its plain version and its test.

Nothing of a file's blocks is rounded, the residual stream is float32, and rows are invariant by construction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.cache import KVCache
from draftwise.models.base import Embed, Model, WeightSource
from draftwise.models.layers import Rotary
from draftwise.models.linear import DTYPES, Compiled, WeightKind
from draftwise.models.loader import Loader, describe
from draftwise.types import Batch, Hidden, ModelConfig, Tap


def runs_fused(config: ModelConfig, kind: WeightKind, device: torch.device) -> bool:
    """True where the compiled decoder serves this shape, kind and device."""
    rotary_is_fixed = Rotary(config, torch.device("cpu")).is_fixed
    return kind.runs_compiled(device) and kernels.unsupported(config) is None and rotary_is_fixed


def packed_embedding(model: Model) -> kernels.Packed | None:
    """A model's embedding as the compiled kernels read it, where it has one."""
    embedding = model.embedding if isinstance(model, FusedLlama) else None
    return embedding if isinstance(embedding, kernels.Packed) else None


class FusedLlama:
    """A model of the Llama family on the compiled kernels. embedding: its own, or whoever else gives the rows."""

    def __init__(
        self,
        config: ModelConfig,
        kind: WeightKind,
        embedding: kernels.Packed | Embed,
        layers: Sequence[kernels.PackedLayer],
        final_norm_C: Tensor,
        head: Compiled,
        loader: Loader,
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device("cpu"), kind.dtype
        self._kind, self.embedding, self._layers = kind, embedding, list(layers)
        self._final_norm_C, self._head, self._loader = final_norm_C, head, loader
        self.row_report = loader.rules.report()
        self.weights = describe(loader.linears, head)
        self.weight_bytes = sum(layer.nbytes for layer in layers) + head.nbytes
        self._decoder = kernels.Decoder(
            config,
            embedding=embedding if isinstance(embedding, kernels.Packed) else None,
            layers=self._layers,
            final_norm_C=final_norm_C,
            tables=Rotary(config, self.device).half_tables,
            dtype=kind.dtype,
        )

    def forward(self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = ()) -> Hidden:
        """Run the packed rows, staging their keys and values. Taps as in types.Tap, in float32."""
        inputs_NC = None if isinstance(self.embedding, kernels.Packed) else self.embedding(batch.tokens_N)
        return self._decoder.forward(batch, cache, taps, inputs_NC=inputs_NC)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's rows for final hidden states [n, C]: float32 [n, vocab_size], before any warping."""
        return kernels.matmul(hidden if hidden.dtype == self.dtype else hidden.to(self.dtype), self._head.packed, torch.float32)

    @torch.inference_mode()
    def embed(self, tokens_N: Tensor) -> Tensor:
        """Rows of the embedding, [N, C]."""
        rows = self.embedding.rows if isinstance(self.embedding, kernels.Packed) else self.embedding
        return rows(tokens_N).to(self.dtype)

    @torch.inference_mode()
    def head_rows(self, tokens_n: Tensor) -> Tensor:
        """The head's weights for these tokens, float32 [n, C]."""
        return self._head.packed.rows(tokens_n)

    def weight(self, name: str) -> Tensor:
        """A weight as the checkpoint has it, float32."""
        return self._loader.weight(name)

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of this model's shape with room for `capacity` rows."""
        return KVCache(
            layers=max(layer.index for layer in self._layers) + 1,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            capacity=capacity,
            dtype=self.dtype,
        )

    def subset(self, attention: Collection[int], feed_forward: Collection[int] | None = None) -> FusedLlama:
        """The same weights with the attention and the feed-forward of some layers, as in Model."""
        feeding = attention if feed_forward is None else feed_forward
        kept = (
            replace(
                layer,
                attention=layer.attention if layer.index in attention else None,
                feed_forward=layer.feed_forward if layer.index in feeding else None,
            )
            for layer in self._layers
        )
        layers = [layer for layer in kept if layer.attention or layer.feed_forward]
        return FusedLlama(self.config, self._kind, self.embedding, layers, self._final_norm_C, self._head, self._loader)


def build_fused(source: WeightSource, kind: WeightKind, device: torch.device, embed: Embed | None = None) -> FusedLlama:
    """Read all weights of a checkpoint for the compiled decoder. Raises ValueError where one is missing."""
    load = Loader(source, kind, device)
    table = embed or load.packed_table("model.embed_tokens")
    layers = [_layer(load, index) for index in range(source.config.num_layers)]
    if "lm_head.weight" in load.names:
        head = load.linear("lm_head")
    elif not isinstance(table, kernels.Packed) or kind.quantize or not (kind.keep_blocks or table.kind in DTYPES):
        head = load.linear("model.embed_tokens")
    else:
        head = load.settle(Compiled(table, None, kind))
    load.save()
    assert isinstance(head, Compiled)
    return FusedLlama(source.config, kind, table, layers, load.norm("model.norm.weight"), head, load)


def _layer(load: Loader, index: int) -> kernels.PackedLayer:
    name = f"model.layers.{index}"

    def product(part: str) -> kernels.Packed:
        linear = load.linear(f"{name}.{part}_proj")
        assert isinstance(linear, Compiled)
        return linear.packed if linear.bias_M is None else linear.packed.with_bias(linear.bias_M)

    return kernels.PackedLayer(
        index=index,
        attention=kernels.PackedAttention(
            norm_C=load.norm(f"{name}.input_layernorm.weight"),
            query=product("self_attn.q"),
            key=product("self_attn.k"),
            value=product("self_attn.v"),
            query_norm_D=load.vector(f"{name}.self_attn.q_norm.weight"),
            key_norm_D=load.vector(f"{name}.self_attn.k_norm.weight"),
            output=product("self_attn.o"),
            window=load.source.config.windows[index] if load.source.config.windows else None,
        ),
        feed_forward=kernels.PackedFeedForward(
            norm_C=load.norm(f"{name}.post_attention_layernorm.weight"),
            gate=product("mlp.gate"),
            up=product("mlp.up"),
            down=product("mlp.down"),
        ),
    )
