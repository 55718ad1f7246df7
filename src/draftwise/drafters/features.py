"""Drafting with a small network that reads the target's hidden states: EAGLE, MTP modules, and their like.

Knows caches, taps and trees; what the network computes is its own affair. A row stands for a position of the text: it reads
the target's features there and the token that follows, and guesses the token after that. Rows of committed text are read with
true features and stay in the network's own cache; rows of drafted tokens read what the row above them handed on, and go.
Shapes: N rows, E the width of a tap, W numbers that a row hands on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftwise.cache import PAGE, KVCache
from draftwise.drafters.averages import Levels, Pace, Rates
from draftwise.drafters.base import Drafter
from draftwise.drafters.growth import Tree, grow
from draftwise.drafters.straight import Straight
from draftwise.drafters.trees import CHAIN, Trees
from draftwise.kernels import Chained, ChainRule
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Batch, Draft, Feed, Limit, Outcome, Tap

CHUNK = 512  # rows a pass takes while it catches up
FEW = 16  # unread rows that a step leaves behind at most; reading more is catching up
KEPT = 4096
"""Most rows of features kept of a sequence; what lies further back a draft that starts late does not read."""


Features = tuple[Tensor, ...]
"""Of some rows, [N, E] for each of a network's taps."""
Skim = Callable[[Batch, KVCache, Features], None]
"""Stages rows of committed text from their features, where nobody wants what they hand on."""
Chain = Callable[[Batch, KVCache, Features, ChainRule], Chained]
"""Reads rows of committed text of one sequence from their features and guesses a chain below the last; see Decoder.chain."""


class FeatureNetwork(Protocol):
    """What drafts. `width`: W, the numbers that a row hands on to those below it.

    skim: None where that is no cheaper than `read`. chain: None where there is no such call.
    """

    taps: tuple[Tap, ...]
    width: int
    skim: Skim | None
    chain: Chain | None

    def new_cache(self, capacity: int) -> KVCache:
        """A cache for the network's own keys and values, with room for `capacity` rows."""

    def read(self, batch: Batch, cache: KVCache, above: Seq[Tensor | None], features: Features) -> Tensor:
        """Rows of committed text: what they hand on, [N, W]. above: per span what the row before it handed on, [W], if any."""

    def draft(self, batch: Batch, cache: KVCache, above_NW: Tensor, depth: int) -> Tensor:
        """Rows of drafted tokens at one depth, from 1: what they hand on, from what those above them handed on."""

    def logits(self, rows_NW: Tensor) -> Tensor:
        """Of the token after each row, float32 [N, vocab of the target]."""


@dataclass(slots=True)
class _State:
    """What the drafter keeps of one sequence."""

    slot: int
    odds: Rates
    straight: Straight
    features: list[Mapping[Tap, Tensor]] = field(default_factory=list)  # of rows not read yet
    unread: int = 0
    seen: int = 0  # rows of the target told of so far
    above: Tensor | None = None  # what the last row read handed on, [W]
    tree: Tree | None = None  # of this step
    rows: dict[int, int] = field(default_factory=dict)  # staged row by node, of the nodes that were read
    handed: dict[int, Tensor] = field(default_factory=dict)  # what they handed on

    def take(self, count: int, taps: Seq[Tap]) -> Features:
        """Those of the next rows to be read."""
        rows = _joined([tuple(some[tap] for tap in taps) for some in self.features])
        self.features = []
        if count < self.unread:
            self.features = [{tap: rows_nE[count:] for tap, rows_nE in zip(taps, rows, strict=True)}]
            rows = tuple(rows_nE[:count] for rows_nE in rows)
        self.unread -= count
        return rows


