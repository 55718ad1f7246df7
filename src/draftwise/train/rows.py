"""Which rows of a batch learn, where the token of each row's guess has its distribution, and which tokens a draft knows.

Shared by drafts that read the target's hidden states. Knows answers side by side; knows no network. Shapes: B answers, T
tokens, R rows of which a guess is made or read, A of those the ones that learn (the last).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.drafters.base import Target
from draftwise.train.capture import Captured
from draftwise.train.data import Corpus


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which rows of a batch learn. Row i has the features of token i, and the first token that it guesses is i + 2.

    R = `last` rows in all, of which those from `first` on learn where `learns_BA` says so: the guessed token is an answer's,
    and not its first, which the target gives with the prompt.
    """

    first: int
    last: int
    starts_B1: Tensor
    learns_BA: Tensor

    @staticmethod
    def of(batch: Captured) -> Rows:
        length = batch.tokens_BT.shape[1]
        last = length - 2
        first = last - (int(batch.answers_B.max()) - 1)
        columns_A = torch.arange(first, last, device=batch.starts_B.device)
        return Rows(first, last, batch.starts_B[:, None], columns_A >= length - 1 - batch.answers_B[:, None])

    @property
    def positions_BR(self) -> Tensor:
        """Places in the text; 0 where there is padding."""
        return (torch.arange(self.last, device=self.starts_B1.device) - self.starts_B1).clamp(min=0)

    def bias(self, start: int) -> Tensor:
        """For attention of the rows from `start` on to all rows, [B, R - start, R]: 0 where one may look, else -inf."""
        columns_R = torch.arange(self.last, device=self.starts_B1.device)
        looking_A1 = columns_R[start:, None]
        seen_BAR = (columns_R <= looking_A1) & (columns_R >= self.starts_B1)[:, None]
        seen_BAR = seen_BAR | (columns_R == looking_A1)  # a row of padding sees itself: none would give NaN
        return torch.zeros(seen_BAR.shape, device=columns_R.device).masked_fill_(~seen_BAR, -torch.inf)

    def following(self, final_BTE: Tensor) -> Tensor:
        """The target's final rows that say what comes at the place of each learning row's first guess, [learning rows, E]."""
        return final_BTE[:, self.first + 1 : self.last + 1][self.learns_BA]

    def ahead(self, step: int) -> tuple[Tensor, Tensor]:
        """The learning rows that have something to guess `step` tokens further on, bool [B, A], and the place of each one's
        target among the learning rows."""
        place_BA = torch.full(self.learns_BA.shape, -1, device=self.learns_BA.device)
        place_BA[self.learns_BA] = torch.arange(int(self.learns_BA.sum()), device=place_BA.device)
        ahead_BA = F.pad(place_BA, (0, step), value=-1)[:, step:]
        guesses_BA = self.learns_BA & (ahead_BA >= 0)
        return guesses_BA, ahead_BA[guesses_BA]


def frequent_tokens(target: Target, corpus: Corpus, count: int, *, among: Iterable[int] | None = None) -> Tensor:
    """The tokens that answers use most and all that end a text, int64, ascending; the rest by id, as a BPE learnt them.

    among: those to choose from; None: all of the target's.
    """
    offered = set(range(target.vocab)) if among is None else set(among)
    counts = Counter(token for answer in corpus.answers for token in answer.tokens)
    ends = {*target.tokenizer.eos_tokens, *target.model.config.eos_tokens}
    order = [*sorted(ends), *(token for token, _ in counts.most_common()), *sorted(offered)]
    chosen = list(dict.fromkeys(token for token in order if token in offered))[:count]
    return torch.tensor(sorted(chosen))
