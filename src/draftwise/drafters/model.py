"""A second, smaller model drafts a chain: classic speculative decoding.

Source: Leviathan et al. 2023; Chen et al. 2023. Under `match` it shares the verifier's noise (Daliri et al. 2024).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.checkpoint import open_checkpoint
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.models.base import Model
from draftwise.models.load import read_model
from draftwise.sequence import Sequence
from draftwise.tokenizer import load_tokenizer
from draftwise.types import NO_DRAFT, Draft, Drawn, Feed, Limit, Outcome

CHUNK = 512  # rows a pass of the draft takes while it catches up


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the draft model."""

    max_tokens: int = field(default=8, metadata={"help": "most tokens to draft in a step"})
    min_confidence: float = field(
        default=0.0, metadata={"help": "end the chain after a token the draft thought less likely than this (0: never)"}
    )

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"model's max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"model's min_confidence is {self.min_confidence}; it must lie between 0 and 1")


@dataclass(slots=True)
class _Chain:
    """What is drafted for one sequence in this step."""

    tokens: list[int]
    q: list[Tensor]
    depth: int  # tokens wanted


class ModelDrafter(Drafter):
    """Drafts with a model of its own, its own cache and whatever weights it was loaded with.

    Each step it first reads every committed token it has not read, so gaps after full acceptance, plain steps or a
    pause close themselves. Past its own context it falls silent and the target goes on alone.
    """

    def __init__(
        self, model: Model, *, vocab: int, context: int, max_batch: int, max_tokens: int = 8, min_confidence: float = 0.0
    ) -> None:
        self.model, self.vocab, self.context, self.max_depth = model, vocab, context, max_tokens
        self.min_confidence = min_confidence
        self.cache = model.new_cache(max_batch * (context + max_tokens))
        self._slots: dict[int, int] = {}
        self._drafted: dict[int, list[int]] = {}  # tokens behind the staged rows
        self._last: dict[int, Tensor] = {}  # hidden row of the last committed token read
        self._pass_seconds = 0.0

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        chains: dict[int, _Chain] = {}
        for seq, limit in zip(seqs, limits, strict=True):
            depth = min(limit.nodes, limit.depth, self.max_depth, self.context - len(seq.tokens))
            if depth > 0:
                chains[seq.id] = _Chain([], [], depth)
        drafting = [seq for seq in seqs if seq.id in chains]
        if drafting:
            self._extend(drafting, chains, self._catch_up(drafting))
        while growing := [seq for seq in drafting if len(chains[seq.id].tokens) < chains[seq.id].depth]:
            started = time.perf_counter()
            feeds = [Feed.chain(self._slots[seq.id], chains[seq.id].tokens[-1:], self._staged(seq) - 1) for seq in growing]
            hidden = self._forward(feeds)
            for seq in growing:
                self._drafted[seq.id].append(chains[seq.id].tokens[-1])
            self._extend(growing, chains, self.model.logits(hidden))
            took = time.perf_counter() - started
            self._pass_seconds = min(took, self._pass_seconds * 1.05) if self._pass_seconds else took
        return [self._draft(seq, chains.get(seq.id)) for seq in seqs]

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        slot = self._slots.get(seq.id)
        drafted = self._drafted.pop(seq.id, None)
        if slot is None or not drafted:
            return
        kept = 0
        while kept < min(len(drafted), len(outcome.emitted)) and drafted[kept] == outcome.emitted[kept]:
            kept += 1
        self.cache.commit(slot, range(kept))

    def forget(self, seq: Sequence) -> None:
        slot = self._slots.pop(seq.id, None)
        self._drafted.pop(seq.id, None)
        self._last.pop(seq.id, None)
        if slot is not None:
            self.cache.free(slot)

    def seconds_per_depth(self, batch: int) -> float:
        return self._pass_seconds

    def _catch_up(self, seqs: Seq[Sequence]) -> Tensor:
        """Read what is committed and unread; the logits after each sequence's last token, [sequences, vocab]."""
        for seq in seqs:
            if seq.id not in self._slots:
                self._slots[seq.id] = self.cache.alloc()
            self.cache.discard(self._slots[seq.id])
            self._drafted[seq.id] = []
        while reading := [seq for seq in seqs if self.cache.length(self._slots[seq.id]) < len(seq.tokens)]:
            budget, feeds, read = CHUNK, [], []
            for seq in reading:
                slot = self._slots[seq.id]
                tokens = seq.tokens[self.cache.length(slot) :][:budget]
                budget -= len(tokens)
                if tokens:
                    feeds.append(Feed.chain(slot, tokens))
                    read.append(seq)
            hidden = self._forward(feeds, every=False)
            for row, (seq, feed) in enumerate(zip(read, feeds, strict=True)):
                self.cache.commit(feed.slot, range(len(feed.tokens)))
                self._last[seq.id] = hidden[row]
        return self.model.logits(torch.stack([self._last[seq.id] for seq in seqs]))

    def _forward(self, feeds: Seq[Feed], *, every: bool = True) -> Tensor:
        batch = self.cache.pack(feeds)
        final = self.model.forward(batch, self.cache).final
        return final if every else final[[span.stop - 1 for span in batch.spans]]

    def _extend(self, seqs: Seq[Sequence], chains: dict[int, _Chain], logits_NV: Tensor) -> None:
        """Draw the next token of each chain."""
        for seq, logits_V in zip(seqs, logits_NV, strict=True):
            chain = chains[seq.id]
            short = self.vocab - logits_V.shape[0]
            logits_V = F.pad(logits_V, (0, short), value=-torch.inf) if short > 0 else logits_V[: self.vocab]
            q_V = seq.distribution(logits_V, chain.tokens)
            depth = len(chain.tokens)
            if seq.request.verify == "match":
                chain.tokens.append(seq.noise().target(q_V, depth))
            else:
                chain.tokens.append(seq.noise().draft(q_V, depth))
                chain.q.append(q_V)
            if self.min_confidence and float(q_V[chain.tokens[-1]]) < self.min_confidence:
                # the token is kept: dropping it for its own probability would bias the output
                chain.depth = len(chain.tokens)

    def _staged(self, seq: Sequence) -> int:
        return self.cache.staged(self._slots[seq.id])

    def _draft(self, seq: Sequence, chain: _Chain | None) -> Draft:
        if chain is None:
            return NO_DRAFT
        if seq.request.verify == "match":
            return Draft.chain(chain.tokens, Drawn.SHARED_NOISE)
        return Draft.chain(chain.tokens, Drawn.CHAIN, q=torch.stack(chain.q))


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
    return ModelDrafter(
        model,
        vocab=target.vocab,
        context=context,
        max_batch=target.max_batch,
        max_tokens=options.max_tokens,
        min_confidence=options.min_confidence,
    )
