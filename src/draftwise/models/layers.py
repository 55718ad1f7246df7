"""The parts of a decoder layer on packed rows: normalisation, rotary embedding, attention over the staged cache.

Plain torch on any device, and the reference that faster kernels are held to.
Shapes: N rows, H query heads, K key/value heads, G = H / K, D head size, T cached rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.cache import BLOCK, KVCache
from draftwise.models.rows import RowRule
from draftwise.types import Batch, ModelConfig, Span, Tree

SPELLED_ROWS = 32
GRAIN, LANES = 16384, 64
"""Numbers that torch's loops on CPU take in one piece, and a multiple of those that they take at a time."""

ROW_MULTIPLE = 4
"""Query rows a span is padded to: with whole blocks of keys, what makes torch's attention on CPU row-invariant."""


def rms_norm(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, in float32 inside."""
    return F.rms_norm(x_NC.float(), weight_C.shape, weight_C.float(), eps).to(x_NC.dtype)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [..., C] whose bits do not depend on the rows beside a row.

    On CPU the end of a piece that is no whole number of vectors goes through another routine than the rest, whose
    exponential differs in the last bit. So pieces are made of whole rows, padded, and never split between threads.
    """
    if x.device.type != "cpu":
        return function(x)
    width = x.shape[-1]
    multiple = LANES // math.gcd(width, LANES)
    rule = RowRule(multiple, GRAIN // (width * multiple) * multiple) if width * multiple <= GRAIN else RowRule(1, 1)
    return rule(function, x.reshape(-1, width).contiguous()).view(x.shape)


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

    @property
    def is_fixed(self) -> bool:
        """True where a position's rotation does not depend on how far the position is."""
        return self.kind != "dynamic" and self.long is None

    def half_tables(self, positions_P: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each angle once, float32 [P, dim / 2]."""
        angles = positions_P[:, None].float() * self._inverse_at(positions_P)
        return angles.cos() * self.scale, angles.sin() * self.scale

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


class Look(NamedTuple):
    """What the rows of one span see of their slot, under one window. Legend: B branches, R rows of a branch, padded.

    bias_B1NT: 0 where a row may look, else -inf, for N = G * R rows. branch_rows_BR: int64, the rows of the span that a
    branch computes (the last again and again where it has fewer than R); None for all, in order. pool_rows_BT: int64, the
    columns of a branch as places in the pool; None for the span's own view.
    """

    bias_B1NT: Tensor
    branch_rows_BR: Tensor | None = None
    pool_rows_BT: Tensor | None = None


class AttentionMasks:
    """The masks of one pass for layers of `heads` query heads, made once for each sliding window they use."""

    def __init__(self, batch: Batch, cache: KVCache, windows: Iterable[int | None], *, heads: int) -> None:
        groups = heads // cache.pool.shape[2]
        self._looks = {
            window: [_look(span, tree, window, groups, cache) for span, tree in zip(batch.spans, batch.trees, strict=True)]
            for window in set(windows)
        }

    def of(self, window: int | None) -> list[Look]:
        """What each span sees."""
        return self._looks[window]


def _look(span: Span, tree: Tree | None, window: int | None, groups: int, cache: KVCache) -> Look:
    rows, known, device = span.stop - span.start, span.committed + span.staged, cache.pool.device
    if tree is not None and device.type == "cpu":
        return _branches(span, tree, window, groups, cache)
    columns_T = torch.arange(cache.columns(span), device=device)
    if tree is None:
        mask = _seen(torch.arange(known - rows, known, device=device), columns_T, window)
    else:
        mask = (columns_T < span.committed).repeat(rows, 1)
        mask[:, span.committed : known] = tree.visible
        if window is not None:
            positions_T = columns_T.clone()
            positions_T[span.committed : known] = tree.positions
            mask &= positions_T > tree.positions[span.staged - rows :, None] - window
    short = -rows % ROW_MULTIPLE
    # a padding row sees what the last row sees: an empty row of a mask would give NaN
    return Look(_bias(torch.cat([mask, mask[-1:].expand(short, -1)])[None], groups, cache))


def _bias(mask_BRT: Tensor, groups: int, cache: KVCache) -> Tensor:
    bias_BRT = torch.zeros_like(mask_BRT, dtype=cache.pool.dtype).masked_fill_(~mask_BRT, -math.inf)
    return bias_BRT.repeat(1, groups, 1)[:, None]


def _seen(positions: Tensor, columns_T: Tensor, window: int | None) -> Tensor:
    """Bool [..., T]: the columns that rows at these positions see, where a column is its position."""
    positions = positions[..., None]
    mask = columns_T <= positions
    return mask if window is None else mask & (columns_T > positions - window)


def _branches(span: Span, tree: Tree, window: int | None, groups: int, cache: KVCache) -> Look:
    """A tree as its branches, each laid out as the chain it would be: the order of additions is then the chain's.

    Siblings side by side would put a row's keys into other lanes of the sums than they have once they are committed.
    """
    first = span.staged - (span.stop - span.start)
    done: set[int] = set()
    fresh: list[list[int]] = []  # per branch the rows that no branch before it computes, as depths
    for branch in tree.branches:
        fresh.append([depth for depth, row in enumerate(branch) if row >= first and row not in done])
        done.update(branch)
    size = -(-max(map(len, fresh)) // ROW_MULTIPLE) * ROW_MULTIPLE
    depths = [depths + depths[-1:] * (size - len(depths)) for depths in fresh]
    slot_rows = cache.rows(span)
    longest = span.committed + max(map(len, tree.branches))
    pool_rows_BT = slot_rows[:1].repeat(len(depths), -(-longest // BLOCK) * BLOCK)
    pool_rows_BT[:, : span.committed] = slot_rows[: span.committed]
    for pool_rows_T, branch in zip(pool_rows_BT, tree.branches, strict=True):
        pool_rows_T[span.committed : span.committed + len(branch)] = slot_rows[span.committed + torch.tensor(branch)]
    branch_rows = [[branch[depth] - first for depth in row] for branch, row in zip(tree.branches, depths, strict=True)]
    mask_BRT = _seen(span.committed + torch.tensor(depths), torch.arange(pool_rows_BT.shape[1]), window)
    return Look(_bias(mask_BRT, groups, cache), torch.tensor(branch_rows), pool_rows_BT)


def attend(
    q_NHD: Tensor,
    layer: int,
    batch: Batch,
    cache: KVCache,
    looks: list[Look],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its slot's committed rows and the staged rows it may see: [N, H, D].

    soft_cap: scores become cap * tanh(score / cap). sinks_H: per head a score that takes its share and gives nothing.
    Query heads of a group are laid out as further rows of their key head, so keys and values are never repeated.
    """
    heads, size = q_NHD.shape[1:]
    scale = size**-0.5 if scale is None else scale
    out_NHD = torch.empty_like(q_NHD)
    for span, look in zip(batch.spans, looks, strict=True):
        bias_B1NT, branch_rows_BR, pool_rows_BT = look
        q, out, rows = q_NHD[span.start : span.stop], out_NHD[span.start : span.stop], span.stop - span.start
        groups = heads // cache.pool.shape[2]
        padded = bias_B1NT.shape[2] // groups
        if branch_rows_BR is None or pool_rows_BT is None:
            k_BKTD, v_BKTD = (part[None] for part in cache.view(layer, span))
            q_BRHD = (F.pad(q, (0, 0, 0, 0, 0, padded - rows)) if padded > rows else q)[None]
        else:
            kv = cache.pool[layer].index_select(2, pool_rows_BT.flatten())
            k_BKTD, v_BKTD = kv.view(2, -1, *pool_rows_BT.shape, size).transpose(1, 2).unbind(0)
            q_BRHD = q[branch_rows_BR]
        branches, kv_heads = len(bias_B1NT), heads // groups
        q_BKND = q_BRHD.reshape(branches, padded, kv_heads, groups, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if soft_cap is None and sinks_H is None:
            seen = F.scaled_dot_product_attention(q_BKND, k_BKTD, v_BKTD, attn_mask=bias_B1NT, scale=scale)
        else:
            sinks_KN = None if sinks_H is None else sinks_H.view(-1, groups).repeat_interleave(padded, 1)
            seen = _spelled_out(q_BKND, k_BKTD, v_BKTD, bias_B1NT, scale, soft_cap, sinks_KN)
        seen_BRHD = seen.reshape(branches, kv_heads, groups, padded, size).permute(0, 3, 1, 2, 4).flatten(2, 3)
        if branch_rows_BR is None:
            out.copy_(seen_BRHD[0, :rows])
        else:
            out[branch_rows_BR.flatten()] = seen_BRHD.flatten(0, 1)
    return out_NHD


def _spelled_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, cap: float | None, sinks_KN: Tensor | None
) -> Tensor:
    """Attention that torch has no kernel for, in float32, SPELLED_ROWS query rows at a time for one order of additions."""
    rows = q.shape[2]
    if rows != SPELLED_ROWS:
        parts = []
        for start in range(0, rows, SPELLED_ROWS):
            stop = min(start + SPELLED_ROWS, rows)
            short = (0, 0, 0, SPELLED_ROWS - (stop - start))
            part_bias = F.pad(bias[:, :, start:stop], short)
            part_sinks = None if sinks_KN is None else F.pad(sinks_KN[:, start:stop], short[2:])
            part = _spelled_out(F.pad(q[:, :, start:stop], short), k, v, part_bias, scale, cap, part_sinks)
            parts.append(part[:, :, : stop - start])
        return torch.cat(parts, 2)
    scores_BKNT = (q.float() @ k.float().transpose(-1, -2)) * scale
    if cap is not None:
        scores_BKNT = torch.tanh(scores_BKNT / cap) * cap
    scores_BKNT = scores_BKNT + bias
    if sinks_KN is None:
        return (scores_BKNT.softmax(-1) @ v.float()).to(q.dtype)
    top_BKN1 = torch.maximum(scores_BKNT.amax(-1, keepdim=True), sinks_KN[None, :, :, None].float())
    weights_BKNT = (scores_BKNT - top_BKN1).exp()
    total_BKN1 = weights_BKNT.sum(-1, keepdim=True) + (sinks_KN[None, :, :, None].float() - top_BKN1).exp()
    return (weights_BKNT / total_BKN1 @ v.float()).to(q.dtype)
