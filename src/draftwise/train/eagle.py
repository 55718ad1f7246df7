"""EAGLE-1: a layer that foresees the target's next hidden state, read by the target's own head. EAGLE-3 shares the lesson.

Training-time test: the draft reads its own outputs for some steps, as it will when it drafts. Its rows of later steps attend
to rows of the first step, as they stand in the cache when it is served, and to their own earlier steps.
Sources: EAGLE, Li et al. 2024, arXiv 2401.15077, section 4; HASS, Zhang et al. 2024, arXiv 2408.15766; EAGLE-3, Li et al.
2025, arXiv 2503.01840, section 3. Shapes: B answers, T tokens, R rows of the first step, A of those the ones that learn (the
last), H query heads, K key heads, G = H / K, D head size, E the target's width, C the draft's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.drafters.base import Target
from draftwise.drafters.eagle_files import write_eagle
from draftwise.drafters.eagle_network import EagleNetwork, EagleShape
from draftwise.models.layers import Rotary
from draftwise.train.capture import Captured, capture
from draftwise.train.data import Corpus
from draftwise.train.lesson import Lesson, distributions, match
from draftwise.train.rows import Rows, frequent_tokens
from draftwise.types import Tap

SAMPLE = 16
"""Answers that features are measured on before training."""


@dataclass(frozen=True, slots=True)
class Options:
    """What both kinds of EAGLE draft may be given."""

    vocab: int = field(default=16384, metadata={"help": "tokens that the draft knows: the most frequent ones"})
    steps: int = field(default=3, metadata={"help": "steps on its own outputs that it is trained on"})
    decay: float = field(default=0.8, metadata={"help": "weight of a step against the one before"})
    inner: int = field(default=0, metadata={"help": "width of the feed-forward; 0: the target's"})
    feature_weight: float = field(default=2.0, metadata={"help": "weight of meeting the target's final hidden state"})

    def __post_init__(self) -> None:
        for name in ("vocab", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("decay", "feature_weight", "inner"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


class EagleLesson(Lesson):
    """Trains a draft of either kind.

    tokens_V: what the draft knows, as the target's ids. scales_F: what features are divided by, so that taps of all layers
    are of one size; `save` puts it into the weights.
    """

    tokens_V: Tensor
    scales_F: Tensor
    head_VE: Tensor

    def __init__(self, network: EagleNetwork, target: Target, options: Options, *, scales: dict[Tap, float]) -> None:
        super().__init__()
        shape = network.shape
        self.network, self.target, self.options, self.drafter = network, target, options, shape.algorithm
        self.taps = tuple(dict.fromkeys([*shape.taps, "final_norm"]))
        network.midlayer.rotary = Rotary(shape.model_config(), target.model.device)
        widths = [torch.full((shape.target_hidden,), scales[tap]) for tap in shape.taps]
        self.register_buffer("scales_F", torch.cat(widths) if shape.joins else torch.ones(shape.target_hidden))
        self.final_scale = scales["final_norm"]
        self.register_buffer("tokens_V", network.d2t.clone())
        self.register_buffer("head_VE", target.model.head_rows(self.tokens_V).clone(), persistent=False)

    def forward(self, batch: Captured) -> dict[str, Tensor]:
        options, shape = self.options, self.network.shape
        rows = Rows.of(batch)
        final_PE = rows.following(batch.features["final_norm"])
        p_PV = distributions(final_PE, self.head_VE, self._dtype())
        head = self.network.lm_head.weight if shape.own_head else self.head_VE
        count = max(len(final_PE), 1)
        loss, figures = p_PV.new_zeros((), dtype=torch.float32), {}
        for step, state_BAC in enumerate(self.unroll(batch)):
            guesses_BA, place_n = rows.ahead(step)
            before_head = self.network.before_head(state_BAC[guesses_BA]).float()
            lost, accepted = match(before_head, head, p_PV, place_n)
            if options.feature_weight and not shape.own_head:
                wanted, scale = final_PE[place_n].float(), self.final_scale
                missed = F.smooth_l1_loss(before_head / scale, wanted / scale, reduction="none")
                lost = lost + options.feature_weight * missed.mean(-1).sum()
            loss = loss + options.decay**step * lost / count
            figures[f"accepted_{step + 1}"] = accepted / max(len(place_n), 1)
        return {"loss": loss / sum(options.decay**step for step in range(options.steps)), **figures}

    def unroll(self, batch: Captured) -> Iterator[Tensor]:
        """Step by step what the learning rows hand on, [B, A, C]: row a of step s has read s drafted tokens after its own."""
        net, rows, tokens_BT = self.network, Rows.of(batch), batch.tokens_BT
        features = torch.cat([batch.features[tap][:, : rows.last] for tap in net.shape.taps], -1).float() / self.scales_F
        read, residual = net.enter(self._embed(tokens_BT[:, 1 : rows.last + 1]), net.condense(features).float())
        positions_BR, bias_BAR = rows.positions_BR, rows.bias()
        keys, values = net.midlayer.keys_values(read, self._tables(positions_BR))
        read, residual = read[:, rows.first :], residual[:, rows.first :]
        own: list[tuple[Tensor, Tensor]] = []
        state = residual
        for step in range(self.options.steps):
            tables = self._tables(positions_BR[:, rows.first :] + step)
            if step:
                following = F.pad(tokens_BT, (0, step))[:, rows.first + 1 + step : rows.last + 1 + step]
                read, residual = net.enter(self._embed(following), state)
                own.append(net.midlayer.keys_values(read, tables))
            attended = unrolled_attention(net.midlayer.queries(read, tables), keys, values, own, bias_BAR)
            state = net.handed_on(net.midlayer.leave(residual, attended)).float()
            yield state

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.head_VE.copy_(self.target.model.head_rows(self.tokens_V))

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        network = EagleNetwork(self.network.shape)
        network.load_state_dict(self.network.state_dict())
        network.d2t = self.tokens_V.cpu()
        if network.shape.joins:
            with torch.no_grad():
                network.fc.weight /= self.scales_F.cpu()
        write_eagle(folder, network, self.target, card)

    def _embed(self, tokens_BA: Tensor) -> Tensor:
        return self.target.model.embed(tokens_BA.reshape(-1)).view(*tokens_BA.shape, -1).float()

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.network.midlayer.rotary.tables(positions.reshape(-1), torch.float32)
        return cos.view(*positions.shape, 1, -1), sin.view(*positions.shape, 1, -1)

    def _dtype(self) -> torch.dtype:
        device = self.head_VE.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


def unrolled_attention(
    q_BAHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, own: list[tuple[Tensor, Tensor]], bias_BAR: Tensor
) -> Tensor:
    """Attention of learning rows to the rows of the first step, under a mask, and to their own rows of later steps.

    own: keys and values [B, A, K, D] of each step after the first. Returns [B, A, H, D].
    """
    size, learning, heads, dim = q_BAHD.shape
    kv_heads = k_BRKD.shape[2]
    q = q_BAHD.view(size, learning, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)  # B K G A D
    k, v = k_BRKD.to(q.dtype).permute(0, 2, 3, 1)[:, :, None], v_BRKD.transpose(1, 2)[:, :, None]
    scores = [(q @ k).float() * dim**-0.5 + bias_BAR[:, None, None]]
    diagonal = [(key.transpose(1, 2)[:, :, None], value.transpose(1, 2)[:, :, None]) for key, value in own]
    scores += [(q * key).sum(-1, keepdim=True).float() * dim**-0.5 for key, _ in diagonal]
    weights = torch.cat(scores, -1).softmax(-1).to(v.dtype)
    out = weights[..., : k_BRKD.shape[1]] @ v
    for step, (_, value) in enumerate(diagonal):
        out = out + weights[..., k_BRKD.shape[1] + step, None] * value
    return out.permute(0, 3, 1, 2, 4).reshape(size, learning, heads, dim)


def build(options: Options, target: Target, corpus: Corpus) -> EagleLesson:
    """An untrained EAGLE-1 draft."""
    return build_lesson("eagle", ("final_norm",), options, target, corpus, fc_bias=True)


def build_lesson(
    algorithm: str, taps: tuple[Tap, ...], options: Options, target: Target, corpus: Corpus, **shape: Any
) -> EagleLesson:
    """An untrained draft in the shape of one of the target's layers, for the tokens that the answers use most."""
    config = target.model.config
    tokens = frequent_tokens(target, corpus, options.vocab)
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


def feature_scales(target: Target, corpus: Corpus, taps: tuple[Tap, ...]) -> dict[Tap, float]:
    """Per tap the typical root mean square of a row: the median, since the first rows of a text are far from the others."""
    shots = capture(target, corpus.answers[:SAMPLE], taps, most_tokens=512, dtype=torch.float32)
    return {
        tap: float(torch.cat([shot.features[tap].square().mean(-1).sqrt() for shot in shots]).median().clamp(min=1e-6))
        for tap in taps
    }


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
