"""Medusa drafts: small heads that guess the tokens after the next one, all at once, from the target's last hidden state.

The heads do not see each other's guesses, so that one pass of them is all that a step takes: every node of a depth has the
same distribution below it. Trees are grown and learnt from as all others are; under `match` the tokens of a depth are drawn
with its noise, and the rules stay exact where Medusa's own acceptance is not.
Source: Cai et al. 2024, arXiv 2401.10774. Shapes: S sequences, C the target's width, D depths, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from draftwise.drafters.averages import Levels, Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.decoder_layer import to_kind
from draftwise.drafters.draft_head import DraftHead
from draftwise.drafters.growth import Guesses, Tree, grow
from draftwise.drafters.medusa_files import export, read_medusa
from draftwise.drafters.medusa_network import MedusaNetwork
from draftwise.drafters.trained import kind_name, served_acceptance, stored_kind
from draftwise.drafters.trees import HELP, Trees
from draftwise.models.base import Model
from draftwise.models.linear import WeightKind
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Limit, Outcome

__all__ = ["Options", "build", "export"]


@dataclass(frozen=True, slots=True)
class Options(Trees):
    """Options of Medusa drafts."""

    max_tokens: int = field(default=5, metadata={"help": "deepest draft, in tokens; no deeper than there are heads"})
    tree: str = field(default="dynamic", metadata={"help": HELP})
    beam: int = field(default=8, metadata={"help": "nodes that a dynamic tree expands at each depth, and children of each"})


class MedusaRunner:
    """A MedusaNetwork in some kind of weight, with what it borrows of the target."""

    def __init__(self, network: MedusaNetwork, target: Model, *, vocab: int, kind: WeightKind) -> None:
        shape = network.shape
        own = [network.own_rows(k) for k in range(shape.num_heads if shape.own_head else 1)]
        self.heads = [
            DraftHead(target, network.d2t, None if rows is None else rows.detach(), vocab=vocab, kind=kind) for rows in own
        ]
        self.kind, self.most = kind, shape.num_heads
        self.network = network
        to_kind(network, kind, target.device)

    def logits(self, final_SC: Tensor, depth: int) -> list[Tensor]:
        """What each of the first `depth` heads says after rows of the target, float32 [S, V] each."""
        before = list(self.network.before_head(final_SC.to(self.kind.dtype), depth))
        if len(self.heads) == 1:
            return list(self.heads[0](torch.cat(before)).chunk(depth))
        return [head(x_SC) for head, x_SC in zip(self.heads, before, strict=False)]


class HeadsTree(Tree):
    """A tree whose nodes of one depth have the same distribution below them: unless they are drawn from it one by one, or
    depend on the tokens above, their children are the same and found once."""

    def guess(self, node: int, logits_V: Tensor, count: int) -> Guesses:
        if self.sampled or self.seq.params.looks_back:
            return super().guess(node, logits_V, count)
        depth = len(self.place(node))
        if (depth, count) not in self._found:
            self._found[depth, count] = super().guess(node, logits_V, count)
        return self._found[depth, count]

    @cached_property
    def _found(self) -> dict[tuple[int, int], Guesses]:
        return {}


@dataclass(slots=True)
class _State:
    """What the drafter keeps of one sequence."""

    odds: Rates
    final: Tensor  # of the last row in the target's cache: the one before the pending token, [C]
    tree: Tree | None = None  # of this step


class MedusaDrafter(Drafter):
    """Drafts trees from the target's last row. It keeps no cache: there is nothing to catch up on."""

    taps = ("final_norm",)

    def __init__(self, runner: MedusaRunner, trees: Trees, acceptance: float = Drafter.acceptance) -> None:
        self.runner, self.trees, self.acceptance = runner, trees, acceptance
        self.max_depth = min(trees.depth, runner.most)
        self._states: dict[int, _State] = {}
        self._odds = Rates(weight=6.0, forget=0.995)  # of all sequences
        self._levels = Levels()

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        started = time.perf_counter()
        drafting: list[_State] = []
        trees: list[Tree] = []
        for seq, limit in zip(seqs, limits, strict=True):
            state, depth = self._states.get(seq.id), min(limit.depth, limit.nodes, self.max_depth)
            if state is not None and depth > 0:
                limit = limit._replace(depth=depth)
                state.tree = self.trees.start(seq, limit, state.odds, drafter=self.place, kind=HeadsTree)
                drafting.append(state)
                trees.append(state.tree)
        if drafting:
            depth = max(tree.limit.depth for tree in trees)
            logits_DSV = self.runner.logits(torch.stack([state.final for state in drafting]), depth)
            begun = time.perf_counter() - started

            def below(frontiers: list[list[int]]) -> Iterator[Tensor]:
                for place, (tree, nodes) in enumerate(zip(trees, frontiers, strict=True)):
                    for node in nodes:
                        yield logits_DSV[len(tree.place(node))][place]

            grow(trees, logits_DSV[0], below)
            self._levels.learn(begun, time.perf_counter() - started, depth)
        made = {tree.seq.id: tree.draft() for tree in trees}
        return [made.get(seq.id, NO_DRAFT) for seq in seqs]

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        final_C = outcome.features["final_norm"][-1].clone()
        state = self._states.get(seq.id)
        if state is None:
            state = self._states[seq.id] = _State(Rates(self._odds, weight=4.0, forget=0.97), final_C)
        if state.tree is not None:
            state.tree.learn(outcome.emitted)
        state.tree, state.final = None, final_C

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)

    def seconds_to_begin(self, batch: int) -> float:
        return self._levels.beginning

    def seconds_per_depth(self, batch: int) -> float:
        return self._levels.each


def build(options: Options, target: Target, source: DraftSource | None) -> MedusaDrafter:
    """Raises ValueError where no draft is named, or it is another algorithm's or another target's."""
    if source is None:
        raise ValueError("the medusa drafter needs a draft: --drafter medusa:FOLDER, as `draftwise train` writes it")
    network, config = read_medusa(Path(source.path).expanduser(), target)
    kind = source.kind(target, stored_kind(config))
    runner = MedusaRunner(network, target.model, vocab=target.vocab, kind=kind)
    target.notice(f"draft {source.path}: {kind_name(kind)}")
    return MedusaDrafter(runner, options, served_acceptance(config))
