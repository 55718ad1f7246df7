"""A draft model with another tokenizer, of any family: by the tokens both vocabularies have, or by way of the text.

`intersection` keeps the draft to the shared tokens, so that what it draws is a draw of the target's tokens with a known
distribution. `text` lets it write what it finds likeliest, and encodes that with the target's tokenizer: chosen tokens.
Source: Timor et al. 2025 (arXiv 2502.05202), token-level intersection and string-level exact match.
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
from draftwise.drafters.crossing import Crossing, Shared, Written
from draftwise.drafters.growth import grow
from draftwise.drafters.transcripts import Reader, Transcript
from draftwise.drafters.trees import CHAIN, Trees
from draftwise.drafters.vocabularies import SharedTokens
from draftwise.models.base import Model
from draftwise.models.load import read_model
from draftwise.sequence import Sequence
from draftwise.tokenizer import Tokenizer, load_tokenizer
from draftwise.types import NO_DRAFT, Draft, Drawn, Feed, Limit, Outcome, Request

CHUNK = 512  # rows a pass of the draft takes while it catches up
FEW = 32  # unread ids that a step leaves behind at most, an open text without words included; more is catching up
ENOUGH = 0.95  # share of a request's tokens that both vocabularies have, from which on `auto` keeps to those
METHODS = ("auto", "intersection", "text")


@dataclass(frozen=True, slots=True)
class Options(Trees):
    """Options of a draft model with another vocabulary."""

    method: str = field(
        default="auto",
        metadata={"help": "intersection: draft shared tokens; text: draft text and encode it; auto: by how much is shared"},
    )

    def __post_init__(self) -> None:
        Trees.__post_init__(self)
        if self.method not in METHODS:
            raise ValueError(f"cross's method is {self.method!r}; it must be one of: {', '.join(METHODS)}")


@dataclass(slots=True)
class _State:
    """What the drafter keeps of one sequence."""

    slot: int
    transcript: Transcript
    odds: Rates
    seen: int  # tokens of the sequence in the transcript
    shared: int  # of those, tokens that both vocabularies have
    rows: list[int] = field(default_factory=list)  # ids of the staged rows
    above: list[int] = field(default_factory=list)  # the staged row that each follows
    row_of: dict[int, int] = field(default_factory=dict)  # by node of this step's tree
    crossing: Crossing | None = None  # of this step

    def feed(self, ids: Seq[int], above: Seq[int]) -> Feed:
        """Further rows to stage."""
        self.rows += ids
        self.above += above
        return Feed(self.slot, ids, above)


class CrossDrafter(Drafter):
    """Drafts with a model of any vocabulary, which reads the text so far in its own tokens.

    Committed rows hold ids that no further text can change. The last word stays staged until the next one begins: where
    it comes out in other tokens than were drafted, those few rows are fed again, and nothing is ever rolled back.
    Past its own context the draft falls silent and the target goes on alone.
    """

    def __init__(
        self,
        model: Model,
        *,
        target: Tokenizer,
        draft: Tokenizer,
        vocab: int,
        context: int,
        max_batch: int,
        method: str = "auto",
        trees: Trees = CHAIN,
    ) -> None:
        self.model, self.context, self.method, self.trees = model, context, method, trees
        self.max_depth = trees.depth
        self.vocab = min(draft.size, model.config.vocab_size)
        self.shared = SharedTokens(target, draft, target_vocab=vocab, draft_vocab=self.vocab, device=model.device)
        self.reader = Reader(target, draft, self.shared)
        self.cache = model.new_cache(max_batch * (context + trees.most_read + PAGE))
        # the draft's own side of a text: greedy, without history
        self._writer = Sequence(-1, Request(prompt=(0,)), end_tokens=(), context=context, decoder=draft.decoder())
        self._states: dict[int, _State] = {}
        self._odds = Rates(weight=6.0, forget=0.995)  # of all sequences
        self._levels, self._row = Levels(), Pace()

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        started = time.perf_counter()
        drafting: list[_State] = []
        crossings: list[Crossing] = []
        unread: list[list[int]] = []
        for seq, limit in zip(seqs, limits, strict=True):
            state = self._state(seq)
            state.crossing = None
            if min(limit.depth, limit.nodes) > 0:
                ids = self._ids(seq, state)
                left = self._settle(state, ids)
                depth = min(limit.depth, limit.nodes, self.context - len(ids))
                if left and depth > 0:
                    state.crossing = self._crossing(seq, state, limit._replace(depth=depth))
                    drafting.append(state)
                    crossings.append(state.crossing)
                    unread.append(left)
        if drafting:
            late = any(len(ids) > FEW for ids in unread)
            rows = self._catch_up(drafting, crossings, unread)
            begun = time.perf_counter() - started
            grow([crossing.tree for crossing in crossings], rows, lambda nodes: self._expand(drafting, crossings, nodes))
            if not late:
                self._levels.learn(begun, time.perf_counter() - started, max(crossing.tree.depth for crossing in crossings))
        return [made.draft() if (made := self._states[seq.id].crossing) is not None else NO_DRAFT for seq in seqs]

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        state = self._states.get(seq.id)
        if state is not None and state.crossing is not None:
            state.crossing.learn(outcome.emitted)
            state.crossing = None

    def forget(self, seq: Sequence) -> None:
        state = self._states.pop(seq.id, None)
        if state is not None:
            self.cache.free(state.slot)

    def seconds_to_begin(self, batch: int) -> float:
        return self._levels.beginning

    def seconds_per_depth(self, batch: int) -> float:
        return self._levels.each

    def seconds_to_catch_up(self, seq: Sequence) -> float:
        unread = len(seq.tokens) - (self._states[seq.id].seen if seq.id in self._states else 0)
        return self._row.seconds * unread if unread > FEW else 0.0

    # text

    def _state(self, seq: Sequence) -> _State:
        if seq.id not in self._states:
            prompt = seq.tokens[: seq.prompt_length]
            odds = Rates(self._odds, weight=4.0, forget=0.97)
            transcript = Transcript(self.reader, prompt)
            self._states[seq.id] = _State(self.cache.alloc(), transcript, odds, len(prompt), self._count_shared(prompt))
        return self._states[seq.id]

    def _ids(self, seq: Sequence, state: _State) -> list[int]:
        """All of the sequence in the draft's ids."""
        new = seq.tokens[state.seen :]
        state.transcript.append(new)
        state.seen += len(new)
        state.shared += self._count_shared(new)
        return state.transcript.ids()

    def _count_shared(self, tokens: Seq[int]) -> int:
        return sum(token in self.shared.to_draft for token in tokens)

    def _crossing(self, seq: Sequence, state: _State, limit: Limit) -> Crossing:
        if self.method == "intersection" or (self.method == "auto" and state.shared >= ENOUGH * state.seen):
            return Shared(self.trees.start(seq, limit, state.odds, drafter=self.place), self.shared)
        return Written(self.trees.start(self._writer, limit, state.odds, drafter=self.place), seq, self.reader, self.vocab)

    # rows

    def _settle(self, state: _State, ids: list[int]) -> list[int]:
        """Commit the staged rows that turned out right and settled, and drop the others; what of `ids` is unread."""
        done = self.cache.length(state.slot)
        most = min(len(state.transcript.settled), len(ids) - 1)  # the last row is read anew, for its logits
        staged = Draft(tuple(state.rows), tuple(state.above), (Drawn.CHOSEN,) * len(state.rows))
        right = staged.follow(ids[done:most])
        self.cache.commit(state.slot, right)
        state.rows, state.above = [], []
        return ids[done + len(right) :]

    def _catch_up(self, states: Seq[_State], crossings: Seq[Crossing], unread: list[list[int]]) -> list[Tensor]:
        """Read all that is unread; the logits after it, in the vocabulary of each tree."""
        self._read_ahead(states, unread)
        feeds = []
        for state, ids in zip(states, unread, strict=True):
            feeds.append(state.feed(ids, range(-1, len(ids) - 1)))
            state.row_of = {-1: len(ids) - 1}
        started = time.perf_counter()
        batch = self.cache.pack(feeds)
        final = self.model.forward(batch, self.cache).final
        logits_NV = self.model.logits(final[[span.stop - 1 for span in batch.spans]])
        if len(batch) > FEW * len(states):
            self._row.learn((time.perf_counter() - started) / len(batch))
        return [crossing.logits(logits_V) for crossing, logits_V in zip(crossings, logits_NV, strict=True)]

    def _read_ahead(self, states: Seq[_State], unread: list[list[int]]) -> None:
        """Commit what is settled, in chunks, until one pass takes all that is left in `unread`."""
        share = CHUNK // len(states)

        def settled(state: _State) -> int:
            return len(state.transcript.settled) - self.cache.length(state.slot)

        while behind := [i for i, state in enumerate(states) if settled(state) > share]:
            started = time.perf_counter()
            feeds = [Feed.chain(states[i].slot, unread[i][:share]) for i in behind]
            self.model.forward(self.cache.pack(feeds), self.cache)
            for i in behind:
                self.cache.commit(states[i].slot, range(share))
                unread[i] = unread[i][share:]
            self._row.learn((time.perf_counter() - started) / (share * len(behind)))

    def _expand(self, states: Seq[_State], crossings: Seq[Crossing], frontiers: list[list[int]]) -> list[Tensor]:
        """Read each tree's frontier; the logits after its nodes, in the vocabulary of the tree."""
        feeds: list[Feed] = []
        owners: list[Crossing] = []
        for state, crossing, nodes in zip(states, crossings, frontiers, strict=True):
            if nodes:
                first = len(state.rows)
                above = [state.row_of[crossing.tree.parents[node]] for node in nodes]
                state.row_of |= {node: first + i for i, node in enumerate(nodes)}
                feeds.append(state.feed([crossing.id(node) for node in nodes], above))
                owners += [crossing] * len(nodes)
        logits_NV = self.model.logits(self.model.forward(self.cache.pack(feeds), self.cache).final)
        return [crossing.logits(logits_V) for crossing, logits_V in zip(owners, logits_NV, strict=True)]


def build(options: Options, target: Target, source: DraftSource | None) -> CrossDrafter:
    """Raises ValueError where a checkpoint is wanted, or its tokens cannot be told by their bytes."""
    if source is None:
        raise ValueError("the cross drafter needs a checkpoint: --drafter cross:PATH (a folder, hub id, .gguf file or alias)")
    checkpoint = open_checkpoint(source.path, revision=source.revision)
    tokenizer = load_tokenizer(checkpoint)
    context = min(target.context, checkpoint.config.max_positions)
    model = read_model(
        checkpoint,
        dtype=source.dtype,
        quantize=source.quantize,
        device=target.model.device,
        cache_rows=context * target.max_batch,
        compiled=source.compiled,
    )
    drafter = CrossDrafter(
        model,
        target=target.tokenizer,
        draft=tokenizer,
        vocab=target.vocab,
        context=context,
        max_batch=target.max_batch,
        method=options.method,
        trees=options,
    )
    if context < target.context:
        target.notice(f"the draft's context is {context} tokens; past it the target goes on alone to its own {target.context}")
    target.notice(
        f"draft {source.path}: {model.weights}; {len(drafter.shared)} of its {drafter.vocab} tokens are also the target's"
    )
    return drafter
