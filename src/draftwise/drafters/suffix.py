"""Suffix decoding: what followed the longest run of last tokens, in this request and in past outputs, by frequency.

Source: Oliaro et al. 2024 (arXiv 2411.04975). There a tree holds all suffixes, here an automaton does, at constant cost a
token. A token's chance is its share of what followed, less after a short match or few cases, corrected by what came of
guesses like it; so a longer match makes a longer draft. A prompt is remembered for its own request only. Response times
may tell what past outputs held: users who must not learn of each other need a drafter each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draftwise.drafters.automaton import NOTHING, START, Automaton, Match
from draftwise.drafters.averages import Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.chosen import NO_TREE, Guess, best_first, match_class, share
from draftwise.drafters.keeping import Arrays, Keeper, KeptFile
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Limit, Outcome


@dataclass(frozen=True, slots=True)
class Options:
    """Options of suffix decoding."""

    max_tokens: int = field(default=16, metadata={"help": "most tokens to propose"})
    width: int = field(default=3, metadata={"help": "most guesses for one place; 1 gives a chain"})
    max_match: int = field(default=32, metadata={"help": "longest run of last tokens that is looked up"})
    min_chance: float = field(default=0.01, metadata={"help": "leave out guesses less likely than this to be accepted"})
    memory_tokens: int = field(default=65_536, metadata={"help": "most tokens of past output to remember (0: none)"})
    memory_file: str | None = field(default=None, metadata={"help": "file that past output is read from and kept in"})

    def __post_init__(self) -> None:
        for name in ("max_tokens", "width", "max_match"):
            if getattr(self, name) < 1:
                raise ValueError(f"suffix's {name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.min_chance < 1:
            raise ValueError(f"suffix's min_chance is {self.min_chance}; it must be 0 or more and below 1")
        if self.memory_tokens < 0:
            raise ValueError(f"suffix's memory_tokens is {self.memory_tokens}; it must be 0 (none) or more")
        if self.memory_file and not self.memory_tokens:
            raise ValueError("suffix's memory_file has nothing to keep where memory_tokens is 0; leave one of them out")


class Memory:
    """Past outputs, `tokens` of them at most; once it was full, about half as many at least. Safe between threads.

    Nothing can be taken out of an automaton, so two take turns: when the one in use is half full, the other begins to
    learn with it, and takes its place when it is full.
    """

    def __init__(self, tokens: int, longest: int) -> None:
        self.tokens, self.longest = tokens, longest
        self.lock = threading.RLock()
        """Held by whoever reads `automaton`, which another one may replace at any other time."""
        self.automaton, self._next = Automaton(longest), Automaton(longest)
        self._texts: list[tuple[int, ...]] = []  # in the automaton in use
        self._next_texts: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        """Tokens remembered."""
        return sum(map(len, self._texts))

    def add(self, text: Seq[int]) -> None:
        """Remember an output; of one longer than half of the room its end."""
        text = tuple(text[-max(self.tokens // 2, 1) :])
        if not text:
            return
        with self.lock:
            while len(self) + len(text) > self.tokens:
                self.automaton, self._texts = self._next, self._next_texts
                self._next, self._next_texts = Automaton(self.longest), []
            if len(self) >= self.tokens // 2:
                _append(self._next, text)
                self._next_texts.append(text)
            _append(self.automaton, text)
            self._texts.append(text)

    def arrays(self) -> Arrays:
        """What is remembered, oldest first, for `restore`."""
        with self.lock:
            texts = list(self._texts)
        tokens = [token for text in texts for token in text]
        return {"tokens": np.array(tokens, np.int32), "lengths": np.array([len(text) for text in texts], np.int32)}

    def restore(self, arrays: Arrays) -> None:
        """Add what `arrays` gave."""
        tokens, start = arrays["tokens"].tolist(), 0
        for length in arrays["lengths"].tolist():
            self.add(tokens[start : start + length])
            start += length


def _append(automaton: Automaton, text: Seq[int]) -> None:
    end = START
    for token in text:
        end = automaton.append(end, token)


LOOKS, ENOUGH = 6, 0.3
"""For one place as many matches are looked at, the longest first, until less chance than this is left."""


class _Text:
    """One request: its own automaton, where it stands in the memory's, and what it taught."""

    def __init__(self, longest: int, rates: Rates) -> None:
        self.automaton, self.end, self.size = Automaton(longest), START, 0
        self.memory: Automaton | None = None
        self.remembered, self.recalled = NOTHING, 0  # the match in the memory's, and tokens read for it
        self.rates = Rates(rates, weight=4.0, forget=0.98)
        self.tree = NO_TREE

    def read(self, tokens: Seq[int]) -> Match:
        """Take in what was appended; the longest run at the end that stood before."""
        for token in tokens[self.size :]:
            self.end = self.automaton.append(self.end, token)
        self.size = len(tokens)
        return self.automaton.repeated(self.end)

    def recall(self, tokens: Seq[int], memory: Automaton) -> Match:
        """The longest run at the end that is remembered."""
        if memory is not self.memory:
            self.memory, self.remembered, self.recalled = memory, NOTHING, max(len(tokens) - memory.longest, 0)
        for token in tokens[self.recalled :]:
            self.remembered = memory.follow(self.remembered, token)
        self.recalled = len(tokens)
        return self.remembered


