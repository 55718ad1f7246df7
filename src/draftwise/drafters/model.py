"""A second, smaller model drafts a chain or a tree: classic speculative decoding.

Source: Leviathan et al. 2023; Chen et al. 2023. Under `match` it shares the verifier's noise (Daliri et al. 2024). Trees:
Miao et al. 2023 (fixed widths), Chen et al. 2024 (Sequoia), Li et al. 2024 (EAGLE-2).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwise.cache import PAGE
from draftwise.checkpoint import open_checkpoint
from draftwise.drafters.averages import Levels, Pace, Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.draft_head import spread
from draftwise.drafters.growth import Tree, grow
from draftwise.drafters.trees import CHAIN, Trees
from draftwise.models.base import Model
from draftwise.models.load import read_model
from draftwise.sequence import Sequence
from draftwise.tokenizer import load_tokenizer
from draftwise.types import NO_DRAFT, Draft, Feed, Limit, Outcome

CHUNK = 512  # rows a pass of the draft takes while it catches up
FEW = 8  # unread tokens that a step leaves behind at most; reading more is catching up


@dataclass(frozen=True, slots=True)
class Options(Trees):
    """Options of the draft model."""


@dataclass(slots=True)
class _State:
    """What the drafter keeps of one sequence."""

    slot: int
    odds: Rates
    last: Tensor | None = None  # hidden row of the last committed token read
    tree: Tree | None = None  # of this step
    read: dict[int, int] = field(default_factory=dict)  # staged row by node, of the nodes that were read


class ModelDrafter(Drafter):
    """Drafts with a model of its own, its own cache and whatever weights it was loaded with.

    Each step it first reads every committed token it has not read, so gaps after full acceptance, plain steps or a
    pause close themselves. Past its own context it falls silent and the target goes on alone. tokens_v: the target's ids
    of the model's vocabulary; None where both count alike.
    """

    def __init__(
        self,
        model: Model,
        *,
        vocab: int,
        context: int,
        max_batch: int,
        trees: Trees = CHAIN,
        tokens_v: Tensor | None = None,
    ) -> None:
        self.model, self.vocab, self.context, self.trees = model, vocab, context, trees
        self.max_depth = trees.depth
        self._tokens_v = None if tokens_v is None else tokens_v.to(model.device)
        self.cache = model.new_cache(max_batch * (context + trees.most_read + PAGE))
        self._states: dict[int, _State] = {}
        self._odds = Rates(weight=6.0, forget=0.995)  # of all sequences
        self._levels, self._row = Levels(), Pace()

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        started = time.perf_counter()
        drafting: list[Sequence] = []
        trees: list[Tree] = []
        for seq, limit in zip(seqs, limits, strict=True):
            state = self._state(seq)
            state.tree = None
            depth = min(limit.depth, limit.nodes, self.context - len(seq.tokens))
            if depth > 0:
                state.tree = self.trees.start(seq, limit._replace(depth=depth), state.odds, drafter=self.place)
                drafting.append(seq)
                trees.append(state.tree)
        if drafting:
            late = any(self._unread(seq) > FEW for seq in drafting)
            states = [self._states[seq.id] for seq in drafting]
            logits_NV = self._catch_up(drafting)
            begun = time.perf_counter() - started
            grow(trees, logits_NV, lambda frontiers: self._read(states, frontiers))
            if not late:
                self._levels.learn(begun, time.perf_counter() - started, max(tree.depth for tree in trees))
        return [tree.draft() if (tree := self._states[seq.id].tree) is not None else NO_DRAFT for seq in seqs]

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        state = self._states.get(seq.id)
        if state is None or state.tree is None:
            return
        path = state.tree.learn(outcome.emitted)
        self.cache.commit(state.slot, [state.read[node] for node in path if node in state.read])
        state.tree, state.read = None, {}

    def forget(self, seq: Sequence) -> None:
        state = self._states.pop(seq.id, None)
        if state is not None:
            self.cache.free(state.slot)

    def seconds_to_begin(self, batch: int) -> float:
        return self._levels.beginning

    def seconds_per_depth(self, batch: int) -> float:
        return self._levels.each

    def seconds_to_catch_up(self, seq: Sequence) -> float:
        unread = self._unread(seq)
        return self._row.seconds * unread if unread > FEW else 0.0

    def _unread(self, seq: Sequence) -> int:
        state = self._states.get(seq.id)
        return len(seq.tokens) - (self.cache.length(state.slot) if state is not None else 0)

    def _state(self, seq: Sequence) -> _State:
        if seq.id not in self._states:
            self._states[seq.id] = _State(self.cache.alloc(), Rates(self._odds, weight=4.0, forget=0.97))
        return self._states[seq.id]

    def _catch_up(self, seqs: Seq[Sequence]) -> Tensor:
        """Read what is committed and unread; the logits after each sequence's last token, [sequences, vocab]."""
        states = [self._states[seq.id] for seq in seqs]
        for state in states:
            self.cache.discard(state.slot)
            state.read = {}
        while any(self.cache.length(state.slot) < len(seq.tokens) for seq, state in zip(seqs, states, strict=True)):
            started = time.perf_counter()
            budget, feeds, reading = CHUNK, [], []
            for seq, state in zip(seqs, states, strict=True):
                tokens = seq.tokens[self.cache.length(state.slot) :][:budget]
                budget -= len(tokens)
                if tokens:
                    feeds.append(Feed.chain(state.slot, tokens))
                    reading.append(state)
            batch = self.cache.pack(feeds)
            final = self.model.forward(batch, self.cache).final
            for state, span in zip(reading, batch.spans, strict=True):
                self.cache.commit(state.slot, range(span.stop - span.start))
                state.last = final[span.stop - 1]
            if len(batch) > FEW * len(reading):
                self._row.learn((time.perf_counter() - started) / len(batch))
        return self._logits(torch.stack([state.last for state in states if state.last is not None]))

    def _read(self, states: Seq[_State], frontiers: list[list[int]]) -> Tensor:
        """Run the model on each tree's frontier; the logits after its nodes."""
        feeds = []
        for state, nodes in zip(states, frontiers, strict=True):
            if nodes and (tree := state.tree) is not None:
                above = [state.read.get(tree.parents[node], -1) for node in nodes]
                first = self.cache.staged(state.slot)
                state.read |= {node: first + i for i, node in enumerate(nodes)}
                feeds.append(Feed(state.slot, [tree.tokens[node] for node in nodes], above))
        return self._logits(self.model.forward(self.cache.pack(feeds), self.cache).final)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The head's rows as wide as the target's vocabulary."""
        return spread(self.model.logits(hidden), self._tokens_v, self.vocab)


def build(options: Options, target: Target, source: DraftSource | None) -> ModelDrafter:
    """Raises ValueError where the draft's vocabulary is not the target's, by content, or a checkpoint is wanted."""
    if source is None:
        raise ValueError("the model drafter needs a checkpoint: --drafter model:PATH (a folder, hub id, .gguf file or alias)")
    checkpoint = open_checkpoint(source.path, revision=source.revision)
    difference = target.tokenizer.mismatch(load_tokenizer(checkpoint), upto=target.vocab)
    if difference:
        raise ValueError(
            f"the draft {source.path} has another vocabulary than the target: {difference}; "
            f"use a draft of its family, or --drafter cross:{source.path}"
        )
    context = min(target.context, checkpoint.config.max_positions)
    model = read_model(
        checkpoint,
        dtype=source.dtype,
        quantize=source.quantize,
        device=target.model.device,
        cache_rows=context * target.max_batch,
        compiled=source.compiled,
    )
    if context < target.context:
        target.notice(f"the draft's context is {context} tokens; past it the target goes on alone to its own {target.context}")
    target.notice(f"draft {source.path}: {model.weights}")
    return ModelDrafter(model, vocab=target.vocab, context=context, max_batch=target.max_batch, trees=options)
