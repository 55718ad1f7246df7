"""Self-speculation: the target drafts for itself with some of its layers, attentions or feed-forwards left out.

Source: Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168), sec. 3, without training and with nothing stored: the draft
has the target's weights, and reads the keys and values that the target committed. `exit` is the early exit of LayerSkip
(Elhoushi et al. 2024, arXiv 2404.16710), which pays on models trained for it. Verification reads the draft anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.drafters.averages import Levels, Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.growth import Tree, grow
from draftwise.drafters.skipset import EXAMPLE, NOTHING, SkipSet, after
from draftwise.drafters.trees import CHAIN, Trees
from draftwise.models.base import Model
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Feed, Limit, ModelConfig, Outcome


@dataclass(frozen=True, slots=True)
class Options(Trees):
    """Options of self-speculation."""

    skip: str | None = field(
        default=None,
        metadata={"help": f"layers to leave out, such as {EXAMPLE}: `a` for the attention alone, `m` for the feed-forward"},
    )
    exit: int | None = field(default=None, metadata={"help": "leave out all that follows this many layers"})
    file: str | None = field(default=None, metadata={"help": "a set of layers found by `draftwise tune skip`"})

    def __post_init__(self) -> None:
        Trees.__post_init__(self)
        if self.file is not None and (self.skip is not None or self.exit is not None):
            raise ValueError("skip's file says what to leave out; give it, or skip and exit, but not both")
        if self.skip is not None:
            SkipSet.parse(self.skip)
        if self.exit is not None and self.exit < 1:
            raise ValueError(f"skip's exit is {self.exit}; it must be at least 1")

    def chosen(self, config: ModelConfig) -> SkipSet | None:
        """What the user named for this model; None for nothing. Raises ValueError where it does not fit the model."""
        layers = config.num_layers
        if self.file is not None:
            return SkipSet.load(self.file, config)
        if self.skip is None and self.exit is None:
            return None
        if self.exit is not None and self.exit > layers:
            raise ValueError(f"skip's exit is {self.exit}; the model has {layers} layers")
        named = SkipSet.parse(self.skip) if self.skip is not None else NOTHING
        return named if self.exit is None else named | after(layers, self.exit)


@dataclass(slots=True)
class _State:
    """What the drafter keeps of one sequence."""

    odds: Rates
    tree: Tree | None = None  # of this step
    row_of: dict[int, int] = field(default_factory=dict)  # staged row by node, -1 for the last committed token


class SkipDrafter(Drafter):
    """Drafts with part of the target, in the target's cache.

    Of a sequence it reads the rows that the target committed, stages the tokens that the target has not read yet and the
    nodes it grows, and discards all of them before the step goes on: the target finds its slot as it left it.
    """

    def __init__(self, model: Model, cache: KVCache, *, vocab: int, trees: Trees = CHAIN) -> None:
        self.model, self.cache, self.vocab, self.trees = model, cache, vocab, trees
        self.max_depth = trees.depth
        self._states: dict[int, _State] = {}
        self._odds = Rates(weight=6.0, forget=0.995)  # of all sequences
        self._levels = Levels()

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        started = time.perf_counter()
        drafting: list[Sequence] = []
        trees: list[Tree] = []
        for seq, limit in zip(seqs, limits, strict=True):
            state = self._states.setdefault(seq.id, _State(Rates(self._odds, weight=4.0, forget=0.97)))
            state.tree = None
            depth = min(limit.depth, limit.nodes)
            if depth > 0:
                state.tree = self.trees.start(seq, limit._replace(depth=depth), state.odds, drafter=self.place)
                drafting.append(seq)
                trees.append(state.tree)
        if drafting:
            try:
                logits_NV = self._begin(drafting)
                begun = time.perf_counter() - started
                grow(trees, logits_NV, lambda frontiers: self._read(drafting, frontiers))
            finally:
                for seq in drafting:
                    self.cache.discard(_slot(seq))
            self._levels.learn(begun, time.perf_counter() - started, max(tree.depth for tree in trees))
        return [tree.draft() if (tree := self._states[seq.id].tree) is not None else NO_DRAFT for seq in seqs]

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        state = self._states.get(seq.id)
        if state is not None and state.tree is not None:
            state.tree.learn(outcome.emitted)
            state.tree = None

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)

    def seconds_to_begin(self, batch: int) -> float:
        return self._levels.beginning

    def seconds_per_depth(self, batch: int) -> float:
        return self._levels.each

    def _begin(self, seqs: Seq[Sequence]) -> Tensor:
        """Stage what the target has not read; the logits after each sequence's last token, [sequences, vocab]."""
        feeds = []
        for seq in seqs:
            pending = seq.tokens[self.cache.length(_slot(seq)) :]
            feeds.append(Feed.chain(_slot(seq), pending))
            self._states[seq.id].row_of = {-1: len(pending) - 1}
        batch = self.cache.pack(feeds)
        final = self.model.forward(batch, self.cache).final
        return self._logits(final[[span.stop - 1 for span in batch.spans]])

    def _read(self, seqs: Seq[Sequence], frontiers: list[list[int]]) -> Tensor:
        """Run the model on each tree's frontier; the logits after its nodes."""
        feeds = []
        for seq, nodes in zip(seqs, frontiers, strict=True):
            state, slot = self._states[seq.id], _slot(seq)
            if nodes and (tree := state.tree) is not None:
                above = [state.row_of[tree.parents[node]] for node in nodes]
                first = self.cache.staged(slot)
                state.row_of |= {node: first + i for i, node in enumerate(nodes)}
                feeds.append(Feed(slot, [tree.tokens[node] for node in nodes], above))
        return self._logits(self.model.forward(self.cache.pack(feeds), self.cache).final)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)[:, : self.vocab]


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None, "a sequence that decodes has its place in the cache"
    return seq.slot


def by_rule(layers: int) -> SkipSet:
    """What is left out unless something is named: the attention of a fifth of the layers, from the first tenth on.

    Of single parts these mattered least in SmolLM2-135M and Qwen2.5-Coder-0.5B.
    """
    count = max(layers // 5, 1)
    first = min(max(layers // 10, 1), layers - count)
    return SkipSet(attention=frozenset(range(first, first + count)))


def build(options: Options, target: Target, source: DraftSource | None) -> SkipDrafter:
    """Raises ValueError where what is to be left out does not fit the target, or a checkpoint is named."""
    if source is not None:
        raise ValueError("skip drafts with the target itself and takes no checkpoint; its options say what is left out")
    layers = target.model.config.num_layers
    skip = options.chosen(target.model.config)
    if skip is None:
        skip = by_rule(layers)
        target.notice(f"skip leaves out {skip} by a rule of thumb; `draftwise tune skip` finds what pays")
    model = target.model.subset(*skip.kept(layers))
    return SkipDrafter(model, target.cache, vocab=target.vocab, trees=options)
