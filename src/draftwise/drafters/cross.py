"""A draft model with another tokenizer, of any family: by the tokens both vocabularies have, or by way of the text.

`intersection` keeps the draft to the shared tokens, so that what it draws is a draw of the target's tokens with a known
distribution. `text` lets it write freely and encodes what it wrote with the target's tokenizer: tokens that are chosen.
Source: Timor et al. 2025 (arXiv 2502.05202), token-level intersection and string-level exact match; under `match` the draws
share the verifier's noise (Daliri et al. 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftwise.cache import PAGE
from draftwise.checkpoint import open_checkpoint
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.transcripts import Reader, Transcript
from draftwise.drafters.vocabularies import SharedTokens
from draftwise.models.base import Model
from draftwise.models.load import read_model
from draftwise.sequence import Sequence
from draftwise.tokenizer import Tokenizer, load_tokenizer
from draftwise.types import NO_DRAFT, Draft, Drawn, Feed, Limit

CHUNK = 512  # rows a pass of the draft takes while it catches up
ENOUGH = 0.95  # share of a request's tokens that both vocabularies have, from which on `auto` keeps to those
METHODS = ("auto", "intersection", "text")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a draft model with another vocabulary."""

    method: str = field(
        default="auto",
        metadata={"help": "intersection: draft shared tokens; text: draft text and encode it; auto: by how much is shared"},
    )
    max_tokens: int = field(default=8, metadata={"help": "most tokens to draft in a step"})
    min_confidence: float = field(
        default=0.0, metadata={"help": "end the draft after a token the draft thought less likely than this (0: never)"}
    )

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"cross's method is {self.method!r}; it must be one of: {', '.join(METHODS)}")
        if self.max_tokens < 1:
            raise ValueError(f"cross's max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"cross's min_confidence is {self.min_confidence}; it must lie between 0 and 1")


class _Chain(Protocol):
    """What is drafted for one sequence in this step: `ids` are the draft's own, `ended` says that no more may follow."""

    ids: list[int]
    ended: bool

    def extend(self, logits_V: Tensor) -> float:
        """Add a token from the draft's logits; returns how likely the draft thought it."""

    def draft(self) -> Draft:
        """The chain in the target's tokens."""


class _Shared:
    """A chain of shared tokens, drawn from the draft's distribution over them after the request's own warpers."""

    def __init__(self, seq: Sequence, shared: SharedTokens) -> None:
        self.seq, self.shared = seq, shared
        self.ids: list[int] = []
        self.ended = False
        self._tokens: list[int] = []
        self._q: list[Tensor] = []

    def extend(self, logits_V: Tensor) -> float:
        try:
            q_V = self.seq.distribution(self.shared.row(logits_V), self._tokens)
        except ValueError:  # the request forbids every shared token here
            self.ended = True
            return 0.0
        noise, depth = self.seq.noise(), len(self._tokens)
        token = noise.target(q_V, depth) if self.seq.request.verify == "match" else noise.draft(q_V, depth)
        self._tokens.append(token)
        self._q.append(q_V)
        self.ids.append(self.shared.to_draft[token])
        return float(q_V[token])

    def draft(self) -> Draft:
        if self.seq.request.verify == "match" or not self._q:
            return Draft.chain(self._tokens, Drawn.SHARED_NOISE)
        return Draft.chain(self._tokens, Drawn.CHAIN, q=torch.stack(self._q))


class _Text:
    """A chain of the draft's likeliest tokens, whose text becomes tokens of the target. An end token ends it."""

    def __init__(self, seq: Sequence, reader: Reader, vocab: int) -> None:
        self.seq, self.reader, self.vocab = seq, reader, vocab
        self.ids: list[int] = []
        self.ended = False
        self._text = b""
        self._last: list[int] = []

    def extend(self, logits_V: Tensor) -> float:
        logits_V = logits_V[: self.vocab].float()
        token = int(logits_V.argmax())
        written = self.reader.draft.token_bytes(token)
        if written is None:
            self.ended = True
            self._last = [self.reader.shared.to_target[token]] if token in self.reader.shared.to_target else []
        else:
            self.ids.append(token)
            self._text += written
        return float(logits_V.softmax(0)[token])

    def draft(self) -> Draft:
        tokens = self.reader.rewrite(self.seq.tokens, self._text) if self._text else []
        known = [token for token in tokens if token < self.reader.shared.target_vocab]
        return Draft.chain(known + self._last if known == tokens else known)


@dataclass(slots=True)
class _State:
    """What the draft has read of one sequence."""

    slot: int
    transcript: Transcript
    seen: int  # tokens of the sequence in the transcript
    shared: int = 0  # of those, tokens that both vocabularies have
    staged: list[int] = field(default_factory=list)  # ids behind the staged rows


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
        max_tokens: int = 8,
        min_confidence: float = 0.0,
    ) -> None:
        self.model, self.context, self.max_depth = model, context, max_tokens
        self.method, self.min_confidence = method, min_confidence
        self.vocab = min(draft.size, model.config.vocab_size)
        self.shared = SharedTokens(target, draft, target_vocab=vocab, draft_vocab=self.vocab, device=model.device)
        self.reader = Reader(target, draft, self.shared)
        self.cache = model.new_cache(max_batch * (context + PAGE))
        self._states: dict[int, _State] = {}
        self._pass_seconds = 0.0

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        chains: dict[int, _Chain] = {}
        depths: dict[int, int] = {}
        unread: dict[int, list[int]] = {}
        for seq, limit in zip(seqs, limits, strict=True):
            depth = min(limit.nodes, limit.depth, self.max_depth)
            if depth > 0:
                ids = self._read(seq)
                depth = min(depth, self.context - len(ids))
            if depth > 0:
                unread[seq.id], depths[seq.id], chains[seq.id] = self._settle(seq, ids), depth, self._chain(seq)
        growing = [seq for seq in seqs if seq.id in chains]
        if growing:
            self._read_ahead(growing, unread)
        fed = unread
        while growing:
            started = time.perf_counter()
            for seq, logits_V in zip(growing, self._stage([(seq, fed[seq.id]) for seq in growing]), strict=True):
                chain = chains[seq.id]
                if chain.extend(logits_V) < self.min_confidence:
                    # the token is kept: dropping it for its own probability would bias the output
                    chain.ended = True
            if fed is not unread:
                took = time.perf_counter() - started
                self._pass_seconds = min(took, self._pass_seconds * 1.05) if self._pass_seconds else took
            growing = [seq for seq in growing if not chains[seq.id].ended and len(chains[seq.id].ids) < depths[seq.id]]
            fed = {seq.id: chains[seq.id].ids[-1:] for seq in growing}
        return [chains[seq.id].draft() if seq.id in chains else NO_DRAFT for seq in seqs]

    def forget(self, seq: Sequence) -> None:
        state = self._states.pop(seq.id, None)
        if state is not None:
            self.cache.free(state.slot)

    def seconds_per_depth(self, batch: int) -> float:
        return self._pass_seconds

    def _read(self, seq: Sequence) -> list[int]:
        """All of the sequence in the draft's ids."""
        state = self._states.get(seq.id)
        if state is None:
            prompt = seq.tokens[: seq.prompt_length]
            state = self._states[seq.id] = _State(self.cache.alloc(), Transcript(self.reader, prompt), len(prompt))
            state.shared = sum(token in self.shared.to_draft for token in prompt)
        new = seq.tokens[state.seen :]
        state.transcript.append(new)
        state.seen += len(new)
        state.shared += sum(token in self.shared.to_draft for token in new)
        return state.transcript.ids()

    def _settle(self, seq: Sequence, ids: list[int]) -> list[int]:
        """Commit the staged rows that turned out right and settled; what of `ids` is to be read, one at least."""
        state = self._states[seq.id]
        done = self.cache.length(state.slot)
        right = 0
        most = min(len(state.staged), len(state.transcript.settled) - done, len(ids) - 1 - done)
        while right < most and state.staged[right] == ids[done + right]:
            right += 1
        self.cache.commit(state.slot, range(right))
        state.staged = []
        return ids[done + right :]

    def _chain(self, seq: Sequence) -> _Chain:
        state = self._states[seq.id]
        if self.method == "intersection" or (self.method == "auto" and state.shared >= ENOUGH * state.seen):
            return _Shared(seq, self.shared)
        return _Text(seq, self.reader, self.vocab)

    def _read_ahead(self, seqs: Seq[Sequence], unread: dict[int, list[int]]) -> None:
        """Commit what is settled, in chunks, until one pass takes all that is left in `unread`."""

        def settled(seq: Sequence) -> int:
            state = self._states[seq.id]
            return len(state.transcript.settled) - self.cache.length(state.slot)

        share = CHUNK // len(seqs)
        while behind := [seq for seq in seqs if settled(seq) > share]:
            feeds = [Feed.chain(self._states[seq.id].slot, unread[seq.id][:share]) for seq in behind]
            self.model.forward(self.cache.pack(feeds), self.cache)
            for seq, feed in zip(behind, feeds, strict=True):
                self.cache.commit(feed.slot, range(share))
                unread[seq.id] = unread[seq.id][share:]

    def _stage(self, fed: Seq[tuple[Sequence, list[int]]]) -> Tensor:
        """Read ids past what is staged; the logits after the last of each sequence, [sequences, the draft's V]."""
        feeds = []
        for seq, ids in fed:
            state = self._states[seq.id]
            feeds.append(Feed.chain(state.slot, ids, len(state.staged) - 1))
            state.staged += ids
        batch = self.cache.pack(feeds)
        final = self.model.forward(batch, self.cache).final
        return self.model.logits(final[[span.stop - 1 for span in batch.spans]])


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
        max_tokens=options.max_tokens,
        min_confidence=options.min_confidence,
    )
    if context < target.context:
        target.notice(f"the draft's context is {context} tokens; past it the target goes on alone to its own {target.context}")
    target.notice(
        f"draft {source.path}: {model.weights}; {len(drafter.shared)} of its {drafter.vocab} tokens are also the target's"
    )
    return drafter
