"""What the target computes on its own answers, made when it is needed and laid out for training.

Knows the target's passes and taps; knows nothing of drafts. Shapes: B answers, T tokens of the longest, E the target's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.drafters.base import Target
from draftwise.train.data import Answer
from draftwise.types import Feed, Tap

PASS_ROWS = 2048
"""Rows of a target pass at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Shot:
    """One answer with the end of its prompt, int64 [T], and per tap the target's rows at all tokens but the last, [T-1, E]."""

    tokens_T: Tensor
    answer: int  # tokens of the answer among them
    features: Mapping[Tap, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.features.values())


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """Shots side by side, aligned at their ends: what lies before `starts_B` is padding.

    tokens_BT: int64. features: per tap [B, T - 1, E]. answers_B: tokens of each answer.
    """

    tokens_BT: Tensor
    starts_B: Tensor
    answers_B: Tensor
    features: Mapping[Tap, Tensor]

    @property
    def rows(self) -> int:
        """Tokens of answers."""
        return int(self.answers_B.sum())


@torch.inference_mode()
def capture(target: Target, answers: Seq[Answer], taps: Seq[Tap], *, most_tokens: int, dtype: torch.dtype) -> list[Shot]:
    """Run the target on answers. most_tokens: of an answer and the end of its prompt that are kept; dtype: of features."""
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].prompt) + len(answers[i].tokens))
    shots: dict[int, Shot] = {}
    while order:
        turn: list[int] = []
        rows = 0
        while order and (not turn or rows + _length(answers[order[0]]) <= PASS_ROWS):
            rows += _length(answers[order[0]])
            turn.append(order.pop(0))
        for i, shot in zip(turn, _pass(target, [answers[i] for i in turn], taps, most_tokens, dtype), strict=True):
            shots[i] = shot
    return [shots[i] for i in range(len(answers))]


def collate(shots: Seq[Shot], device: torch.device) -> Captured:
    """Shots as one batch on a device."""
    longest = max(len(shot.tokens_T) for shot in shots)
    tokens_BT = torch.zeros(len(shots), longest, dtype=torch.int64)
    features = {
        tap: rows.new_zeros(len(shots), longest - 1, rows.shape[-1]) for tap, rows in shots[0].features.items()
    }
    for i, shot in enumerate(shots):
        tokens_BT[i, longest - len(shot.tokens_T) :] = shot.tokens_T
        for tap, rows in shot.features.items():
            features[tap][i, longest - 1 - len(rows) :] = rows
    return Captured(
        tokens_BT.to(device),
        torch.tensor([longest - len(shot.tokens_T) for shot in shots], device=device),
        torch.tensor([shot.answer for shot in shots], device=device),
        {tap: rows.to(device) for tap, rows in features.items()},
    )


def _length(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.tokens) - 1


def _pass(target: Target, answers: Seq[Answer], taps: Seq[Tap], most_tokens: int, dtype: torch.dtype) -> list[Shot]:
    cache = target.model.new_cache(sum(_length(answer) + 16 for answer in answers))
    texts = [[*answer.prompt, *answer.tokens] for answer in answers]
    batch = cache.pack([Feed.chain(cache.alloc(), text[:-1]) for text in texts])
    tapped = target.model.forward(batch, cache, taps).taps
    shots = []
    for text, answer, span in zip(texts, answers, batch.spans, strict=True):
        first = max(len(text) - most_tokens, 0)
        rows = slice(span.start + first, span.stop)
        shots.append(
            Shot(
                torch.tensor(text[first:]),
                min(len(answer.tokens), len(text) - first - 1),
                {tap: tapped[tap][rows].to(dtype).clone() for tap in taps},
            )
        )
    return shots
