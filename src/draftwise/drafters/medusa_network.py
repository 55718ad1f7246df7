"""The network of Medusa drafts: from the target's last hidden state, a head for each of the tokens that follow the next one.

The same object is trained and served. Its parameters bear the names of published files: `{head}.{block}.linear.weight` and
`.bias` of residual blocks, and `{head}.{blocks}.weight` of the product at their end: the head's own rows, or, where it borrows
the target's, what comes between the blocks and these. Shapes: N rows, C the target's width, V tokens that the draft knows.
Source: Cai et al. 2024, arXiv 2401.10774, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape:
    """What a draft is made of. num_layers: residual blocks of each head. draft_vocab: tokens that it can draft. own_head:
    each head ends in rows of its own for them, [V, C]; else in a matrix [C, C] before the target's rows, which serve all."""

    hidden_size: int
    num_heads: int
    num_layers: int
    draft_vocab: int
    own_head: bool

    def __post_init__(self) -> None:
        for name, least in (("num_heads", 1), ("num_layers", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


class ResBlock(nn.Module):
    """x + SiLU(W x + b); it begins as next to nothing added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_NC: Tensor) -> Tensor:
        return x_NC + F.silu(self.linear(x_NC))


class MedusaNetwork(nn.ModuleList):
    """A list of heads, each a list of its blocks and the product at their end.

    `d2t` holds per row of a head the target's id of that token, int64 [draft_vocab]. The target's head is not part of it.
    """

    d2t: Tensor

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(_head(shape) for _ in range(shape.num_heads))
        self.shape = shape
        self.register_buffer("d2t", torch.arange(shape.draft_vocab), persistent=False)

    def before_head(self, final_NC: Tensor, count: int | None = None) -> Iterator[Tensor]:
        """Of each of the first `count` heads what its rows are multiplied with, [N, C]: that of head k stands for the token
        k + 2 places after the row's own. final_NC: rows after the target's final norm."""
        shape = self.shape
        for k in range(shape.num_heads if count is None else count):
            x_NC = final_NC
            for part in range(shape.num_layers + (not shape.own_head)):
                x_NC = self.get_submodule(f"{k}.{part}")(x_NC)
            yield x_NC

    def end(self, k: int) -> Tensor:
        """The weights at the end of head k."""
        return self.get_parameter(f"{k}.{self.shape.num_layers}.weight")

    def own_rows(self, k: int) -> Tensor | None:
        """The rows of head k, [V, C]; None where they are the target's."""
        return self.end(k) if self.shape.own_head else None


def _head(shape: MedusaShape) -> nn.ModuleList:
    outputs = shape.draft_vocab if shape.own_head else shape.hidden_size
    blocks = [ResBlock(shape.hidden_size) for _ in range(shape.num_layers)]
    return nn.ModuleList([*blocks, nn.Linear(shape.hidden_size, outputs, bias=False)])
