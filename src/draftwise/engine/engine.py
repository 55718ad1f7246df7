"""The one loop: schedule, propose, pack, forward, verify, commit, observe. Plain decoding is an empty draft.

Knows sequences, passes and drafts; has no branch on a drafter's kind and never looks at a token's meaning.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence as Seq

import torch
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.drafters.base import Drafter
from draftwise.engine.governor import Governor, Load
from draftwise.engine.kept import Kept
from draftwise.engine.proposals import Proposals
from draftwise.engine.scheduler import Scheduler, Turn
from draftwise.engine.step import decide, report_logprobs
from draftwise.models.base import Model
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Decoder, Draft, Event, Feed, Hidden, Limit, Outcome, Piece, Request, Result, Tap, Verdict

CHUNK = 512
"""Rows of prompt that a pass takes at most."""
SLACK = 64
"""Rows staged past a request's committed ones at most."""


class Engine:
    """Runs requests on a target model with any drafters, many at a time. Not thread-safe: one caller at a time.

    vocab: ids below it may be emitted; further rows of the head are padding. context: most tokens of a request.
    clock: seconds, for statistics and for what the governor learns of passes.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        drafters: Seq[Drafter],
        *,
        name: str,
        vocab: int,
        context: int,
        end_tokens: Collection[int],
        decoder: Callable[[bool], Decoder],
        governor: Governor,
        max_batch: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.cache, self.name = model, cache, name
        self.vocab, self.context, self.end_tokens = vocab, context, frozenset(end_tokens)
        self.governor, self.max_batch = governor, max_batch
        self._proposals = Proposals(drafters, governor, clock)
        self._clock = clock
        self._decoder = decoder
        self._scheduler = Scheduler(cache, max_batch=max_batch, chunk=CHUNK, slack=SLACK)
        self._sequences: dict[int, Sequence] = {}
        self._clocks: dict[int, _Clock] = {}
        self._ids = itertools.count()

    # requests

    def submit(self, request: Request, *, choice: int = 0) -> int:
        """Queue a request and return its id. Raises ValueError where it cannot be honoured.

        `choice` numbers the answers wanted to one prompt: each gets its own noise from the request's seed.
        """
        self._check(request)
        identity = next(self._ids)
        seq = Sequence(
            identity,
            request,
            end_tokens=self.end_tokens,
            context=self.context,
            decoder=self._decoder(request.continues),
            choice=choice,
        )
        self._scheduler.add(seq)
        self._sequences[identity] = seq
        self._clocks[identity] = _Clock(self._clock)
        return identity

    def cancel(self, identity: int) -> Event | None:
        """End a request now; its event holds what it had. None where it is not running."""
        seq = self._sequences.get(identity)
        return None if seq is None else self._close(seq, seq.end("cancelled"))

    @property
    def busy(self) -> bool:
        """True while a request is queued or running."""
        return bool(self._sequences)

    def generate(self, requests: Seq[Request]) -> list[Result]:
        """Run requests to their ends, together; results in their order. A request that is refused stops them all."""
        order: list[int] = []
        try:
            for request in requests:
                order.append(self.submit(request))
        except ValueError:
            for identity in order:
                self.cancel(identity)
            raise
        results: dict[int, Result] = {}
        while len(results) < len(order):
            results |= {event.request_id: event.result for event in self.step() if event.result is not None}
        return [results[identity] for identity in order]

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one request, yielding what each step adds; closing the iterator cancels it."""
        identity = self.submit(request)
        try:
            while identity in self._sequences:
                yield from (event for event in self.step() if event.request_id == identity)
        finally:
            self.cancel(identity)

    # the loop

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One target pass for everything that is running."""
        turns = self._scheduler.turns()
        if not turns:
            return []
        began = self._clock()
        load = Load(sum(len(turn.tokens) for turn in turns), sum(turn.complete for turn in turns))
        decoding = all(_decoding(turn) for turn in turns)
        drafts = self._propose(turns, load)
        started = self._clock()
        batch = self.cache.pack([_feed(turn, draft) for turn, draft in zip(turns, drafts, strict=True)])
        hidden = self.model.forward(batch, self.cache, self._proposals.taps([turn.seq for turn in turns]))
        logits = self._logits(hidden, turns, drafts)
        seconds = self._clock() - started
        events = []
        first = 0
        for turn, draft in zip(turns, drafts, strict=True):
            rows = range(first, first + len(turn.tokens) + len(draft))
            first = rows.stop
            self._clocks[turn.seq.id].passed(seconds * len(rows) / len(batch), decoding=_decoding(turn))
            event = self._finish(turn, draft, logits.get(turn.seq.id), hidden, rows)
            if event is not None:
                events.append(event)
        if decoding:
            emitted = sum(len(event.tokens) for event in events)
            took = self._clock() - began
            rest = took - seconds - self._proposals.foreseen
            self.governor.passed(load, len(batch), seconds, emitted, self._proposals.seconds, rest, took)
        return events

    def _propose(self, turns: list[Turn], load: Load) -> list[Draft]:
        """Drafts for the requests that decode, within what each may still emit."""
        limits = [(turn.seq, self._limit(turn.seq)) for turn in turns if _decoding(turn)]
        drafting = [(seq, limit) for seq, limit in limits if limit.depth > 0]
        started = self._clock()
        made = self._proposals.propose(drafting, load)
        seconds = (self._clock() - started) / max(len(drafting), 1)
        for seq, _ in drafting:
            self._clocks[seq.id].drafted(seconds)
        return [made.get(turn.seq.id, NO_DRAFT) for turn in turns]

    def _limit(self, seq: Sequence) -> Limit:
        # the pass emits one token more than it accepts
        depth = max(min(seq.room - 1, self._proposals.max_depth), 0)
        wanted = seq.request.draft_tokens
        nodes = SLACK - 1 if wanted is None else min(wanted, SLACK - 1)
        return Limit(nodes, min(depth, nodes))

    def _logits(self, hidden: Hidden, turns: list[Turn], drafts: list[Draft]) -> dict[int, Tensor]:
        """Per request that reached its last token, the logits after it and after each drafted node."""
        picked: list[int] = []
        shares: dict[int, slice] = {}
        first = 0
        for turn, draft in zip(turns, drafts, strict=True):
            stop = first + len(turn.tokens) + len(draft)
            if turn.complete:
                shares[turn.seq.id] = slice(len(picked), len(picked) + 1 + len(draft))
                picked += range(first + len(turn.tokens) - 1, stop)
            first = stop
        if not picked:
            return {}
        final = hidden.final if len(picked) == first else hidden.final[picked]
        logits = self.model.logits(final)
        if logits.shape[1] > self.vocab:
            logits = logits[:, : self.vocab]
        return {identity: logits[share] for identity, share in shares.items()}

    def _finish(self, turn: Turn, draft: Draft, logits: Tensor | None, hidden: Hidden, rows: range) -> Event | None:
        """Verify, commit and observe one request; what it adds, if anything."""
        seq, fed = turn.seq, len(turn.tokens)
        if logits is None:
            self.cache.commit(turn.slot, range(fed))
            self._proposals.observe(seq, Outcome(tuple(turn.tokens), (), features=_features(hidden, rows)))
            return None
        try:
            verdict = decide(logits, seq, draft)
        except ValueError as error:  # a mask hook or a combination that forbids every token: this request's own fault
            return self._close(seq, seq.end("error", str(error)))
        decoding = _decoding(turn)
        kept = [*range(fed), *(fed + node for node in verdict.path)]
        self.cache.commit(turn.slot, kept)
        accepted = [draft.tokens[node] for node in verdict.path]
        taken, pieces = seq.extend([*accepted, verdict.token], drafted=len(accepted))
        self._clocks[seq.id].emitted()
        if decoding:
            self._account(seq, draft, verdict, taken)
        report_logprobs(logits, seq, draft, verdict, taken)
        outcome = Outcome(
            consumed=(*turn.tokens, *accepted),
            emitted=tuple(seq.tokens[len(seq.tokens) - taken :]),
            draft=draft,
            path=tuple(verdict.path),
            features=_features(hidden, [rows[row] for row in kept]),
            logits=lambda: logits,
        )
        self._proposals.observe(seq, outcome)
        if seq.finished:
            return self._close(seq, pieces, outcome.emitted)
        return Event(seq.id, outcome.emitted, pieces)

    def _account(self, seq: Sequence, draft: Draft, verdict: Verdict, taken: int) -> None:
        """Count a pass after the prefill. Nodes accepted past the request's end count as never reached."""
        path = verdict.path[:taken]
        counted = draft if taken > len(path) else draft.within(Limit(len(draft), len(path)))
        seq.stats.record(counted, path)
        seq.stats.drafted += len(draft) - len(counted)

    def _close(self, seq: Sequence, pieces: tuple[Piece, ...], tokens: tuple[int, ...] = ()) -> Event:
        self._scheduler.remove(seq)
        self._proposals.forget(seq)
        del self._sequences[seq.id]
        self._clocks.pop(seq.id).close(seq)
        assert seq.finish_reason is not None
        result = Result(
            text=seq.text,
            tokens=tuple(seq.output),
            finish_reason=seq.finish_reason,
            stats=seq.stats,
            logprobs=tuple(seq.logprobs) if seq.params.logprobs is not None else None,
            stop_reason=seq.stop_reason,
            drafter=self.name,
            verify=seq.request.verify,
            error=seq.error,
        )
        return Event(seq.id, tokens, pieces, result)

    def _check(self, request: Request) -> None:
        size = len(request.prompt)
        if size >= self.context:
            raise ValueError(
                f"the prompt has {size} tokens and the context is {self.context}; shorten it or load with a larger context"
            )
        for token in request.prompt:
            if not 0 <= token < self.vocab:
                raise ValueError(f"the prompt holds token id {token}; ids lie between 0 and {self.vocab - 1}")
        for name, token in request.params.token_ids():
            if not 0 <= token < self.vocab:
                raise ValueError(f"{name} names token id {token}; ids lie between 0 and {self.vocab - 1}")


