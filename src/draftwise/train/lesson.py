"""What a kind of draft must offer to be trained, and the loss that all kinds share.

A file in this folder that defines `Options`, a frozen dataclass, and `build(options, target, corpus) -> Lesson` is a kind of
draft; its file name is the kind's. Shapes: n rows, C width, V tokens that the draft knows, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.models.linear import GROUP, quantize
from draftwise.train.capture import Captured
from draftwise.types import Tap

AT_ONCE = 256
"""Rows that pass over a head together: enough for the matrix units."""
ROWS = 32
"""Rows whose distributions are worked on at once: few, so that they stay in the processor's caches."""


class Lesson(nn.Module):
    """A draft being trained: its parameters, and what they are to learn from a batch.

    taps: hidden states of the target that it wants. drafter: the drafter that runs what `save` writes. kind: "int8" or "int4"
    where the draft is to learn with weights rounded so, as it will be served.
    """

    taps: tuple[Tap, ...]
    drafter: str
    kind: str | None = None
    _served: Tensor | None = None

    def forward(self, batch: Captured) -> dict[str, Tensor]:
        """`loss`, and figures of interest by name; all scalars."""
        raise NotImplementedError

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        """Write what the drafter loads; `card` says how it came about and goes into the configuration."""
        raise NotImplementedError

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over the weights of a checkpoint, `state_dict` of such a lesson."""
        self.load_state_dict(state)
        self._served = None

    def served(self, head_VC: Tensor) -> Tensor:
        """The one head that the draft borrows, as it will have it when served in `kind`."""
        if self.kind is None:
            return head_VC
        if self._served is None:
            self._served = rounded(head_VC, self.kind)
        return self._served

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Inside, matrices are as `kind` rounds them. Gradients are taken there, and go to the weights as they are:
        the straight-through estimator, Bengio et al. 2013, arXiv 1308.3432.
        """
        kept = [p for p in self.parameters() if self.kind and p.dim() == 2 and p.shape[1] % GROUP == 0]
        whole = [parameter.data for parameter in kept]
        for parameter in kept:
            parameter.data = rounded(parameter.data, str(self.kind))
        try:
            yield
        finally:
            for parameter, data in zip(kept, whole, strict=True):
                parameter.data = data

    @property
    def precision(self) -> torch.dtype:
        """Of products with the target's rows: autocast's where that is on."""
        device = next(self.parameters()).device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


@torch.no_grad()
def rounded(weight_MK: Tensor, kind: str) -> Tensor:
    """A matrix as int8 or int4 in groups has it."""
    return quantize(weight_MK, kind).dequantize().to(weight_MK)


DIVERGENCES = ("forward", "reverse", "tv")
"""KL(p, q) but for a constant, KL(q, p), and the total variation, of a target's p and a draft's q."""


def divergence(kind: str, p_nV: Tensor, log_q_nV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over rows of a divergence and of the chance that rejection accepts, 1 - TV(p, q); and the divergence's gradient by
    the logits that q came from. `log_q_nV` may be overwritten.
    """
    if kind == "forward":
        loss = -torch.dot(p_nV.flatten(), log_q_nV.flatten())
        slope_nV = log_q_nV.exp_().sub_(p_nV)
        return loss, _accepted(p_nV, slope_nV), slope_nV
    q_nV = log_q_nV.exp()
    accepted = _accepted(p_nV, q_nV - p_nV)
    if kind == "reverse":
        ratio_nV = log_q_nV - p_nV.clamp(min=1e-30).log()
        each_n1 = (q_nV * ratio_nV).sum(-1, keepdim=True)
        return each_n1.sum(), accepted, q_nV * (ratio_nV - each_n1)
    short_nV = (q_nV < p_nV).to(q_nV.dtype)  # more of q there is accepted
    return len(q_nV) - accepted, accepted, q_nV * ((short_nV * q_nV).sum(-1, keepdim=True) - short_nV)


def _accepted(p_nV: Tensor, more_nV: Tensor) -> Tensor:
    """The sum of min(p, q), where `more_nV` is q - p and the rows of q add up to 1."""
    return (len(p_nV) + p_nV.sum() - more_nV.abs().sum()) / 2


class Match(torch.autograd.Function):
    """A divergence of a draft's distributions from the target's, without keeping either in memory.

    The gradient is found on the way forward, some rows at a time, since the loss is where all of it ends.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_nC: Tensor, head_VC: Tensor, p_PV: Tensor, place_n: Tensor, kind: str
    ) -> tuple[Tensor, Tensor]:
        head = head_VC.detach().to(p_PV.dtype)
        grad_nC = torch.empty_like(hidden_nC)
        grad_VC = torch.zeros_like(head_VC) if ctx.needs_input_grad[1] else None
        loss, accepted = (hidden_nC.new_zeros((), dtype=torch.float32) for _ in range(2))
        for start in range(0, len(hidden_nC), AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            x = hidden_nC[rows].to(p_PV.dtype)
            logits = x @ head.T
            for some, places in zip(torch.split(logits, ROWS), torch.split(place_n[rows], ROWS), strict=True):
                lost, likely, slope = divergence(kind, p_PV[places].float(), some.float().log_softmax(-1))
                loss += lost
                accepted += likely
                some.copy_(slope)  # the logits have served
            grad_nC[rows] = (logits @ head).to(hidden_nC.dtype)
            if grad_VC is not None:
                grad_VC += (logits.T @ x).to(grad_VC.dtype)
        ctx.save_for_backward(grad_nC, grad_VC)
        return loss, accepted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_nC, grad_VC = ctx.saved_tensors
        return grad_nC * grad, None if grad_VC is None else grad_VC * grad, None, None, None


def match(
    hidden_nC: Tensor, head_VC: Tensor, p_PV: Tensor, place_n: Tensor, *, kind: str = "forward"
) -> tuple[Tensor, Tensor]:
    """Sums over rows: one of DIVERGENCES, and the chance that rejection accepts what the draft says, 1 - TV(p, q).

    hidden_nC: what the draft's head reads; head_VC: the head; p_PV: the target's distributions, place_n: each row's.
    `forward` is the cross-entropy.
    """
    loss, accepted = Match.apply(hidden_nC, head_VC, p_PV, place_n, kind)  # type: ignore[no-untyped-call]
    return loss, accepted


@torch.no_grad()
def distributions(final_PE: Tensor, head_VE: Tensor, dtype: torch.dtype) -> Tensor:
    """The target's distributions over the draft's tokens, renormalised, [P, V], from rows after its final norm."""
    head = head_VE.to(dtype)
    out_PV = torch.empty(len(final_PE), len(head), dtype=dtype, device=final_PE.device)
    for rows, part in zip(torch.split(final_PE, AT_ONCE), torch.split(out_PV, AT_ONCE), strict=True):
        torch.matmul(rows.to(dtype), head.T, out=part)
        for some in torch.split(part, ROWS):
            some.copy_(some.float().softmax(-1))
    return out_PV
