"""Lookahead decoding: the target guesses ahead of itself in a window, and what it guesses becomes a pool of runs.

Source: Fu et al. 2024 (arXiv 2402.02057). The window has W columns, one for each of the next places, and N - 1 levels of
guesses at each, the oldest at level 0. A pass gives every column one guess more: its levels with that guess are a run of
N tokens, kept under the first, and the column moves up a level. Up to G runs under the last token of the text are drafted
beside the window, all as one tree: level j of column i stands below level j - 1, and level 0 is a chain. The window's rows
are seldom accepted; what they bring is the runs of later steps. Hence a draft is verified whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field

from draftwise.drafters.base import Drafter, DraftSource, Target
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Drawn, Limit, Outcome


@dataclass(frozen=True, slots=True)
class Options:
    """Options of lookahead decoding."""

    window: int = field(default=8, metadata={"help": "W: places ahead at which the target guesses"})
    ngram: int = field(default=4, metadata={"help": "N: tokens of a run, the one it is kept under included"})
    guesses: int = field(default=6, metadata={"help": "G: most runs kept under a token and drafted"})
    text: bool = field(default=True, metadata={"help": "also keep the runs of prompt and output"})

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("guesses", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"lookahead's {name} is {getattr(self, name)}; it must be at least {least}")


Run = tuple[int, ...]

TOKENS = 4096
"""Tokens under which runs are kept."""


class Pool:
    """Runs by the token before them, the `most` latest of each of the `TOKENS` latest tokens."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._runs: dict[int, dict[Run, None]] = {}  # the latest last, here and within

    def put(self, token: int, run: Run) -> None:
        runs = self._runs.pop(token, {})
        runs.pop(run, None)
        runs[run] = None
        if len(runs) > self.most:
            del runs[next(iter(runs))]
        self._runs[token] = runs
        if len(self._runs) > TOKENS:
            del self._runs[next(iter(self._runs))]

    def get(self, token: int) -> Iterator[Run]:
        """The latest run first."""
        return reversed(self._runs.get(token, {}))


class _Trie:
    """A draft under way, or one that was verified: nodes by parent and token, so that equal paths share them."""

    def __init__(self, draft: Draft = NO_DRAFT) -> None:
        self.nodes: dict[tuple[int, int], int] = {}
        for node, place in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            self.nodes.setdefault(place, node)

    def reach(self, path: Seq[int]) -> tuple[int, int]:
        """How many tokens of the path there are, and the node of the last of them."""
        node = -1
        for known, token in enumerate(path):
            if (node, token) not in self.nodes:
                return known, node
            node = self.nodes[node, token]
        return len(path), node

    def add(self, path: Seq[int], limit: Limit) -> bool:
        """Add a path from the root; False where it does not fit in whole."""
        known, node = self.reach(path)
        if len(path) > limit.depth or len(self.nodes) + len(path) - known > limit.nodes:
            return False
        for token in path[known:]:
            below = self.nodes[node, token] = len(self.nodes)
            node = below
        return True

    def draft(self) -> Draft:
        tokens = tuple(token for _, token in self.nodes)
        return Draft(tokens, tuple(parent for parent, _ in self.nodes), (Drawn.CHOSEN,) * len(tokens))


class _Request:
    """A request's window and pool. columns[i][j]: level j of column i; level 0 of column 0 is the text's last token."""

    def __init__(self, options: Options, text: Seq[int]) -> None:
        self.pool = Pool(options.guesses)
        self.read = 0  # tokens of the text whose runs are in the pool
        self.drafted = 0  # columns in the draft
        self.columns = [
            [_stretch(text, i, options.window, level) for level in range(options.ngram - 1)] for i in range(options.window)
        ]

    def paths(self) -> list[Run]:
        """Per column the path from the root to its last level."""
        chain = [column[0] for column in self.columns]
        return [(*chain[1 : i + 1], *column[1:]) for i, column in enumerate(self.columns)]


def _stretch(text: Seq[int], i: int, count: int, level: int = 0) -> int:
    """A token of the i-th of `count` stretches of the text: likelier than any where nothing is known."""
    return text[(i * len(text) // count + level) % len(text)]


class LookaheadDrafter(Drafter):
    """Drafts a window and the runs that earlier windows found, for each request its own."""

    free = True

    def __init__(self, *, window: int = 8, ngram: int = 4, guesses: int = 6, text: bool = True) -> None:
        self.options = Options(window, ngram, guesses, text)
        self.max_depth = window + ngram - 2
        self._requests: dict[int, _Request] = {}

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: Limit) -> Draft:
        window, ngram, guesses, text = self.options.window, self.options.ngram, self.options.guesses, self.options.text
        request = self._requests.get(seq.id)
        if request is None:
            request = self._requests[seq.id] = _Request(self.options, seq.tokens)
        if text:
            for end in range(max(request.read + 1, ngram), len(seq.tokens) + 1):
                request.pool.put(seq.tokens[end - ngram], tuple(seq.tokens[end - ngram + 1 : end]))
            request.read = len(seq.tokens)
        trie = _Trie()
        share = limit._replace(nodes=limit.nodes * guesses // (window + guesses))
        for run in request.pool.get(seq.tokens[-1]):
            trie.add(run[: min(limit.depth, share.nodes)], share)
        request.columns[0][0] = seq.tokens[-1]
        request.drafted = 0
        for path in request.paths():
            if not trie.add(path, limit):
                break
            request.drafted += 1
        return trie.draft()

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        request = self._requests.get(seq.id)
        if request is None or not request.drafted or outcome.logits is None:
            return
        paths, request.drafted = request.paths()[: request.drafted], 0
        trie = _Trie(outcome.draft)
        ends = [trie.reach(path) for path in paths]
        if not ends or any(known < len(path) for (known, _), path in zip(ends, paths, strict=True)):
            return  # the window was not verified
        guesses = outcome.logits()[[node + 1 for _, node in ends]].argmax(-1).tolist()
        for i, (column, guess) in enumerate(zip(request.columns, guesses, strict=False)):
            request.pool.put(column[0], (*column[1:], guess))
            if guess in seq.end_tokens:  # what would come after the end is of no use
                guess = _stretch(seq.tokens, i, self.options.window)
            column[:] = [*column[1:], guess]

    def forget(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)


def build(options: Options, target: Target, source: DraftSource | None) -> LookaheadDrafter:
    return LookaheadDrafter(window=options.window, ngram=options.ngram, guesses=options.guesses, text=options.text)
