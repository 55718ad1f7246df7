"""EAGLE-1: a layer that foresees the target's next hidden state, read by the target's own head. EAGLE-3 shares the lesson.

Source: EAGLE, Li et al. 2024, arXiv 2401.15077, section 4. Shapes: B answers, R rows of the first step, A of those the ones
that learn (the last), C the draft's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from math import log2
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.drafters.base import Target
from draftwise.drafters.eagle_files import read_eagle, write_eagle
from draftwise.drafters.eagle_network import EagleNetwork, EagleShape
from draftwise.models.layers import Rotary
from draftwise.train.capture import Captured
from draftwise.train.data import Corpus
from draftwise.train.feature_lesson import (
    FeatureLesson,
    embedding_scale,
    feature_scales,
    fit_mixtures,
    rotations,
    unrolled_attention,
)
from draftwise.train.rows import Rows, frequent_tokens
from draftwise.types import Tap

SETTLED = ("inner", "taps", "own_head")
"""Options that the weights of a draft have decided on."""
SHARE, LEAST = 6, 4096
"""A draft knows one in so many of the target's tokens, and so many at least: the head is half of what it reads, and the others
are rare."""


@dataclass(frozen=True, slots=True)
class Options:
    """What both kinds of EAGLE draft may be given."""

    vocab: int = field(
        default=0,
        metadata={"help": "tokens that the draft knows: the most frequent; 0: a sixth of the target's, or all of start's"},
    )
    steps: int = field(default=3, metadata={"help": "steps on its own outputs that it is trained on"})
    decay: float = field(default=0.8, metadata={"help": "weight of a step against the one before"})
    inner: int = field(default=0, metadata={"help": "width of the feed-forward; 0: the target's"})
    feature_weight: float = field(default=2.0, metadata={"help": "weight of meeting the target's final hidden state"})
    start: str = field(default="", metadata={"help": "folder of a draft to go on from, its shape kept"})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")
        for name in ("vocab", "decay", "feature_weight", "inner"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        given = [option.name for option in fields(self) if getattr(self, option.name) != option.default]
        if self.start and (settled := [name for name in given if name in SETTLED]):
            raise ValueError(f"the draft of start has its own {', '.join(settled)}; leave out one or the other")


class EagleLesson(FeatureLesson):
    """Trains a draft of either kind.

    scales_F: what the inputs of the network's `fc` are divided by, so that all are of about one size: taps of EAGLE-3,
    embedding and state of EAGLE-1. `save` puts it into the weights; powers of two, so that this rounds nothing.
    """

    scales_F: Tensor

    def __init__(self, network: EagleNetwork, target: Target, options: Options, *, scales: dict[Tap, float]) -> None:
        shape = network.shape
        weights = {"decay": options.decay, "feature_weight": options.feature_weight, "final_scale": scales["final_norm"]}
        super().__init__(target, network.d2t, **weights)
        self.network, self.steps, self.drafter = network, options.steps, shape.algorithm
        self.taps = tuple(dict.fromkeys([*shape.taps, "final_norm"]))
        network.midlayer.rotary = Rotary(shape.model_config(), target.model.device)
        read = [scales[tap] for tap in shape.taps] if shape.joins else [embedding_scale(target), scales["final_norm"]]
        sizes = [torch.full((shape.target_hidden,), 2.0 ** round(log2(scale))) for scale in read]
        self.register_buffer("scales_F", torch.cat(sizes))

    def guesses(self, batch: Captured) -> Iterator[tuple[int, Tensor]]:
        for step, state_BAC in enumerate(self.unroll(batch)):
            yield step, self.network.before_head(state_BAC)

    def own_head(self, step: int) -> Tensor | None:
        return self.network.lm_head.weight if self.network.shape.own_head else None

    def unroll(self, batch: Captured) -> Iterator[Tensor]:
        """Step by step what the learning rows hand on, [B, A, C]: row a of step s has read s drafted tokens after its own."""
        net, rows, tokens_BT = self.network, Rows.of(batch), batch.tokens_BT
        features = torch.cat([batch.features[tap][:, : rows.last] for tap in net.shape.taps], -1).float()
        state = net.condense(features / self.scales_F).float() if net.shape.joins else features
        read, residual = self._enter(tokens_BT[:, 1 : rows.last + 1], state)
        positions_BR, bias_BAR = rows.positions_BR, rows.bias(rows.first)
        keys, values = net.midlayer.keys_values(read, rotations(net.midlayer.rotary, positions_BR))
        read, residual = read[:, rows.first :], residual[:, rows.first :]
        own: list[tuple[Tensor, Tensor]] = []
        state = residual
        for step in range(self.steps):
            tables = rotations(net.midlayer.rotary, positions_BR[:, rows.first :] + step)
            if step:
                following = F.pad(tokens_BT, (0, step))[:, rows.first + 1 + step : rows.last + 1 + step]
                read, residual = self._enter(following, state)
                own.append(net.midlayer.keys_values(read, tables))
            attended = unrolled_attention(net.midlayer.queries(read, tables), keys, values, own, bias_BAR)
            state = net.handed_on(net.midlayer.leave(residual, attended)).float()
            yield state

    def _enter(self, tokens_BA: Tensor, state_BAC: Tensor) -> tuple[Tensor, Tensor]:
        embedded_BAE = self._embed(tokens_BA)
        if not self.network.shape.joins:  # `fc` reads both here
            embedding, feature = self.scales_F.chunk(2)
            embedded_BAE, state_BAC = embedded_BAE / embedding, state_BAC / feature
        return self.network.enter(embedded_BAE, state_BAC)

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        network = EagleNetwork(self.network.shape)
        network.load_state_dict(self.network.state_dict())
        network.d2t = self.tokens_V.cpu()
        with torch.no_grad():
            network.fc.weight /= self.scales_F.cpu()
        write_eagle(folder, network, self.target, card)


def build(options: Options, target: Target, corpus: Corpus) -> EagleLesson:
    """An EAGLE-1 draft whose mixture of embedding and feature foretells the next feature; the rest of it is untrained."""
    lesson = build_lesson("eagle", ("final_norm",), options, target, corpus, fc_bias=True)
    if not options.start:
        fit_mixtures(lesson, [lesson.network.fc], corpus, scale=1.0)
    return lesson


def build_lesson(
    algorithm: str, taps: tuple[Tap, ...], options: Options, target: Target, corpus: Corpus, **shape: Any
) -> EagleLesson:
    """An untrained draft in the shape of one of the target's layers, for the tokens that the answers use most; or the draft of
    `options.start`, to be trained further."""
    if options.start:
        return _going_on(algorithm, options, target, corpus)
    config = target.model.config
    tokens = frequent_tokens(target, corpus, options.vocab or max(target.vocab // SHARE, LEAST))
    network = EagleNetwork(
        EagleShape(
            algorithm=algorithm,
            hidden_size=config.hidden_size,
            intermediate_size=options.inner or config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            max_positions=config.max_positions,
            target_hidden=config.hidden_size,
            target_vocab=target.vocab,
            taps=taps,
            draft_vocab=len(tokens),
            **{"own_head": False, **shape},
        )
    )
    network.d2t = tokens
    scales = feature_scales(target, corpus, tuple(dict.fromkeys([*taps, "final_norm"])))
    begin(network, scales["final_norm"])
    return EagleLesson(network, target, options, scales=scales).to(target.model.device)


def _going_on(algorithm: str, options: Options, target: Target, corpus: Corpus) -> EagleLesson:
    """The draft of a folder as a lesson; small files hold rounded weights, and these are where it begins."""
    network, _ = read_eagle(Path(options.start), algorithm, target)
    if options.vocab:
        network = _knowing_less(network, frequent_tokens(target, corpus, options.vocab, among=network.d2t.tolist()))
    scales = feature_scales(target, corpus, tuple(dict.fromkeys([*network.shape.taps, "final_norm"])))
    lesson = EagleLesson(network, target, options, scales=scales)
    with torch.no_grad():
        network.fc.weight *= lesson.scales_F  # `save` takes it out again
    return lesson.to(target.model.device)


def _knowing_less(network: EagleNetwork, tokens_V: Tensor) -> EagleNetwork:
    """The same draft, for some of its tokens. Raises ValueError where it has a head of its own."""
    if network.shape.own_head:
        raise ValueError("the draft of start has a head of its own, and with it the tokens that it knows; leave out vocab")
    fewer = EagleNetwork(replace(network.shape, draft_vocab=len(tokens_V)))
    fewer.load_state_dict(network.state_dict())
    fewer.d2t = tokens_V
    return fewer


@torch.no_grad()
def begin(network: EagleNetwork, final_scale: float) -> None:
    """First weights: the last tap passes through, all else adds little, and the norm's output is of the size the head knows."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
    network.midlayer.self_attn.o_proj.weight.mul_(0.3)
    network.midlayer.mlp.down_proj.weight.mul_(0.3)
    network.fc.weight.mul_(0.1)
    last = network.fc.weight[:, -network.shape.target_hidden :]
    last += torch.eye(*last.shape)
    if network.shape.joins:
        network.norm.weight.fill_(final_scale)
