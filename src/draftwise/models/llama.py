"""The decoder of the Llama family: RMSNorm, rotary embedding, grouped-query attention, gated feed-forward.

Serves llama, mistral (sliding window), qwen2 (query/key/value biases) and qwen3 (query/key norms).
Shapes: N rows, C hidden width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.cache import KVCache
from draftwise.checkpoint import Quantized, cache_dir
from draftwise.models.base import WeightSource
from draftwise.models.layers import AttentionMasks, Rotary, attend, rms_norm
from draftwise.models.linear import Compiled, Embedding, Linear, RowRules, WeightKind, make_linear, pack, stack
from draftwise.types import Batch, Hidden, ModelConfig, Tap

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


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
            return [self._settled(Compiled(kept, bias_M))]
        apart = len(names) > 1 and self.store is not None and all(name in self.store for name in names)
        weight = None if apart else stack([self.source.tensor(f"{name}.weight") for name in names])
        if weight is None:
            return [self.linear(name) for name in names]
        linear = make_linear(weight, bias_M, self.kind, self.device)
        if self.store is not None and isinstance(linear, Compiled):
            self.store.put(joined, linear.packed)
        return [self._settled(linear)]

    def embedding(self, name: str) -> Embedding:
        """The table of a name; blocks stay blocks, whatever the products' kind: a row looked up is the same."""
        kept = self.store.get(f"{name} table") if self.store is not None else None
        if kept is not None:
            return Embedding(kept, self.kind.dtype, self.device)
        table = self.source.tensor(f"{name}.weight")
        if self.store is not None and isinstance(table, Quantized):
            packed = pack(table, WeightKind(self.kind.dtype))
            self.store.put(f"{name} table", packed)
            return Embedding(packed, self.kind.dtype, self.device)
        return Embedding(table, self.kind.dtype, self.device)

    def head(self, embedding: Embedding) -> Linear:
        """The product of the head; a tied one shares the table's memory where kinds allow."""
        if "lm_head.weight" in self.names:
            return self.linear("lm_head")
        if self.kind.quantize or isinstance(embedding.table, Quantized):
            return self.linear("model.embed_tokens")
        if isinstance(embedding.table, Tensor):
            return self._settled(make_linear(embedding.table, None, self.kind, self.device))
        return self._settled(Compiled(embedding.table, None))

    def _settled(self, linear: Linear) -> Linear:
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


class Layer:
    """One decoder layer; `index` is its place in the cache."""

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

    def attention(
        self, x_NC: Tensor, rotary: Rotary, tables: tuple[Tensor, Tensor], masks: AttentionMasks, batch: Batch, cache: KVCache
    ) -> Tensor:
        config, eps = self.config, self.config.norm_eps
        x_NC = rms_norm(x_NC, self.input_norm_C, eps)
        projected = torch.cat([part(x_NC) for part in self.query_key_value], -1)
        heads_NHD = projected.view(len(batch), -1, config.head_dim)
        q_NHD, k_NKD, v_NKD = heads_NHD.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.query_norm_D is not None and self.key_norm_D is not None:
            q_NHD, k_NKD = rms_norm(q_NHD, self.query_norm_D, eps), rms_norm(k_NKD, self.key_norm_D, eps)
        q_NHD, k_NKD = rotary.apply(q_NHD, tables), rotary.apply(k_NKD, tables)
        cache.stage(self.index, batch, k_NKD, v_NKD)
        return self.output(attend(q_NHD, self.index, batch, cache, masks.of(self.window)).flatten(1))

    def feed_forward(self, x_NC: Tensor) -> Tensor:
        x_NC = rms_norm(x_NC, self.feed_norm_C, self.config.norm_eps)
        gate, up = torch.cat([part(x_NC) for part in self.gate_up], -1).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class LlamaModel:
    """A model of the Llama family in plain torch, on any device."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[Layer],
        final_norm_C: Tensor,
        head: Linear,
        loader: Loader,
    ) -> None:
        self.config, self.device, self.dtype = config, loader.device, loader.kind.dtype
        self.embedding, self.layers, self.final_norm_C, self.head = embedding, list(layers), final_norm_C, head
        self.rotary = Rotary(config, loader.device)
        self.windows = {layer.window for layer in self.layers}
        self._loader = loader
        self.row_report = loader.rules.report()
        self.weight_bytes = sum(linear.nbytes for linear in loader.linears)
        self.weights = _describe(loader.linears, head)

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
            x_NC = x_NC + layer.attention(x_NC, self.rotary, tables, masks, batch, cache)
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

    def subset(self, layers: Sequence[int]) -> LlamaModel:
        """The same weights with only `layers`, each keeping its place in the cache."""
        chosen = [layer for layer in self.layers if layer.index in set(layers)]
        return LlamaModel(self.config, self.embedding, chosen, self.final_norm_C, self.head, self._loader)


def build(source: WeightSource, kind: WeightKind, device: torch.device) -> LlamaModel:
    """Read all weights of a Llama-family checkpoint. Raises ValueError where one is missing."""
    config = source.config
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"activation {config.activation!r} is not known; it must be one of: {', '.join(ACTIVATIONS)}")
    load = Loader(source, kind, device)
    embedding = load.embedding("model.embed_tokens")
    layers = [Layer(config, index, load) for index in range(config.num_layers)]
    head = load.head(embedding)
    if load.store is not None:
        load.store.save()
    return LlamaModel(config, embedding, layers, load.norm("model.norm.weight"), head, load)


def _describe(linears: Sequence[Linear], head: Linear) -> str:
    kinds = {linear.kind for linear in linears if linear is not head}
    text = f"{' and '.join(sorted(kinds))}, head {head.kind}"
    worst = max(linears, key=lambda linear: linear.rounding)
    if worst.rounding > 1e-4:
        text += f"; torch's kernels round the file's scales: weights differ by up to {worst.rounding:.2%}"
    return text
