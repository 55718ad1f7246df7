"""Token recycling: what the target last thought likely after the same one or two tokens, in rejected rows as well.

Source: Luo et al. 2024 (arXiv 2408.08696). Each row of a pass tells the likeliest successors of its token. They are kept,
by the last two tokens and by the last one, and drafted as a tree when those come up again. There the tree has one shape of
80 nodes; here it grows towards the likeliest guesses, since a few rows are all that pays on most machines. A prompt is
used for its own request only; the table is shared by all requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor

from draftwise.drafters.averages import Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.chosen import NO_TREE, Guess, best_first
from draftwise.drafters.keeping import Arrays, Keeper, KeptFile
from draftwise.kernels import largest
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Limit, Outcome


@dataclass(frozen=True, slots=True)
class Options:
    """Options of token recycling."""

    max_tokens: int = field(default=16, metadata={"help": "most tokens to propose"})
    max_depth: int = field(default=8, metadata={"help": "most tokens to propose one after another"})
    width: int = field(default=6, metadata={"help": "most guesses for one place; twice as many successors are kept"})
    min_chance: float = field(default=0.01, metadata={"help": "leave out guesses less likely than this to be accepted"})
    pairs: int = field(default=100_000, metadata={"help": "most pairs of tokens whose successors are kept (0: none)"})
    prompt: bool = field(default=True, metadata={"help": "also guess what followed the same one or two tokens in the prompt"})
    table_file: str | None = field(default=None, metadata={"help": "file that successors are read from and kept in"})

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_depth", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"recycling's {name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.min_chance < 1:
            raise ValueError(f"recycling's min_chance is {self.min_chance}; it must be 0 or more and below 1")
        if self.pairs < 0:
            raise ValueError(f"recycling's pairs is {self.pairs}; it must be 0 (none) or more")


Successors = tuple[tuple[int, float], ...]
"""Tokens that may follow and the share that the target gave each among them, the likeliest first."""
Key = TypeVar("Key", int, tuple[int, int])

NEWS = 0.5
"""What a row counts against all that was known before."""
IN_PROMPT, IN_PROMPT_SHORT = 0.4, 0.2
"""A guess at how often the prompt is right after the same two tokens, and the same one; soon learnt."""


class Table:
    """Successors by the last two tokens, for the `pairs` latest such pairs, and by the last one; `width` of each."""

    def __init__(self, pairs: int, width: int) -> None:
        self.pairs, self.width = pairs, width
        self.after_two: dict[tuple[int, int], Successors] = {}  # the latest pair last
        self.after_one: dict[int, Successors] = {}

    def put(self, last: tuple[int, int], successors: Successors) -> None:
        """Take in what a row said may follow."""
        token = last[1]
        self.after_one[token] = self._blend(self.after_one.get(token, ()), successors)
        if self.pairs:
            self.after_two[last] = self._blend(self.after_two.pop(last, ()), successors)
            if len(self.after_two) > self.pairs:
                del self.after_two[next(iter(self.after_two))]

    def _blend(self, known: Successors, news: Successors) -> Successors:
        if not known:
            return news
        shares = {token: share * (1 - NEWS) for token, share in known}
        for token, share in news:
            shares[token] = shares.get(token, 0.0) + share * NEWS
        return tuple(sorted(shares.items(), key=lambda item: (-item[1], item[0]))[: self.width])

    def arrays(self) -> Arrays:
        """All that is known, for `restore`."""
        packed = {"two": _pack(self.after_two, self.width), "one": _pack(self.after_one, self.width)}
        return {f"{name}_{part}": array for name, parts in packed.items() for part, array in parts.items()}

    def restore(self, arrays: Arrays) -> None:
        """Take in what `arrays` gave, as far as there is room."""
        for (before, token), successors in _unpack(arrays, "two", self.width)[-self.pairs :] if self.pairs else []:
            self.after_two[before, token] = successors
        for (token,), successors in _unpack(arrays, "one", self.width):
            self.after_one[token] = successors


def _pack(known: Mapping[Key, Successors], width: int) -> Arrays:
    tokens = np.full((len(known), width), -1, np.int32)
    shares = np.zeros((len(known), width), np.float32)
    for row, successors in enumerate(known.values()):
        for place, (token, share) in enumerate(successors):
            tokens[row, place], shares[row, place] = token, share
    keys = np.array(list(known), np.int32).reshape(len(known), -1 if known else 1)
    return {"keys": keys, "tokens": tokens, "shares": shares}


def _unpack(arrays: Arrays, name: str, width: int) -> list[tuple[tuple[int, ...], Successors]]:
    keys, tokens, shares = (arrays[f"{name}_{part}"].tolist() for part in ("keys", "tokens", "shares"))
    return [
        (tuple(key), tuple((token, share) for token, share in zip(row, held, strict=True) if token >= 0)[:width])
        for key, row, held in zip(keys, tokens, shares, strict=True)
    ]


class _Request:
    """What belongs to one request: what came after one and two tokens of its prompt, and what it taught."""

    def __init__(self, prompt: Seq[int], rates: Rates) -> None:
        pairs = zip(prompt, prompt[1:], prompt[2:], strict=False)
        self.after: dict[tuple[int, ...], int] = {(before, token): after for before, token, after in pairs}
        self.after |= {(token,): after for token, after in zip(prompt, prompt[1:], strict=False)}
        self.rates = Rates(rates, weight=4.0, forget=0.98)
        self.tree = NO_TREE


class RecyclingDrafter(Drafter):
    """Drafts trees from a table of successors that all requests fill."""

    free = True

    def __init__(
        self,
        table: Table,
        *,
        max_tokens: int = 16,
        max_depth: int = 8,
        width: int = 6,
        min_chance: float = 0.01,
        prompt: bool = True,
        kept: KeptFile | None = None,
    ) -> None:
        self.table, self.max_tokens, self.max_depth, self.width = table, max_tokens, min(max_depth, max_tokens), width
        self.min_chance, self.prompt = min_chance, prompt
        self._keeper = Keeper(self, kept, table.arrays) if kept is not None else None
        self._rates = Rates(weight=6.0, forget=0.995)  # of all requests
        self._requests: dict[int, _Request] = {}

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: Limit) -> Draft:
        limit = limit._replace(nodes=min(limit.nodes, self.max_tokens), depth=min(limit.depth, self.max_depth))
        if limit.nodes < 1 or limit.depth < 1:
            return NO_DRAFT
        request = self._requests.get(seq.id)
        if request is None:
            request = self._requests[seq.id] = _Request(seq.request.prompt if self.prompt else (), self._rates)
        known = request.after

        def expand(last: tuple[int, int]) -> Iterator[Guess]:
            return self._guesses(last, known)

        request.tree = best_first(expand, _last_two(seq.tokens), request.rates, limit, min_chance=self.min_chance)
        return request.tree.draft

    def _guesses(self, last: tuple[int, int], prompt: Mapping[tuple[int, ...], int]) -> Iterator[Guess]:
        """After two tokens what the table and the prompt say; what they say after the last one where that is nothing."""
        token = last[1]
        successors, said = self.table.after_two.get(last), prompt.get(last)
        kind, share = "two", IN_PROMPT
        if successors is None:
            kind, successors = "one", self.table.after_one.get(token, ())
            if said is None:
                said, share = prompt.get(last[1:]), IN_PROMPT_SHORT
        if said is not None:
            yield Guess(said, "prompt", share, (token, said))
        for successor, share in successors[: self.width]:
            if successor != said:
                yield Guess(successor, kind, share, (token, successor))

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        request = self._requests.get(seq.id)
        if request is not None:
            request.tree.learn(outcome.emitted, request.rates)
            request.tree = NO_TREE
        if outcome.logits is not None:
            before = seq.tokens[-len(outcome.emitted) - 2 : -len(outcome.emitted)]
            self._recycle(_last_two(before), outcome.draft, outcome.path, outcome.logits())

    def _recycle(self, last: tuple[int, int], draft: Draft, path: Seq[int], logits_NV: Tensor) -> None:
        """Take in every row, those of the accepted path after the others, since they fit the text best."""
        rows = _successors(logits_NV, self.table.width)
        for node in (*(node for node in range(len(draft)) if node not in path), -1, *path):
            ends = last
            if node >= 0:
                parent = draft.parents[node]
                ends = (draft.tokens[parent] if parent >= 0 else last[1]), draft.tokens[node]
            self.table.put(ends, rows[node + 1])

    def forget(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)
        if self._keeper is not None:
            self._keeper.write_if_due()


def _last_two(tokens: Seq[int]) -> tuple[int, int]:
    """The last two tokens; -1 stands before the first."""
    return (tokens[-2] if len(tokens) > 1 else -1), tokens[-1]


def _successors(logits_NV: Tensor, count: int) -> list[Successors]:
    values, tokens = largest(logits_NV, count)
    shares = values.softmax(-1).tolist()
    return [tuple(zip(row, held, strict=True)) for row, held in zip(tokens.tolist(), shares, strict=True)]


def build(options: Options, target: Target, source: DraftSource | None) -> RecyclingDrafter:
    """Raises ValueError where the table's file is none, or holds another vocabulary."""
    table, kept = Table(options.pairs, 2 * options.width), None
    if options.table_file:
        kept = KeptFile(Path(options.table_file), "recycling", target.tokenizer.vocabulary_fingerprint, target.notice)
        table.restore(kept.read() or table.arrays())
    return RecyclingDrafter(
        table,
        max_tokens=options.max_tokens,
        max_depth=options.max_depth,
        width=options.width,
        min_chance=options.min_chance,
        prompt=options.prompt,
        kept=kept,
    )
