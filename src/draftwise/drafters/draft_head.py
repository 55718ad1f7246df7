"""The head of a trained draft: rows of the target's, or of its own, for the tokens that the draft knows.

Knows vocabularies and products; knows nothing of how the rows that it reads come about. Shapes: N rows, C width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.models.base import Model
from draftwise.models.linear import Compiled, WeightKind, make_linear


def spread(known_Nv: Tensor, tokens_v: Tensor | None, vocab: int) -> Tensor:
    """Logits over the target's vocabulary, [N, vocab]: what a draft lacks is impossible, what it has beyond is cut.

    tokens_v: the target's id of each of the draft's tokens; None where both count alike.
    """
    if tokens_v is not None:
        return known_Nv.new_full((len(known_Nv), vocab), -torch.inf).scatter_(1, tokens_v.expand_as(known_Nv), known_Nv)
    short = vocab - known_Nv.shape[1]
    return F.pad(known_Nv, (0, short), value=-torch.inf) if short > 0 else known_Nv[:, :vocab]


class DraftHead:
    """From rows to the target's whole vocabulary; what the draft does not know is impossible.

    tokens_v: the target's ids of what is known, int64 [draft vocabulary]. own_vC: the draft's own rows; None borrows the
    target's. vocab: the ids that the target ever emits.
    """

    def __init__(self, target: Model, tokens_v: Tensor, own_vC: Tensor | None, *, vocab: int, kind: WeightKind) -> None:
        tokens_v = tokens_v.to(target.device)
        in_order = torch.equal(tokens_v, torch.arange(len(tokens_v), device=tokens_v.device))
        self.tokens_v, self.vocab, self.dtype = None if in_order else tokens_v, vocab, kind.dtype
        rows_vC = target.head_rows(tokens_v) if own_vC is None else own_vC
        self.product = make_linear(rows_vC, None, kind, target.device)
        self._logits_NV = torch.empty(0, vocab)

    @property
    def chain_head(self) -> kernels.ChainHead | None:
        """For chains that are guessed in one call; None where the product is not compiled, or its tokens are out of order."""
        tokens_v = self.tokens_v
        ascending = tokens_v is None or bool((tokens_v[1:] > tokens_v[:-1]).all())
        if not isinstance(self.product, Compiled) or not ascending:
            return None
        return kernels.ChainHead(self.product.packed, tokens_v, self.vocab, self.dtype)

    def __call__(self, rows_NC: Tensor) -> Tensor:
        """Logits, float32 [N, V], until the next call."""
        if not isinstance(self.product, Compiled):
            return spread(self.product(rows_NC.to(self.dtype)).float(), self.tokens_v, self.vocab)
        packed = self.product.packed
        if self.tokens_v is None:
            return spread(kernels.matmul(rows_NC, packed, torch.float32, dtype=self.dtype), None, self.vocab)
        if len(self._logits_NV) < len(rows_NC):  # what the draft does not know stays impossible
            self._logits_NV = torch.full((len(rows_NC), self.vocab), -torch.inf)
        logits_NV = self._logits_NV[: len(rows_NC)]
        return kernels.matmul(rows_NC, packed, torch.float32, dtype=self.dtype, into_NW=logits_NV, places_O=self.tokens_v)