class _Sources:
    """Automata with a match in each: what may follow, as a tree of guesses sees it."""

    def __init__(self, automata: Seq[Automaton], width: int) -> None:
        self.automata, self.width = automata, width

    def expand(self, after: tuple[Seq[Match], int | None]) -> Iterator[Guess]:
        """What followed the longest match; then, for the chance that is left, what followed shorter ones."""
        matches, token = list(after[0]), after[1]
        if token is not None:
            matches = [automaton.follow(match, token) for automaton, match in zip(self.automata, matches, strict=True)]
        here, left = tuple(matches), 1.0
        found: set[int] = set()
        for _ in range(LOOKS):
            lengths = [match.length for match in matches]
            longest = max(lengths)
            source = lengths.index(longest)
            if not longest:
                return
            total, followers = self.automata[source].followers(matches[source], self.width)
            if total:
                kind = source, match_class(longest)
                for follower, count in followers:
                    if follower not in found:
                        yield Guess(follower, kind, left * share(count, total, longest), (here, follower))
                        found.add(follower)
                    if len(found) == self.width:
                        return
                left *= 1 - share(total, total, longest)
                if left < ENOUGH:
                    return
            matches[source] = self.automata[source].shorter(matches[source])


class SuffixDrafter(Drafter):
    """Proposes what followed the longest matches. `memory` may be shared with other drafters of the same vocabulary."""

    free = True

    def __init__(
        self,
        *,
        max_tokens: int = 16,
        width: int = 3,
        max_match: int = 32,
        min_chance: float = 0.01,
        memory: Memory | None = None,
        kept: KeptFile | None = None,
    ) -> None:
        self.max_depth, self.width, self.max_match, self.min_chance = max_tokens, width, max_match, min_chance
        self.memory = memory
        self._keeper = Keeper(self, kept, memory.arrays) if kept is not None and memory is not None else None
        self._rates = Rates(weight=6.0, forget=0.995)  # of all requests
        self._texts: dict[int, _Text] = {}

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: Limit) -> Draft:
        limit = limit._replace(nodes=min(limit.nodes, self.max_depth), depth=min(limit.depth, self.max_depth))
        if limit.nodes < 1 or limit.depth < 1:
            return NO_DRAFT
        text = self._texts.get(seq.id)
        if text is None:
            text = self._texts[seq.id] = _Text(self.max_match, self._rates)
        own = text.read(seq.tokens)
        if self.memory is None:
            return self._guess(text, [text.automaton], [own], limit)
        with self.memory.lock:
            automata = [text.automaton, self.memory.automaton]
            return self._guess(text, automata, [own, text.recall(seq.tokens, self.memory.automaton)], limit)

    def _guess(self, text: _Text, automata: Seq[Automaton], matches: Seq[Match], limit: Limit) -> Draft:
        sources = _Sources(automata, self.width)
        text.tree = best_first(sources.expand, (matches, None), text.rates, limit, min_chance=self.min_chance)
        return text.tree.draft

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        text = self._texts.get(seq.id)
        if text is not None:
            text.tree.learn(outcome.emitted, text.rates)
            text.tree = NO_TREE

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)
        if self.memory is not None:
            self.memory.add(seq.output)
        if self._keeper is not None:
            self._keeper.write_if_due()


def build(options: Options, target: Target, source: DraftSource | None) -> SuffixDrafter:
    """Raises ValueError where the memory's file is none, or holds another vocabulary."""
    memory = Memory(options.memory_tokens, options.max_match) if options.memory_tokens else None
    kept = None
    if memory is not None and options.memory_file:
        kept = KeptFile(Path(options.memory_file), "suffix", target.tokenizer.vocabulary_fingerprint, target.notice)
        memory.restore(kept.read() or memory.arrays())
    return SuffixDrafter(
        max_tokens=options.max_tokens,
        width=options.width,
        max_match=options.max_match,
        min_chance=options.min_chance,
        memory=memory,
        kept=kept,
    )
