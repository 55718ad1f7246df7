"""The parts of a decoder layer on packed rows: normalisation, rotary embedding, attention over the staged cache.

Plain torch on any device, and the reference that faster kernels are held to.
Shapes: N rows, H query heads, K key/value heads, G = H / K, D head size, T cached rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.types import Batch, ModelConfig, Span, Tree

ROW_MULTIPLE = 4
"""Query rows a span is padded to: with KEY_MULTIPLE, what makes torch's attention on CPU row-invariant."""


def rms_norm(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32 inside."""
    return F.rms_norm(x_NC.float(), weight_C.shape, weight_C.float(), eps).to(x_NC.dtype)


class Rotary:
    """Rotary position embedding, half-rotation layout, with the scaling variants of the Hugging Face configurations.

    `default`, `linear`, `llama3`, `yarn` and `factors` (a divisor per frequency) are fixed; `dynamic` and `longrope`
    depend on length, here on the row's own position, so that a row is the same however it was fed.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        rope = dict(config.rope)
        self.kind = str(rope.get("rope_type", rope.get("type", "default")))
        self.dim = int(config.head_dim * float(rope.get("partial_rotary_factor", 1.0)))
        self.theta = float(rope.get("rope_theta", 10000.0))
        self.original = int(rope.get("original_max_position_embeddings") or config.max_positions)
        self.factor = float(rope.get("factor") or 1.0)
        self.scale = 1.0
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        self.inverse = self.theta**-exponent
        self.long: Tensor | None = None
        if self.kind == "linear":
            self.inverse = self.inverse / self.factor
        elif self.kind == "factors":
            self.inverse = self.inverse / torch.tensor(rope["factors"], dtype=torch.float32)
        elif self.kind == "llama3":
            self.inverse = self._llama3(rope)
        elif self.kind == "yarn":
            self.inverse = self._yarn(rope)
        elif self.kind == "longrope":
            self._longrope(rope, config)
        elif self.kind not in ("default", "dynamic"):
            raise ValueError(
                f"rotary embedding of kind {self.kind!r} is not known; "
                "it must be one of: default, linear, dynamic, yarn, longrope, llama3, factors"
            )
        self.inverse = self.inverse.to(device)
        self.long = self.long.to(device) if self.long is not None else None

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [N, 1, dim], for rows at these positions."""
        angles = positions_N[:, None].float() * self._inverse_at(positions_N)
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def apply(self, x_NHD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first `dim` channels of every head."""
        cos, sin = tables
        turned, rest = x_NHD[..., : self.dim], x_NHD[..., self.dim :]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return turned if not rest.shape[-1] else torch.cat([turned, rest], dim=-1)

    def _inverse_at(self, positions_N: Tensor) -> Tensor:
        if self.kind == "dynamic":
            length = (positions_N + 1).clamp(min=self.original).double()[:, None]
            grown = (self.factor * length / self.original - (self.factor - 1)) ** (self.dim / (self.dim - 2))
            exponent = torch.arange(0, self.dim, 2, device=positions_N.device).double() / self.dim
            return ((self.theta * grown) ** -exponent).float()
        if self.long is not None:
            return torch.where((positions_N >= self.original)[:, None], self.long, self.inverse)
        return self.inverse

    def _llama3(self, rope: Mapping[str, Any]) -> Tensor:
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        wavelength = 2 * math.pi / self.inverse
        smooth = ((self.original / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * self.inverse / self.factor + smooth * self.inverse

    def _yarn(self, rope: Mapping[str, Any]) -> Tensor:
        def dimension(rotations: float) -> float:
            return self.dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        def magnitude(scale: float, weight: float = 1.0) -> float:
            return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

        given, weight, whole = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
        if given is not None:
            self.scale = float(given)
        elif weight and whole:
            self.scale = magnitude(self.factor, float(weight)) / magnitude(self.factor, float(whole))
        else:
            self.scale = magnitude(self.factor)
        low, high = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
        return self.inverse / self.factor * ramp + self.inverse * (1 - ramp)

    def _longrope(self, rope: Mapping[str, Any], config: ModelConfig) -> None:
        factor = float(rope.get("factor") or config.max_positions / self.original)
        given = rope.get("attention_factor")
        if given is not None:
            self.scale = float(given)
        elif factor > 1:
            self.scale = math.sqrt(1 + math.log(factor) / math.log(self.original))
        self.long = self.inverse / torch.tensor(rope["long_factor"], dtype=torch.float32)
        self.inverse = self.inverse / torch.tensor(rope["short_factor"], dtype=torch.float32)


class AttentionMasks:
    """The masks of one pass, made once for each sliding window the layers use."""

    def __init__(self, batch: Batch, cache: KVCache, windows: Iterable[int | None]) -> None:
        self._masks = {
            window: [
                _mask(span, tree, window, cache.columns(span), batch.tokens_N.device)
                for span, tree in zip(batch.spans, batch.trees, strict=True)
            ]
            for window in set(windows)
        }

    def of(self, window: int | None) -> list[Tensor]:
        """Per span, bool [padded rows, T]: True where a row may look."""
        return self._masks[window]


def _mask(span: Span, tree: Tree | None, window: int | None, columns: int, device: torch.device) -> Tensor:
    rows, known = span.stop - span.start, span.committed + span.staged
    columns_T = torch.arange(columns, device=device)
    if tree is None:
        positions_N = torch.arange(known - rows, known, device=device)
        mask = columns_T <= positions_N[:, None]
        column_positions_T = columns_T
    else:
        positions_N = tree.positions[span.staged - rows :]
        mask = (columns_T < span.committed).repeat(rows, 1)
        mask[:, span.committed : known] = tree.visible
        column_positions_T = columns_T.clone()
        column_positions_T[span.committed : known] = tree.positions
    if window is not None:
        mask = mask & (column_positions_T > positions_N[:, None] - window)
    short = -rows % ROW_MULTIPLE
    # a padding row sees what the last row sees: an empty row of a mask would give NaN
    return torch.cat([mask, mask[-1:].expand(short, -1)]) if short else mask


def attend(
    q_NHD: Tensor,
    layer: int,
    batch: Batch,
    cache: KVCache,
    masks: list[Tensor],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of every row over its slot's committed rows and the staged rows it may see: [N, H, D].

    Query heads of a group are laid out as further rows of their key head, so keys and values are never repeated.
    """
    out = torch.empty_like(q_NHD)
    for span, mask in zip(batch.spans, masks, strict=True):
        k_KTD, v_KTD = cache.view(layer, span)
        rows, (heads, size) = span.stop - span.start, q_NHD.shape[1:]
        groups, padded = heads // k_KTD.shape[0], mask.shape[0]
        q_KGND = q_NHD[span.start : span.stop].view(rows, -1, groups, size).permute(1, 2, 0, 3)
        if padded > rows:
            q_KGND = F.pad(q_KGND, (0, 0, 0, padded - rows))
        q_KND = q_KGND.reshape(1, -1, groups * padded, size)
        mask_NT = mask.repeat(groups, 1)
        if soft_cap is None:
            seen = F.scaled_dot_product_attention(q_KND, k_KTD[None], v_KTD[None], attn_mask=mask_NT[None, None], scale=scale)
        else:
            seen = _soft_capped(q_KND, k_KTD, v_KTD, mask_NT, scale or size**-0.5, soft_cap)
        seen = seen.view(-1, groups, padded, size)[:, :, :rows]
        out[span.start : span.stop] = seen.permute(2, 0, 1, 3).reshape(rows, heads, size)
    return out


def _soft_capped(q: Tensor, k_KTD: Tensor, v_KTD: Tensor, mask_NT: Tensor, scale: float, cap: float) -> Tensor:
    scores = (q[0].float() @ k_KTD.float().transpose(1, 2)) * scale
    scores = (torch.tanh(scores / cap) * cap).masked_fill(~mask_NT, -math.inf)
    return (scores.softmax(-1) @ v_KTD.float()).to(q.dtype)[None]
