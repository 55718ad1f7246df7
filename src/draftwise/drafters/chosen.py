"""Trees of guesses that were chosen for their estimated chance: the likeliest first, and what came of them.

Knows tokens and chances; knows nothing of where guesses come from. Shared by the drafters that need no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence as Seq
from heapq import heappop, heappush
from typing import Any, NamedTuple

from draftwise.drafters.averages import Rates, level
from draftwise.types import NO_DRAFT, Draft, Drawn, Limit

SURE = 0.99
LENGTHS = (2, 3, 4, 6, 9, 16)


def match_class(length: int) -> int:
    """Matches of one class, by their length in tokens, are trusted alike."""
    return bisect_right(LENGTHS, length)


def share(count: int, total: int, length: int) -> float:
    """The chance of a token that followed a match `count` times of `total`: some of it is for what was not seen yet.

    That counts for fewer cases the longer the match; how many was fitted to the outputs of a language model.
    """
    unseen: float = 1.8 * length**-1.2
    return count / (total + unseen)


class Guess(NamedTuple):
    """A token that may come next. `estimate`: how likely it seems where all above it is right; `kind`: of evidence."""

    token: int
    kind: Hashable
    estimate: float
    after: Any  # what the guesses below it are made from

    @property
    def key(self) -> tuple[Hashable, int]:
        """Guesses that agree in it are taken to be right equally often."""
        return self.kind, level(self.estimate)


class ChosenTree(NamedTuple):
    """A draft, and per node the guess behind it."""

    draft: Draft
    guesses: Seq[Guess]

    def learn(self, emitted: Seq[int], rates: Rates) -> None:
        """Count which guesses the emitted tokens proved right or wrong, verified or not."""
        reached = {-1: 0}  # tokens that the path down to a node spells
        for node, (guess, parent) in enumerate(zip(self.guesses, self.draft.parents, strict=True)):
            depth = reached.get(parent, len(emitted))
            if depth < len(emitted):
                right = guess.token == emitted[depth]
                rates.learn(guess.key, right)
                if right:
                    reached[node] = depth + 1


NO_TREE = ChosenTree(NO_DRAFT, ())


def best_first(
    expand: Callable[[Any], Iterable[Guess]], root: Any, rates: Rates, limit: Limit, *, min_chance: float
) -> ChosenTree:
    """The tree of most expected accepted tokens: time and again the guess that is likeliest to be reached and right.

    expand(after) gives distinct tokens. rates: what `ChosenTree.learn` found; a guess leans on its estimate where that is
    little. Nodes stand in the order of their survival; less likely ones than `min_chance` are left out.
    Source: OPT-Tree, Wang et al. 2024 (arXiv 2406.17276), for a draft whose chances cost nothing to know.
    """
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    guesses: list[Guess] = []
    waiting: list[tuple[float, int, int, int, Guess]] = []
    found = 0  # among equals the first found comes first

    def offer(parent: int, reach: float, depth: int, after: Any) -> None:
        nonlocal found
        for guess in expand(after):
            chance = reach * min(rates.rate(guess.key, guess.estimate), SURE)
            if chance >= min_chance:
                heappush(waiting, (-chance, found, parent, depth, guess))
                found += 1

    if limit.nodes > 0 and limit.depth > 0:
        offer(-1, 1.0, 1, root)
    while waiting and len(tokens) < limit.nodes:
        negative, _, parent, depth, guess = heappop(waiting)
        tokens.append(guess.token)
        parents.append(parent)
        survival.append(-negative)
        guesses.append(guess)
        if depth < limit.depth:
            offer(len(tokens) - 1, -negative, depth + 1, guess.after)
    if not tokens:
        return NO_TREE
    draft = Draft(tuple(tokens), tuple(parents), (Drawn.CHOSEN,) * len(tokens), survival=tuple(survival))
    return ChosenTree(draft, guesses)