class FeatureDrafter(Drafter):
    """Drafts chains and trees with a FeatureNetwork. Off or on, it is told every committed row, and reads them when asked.

    context: most tokens of a sequence that it reads; past that it falls silent.
    """

    def __init__(
        self,
        network: FeatureNetwork,
        *,
        context: int,
        max_batch: int,
        trees: Trees = CHAIN,
        acceptance: float = Drafter.acceptance,
    ) -> None:
        self.network, self.context, self.trees = network, context, trees
        self.taps, self.acceptance = tuple(network.taps), acceptance
        self.max_depth = trees.depth
        self.cache = network.new_cache(max_batch * (context + trees.most_read + PAGE))
        self._states: dict[int, _State] = {}
        self._odds = Rates(weight=6.0, forget=0.995)  # of all sequences
        self._levels, self._row = Levels(), Pace()

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        started = time.perf_counter()
        drafting: list[tuple[Sequence, _State]] = []
        trees: list[Tree] = []
        for seq, limit in zip(seqs, limits, strict=True):
            state = self._states.get(seq.id)
            depth = min(limit.depth, limit.nodes, self.context - len(seq.tokens))
            if state is None or depth < 1 or state.seen != len(seq.tokens) - 1:
                continue
            state.tree = self.trees.start(seq, limit._replace(depth=depth), state.odds, drafter=self.place)
            drafting.append((seq, state))
            trees.append(state.tree)
        if drafting:
            late = any(state.unread > FEW for _, state in drafting)
            states = [state for _, state in drafting]
            later = None if late or len(drafting) > 1 else self._whole(*drafting[0], trees[0])
            if later is None:
                logits_NV = self._catch_up(drafting)
                begun = time.perf_counter()
                grow(trees, logits_NV, lambda frontiers: self._read(states, frontiers))
                later = time.perf_counter() - begun
            if not late:
                seconds = time.perf_counter() - started
                self._levels.learn(seconds - later, seconds, max(tree.depth for tree in trees))
        made = {seq.id: state.tree.draft() for seq, state in drafting if state.tree is not None}
        return [made.get(seq.id, NO_DRAFT) for seq in seqs]

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        state = self._states.get(seq.id)
        if state is None:
            odds = Rates(self._odds, weight=4.0, forget=0.97)
            state = self._states[seq.id] = _State(self.cache.alloc(), odds, Straight(odds))
        if state.tree is not None:
            state.tree.learn(outcome.emitted)
            self.cache.discard(state.slot)
            state.tree, state.rows, state.handed = None, {}, {}
        state.features.append(outcome.features)
        state.unread += len(outcome.consumed)
        state.seen += len(outcome.consumed)
        if state.unread > KEPT:
            self._skip(state)

    def forget(self, seq: Sequence) -> None:
        state = self._states.pop(seq.id, None)
        if state is not None:
            self.cache.free(state.slot)

    def seconds_to_begin(self, batch: int) -> float:
        return self._levels.beginning

    def seconds_per_depth(self, batch: int) -> float:
        return self._levels.each

    def seconds_to_catch_up(self, seq: Sequence) -> float:
        state = self._states.get(seq.id)
        return self._row.seconds * state.unread if state is not None and state.unread > FEW else 0.0

    def _skip(self, state: _State) -> None:
        """Begin anew with the later half of what is unread: positions are relative, so only far context is lost."""
        state.take(state.unread - KEPT // 2, self.taps)
        self.cache.free(state.slot)
        state.slot, state.above = self.cache.alloc(), None

    def _whole(self, seq: Sequence, state: _State, tree: Tree) -> float | None:
        """Read what is unread and grow a whole chain in one call, where that can be; the seconds of guesses after the first."""
        rule = None if self.network.chain is None or not state.unread else state.straight.rule(tree)
        if rule is None or self.network.chain is None:
            return None
        count = state.unread
        feed = Feed.chain(state.slot, seq.tokens[len(seq.tokens) - count :] + [0] * (rule.depth - 1))
        guesses, handed_NW, later = self.network.chain(self.cache.pack([feed]), self.cache, state.take(count, self.taps), rule)
        self.cache.commit(state.slot, range(count))
        state.above = handed_NW[count - 1]
        tree.follow(guesses)
        return later

    def _catch_up(self, drafting: Seq[tuple[Sequence, _State]]) -> Tensor:
        """Read what is committed and unread; the logits after each sequence's last row."""
        while any(state.unread for _, state in drafting):
            started = time.perf_counter()
            budget, feeds, features, reading = CHUNK, list[Feed](), list[Features](), list[_State]()
            skim = self.network.skim if any(state.unread > FEW for _, state in drafting) else None
            for seq, state in drafting:
                count = min(state.unread - (skim is not None), budget)  # the last row is always read
                if count < 1:
                    continue
                budget -= count
                first = len(seq.tokens) - state.unread  # the row of position i reads token i + 1
                feeds.append(Feed.chain(state.slot, seq.tokens[first : first + count]))
                features.append(state.take(count, self.taps))
                reading.append(state)
            batch = self.cache.pack(feeds)
            handed_NW = None
            if skim is not None:
                skim(batch, self.cache, _joined(features))
            else:
                handed_NW = self.network.read(batch, self.cache, [state.above for state in reading], _joined(features))
            for state, span in zip(reading, batch.spans, strict=True):
                self.cache.commit(state.slot, range(span.stop - span.start))
                state.above = None if handed_NW is None else handed_NW[span.stop - 1]
            if len(batch) > FEW * len(reading):
                self._row.learn((time.perf_counter() - started) / len(batch))
        return self.network.logits(_stacked([state.above[None] for _, state in drafting if state.above is not None]))

    def _read(self, states: Seq[_State], frontiers: list[list[int]]) -> Tensor:
        """Run the network on each tree's frontier, all of one depth; the logits after its nodes."""
        feeds, above, depth = [], [], 0
        for state, nodes in zip(states, frontiers, strict=True):
            if nodes and (tree := state.tree) is not None and state.above is not None:
                parents = [tree.parents[node] for node in nodes]
                depth = len(tree.place(nodes[0]))
                first = self.cache.staged(state.slot)
                feeds.append(Feed(state.slot, [tree.tokens[node] for node in nodes], [state.rows.get(p, -1) for p in parents]))
                above += [state.handed.get(parent, state.above)[None] for parent in parents]
                state.rows |= {node: first + i for i, node in enumerate(nodes)}
        handed_NW = self.network.draft(self.cache.pack(feeds), self.cache, _stacked(above), depth)
        rows = iter(handed_NW)
        for state, nodes in zip(states, frontiers, strict=True):
            state.handed |= {node: next(rows) for node in nodes}
        return self.network.logits(handed_NW)


def _stacked(rows: Seq[Tensor]) -> Tensor:
    """Rows [n, W] one above another."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _joined(features: Seq[Features]) -> Features:
    """Stretches of rows one after another."""
    return features[0] if len(features) == 1 else tuple(torch.cat(rows) for rows in zip(*features, strict=True))
