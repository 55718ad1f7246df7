"""The network of EAGLE drafts: one decoder layer over a target's hidden states and the embedding of the token that follows.

The same object is trained and served. Shapes: N rows, C width, E the target's width, F features (E for each tap).
Sources: EAGLE, Li et al. 2024, arXiv 2401.15077; EAGLE-3, Li et al. 2025, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.drafters.decoder_layer import Attend, DecoderLayer, RMSNorm, to_kind
from draftwise.models.linear import WeightKind
from draftwise.types import ModelConfig, Tap

ALGORITHMS = ("eagle", "eagle3")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleShape:
    """What a draft of either kind is made of.

    taps: what it reads of the target, in the order in which they stand beside each other. draft_vocab: tokens that it can
    draft. own_head: it brings the rows of its head; else the target's rows of those tokens serve. residual_after_norm: the
    residual stream continues from the normed feature. recycle_normed: what a row hands on to the next is normed.
    """

    algorithm: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048
    target_hidden: int
    target_vocab: int
    taps: tuple[Tap, ...]
    draft_vocab: int
    own_head: bool
    fc_bias: bool = False
    residual_after_norm: bool = False
    recycle_normed: bool = False

    def __post_init__(self) -> None:
        assert self.algorithm in ALGORITHMS
        if self.algorithm == "eagle" and self.hidden_size != self.target_hidden:
            raise ValueError(
                f"an EAGLE-1 draft is as wide as its target: {self.hidden_size} is not {self.target_hidden}; use eagle3"
            )
        if not self.own_head and self.hidden_size != self.target_hidden:
            raise ValueError("a draft of another width than its target needs a head of its own")

    @property
    def width(self) -> int:
        """Numbers that a row hands on."""
        return self.hidden_size

    @property
    def joins(self) -> bool:
        """True where attention reads embedding and feature side by side (EAGLE-3), not their mixture (EAGLE-1)."""
        return self.algorithm == "eagle3"

    def model_config(self) -> ModelConfig:
        """The one layer as a decoder's shape."""
        return ModelConfig(
            architecture=self.algorithm,
            vocab_size=self.draft_vocab,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            max_positions=self.max_positions,
            rope=self.rope,
        )


class Layer(DecoderLayer):
    """The decoder layer of either kind."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__(shape.model_config(), shape.hidden_size * (2 if shape.joins else 1))
        self.shape = shape
        if shape.joins:
            self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
            self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def enter(self, embedded_NC: Tensor, state_NC: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream that goes past it."""
        if not self.shape.joins:
            return state_NC, state_NC
        normed_NC = self.hidden_norm(state_NC)
        read = torch.cat([self.input_layernorm(embedded_NC).to(normed_NC.dtype), normed_NC], -1)
        return read, normed_NC if self.shape.residual_after_norm else state_NC


class EagleNetwork(nn.Module):
    """A draft of either kind. `d2t` holds per row of its head the target's id of that token, int64 [draft_vocab].

    The target's embedding is not part of it, nor is its head where that is borrowed: both come as arguments.
    """

    d2t: Tensor

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        beside = shape.target_hidden * (len(shape.taps) if shape.joins else 2)
        self.fc = nn.Linear(beside, shape.hidden_size, bias=shape.fc_bias)
        self.midlayer = Layer(shape)
        if shape.joins:
            self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        if shape.own_head:
            self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.arange(shape.draft_vocab), persistent=False)

    def condense(self, features_NF: Tensor) -> Tensor:
        """Tapped features as states: what a row would have handed on, were it the draft's own."""
        return self.fc(features_NF) if self.shape.joins else features_NF

    def mix(self, embedded_NC: Tensor, state_NC: Tensor) -> Tensor:
        """Where the residual stream begins: EAGLE-1 mixes embedding and feature, EAGLE-3 leaves that to attention."""
        return state_NC if self.shape.joins else self.fc(torch.cat([embedded_NC.to(state_NC.dtype), state_NC], -1))

    def enter(self, embedded_NC: Tensor, state_NC: Tensor) -> tuple[Tensor, Tensor]:
        """See Layer.enter."""
        return self.midlayer.enter(embedded_NC, self.mix(embedded_NC, state_NC))

    def forward(self, embedded_NC: Tensor, state_NC: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """One row each for the tokens of embedded_NC and the states before them: the states to hand on, [N, C]."""
        read_N, residual_NC = self.enter(embedded_NC, state_NC)
        attended = attend(self.midlayer.queries(read_N, tables), *self.midlayer.keys_values(read_N, tables))
        return self.handed_on(self.midlayer.leave(residual_NC, attended))

    def handed_on(self, out_NC: Tensor) -> Tensor:
        """A layer's output as the next row reads it."""
        return self.norm(out_NC) if self.shape.recycle_normed else out_NC

    def before_head(self, state_NC: Tensor) -> Tensor:
        """A state as the head reads it."""
        return self.norm(state_NC) if self.shape.joins and not self.shape.recycle_normed else state_NC

    def serve(self, kind: WeightKind, device: torch.device) -> EagleNetwork:
        """The same network with its products in a kind of weight, on a device; no longer to be trained."""
        to_kind(self, kind, device)
        return self
