"""What lessons share whose drafts read the target's hidden states and, further on, their own outputs.

Training-time test: the draft reads its own outputs for some steps, as it will when it drafts. Its rows of later steps attend
to rows of the first step, as they stand in the cache when it is served, and to their own earlier steps.
Sources: HASS, Zhang et al. 2024, arXiv 2408.15766; EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3. Shapes: B answers,
R rows of the first step, A of those the ones that learn (the last), H query heads, K key heads, G = H / K, D head size, E the
target's width, C the draft's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.drafters.base import Target
from draftwise.models.layers import Rotary
from draftwise.train.batches import spread
from draftwise.train.capture import Captured, capture, collate
from draftwise.train.data import Corpus
from draftwise.train.lesson import Lesson, distributions, match
from draftwise.train.ridge import Ridge
from draftwise.train.rows import Rows
from draftwise.types import Tap

SAMPLE = 16
"""Answers that features are measured on before training."""
FITTED, TOGETHER, RIDGE = 64, 8, 1e-2
"""Answers that mixtures are fitted to before training, so many at a time, and how much they are held back."""
WIDEST = 8192
"""Inputs of a mixture beyond which it is not fitted: the equations would not fit into memory beside a model."""


class FeatureLesson(Lesson):
    """A draft that is to foresee the target's tokens, step after step.

    tokens_V: what the draft knows, as the target's ids; head_VE: the target's rows for these. decay: weight of a step against
    the one before. feature_weight: of meeting the target's final hidden state, whose rows are of size final_scale.
    """

    tokens_V: Tensor
    head_VE: Tensor

    def __init__(
        self, target: Target, tokens_V: Tensor, *, decay: float, feature_weight: float, final_scale: float
    ) -> None:
        super().__init__()
        self.target, self.decay, self.feature_weight, self.final_scale = target, decay, feature_weight, final_scale
        self.register_buffer("tokens_V", tokens_V.clone())
        self.register_buffer("head_VE", target.model.head_rows(tokens_V.to(target.model.device)).clone(), persistent=False)

    def guesses(self, batch: Captured) -> Iterator[tuple[int, Tensor]]:
        """Step by step: how many tokens past its first guess each learning row guesses, and what the head reads, [B, A, C]."""
        raise NotImplementedError

    def unroll(self, batch: Captured) -> Iterator[Any]:
        """The steps of the draft itself, each run when asked for."""
        raise NotImplementedError

    def own_head(self, step: int) -> Tensor | None:
        """The weights of a step's head where it is learnt, [V, C]; None where it is the target's."""
        return None

    def forward(self, batch: Captured) -> dict[str, Tensor]:
        rows = Rows.of(batch)
        final_PE = rows.following(batch.features["final_norm"])
        p_PV = distributions(final_PE, self.head_VE, self.precision)
        count, total = max(len(final_PE), 1), 0.0
        loss, figures = p_PV.new_zeros((), dtype=torch.float32), {}
        for step, (ahead, before_head_BAC) in enumerate(self.guesses(batch)):
            guesses_BA, place_n = rows.ahead(ahead)
            before_head = before_head_BAC[guesses_BA].float()
            own = self.own_head(step)
            lost, accepted = match(before_head, self.served(self.head_VE) if own is None else own, p_PV, place_n)
            if self.feature_weight and own is None:
                wanted, scale = final_PE[place_n].float(), self.final_scale
                missed = F.smooth_l1_loss(before_head / scale, wanted / scale, reduction="none")
                lost = lost + self.feature_weight * missed.mean(-1).sum()
            loss, total = loss + self.decay**step * lost / count, total + self.decay**step
            figures[f"accepted_{step + 1}"] = accepted / max(len(place_n), 1)
        return {"loss": loss / total, **figures}

    def restore(self, state: dict[str, Tensor]) -> None:
        super().restore(state)
        self.head_VE.copy_(self.target.model.head_rows(self.tokens_V))

    def _embed(self, tokens_BA: Tensor) -> Tensor:
        return self.target.model.embed(tokens_BA.reshape(-1)).view(*tokens_BA.shape, -1).float()


def rotations(rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for rows at positions of any shape, [..., 1, D]."""
    cos, sin = rotary.tables(positions.reshape(-1), torch.float32)
    return cos.view(*positions.shape, 1, -1), sin.view(*positions.shape, 1, -1)


