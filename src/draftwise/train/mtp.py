"""Multi-token prediction: modules one behind the other, each of which learns to foresee one token further than the last.

Every module runs on all rows of an answer, on what the module before it made of the true text; past the last module that one
reads its own outputs, as it will when it drafts on.
Source: DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2; one module for all depths: FastMTP, Cai et al. 2025, arXiv
2509.18362. Shapes: B answers, T tokens, R rows, A of those the ones that learn (the last), C width.
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
from draftwise.drafters.mtp_files import write_mtp
from draftwise.drafters.mtp_network import MtpNetwork, MtpShape
from draftwise.models.layers import Rotary
from draftwise.train.capture import Captured
from draftwise.train.data import Corpus
from draftwise.train.feature_lesson import FeatureLesson, feature_scales, fit_mixtures, rotations, unrolled_attention
from draftwise.train.rows import Rows, frequent_tokens
from draftwise.types import ModelConfig


@dataclass(frozen=True, slots=True)
class Options:
    """What modules may be given."""

    modules: int = field(default=2, metadata={"help": "modules, each for one token further"})
    steps: int = field(default=3, metadata={"help": "tokens that are foretold in training; past the modules the last goes on"})
    vocab: int = field(default=16384, metadata={"help": "tokens that the draft knows: the most frequent ones"})
    decay: float = field(default=0.8, metadata={"help": "weight of a token against the one before"})
    inner: int = field(default=0, metadata={"help": "width of the feed-forward; 0: the target's"})
    feature_weight: float = field(default=2.0, metadata={"help": "weight of meeting the target's final hidden state"})

    def __post_init__(self) -> None:
        for name in ("modules", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.steps < self.modules:
            raise ValueError(f"steps is {self.steps}; with {self.modules} modules it must be at least as many")
        for name in ("decay", "feature_weight", "inner"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


class MtpLesson(FeatureLesson):
    """Trains all modules together."""

    taps = ("final_norm",)
    drafter = "mtp"

    def __init__(self, network: MtpNetwork, target: Target, options: Options, *, final_scale: float) -> None:
        weights = {"decay": options.decay, "feature_weight": options.feature_weight, "final_scale": final_scale}
        super().__init__(target, network.d2t, **weights)
        self.network, self.steps = network, options.steps
        for module in network.chain:
            module.block.rotary = Rotary(network.shape.block, target.model.device)

    def guesses(self, batch: Captured) -> Iterator[tuple[int, Tensor]]:
        for step, (module, out_BAC) in enumerate(self.unroll(batch)):
            yield max(step - self.network.shape.modules + 1, 0), self.network.chain[module].norm(out_BAC)

    def unroll(self, batch: Captured) -> Iterator[tuple[int, Tensor]]:
        """Step by step a module and its outputs at the learning rows, [B, A, C].

        At the step of each module a row reads the token after it. At steps past the last module it reads one token more
        at each.
        """
        rows, tokens_BT = Rows.of(batch), batch.tokens_BT
        positions_BR, bias_BRR = rows.positions_BR, rows.bias(0)
        begun_BR1 = (torch.arange(rows.last, device=positions_BR.device) > rows.starts_B1)[..., None]
        embedded_BRC = self._embed(tokens_BT[:, 1 : rows.last + 1])
        state = batch.features["final_norm"][:, : rows.last].float()
        for index, module in enumerate(self.network.chain):
            x = module.mix(embedded_BRC, state)
            tables = rotations(module.block.rotary, positions_BR)
            read = module.block.input_layernorm(x)
            keys, values = module.block.keys_values(read, tables)
            attended = unrolled_attention(module.block.queries(read, tables), keys, values, [], bias_BRR)
            out = module.block.leave(x, attended)
            yield index, out[:, rows.first :]
            # the next module reads what this one made at the row before, and nothing before the text begins
            state = torch.where(begun_BR1, module.handed_on(out).float().roll(1, 1), 0.0)
        own: list[tuple[Tensor, Tensor]] = []
        out, bias_BAR = out[:, rows.first :], bias_BRR[:, rows.first :]
        for step in range(1, self.steps - index):
            following = F.pad(tokens_BT, (0, step))[:, rows.first + 1 + step : rows.last + 1 + step]
            x = module.mix(self._embed(following), module.handed_on(out).float())
            tables = rotations(module.block.rotary, positions_BR[:, rows.first :] + step)
            read = module.block.input_layernorm(x)
            own.append(module.block.keys_values(read, tables))
            attended = unrolled_attention(module.block.queries(read, tables), keys, values, own, bias_BAR)
            out = module.block.leave(x, attended)
            yield index, out

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        network = MtpNetwork(self.network.shape)
        network.load_state_dict(self.network.state_dict())
        network.d2t = self.tokens_V.cpu()
        write_mtp(folder, network, self.target, card)


def build(options: Options, target: Target, corpus: Corpus) -> MtpLesson:
    """Untrained modules in the shape of one of the target's layers, for the tokens that the answers use most."""
    config = target.model.config
    tokens = frequent_tokens(target, corpus, options.vocab)
    block = ModelConfig(
        architecture="mtp",
        vocab_size=target.vocab,
        hidden_size=config.hidden_size,
        intermediate_size=options.inner or config.intermediate_size,
        num_layers=options.modules,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        max_positions=config.max_positions,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )
    network = MtpNetwork(MtpShape(block=block, target_vocab=target.vocab, draft_vocab=len(tokens)))
    network.d2t = tokens
    final_scale = feature_scales(target, corpus, ("final_norm",))["final_norm"]
    begin(network, final_scale)
    lesson = MtpLesson(network, target, options, final_scale=final_scale).to(target.model.device)
    fit_mixtures(lesson, [module.eh_proj for module in network.chain], corpus, scale=final_scale)
    return lesson


@torch.no_grad()
def begin(network: MtpNetwork, final_scale: float) -> None:
    """First weights: blocks add little to what goes past them, and the norm's output is of the size the head knows."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.normal_(std=layer.in_features**-0.5)
    for module in network.chain:
        module.block.self_attn.o_proj.weight.mul_(0.1)
        module.block.mlp.down_proj.weight.mul_(0.1)
        module.norm.weight.fill_(final_scale)
