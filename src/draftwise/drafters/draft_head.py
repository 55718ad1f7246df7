"""The head of a trained draft: rows of the target's, or of its own, for the tokens that the draft knows.

Knows vocabularies and products; knows nothing of how the rows that it reads come about. Shapes: N rows, C width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.base import Model
from draftwise.models.linear import WeightKind, make_linear


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

    def __call__(self, rows_NC: Tensor) -> Tensor:
        """Logits, float32 [N, V]."""
        known_Nv = self.product(rows_NC.to(self.dtype)).float()
        if self.tokens_v is None:
            return F.pad(known_Nv, (0, self.vocab - known_Nv.shape[1]), value=-torch.inf)
        logits_NV = known_Nv.new_full((len(rows_NC), self.vocab), -torch.inf)
        logits_NV[:, self.tokens_v] = known_Nv
        return logits_NV
