"""Medusa: heads that learn the target's own distributions some places further on, each from the same hidden state.

Source: Cai et al. 2024, arXiv 2401.10774, section 2.2.1 (Medusa-1, the target left as it is), with the target's whole
distributions instead of the tokens that were drawn from them. Shapes: B answers, A learning rows, E the target's width, V
tokens that the draft knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.drafters.base import Target
from draftwise.drafters.medusa_files import write_medusa
from draftwise.drafters.medusa_network import MedusaNetwork, MedusaShape
from draftwise.train.batches import spread
from draftwise.train.capture import Captured, capture, collate
from draftwise.train.data import Answer, Corpus
from draftwise.train.feature_lesson import FeatureLesson, feature_scales
from draftwise.train.ridge import Ridge
from draftwise.train.rows import Rows, frequent_tokens

SAMPLE, AT_ONCE, RIDGE = 256, 8, 1e-2
"""Answers that the first weights are fitted on, those of a batch, and the damping."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of Medusa drafts."""

    num_heads: int = field(default=4, metadata={"help": "heads: tokens ahead that are guessed"})
    num_layers: int = field(default=2, metadata={"help": "residual blocks of a head"})
    vocab: int = field(default=16384, metadata={"help": "tokens that the draft knows: the most frequent ones"})
    decay: float = field(default=0.8, metadata={"help": "weight of a head against the one before"})
    feature_weight: float = field(default=0.0, metadata={"help": "weight of meeting the target's later hidden states"})
    own_head: bool = field(default=False, metadata={"help": "learn rows for each head instead of borrowing the target's"})

    def __post_init__(self) -> None:
        for name in ("num_heads", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("num_layers", "decay", "feature_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


class MedusaLesson(FeatureLesson):
    """Trains a draft; its steps are its heads."""

    taps = ("final_norm",)
    drafter = "medusa"

    def __init__(self, network: MedusaNetwork, target: Target, options: Options, *, final_scale: float) -> None:
        weights = {"decay": options.decay, "feature_weight": options.feature_weight, "final_scale": final_scale}
        super().__init__(target, network.d2t, **weights)
        self.network = network

    def guesses(self, batch: Captured) -> Iterator[tuple[int, Tensor]]:
        rows = Rows.of(batch)
        features_BAE = batch.features["final_norm"][:, rows.first : rows.last].float()
        return enumerate(self.network.before_head(features_BAE))

    def own_head(self, step: int) -> Tensor | None:
        return self.network.own_rows(step)

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        self.network.d2t = self.tokens_V
        write_medusa(folder, self.network, self.target, card)


def build(options: Options, target: Target, corpus: Corpus) -> MedusaLesson:
    """Heads for the tokens that the answers use most that have learnt no more than a linear map."""
    tokens_V = frequent_tokens(target, corpus, options.vocab)
    network = MedusaNetwork(
        MedusaShape(
            hidden_size=target.model.config.hidden_size,
            num_heads=options.num_heads,
            num_layers=options.num_layers,
            draft_vocab=len(tokens_V),
            own_head=options.own_head,
        )
    )
    network.d2t = tokens_V
    scales = feature_scales(target, corpus, ("final_norm",))
    lesson = MedusaLesson(network, target, options, final_scale=scales["final_norm"]).to(target.model.device)
    fit(lesson, spread(corpus.answers, SAMPLE))
    return lesson


@torch.no_grad()
def fit(lesson: MedusaLesson, answers: Seq[Answer]) -> None:
    """Set the end of each head to what best foretells the target's later final state: ridge regression over some answers."""
    device, network = lesson.tokens_V.device, lesson.network
    maps = [Ridge(network.shape.hidden_size, network.shape.hidden_size, device) for _ in network]
    for start in range(0, len(answers), AT_ONCE):
        shots = capture(lesson.target, answers[start : start + AT_ONCE], lesson.taps, most_tokens=512, dtype=torch.float32)
        batch = collate(shots, device)
        rows, features = Rows.of(batch), batch.features["final_norm"]
        final_PE = rows.following(features)
        for k, ridge in enumerate(maps):
            guesses_BA, place_n = rows.ahead(k)
            ridge.add(features[:, rows.first : rows.last][guesses_BA], final_PE[place_n])
    for k, ridge in enumerate(maps):
        map_EE = ridge.solve(RIDGE).float()
        network.end(k).copy_(lesson.head_VE @ map_EE if network.shape.own_head else map_EE)
