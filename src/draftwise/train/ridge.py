"""A linear map by least squares, to begin a draft with: from what it reads to what it is to foretell.

Knows rows side by side; knows nothing of where they come from. Shapes: P rows, M inputs, C outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Ridge:
    """Ridge regression over rows that come a batch at a time."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self._read_MM = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self._both_MC = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)

    def add(self, x_PM: Tensor, y_PC: Tensor) -> None:
        """Take in rows and what they should give."""
        x_PM = x_PM.double()
        self._read_MM += x_PM.T @ x_PM
        self._both_MC += x_PM.T @ y_PC.double()

    def solve(self, damping: float) -> Tensor:
        """The weights of an nn.Linear that does best, float64 [C, M]. damping: against the inputs' mean square."""
        ridge = damping * self._read_MM.diagonal().mean().clamp(min=1e-6)
        damped_MM = self._read_MM + ridge * torch.eye(len(self._read_MM), device=ridge.device)
        solved_MC: Tensor = torch.linalg.solve(damped_MM, self._both_MC)
        return solved_MC.T
