"""Retrieval: what follows the last tokens in a text or a folder of texts that the user points at.

Source: REST, He et al. 2023 (arXiv 2311.08252). The texts are encoded once, with the target's tokenizer, and sorted into a
suffix array, which stays on disk and is searched there. The continuations of the longest match, weighted by how often
they occur, are drafted as a tree.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from draftwise.checkpoint import cache_dir
from draftwise.drafters.averages import Rates
from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.drafters.chosen import NO_TREE, Guess, best_first, match_class, share
from draftwise.sequence import Sequence
from draftwise.tokenizer import Tokenizer
from draftwise.types import NO_DRAFT, Draft, Limit, Outcome


@dataclass(frozen=True, slots=True)
class Options:
    """Options of retrieval."""

    max_tokens: int = field(default=16, metadata={"help": "most tokens to propose"})
    width: int = field(default=3, metadata={"help": "most guesses for one place; 1 gives a chain"})
    max_match: int = field(default=16, metadata={"help": "longest run of last tokens that is looked up"})
    min_match: int = field(default=1, metadata={"help": "shortest match that is used"})
    min_chance: float = field(default=0.01, metadata={"help": "leave out guesses less likely than this to be accepted"})

    def __post_init__(self) -> None:
        for name in ("max_tokens", "width", "min_match"):
            if getattr(self, name) < 1:
                raise ValueError(f"corpus's {name} is {getattr(self, name)}; it must be at least 1")
        if self.max_match < self.min_match:
            raise ValueError(f"corpus's max_match is {self.max_match}, below min_match {self.min_match}")
        if not 0 <= self.min_chance < 1:
            raise ValueError(f"corpus's min_chance is {self.min_chance}; it must be 0 or more and below 1")


TOKEN = np.dtype(">u4")
"""Big-endian, so that runs of tokens compare as their bytes do."""
BORDER = 2**32 - 1
"""Stands after each text; no token."""
SORTED = 32
"""Tokens by which suffixes are sorted; a match and what follows it seldom need more."""
SAMPLE = 64
"""Continuations looked at, evenly spread over all in their order."""
MOST = 2**31 - 2 * SORTED
"""Tokens of a corpus."""
PIECE = 1 << 20
"""Characters encoded at once, up to the end of a line."""


class Index:
    """Texts as one run of tokens, and all places in it, sorted by the tokens from there on.

    data: the tokens as bytes, with borders, `SORTED` of them at the end. places: int32 [tokens].
    """

    def __init__(self, data: bytes | mmap.mmap, places: np.ndarray[Any, Any]) -> None:
        self.data, self.places = data, places
        self._tokens = np.frombuffer(data, TOKEN)
        self._at = memoryview(places)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.places)

    def find(self, stretch: Seq[int]) -> range:
        """The ranks of the places where the stretch stands."""
        wanted = np.array(stretch, TOKEN).tobytes()
        size = len(wanted)

        def there(place: int) -> bytes:
            return self.data[4 * place : 4 * place + size]

        first = bisect_left(self._at, wanted, key=there)
        if first == len(self) or there(self._at[first]) != wanted:
            return range(first, first)
        return range(first, bisect_right(self._at, wanted, first, key=there))

    def longest(self, tokens: Seq[int], least: int) -> tuple[int, range]:
        """Length and ranks of the longest end of `tokens` that occurs; no ranks where none of `least` tokens does."""
        length, found = least, self.find(tokens[len(tokens) - least :]) if least <= len(tokens) else range(0)
        above = len(tokens) + 1
        while found and above - length > 1:  # `length` occurs, `above` does not
            middle = (length + above) // 2
            ranks = self.find(tokens[len(tokens) - middle :])
            if ranks:
                length, found = middle, ranks
            else:
                above = middle
        return length, found

    def continuations(self, ranks: range, skip: int, length: int) -> list[list[int]]:
        """`length` tokens from `skip` tokens after each place on, in order; of many places a sample."""
        if len(ranks) > SAMPLE:
            ranks = range(ranks.start, ranks.stop, -(-len(ranks) // SAMPLE))
        places = self.places[ranks.start : ranks.stop : ranks.step].astype(np.int64)
        spots = places[:, None] + np.arange(skip, skip + length)
        rows: list[list[int]] = self._tokens[np.minimum(spots, len(self._tokens) - 1)].tolist()
        return rows


def suffix_array(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The places of all suffixes in the order of their first `SORTED` tokens: int32 [tokens]; tokens: integers.

    By doubling: places sorted by k tokens give the order by 2k, from the rank at the place and that k places on.
    Source: Manber and Myers 1990.
    """
    _, rank = np.unique(tokens, return_inverse=True)
    known = 1
    while True:
        later = np.zeros_like(rank)
        later[:-known] = rank[known:] + 1
        both = rank * (len(rank) + 1) + later
        order = np.argsort(both, kind="stable")
        known *= 2
        steps = np.diff(both[order], prepend=both[order[:1]]) != 0
        rank = np.empty_like(rank)
        rank[order] = np.cumsum(steps)
        if known >= SORTED or rank[order[-1]] == len(rank) - 1:
            return order.astype(np.int32)


def texts_of(path: Path) -> list[str]:
    """The texts of a file, or of all files of a folder that are UTF-8 text, hidden ones left out. Raises ValueError."""
    if path.is_file():
        text = _text(path)
        if text is None:
            raise ValueError(f"the corpus {path} is not UTF-8 text; give a text file, or a folder of them")
        return [text] if text else []
    if not path.is_dir():
        raise ValueError(f"the corpus {path} does not exist; give a text file, or a folder of them")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    shown = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    return [text for file in shown if (text := _text(file))]


