"""A decoder layer of the Llama family as part of a draft's network: the same object is trained and served.

Products are nn.Linear or whatever kind of weight `to_kind` makes of them, attention is whatever the caller passes. Parameters
bear Hugging Face names. Shapes: N rows, C width, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import draftwise.kernels as kernels
from draftwise.cache import KVCache
from draftwise.models.convert import RowLinear
from draftwise.models.layers import AttentionMasks, Rotary, attend, rms_norm
from draftwise.models.linear import Compiled, WeightKind, make_linear
from draftwise.types import Batch, ModelConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries [N, H, D], keys and values [N, K, D] of the rows to what they attended to, [N, H, D]."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 inside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x_NC: Tensor) -> Tensor:
        return rms_norm(x_NC, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of the layer's attention, from `inputs` numbers a row; who attends to whom is the caller's."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(inputs, heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=config.output_bias)
        if config.query_key_norm:
            self.q_norm, self.k_norm = RMSNorm(dim, config.norm_eps), RMSNorm(dim, config.norm_eps)


class FeedForward(nn.Module):
    """The gated feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_NC: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_NC)) * self.up_proj(x_NC))
        return out


class DecoderLayer(nn.Module):
    """The layer but for what its attention reads, in the steps that training and serving put together in their own ways."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        assert config.activation == "silu"
        self.config = config
        self.self_attn, self.mlp = Attention(config, inputs), FeedForward(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary = Rotary(config, torch.device("cpu"))

    def queries(self, read_N: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """[N, H, D], rotated."""
        q_NHD = self.self_attn.q_proj(read_N).unflatten(-1, (self.config.num_heads, -1))
        return self.rotary.apply(self.self_attn.q_norm(q_NHD) if self.config.query_key_norm else q_NHD, tables)

    def keys_values(self, read_N: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[N, K, D] each, keys rotated."""
        heads = (self.config.num_kv_heads, -1)
        k_NKD, v_NKD = self.self_attn.k_proj(read_N).unflatten(-1, heads), self.self_attn.v_proj(read_N).unflatten(-1, heads)
        return self.rotary.apply(self.self_attn.k_norm(k_NKD) if self.config.query_key_norm else k_NKD, tables), v_NKD

    def leave(self, residual_NC: Tensor, attended_NHD: Tensor) -> Tensor:
        """The residual stream after attention and feed-forward."""
        x_NC = residual_NC + self.self_attn.o_proj(attended_NHD.flatten(-2))
        out: Tensor = x_NC + self.mlp(self.post_attention_layernorm(x_NC))
        return out

    def runs_compiled(self, kind: WeightKind, device: torch.device) -> bool:
        """True where the compiled kernels run the layer in this kind of weight."""
        runs = kind.runs_compiled(device) and kernels.unsupported(self.config) is None
        return runs and self.rotary.is_fixed and self.config.hidden_size % 16 == 0

    def packed(self, index: int, *, norm_C: Tensor | None, beside_norm_C: Tensor | None = None) -> kernels.PackedLayer:
        """The served layer as the compiled kernels read it, at a place in the cache; norms of what its attention reads."""
        attention, feed = self.self_attn, self.mlp
        normed = self.config.query_key_norm
        return kernels.PackedLayer(
            index=index,
            attention=kernels.PackedAttention(
                norm_C=norm_C,
                beside_norm_C=beside_norm_C,
                query=packed_linear(attention.q_proj),
                key=packed_linear(attention.k_proj),
                value=packed_linear(attention.v_proj),
                query_norm_D=attention.q_norm.weight if normed else None,
                key_norm_D=attention.k_norm.weight if normed else None,
                output=packed_linear(attention.o_proj),
            ),
            feed_forward=kernels.PackedFeedForward(
                norm_C=self.post_attention_layernorm.weight,
                gate=packed_linear(feed.gate_proj),
                up=packed_linear(feed.up_proj),
                down=packed_linear(feed.down_proj),
            ),
        )


def packed_linear(module: nn.Module) -> kernels.Packed:
    """A product that `to_kind` compiled."""
    assert isinstance(module, RowLinear) and isinstance(module.linear, Compiled)
    linear = module.linear
    return linear.packed if linear.bias_M is None else linear.packed.with_bias(linear.bias_M)


def cached_attention(config: ModelConfig, batch: Batch, cache: KVCache, index: int) -> Attend:
    """Attention over a staged cache, where the layer has place `index`."""
    masks = AttentionMasks(batch, cache, (None,), heads=config.num_heads).of(None)

    def attention(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        cache.stage(index, batch, k_NKD, v_NKD)
        return attend(q_NHD, index, batch, cache, masks)

    return attention


@torch.no_grad()
def to_kind(network: nn.Module, kind: WeightKind, device: torch.device) -> None:
    """Turn a network's products into a kind of weight, on a device; it is no longer to be trained.

    Their rows need not be invariant: a draft that differs in a last bit is verified all the same.
    """
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.Linear):
            bias = None if module.bias is None else module.bias.detach()
            linear = make_linear(module.weight.detach(), bias, kind, device)
            parent, _, name = path.rpartition(".")
            setattr(network.get_submodule(parent), name, RowLinear(linear, kind.dtype, device))
        elif isinstance(module, DecoderLayer):
            module.rotary = Rotary(module.config, device)
    network.to(device).requires_grad_(False).eval()
