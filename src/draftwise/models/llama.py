"""The decoder of the Llama family: RMSNorm, rotary embedding, grouped-query attention, gated feed-forward.

Serves llama, mistral (sliding window), qwen2 (query/key/value biases) and qwen3 (query/key norms).
Shapes: N rows, C hidden width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.models.base import Embed, Model, WeightSource
from draftwise.models.fused import build_fused, runs_fused
from draftwise.models.layers import AttentionMasks, Rotary, attend, by_rows, rms_norm
from draftwise.models.linear import Linear, WeightKind
from draftwise.models.loader import Loader, describe
from draftwise.types import Batch, Hidden, ModelConfig, Tap

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Layer:
    """One decoder layer; `index` is its place in the cache. A part that is left out adds nothing to the residual stream."""

    attends = feeds = True

    def __init__(self, config: ModelConfig, index: int, load: Loader) -> None:
        self.config, self.index = config, index
        name = f"model.layers.{index}"
        self.input_norm_C = load.norm(f"{name}.input_layernorm.weight")
        self.query_key_value = load.stacked(*(f"{name}.self_attn.{part}_proj" for part in "qkv"))
        self.query_norm_D = load.vector(f"{name}.self_attn.q_norm.weight")
        self.key_norm_D = load.vector(f"{name}.self_attn.k_norm.weight")
        self.output = load.linear(f"{name}.self_attn.o_proj")
        self.feed_norm_C = load.norm(f"{name}.post_attention_layernorm.weight")
        self.gate_up = load.stacked(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        self.down = load.linear(f"{name}.mlp.down_proj")
        self.activation = ACTIVATIONS[config.activation]
        self.window = config.windows[index] if config.windows else None

    def only(self, *, attention: bool, feed_forward: bool) -> Layer:
        """The same layer, its weights shared, with one of its parts, both or none."""
        layer = copy.copy(self)
        layer.attends, layer.feeds = self.attends and attention, self.feeds and feed_forward
        return layer

    @property
    def nbytes(self) -> int:
        """Bytes of matrices that a pass reads."""
        attention = [*self.query_key_value, self.output] if self.attends else []
        feed_forward = [*self.gate_up, self.down] if self.feeds else []
        return sum(linear.nbytes for linear in (*attention, *feed_forward))

    def attention(
        self, x_NC: Tensor, rotary: Rotary, tables: tuple[Tensor, Tensor], masks: AttentionMasks, batch: Batch, cache: KVCache
    ) -> Tensor:
        config, eps = self.config, self.config.norm_eps
        x_NC = rms_norm(x_NC, self.input_norm_C, eps)
        projected = torch.cat([part(x_NC) for part in self.query_key_value], -1)
        heads_NHD = projected.view(len(batch), -1, config.head_dim)
        q_NHD, k_NKD, v_NKD = torch.split(heads_NHD, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.query_norm_D is not None and self.key_norm_D is not None:
            q_NHD, k_NKD = rms_norm(q_NHD, self.query_norm_D, eps), rms_norm(k_NKD, self.key_norm_D, eps)
        q_NHD, k_NKD = rotary.apply(q_NHD, tables), rotary.apply(k_NKD, tables)
        cache.stage(self.index, batch, k_NKD, v_NKD)
        return self.output(attend(q_NHD, self.index, batch, cache, masks.of(self.window)).flatten(1))

    def feed_forward(self, x_NC: Tensor) -> Tensor:
        x_NC = rms_norm(x_NC, self.feed_norm_C, self.config.norm_eps)
        gate, up = torch.cat([part(x_NC) for part in self.gate_up], -1).chunk(2, dim=-1)
        return self.down(by_rows(self.activation, gate) * up)


class LlamaModel:
    """A model of the Llama family in plain torch, on any device."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embed,
        layers: Sequence[Layer],
        final_norm_C: Tensor,
        head: Linear,
        loader: Loader,
    ) -> None:
        self.config, self.device, self.dtype = config, loader.device, loader.kind.dtype
        self.embedding, self.layers, self.final_norm_C, self.head = embedding, list(layers), final_norm_C, head
        self.rotary = Rotary(config, loader.device)
        self.windows = {layer.window for layer in self.layers if layer.attends}
        self._loader = loader
        self.row_report = loader.rules.report()
        self.weight_bytes = sum(layer.nbytes for layer in self.layers) + head.nbytes
        self.weights = describe(loader.linears, head)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = ()) -> Hidden:
        """Run the packed rows, staging their keys and values. Taps as in types.Tap."""
        taps = set(taps)
        tapped: dict[Tap, Tensor] = {}
        x_NC = self.embedding(batch.tokens_N)
        tables = self.rotary.tables(batch.positions_N, self.dtype)
        masks = AttentionMasks(batch, cache, self.windows, heads=self.config.num_heads)
        for layer in self.layers:
            if layer.index in taps:
                tapped[layer.index] = x_NC
            if layer.attends:
                x_NC = x_NC + layer.attention(x_NC, self.rotary, tables, masks, batch, cache)
            if layer.feeds:
                x_NC = x_NC + layer.feed_forward(x_NC)
        if self.config.num_layers in taps:
            tapped[self.config.num_layers] = x_NC
        x_NC = rms_norm(x_NC, self.final_norm_C, self.config.norm_eps)
        if "final_norm" in taps:
            tapped["final_norm"] = x_NC
        return Hidden(x_NC, tapped)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The head's rows for final hidden states [n, C]: float32 [n, vocab_size], before any warping."""
        return self.head(hidden).float()

    @torch.inference_mode()
    def embed(self, tokens_N: Tensor) -> Tensor:
        """Rows of the embedding, [N, C]."""
        return self.embedding(tokens_N)

    @torch.inference_mode()
    def head_rows(self, tokens_n: Tensor) -> Tensor:
        """The head's weights for these tokens, float32 [n, C]."""
        return self.head.rows(tokens_n, self.dtype, self.device)

    def weight(self, name: str) -> Tensor:
        """A weight as the checkpoint has it, float32."""
        return self._loader.weight(name)

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of this model's shape with room for `capacity` rows."""
        return KVCache(
            layers=max(layer.index for layer in self.layers) + 1,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
        )

    def subset(self, attention: Collection[int], feed_forward: Collection[int] | None = None) -> LlamaModel:
        """The same weights with the attention and the feed-forward of some layers, as in Model."""
        feeding = attention if feed_forward is None else feed_forward
        kept = [
            layer.only(attention=layer.index in attention, feed_forward=layer.index in feeding)
            for layer in self.layers
            if layer.index in attention or layer.index in feeding
        ]
        return LlamaModel(self.config, self.embedding, kept, self.final_norm_C, self.head, self._loader)


def build(source: WeightSource, kind: WeightKind, device: torch.device, *, embed: Embed | None = None) -> Model:
    """Read all weights of a Llama-family checkpoint: for the compiled decoder where there is one, else for torch.

    embed: gives the rows of the embedding where the source has a head but no embedding, as the model it is borrowed from
    does. Raises ValueError where a weight is missing.
    """
    config = source.config
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"activation {config.activation!r} is not known; it must be one of: {', '.join(ACTIVATIONS)}")
    if runs_fused(config, kind, device):
        return build_fused(source, kind, device, embed)
    load = Loader(source, kind, device)
    layers = [Layer(config, index, load) for index in range(config.num_layers)]
    norm_C = load.norm("model.norm.weight")
    if embed is not None:
        return LlamaModel(config, lambda tokens_N: embed(tokens_N).to(kind.dtype), layers, norm_C, load.linear("lm_head"), load)
    embedding = load.embedding("model.embed_tokens")
    head = load.head(embedding)
    load.save()
    return LlamaModel(config, embedding, layers, norm_C, head, load)