def _text(file: Path) -> str | None:
    """None where it is no text."""
    with file.open("rb") as opened:
        start = opened.read(8192)
        if b"\0" in start:
            return None
        try:
            return (start + opened.read()).decode("utf-8")
        except UnicodeDecodeError:
            return None


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + PIECE
        line = text.find("\n", end)
        end = len(text) if line < 0 else line + 1
        yield text[start:end]
        start = end


def encode(texts: Seq[str], tokenizer: Tokenizer) -> np.ndarray[Any, Any]:
    """All texts as tokens, uint32, a border after each."""
    parts = []
    for text in texts:
        parts += [tokenizer.encode(piece, special=False, around=False) for piece in _pieces(text)]
        parts.append([BORDER])
    return np.concatenate([np.array(part, np.uint32) for part in parts])


FILES = ("tokens", "places")


def open_index(path: Path, tokenizer: Tokenizer, folder: Path, notice: Callable[[str], None]) -> Index:
    """The index of a corpus: from `folder`, if its content was indexed before for this vocabulary, else made and kept there."""
    texts = texts_of(path)
    if not texts:
        raise ValueError(f"the corpus {path} holds no text; give a text file, or a folder of them")
    digest = hashlib.sha256(f"{tokenizer.vocabulary_fingerprint} {SORTED} {sys.byteorder}".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    kept = folder / digest.hexdigest()[:24]
    if not kept.is_dir():
        notice(f"indexing the corpus {path}, once")
        encoded = encode(texts, tokenizer)
        if len(encoded) > MOST:
            raise ValueError(
                f"the corpus {path} has {len(encoded)} tokens, above the {MOST} there is room for; give a part of it"
            )
        made = arranged(encoded)
        part = folder / f"{kept.name}.{os.getpid()}.part"
        try:
            part.mkdir(parents=True)
            for name, array in zip(FILES, made, strict=True):
                array.tofile(part / name)
            part.rename(kept)
        except OSError:  # a folder that cannot be written, or another process was faster
            shutil.rmtree(part, ignore_errors=True)
            if not kept.is_dir():
                return Index(made[0].tobytes(), made[1])
    tokens, places = (_mapped(kept / name) for name in FILES)
    index = Index(tokens, np.frombuffer(places, np.int32))
    notice(f"corpus {path}: {len(index)} tokens")
    return index


def arranged(tokens: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What an `Index` is made of, from uint32 tokens with borders."""
    padded = np.concatenate((tokens, np.full(SORTED, BORDER, np.uint32)))
    return padded.astype(TOKEN), suffix_array(tokens)


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


class _Request:
    """What belongs to one request."""

    def __init__(self, rates: Rates) -> None:
        self.rates = Rates(rates, weight=4.0, forget=0.98)
        self.tree = NO_TREE


class CorpusDrafter(Drafter):
    """Proposes what followed the longest match in the corpus."""

    free = True

    def __init__(
        self,
        index: Index,
        *,
        max_tokens: int = 16,
        width: int = 3,
        max_match: int = 16,
        min_match: int = 1,
        min_chance: float = 0.01,
    ) -> None:
        self.index, self.max_depth, self.width = index, max_tokens, width
        self.max_match, self.min_match, self.min_chance = max_match, min_match, min_chance
        self._rates = Rates(weight=6.0, forget=0.995)  # of all requests
        self._requests: dict[int, _Request] = {}

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: Limit) -> Draft:
        limit = limit._replace(nodes=min(limit.nodes, self.max_depth), depth=min(limit.depth, self.max_depth))
        if limit.nodes < 1 or limit.depth < 1:
            return NO_DRAFT
        length, ranks = self.index.longest(seq.tokens[-self.max_match :], self.min_match)
        if not ranks:
            return NO_DRAFT
        request = self._requests.setdefault(seq.id, _Request(self._rates))
        rows = self.index.continuations(ranks, length, limit.depth)

        def expand(after: tuple[int, int, int]) -> list[Guess]:
            return self._followers(rows, length, *after)

        request.tree = best_first(expand, (0, len(rows), 0), request.rates, limit, min_chance=self.min_chance)
        return request.tree.draft

    def _followers(self, rows: Seq[Seq[int]], length: int, first: int, last: int, depth: int) -> list[Guess]:
        """What comes at `depth` of the continuations first … last, which agree up to there, after a match of `length`."""
        match, total = length + depth, last - first
        guesses = []
        for token, group in groupby(row[depth] for row in rows[first:last]):
            count = len(list(group))
            if token != BORDER:
                guesses.append(Guess(token, match_class(match), share(count, total, match), (first, first + count, depth + 1)))
            first += count
        return sorted(guesses, key=lambda guess: -guess.estimate)[: self.width]

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        request = self._requests.get(seq.id)
        if request is not None:
            request.tree.learn(outcome.emitted, request.rates)
            request.tree = NO_TREE

    def forget(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)


def build(options: Options, target: Target, source: DraftSource | None) -> CorpusDrafter:
    """Raises ValueError where there is no text."""
    if source is None:
        raise ValueError("the corpus drafter needs a text: --drafter corpus:PATH (a text file, or a folder of them)")
    return CorpusDrafter(
        open_index(Path(source.path).expanduser(), target.tokenizer, cache_dir() / "corpora", target.notice),
        max_tokens=options.max_tokens,
        width=options.width,
        max_match=options.max_match,
        min_match=options.min_match,
        min_chance=options.min_chance,
    )
