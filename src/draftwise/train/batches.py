"""Which answers make up each update, the same for the same seed whenever training began or was killed.

Knows answers and captured rows; knows nothing of drafts. Held-out answers are never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass

import torch

from draftwise.drafters.base import Target
from draftwise.train.capture import Captured, Shot, capture, collate
from draftwise.train.data import Answer, Corpus
from draftwise.types import Tap

HELD_OUT = 40
"""Every so many answers, one is kept for measuring."""
SORTED = 256
"""Answers that are sorted by length among themselves, so that batches need little padding."""


def is_held_out(place: int) -> bool:
    """True for an answer of the corpus that is never trained on."""
    return place % HELD_OUT == HELD_OUT // 2


def spread(answers: Seq[Answer], count: int) -> list[Answer]:
    """About `count` answers from all over a corpus, none of them held out."""
    learnt = [answer for place, answer in enumerate(answers) if not is_held_out(place) and len(answer.tokens) > 1]
    return learnt[:: max(len(learnt) // count, 1)][:count]


@dataclass(slots=True)
class Place:
    """How far training has come in the data."""

    epoch: int = 0
    batch: int = 0  # of the epoch
    answers: int = 0  # that the epoch began with


def epoch_batches(answers: Seq[Answer], *, seed: int, epoch: int, rows: int) -> list[list[int]]:
    """Answers of an epoch by their place, in batches of about `rows` answered tokens, in random order."""
    shuffle = random.Random(f"{seed} {epoch}")
    order = [place for place, answer in enumerate(answers) if not is_held_out(place) and len(answer.tokens) > 1]
    shuffle.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), SORTED):
        batch: list[int] = []
        taken = 0
        for place in sorted(order[start : start + SORTED], key=lambda place: len(answers[place].tokens)):
            if batch and taken + len(answers[place].tokens) > rows:
                batches.append(batch)
                batch, taken = [], 0
            batch.append(place)
            taken += len(answers[place].tokens)
        batches.append(batch)
    batches = [batch for batch in batches if batch]
    shuffle.shuffle(batches)
    return batches


class Shots:
    """The target's rows on answers: captured when wanted, and kept as far as `memory` bytes go."""

    def __init__(
        self, target: Target, answers: Seq[Answer], taps: tuple[Tap, ...], *, most_tokens: int, dtype: torch.dtype, memory: int
    ) -> None:
        self.target, self.answers, self.taps = target, answers, taps
        self.most_tokens, self.dtype, self.memory = most_tokens, dtype, memory
        self._kept: dict[int, Shot] = {}
        self._bytes = 0

    def batch(self, places: Seq[int]) -> Captured:
        """The answers at these places as one batch on the target's device."""
        missing = [place for place in places if place not in self._kept]
        answers = [self.answers[place] for place in missing]
        taken = capture(self.target, answers, self.taps, most_tokens=self.most_tokens, dtype=self.dtype)
        new = dict(zip(missing, taken, strict=True))
        shots = self._kept | new
        batch = collate([shots[place] for place in places], self.target.model.device)
        for place, shot in new.items():
            if self._bytes + shot.nbytes <= self.memory:
                self._kept[place] = shot
                self._bytes += shot.nbytes
        return batch


def endless(corpus: Corpus, place: Place, *, seed: int, rows: int) -> Iterator[list[int]]:
    """Batches from a place on, epoch after epoch; `place` moves along, past the batch that was given."""
    while True:
        corpus.refresh()
        if place.batch == 0:
            place.answers = len(corpus.answers)  # answers that come while an epoch runs wait for the next
        batches = epoch_batches(corpus.answers[: place.answers], seed=seed, epoch=place.epoch, rows=rows)
        while place.batch < len(batches):
            place.batch += 1
            yield batches[place.batch - 1]
        place.epoch, place.batch = place.epoch + 1, 0