def unrolled_attention(
    q_BAHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, own: list[tuple[Tensor, Tensor]], bias_BAR: Tensor
) -> Tensor:
    """Attention of learning rows to the rows of the first step, under a mask, and to their own rows of later steps.

    own: keys and values [B, A, K, D] of each step after the first. Returns [B, A, H, D].
    """
    size, learning, heads, dim = q_BAHD.shape
    kv_heads = k_BRKD.shape[2]
    q = (q_BAHD * dim**-0.5).view(size, learning, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)  # B K G A D
    k, v = k_BRKD.to(q.dtype).permute(0, 2, 3, 1)[:, :, None], v_BRKD.transpose(1, 2)[:, :, None]
    scores = [(q @ k).float().add_(bias_BAR[:, None, None])]
    diagonal = [(key.transpose(1, 2)[:, :, None], value.transpose(1, 2)[:, :, None]) for key, value in own]
    scores += [(q * key).sum(-1, keepdim=True).float() for key, _ in diagonal]
    weights = (torch.cat(scores, -1) if own else scores[0]).softmax(-1).to(v.dtype)
    out = weights[..., : k_BRKD.shape[1]] @ v
    for step, (_, value) in enumerate(diagonal):
        out = out + weights[..., k_BRKD.shape[1] + step, None] * value
    return out.permute(0, 3, 1, 2, 4).reshape(size, learning, heads, dim)


def feature_scales(target: Target, corpus: Corpus, taps: tuple[Tap, ...]) -> dict[Tap, float]:
    """Per tap the typical root mean square of a row: the median, since the first rows of a text are far from the others."""
    shots = capture(target, corpus.answers[:SAMPLE], taps, most_tokens=512, dtype=torch.float32)
    return {
        tap: float(torch.cat([shot.features[tap].square().mean(-1).sqrt() for shot in shots]).median().clamp(min=1e-6))
        for tap in taps
    }


def embedding_scale(target: Target) -> float:
    """The typical root mean square of a row of the embedding, from 256 spread evenly."""
    count = min(256, target.vocab)
    rows = target.model.embed(torch.arange(count, device=target.model.device) * target.vocab // count)
    return float(rows.float().square().mean(-1).sqrt().median().clamp(min=1e-6))


@torch.no_grad()
def fit_mixtures(lesson: FeatureLesson, mixtures: Seq[nn.Linear], corpus: Corpus, *, scale: float) -> None:
    """Set the mixture of each step of a draft to what best foretells the target's next final state, divided by `scale`: ridge
    regression over some answers. One after another, since each reads what those before it make.
    """
    device = lesson.tokens_V.device
    shots = capture(lesson.target, spread(corpus.answers, FITTED), lesson.taps, most_tokens=512, dtype=torch.float32)
    batches = [collate(shots[start : start + TOGETHER], device) for start in range(0, len(shots), TOGETHER)]
    for step, mixture in enumerate(mixtures):
        if mixture.in_features > WIDEST:
            continue
        ridge = Ridge(mixture.in_features, mixture.out_features, device)
        for batch in batches:
            rows, caught = Rows.of(batch), list[Tensor]()
            hook = mixture.register_forward_pre_hook(lambda _, given, caught=caught: caught.append(given[0]))
            next(islice(lesson.unroll(batch), step, None))
            hook.remove()
            x_PM = caught[0][:, rows.first :][rows.learns_BA]
            ridge.add(x_PM, rows.following(batch.features["final_norm"]) / scale)
        mixture.weight.copy_(ridge.solve(RIDGE))
