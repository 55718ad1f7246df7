"""The network of multi-token prediction: modules one behind the other, each a decoder layer that looks one token further.

Module k mixes what module k - 1 made of a position (the first: the target's final hidden state) with the embedding of the
next token that is known, and its output foretells the token after that. The same object is trained and served.
Source: DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2; Gloeckle et al. 2024, arXiv 2404.19737.
Shapes: N rows, C width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from draftwise.drafters.decoder_layer import Attend, DecoderLayer, RMSNorm, to_kind
from draftwise.models.linear import WeightKind
from draftwise.types import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpShape:
    """What modules are made of.

    block: the shape of their decoder layers; its num_layers counts the modules. draft_vocab: tokens that can be drafted.
    own_head, own_embedding: they bring these; else they are the target's. hidden_first: the hidden state stands before the
    embedding where both enter. recycle_normed: what the next row or module reads is what the head reads, normed. foreign: their
    blocks, with the norms that follow, are run by others.
    """

    block: ModelConfig
    target_vocab: int
    draft_vocab: int
    own_head: bool = False
    own_embedding: bool = False
    hidden_first: bool = False
    recycle_normed: bool = False
    foreign: bool = False

    @property
    def modules(self) -> int:
        return self.block.num_layers


class Block(DecoderLayer):
    """The decoder layer of a module: it reads the residual stream, normed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)


class Module(nn.Module):
    """One module: what enters it, its block, and its norm before the head."""

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        width, eps = shape.block.hidden_size, shape.block.norm_eps
        self.shape = shape
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        if not shape.foreign:
            self.block, self.norm = Block(shape.block), RMSNorm(width, eps)

    def mix(self, embedded_NC: Tensor, state_NC: Tensor) -> Tensor:
        """Where the residual stream of the block begins."""
        both = [self.enorm(embedded_NC), self.hnorm(state_NC)]
        mixed: Tensor = self.eh_proj(torch.cat(both[::-1] if self.shape.hidden_first else both, -1))
        return mixed

    def run(self, x_NC: Tensor, tables: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The block: from the residual stream to itself."""
        read_NC = self.block.input_layernorm(x_NC)
        attended = attend(self.block.queries(read_NC, tables), *self.block.keys_values(read_NC, tables))
        return self.block.leave(x_NC, attended)

    def handed_on(self, out_NC: Tensor) -> Tensor:
        """A block's output as the next module or row reads it."""
        return self.norm(out_NC) if self.shape.recycle_normed else out_NC


class MtpNetwork(nn.Module):
    """All modules. `d2t` holds per row of the head the target's id of that token, int64 [draft_vocab]."""

    d2t: Tensor

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.block.hidden_size
        self.mtp_layers = nn.ModuleList(Module(shape) for _ in range(shape.modules))
        if shape.own_head:
            self.lm_head = nn.Linear(width, shape.draft_vocab, bias=False)
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(shape.target_vocab, width)
        self.register_buffer("d2t", torch.arange(shape.draft_vocab), persistent=False)

    @property
    def chain(self) -> list[Module]:
        """The modules, in order."""
        return [module for module in self.mtp_layers if isinstance(module, Module)]

    def first(self, modules: int) -> MtpNetwork:
        """The network with its first modules alone, or all of them for 0. Raises ValueError where there are fewer."""
        if modules > self.shape.modules:
            raise ValueError(f"modules is {modules}; the draft has {self.shape.modules}")
        if modules:
            self.mtp_layers = self.mtp_layers[:modules]
            self.shape = replace(self.shape, block=replace(self.shape.block, num_layers=modules))
        return self

    def serve(self, kind: WeightKind, device: torch.device) -> MtpNetwork:
        """The same network with its products in a kind of weight, on a device; no longer to be trained."""
        to_kind(self, kind, device)
        return self