class _Clock:
    """Where a request's time goes."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.start = now()
        self.first: float | None = None
        self.last = self.start
        self.draft = self.target = 0.0

    def drafted(self, seconds: float) -> None:
        self.draft += seconds

    def passed(self, seconds: float, *, decoding: bool) -> None:
        if decoding:
            self.target += seconds

    def emitted(self) -> None:
        self.last = self._now()
        if self.first is None:
            self.first = self.last

    def close(self, seq: Sequence) -> None:
        """Write the times into the request's stats."""
        first = self.first if self.first is not None else self.last
        stats = seq.stats
        stats.prefill_seconds = stats.time_to_first_token = first - self.start
        stats.draft_seconds, stats.target_seconds = self.draft, self.target
        stats.decode_seconds, stats.total_seconds = self.last - first, self.last - self.start


def _decoding(turn: Turn) -> bool:
    """True when only the pending token is fed, after the prefill's end."""
    return turn.complete and len(turn.seq.tokens) > turn.seq.prompt_length


def _feed(turn: Turn, draft: Draft) -> Feed:
    """The committed tokens one after another, then the draft's nodes below the last of them."""
    fed = len(turn.tokens)
    below = [fed + parent if parent >= 0 else fed - 1 for parent in draft.parents]
    return Feed(turn.slot, [*turn.tokens, *draft.tokens], [*range(-1, fed - 1), *below])


def _features(hidden: Hidden, rows: Seq[int]) -> Mapping[Tap, Tensor]:
    straight = rows[-1] - rows[0] == len(rows) - 1  # as they are but where a tree was left by a later branch
    if straight and len(rows) == len(hidden.final):
        return hidden.taps
    return Kept(hidden.taps, slice(rows[0], rows[-1] + 1) if straight else list(rows))
