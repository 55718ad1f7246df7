"""The optimizer of all lessons: Muon for matrices, AdamW for the rest, one schedule.

Sources: Muon, Jordan et al. 2024; its rate on AdamW's scale, Liu et al. 2025, arXiv 2502.16982; AdamW, Loshchilov and Hutter
2019.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WARM_UP, HOLD = 0.03, 0.4
"""Shares of a plan: the rate rises, stays, and falls to nothing at the end."""
MOST_ROWS = 8192
"""Matrices of more outputs are heads or tables, which Muon is not for."""


def schedule(progress: float) -> float:
    """The share of the learning rate at a share of the plan."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.05)
    return min(1.0, (1 - progress) / (1 - HOLD)) if progress < 1 else 0.0


class Optimizer:
    """Muon and AdamW side by side over the parameters of a module."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [p for p in wanted if p.dim() == 2 and p.shape[0] <= MOST_ROWS]
        others = [p for p in wanted if not any(p is matrix for matrix in matrices)]
        self.rate = rate
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))

    def step(self, progress: float) -> float:
        """Update and clear the gradients; the learning rate that was used."""
        rate = self.rate * schedule(progress)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)
        return rate

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        for part, kept in zip(self.parts, state, strict=True):
            part.load_state_dict(kept)
