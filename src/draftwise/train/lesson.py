"""What a kind of draft must offer to be trained, and the loss that all kinds share.

A file in this folder that defines `Options`, a frozen dataclass, and `build(options, target, corpus) -> Lesson` is a kind of
draft; its file name is the kind's. Shapes: n rows, C width, V tokens that the draft knows, P positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.train.capture import Captured
from draftwise.types import Tap

ROWS = 256
"""Rows whose distributions are in memory at once."""


class Lesson(nn.Module):
    """A draft being trained: its parameters, and what they are to learn from a batch.

    taps: hidden states of the target that it wants. drafter: the drafter that runs what `save` writes.
    """

    taps: tuple[Tap, ...]
    drafter: str

    def forward(self, batch: Captured) -> dict[str, Tensor]:
        """`loss`, and figures of interest by name; all scalars."""
        raise NotImplementedError

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        """Write what the drafter loads; `card` says how it came about and goes into the configuration."""
        raise NotImplementedError

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the weights of a checkpoint, `state_dict` of such a lesson."""
        self.load_state_dict(state)


class Match(torch.autograd.Function):
    """Cross-entropy of a draft's distributions against the target's, without keeping either in memory.

    The gradient is found on the way forward, some rows at a time, since the loss is where all of it ends.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_nC: Tensor, head_VC: Tensor, p_PV: Tensor, place_n: Tensor
    ) -> tuple[Tensor, Tensor]:
        head = head_VC.detach().to(p_PV.dtype)
        grad_nC = torch.empty_like(hidden_nC)
        grad_VC = torch.zeros_like(head_VC) if ctx.needs_input_grad[1] else None
        loss, accepted = (hidden_nC.new_zeros((), dtype=torch.float32) for _ in range(2))
        for start in range(0, len(hidden_nC), ROWS):
            rows = slice(start, start + ROWS)
            x = hidden_nC[rows].to(p_PV.dtype)
            log_q = (x @ head.T).float().log_softmax(-1)
            p = p_PV[place_n[rows]].float()
            loss -= (p * log_q).sum()
            q = log_q.exp_()
            accepted += torch.minimum(p, q).sum()
            slope = q.sub_(p).to(p_PV.dtype)
            grad_nC[rows] = (slope @ head).to(hidden_nC.dtype)
            if grad_VC is not None:
                grad_VC += (slope.T @ x).to(grad_VC.dtype)
        ctx.save_for_backward(grad_nC, grad_VC)
        return loss, accepted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_nC, grad_VC = ctx.saved_tensors
        return grad_nC * grad, None if grad_VC is None else grad_VC * grad, None, None


def match(hidden_nC: Tensor, head_VC: Tensor, p_PV: Tensor, place_n: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over rows: cross-entropy, and the chance that rejection accepts what the draft says, 1 - TV(p, q).

    hidden_nC: what the draft's head reads; head_VC: the head; p_PV: the target's distributions, place_n: each row's. Forward
    KL divergence but for a constant: its gradient is q - p.
    """
    loss, accepted = Match.apply(hidden_nC, head_VC, p_PV, place_n)  # type: ignore[no-untyped-call]
    return loss, accepted


@torch.no_grad()
def distributions(final_PE: Tensor, head_VE: Tensor, dtype: torch.dtype) -> Tensor:
    """The target's distributions over the draft's tokens, renormalised, [P, V], from rows after its final norm."""
    head = head_VE.to(dtype)
    parts = [(part.to(dtype) @ head.T).float().softmax(-1).to(dtype) for part in torch.split(final_PE, ROWS)]
    return torch.cat(parts)
