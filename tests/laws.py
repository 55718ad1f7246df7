"""Laws of random experiments: exact ones, where every outcome of every choice is run and its probability is a fraction;
and how far a sample lies from the law it should have.
"""

import functools
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from draftwise.types import Draft, Drawn
from draftwise.verify import verify

Vector = np.ndarray


class Chance:
    """One run of an experiment: takes the branches written in `script`, and first branches after its end."""

    def __init__(self, script: list[int]) -> None:
        self.probability = Fraction(1)
        self.taken: list[tuple[int, int]] = []  # per choice the branch, and how many there were
        self._script = script

    def choose(self, weights: Iterable[Any]) -> int:
        """An index, in proportion to its weight."""
        weights = [Fraction(w) for w in weights]
        branches = [i for i, w in enumerate(weights) if w > 0]
        place = len(self.taken)
        branch = self._script[place] if place < len(self._script) else 0
        self.taken.append((branch, len(branches)))
        self.probability *= weights[branches[branch]] / sum(weights)
        return branches[branch]


def law(experiment: Callable[[Chance], Hashable]) -> dict[Any, Fraction]:
    """The probability of each result."""
    found: dict[Any, Fraction] = defaultdict(Fraction)
    script: list[int] = []
    while True:
        chance = Chance(script)
        found[experiment(chance)] += chance.probability
        taken = chance.taken
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            assert sum(found.values()) == 1
            return dict(found)
        script = [branch for branch, _ in taken]
        script[-1] += 1


class ExactNoise:
    """The noise of one step, by enumeration. Holds the rules to asking for each random number once."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._asked: set[Any] = set()

    def target(self, row_V: Vector, depth: int) -> int:
        self._once("target", depth)
        return self._chance.choose(row_V)

    def accept(self, probability: Any, depth: int, candidate: int) -> bool:
        self._once("accept", depth, candidate)
        probability = min(Fraction(probability), Fraction(1))
        return self._chance.choose((1 - probability, probability)) == 1

    def draw(self, weights_V: Vector, depth: int) -> int:
        self._once("draw", depth)
        return self._chance.choose(weights_V)

    def _once(self, *key: Any) -> None:
        assert key not in self._asked
        self._asked.add(key)


class Group(NamedTuple):
    """Siblings drawn in one way from one distribution, with what hangs below each."""

    drawn: Drawn
    below: tuple["Tree", ...]


Tree = tuple[Group, ...]


def levels(drawn: Drawn, *widths: int) -> Tree:
    """The tree with widths[d] children at each node of depth d."""
    return (Group(drawn, (levels(drawn, *widths[1:]),) * widths[0]),) if widths else ()


@dataclass(frozen=True)
class World:
    """A target and drafters, each a random distribution for every prefix; now and then q equals p.

    `zeros`: how often a token has no probability. `stops(prefix)`: drafters end there, before the token after `prefix`.
    """

    seed: int
    vocab: int = 3
    zeros: float = 0.0
    stops: Callable[[tuple[int, ...]], bool] = field(default=lambda prefix: False)

    @functools.cache  # noqa: B019
    def p(self, prefix: tuple[int, ...]) -> Vector:
        return self._random("target", prefix)

    @functools.cache  # noqa: B019
    def q(self, prefix: tuple[int, ...], drafter: int) -> Vector:
        source = random.Random(f"{self.seed} same {prefix} {drafter}")
        return self.p(prefix) if source.random() < 0.15 else self._random(f"drafter {drafter}", prefix)

    def chosen(self, prefix: tuple[int, ...], drafter: int) -> int:
        return random.Random(f"{self.seed} chosen {prefix} {drafter}").randrange(self.vocab)

    def _random(self, name: str, prefix: tuple[int, ...]) -> Vector:
        source = random.Random(f"{self.seed} {name} {prefix}")
        weights = [0]
        while sum(weights) == 0:
            weights = [source.randint(1, 7) * (source.random() >= self.zeros) for _ in range(self.vocab)]
        return np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)

    def draft(self, tree: Tree, chance: Chance, prefix: tuple[int, ...] = ()) -> Draft:
        """A draft after `prefix`, its sampled tokens drawn by `chance`; ends where the support of q does."""
        nodes: list[tuple[int, int, Drawn, int]] = []  # token, parent, drawn, row of q
        rows: dict[tuple[tuple[int, ...], int], int] = {}

        def grow(tree: Tree, parent: int, prefix: tuple[int, ...]) -> None:
            if self.stops(prefix):
                return
            for drafter, group in enumerate(tree):
                row = -1 if group.drawn is Drawn.CHOSEN else rows.setdefault((prefix, drafter), len(rows))
                left = self.q(prefix, drafter).copy()
                for number, below in enumerate(group.below):
                    if group.drawn is Drawn.CHOSEN:
                        token = (self.chosen(prefix, drafter) + number) % self.vocab
                    elif not left.any():
                        break
                    else:
                        token = chance.choose(left)
                    if group.drawn is Drawn.WITHOUT_REPLACEMENT:
                        left[token] = 0
                    nodes.append((token, parent, group.drawn, row))
                    grow(below, len(nodes) - 1, (*prefix, token))

        grow(tree, -1, prefix)
        q = np.array([self.q(*key) for key in rows], dtype=object).reshape(len(rows), self.vocab)
        tokens, parents, drawn, q_row = zip(*nodes, strict=True) if nodes else ((), (), (), ())
        return Draft(tokens, parents, drawn, q, q_row)  # type: ignore[arg-type]

    def step(self, tree: Tree, rule: str, chance: Chance, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The tokens that one step emits after `prefix`."""
        draft = self.draft(tree, chance, prefix)

        def row(node: int) -> Vector:
            return self.p(prefix + tuple(draft.tokens[n] for n in draft.path(node)))

        path, token = verify(draft, row, rule, ExactNoise(chance))
        assert path == (draft.path(path[-1]) if path else [])
        return (*(draft.tokens[node] for node in path), token)

    def sequences(self, length: int) -> dict[tuple[int, ...], Fraction]:
        """The target's own law of the first `length` tokens."""
        return self.extended({(): Fraction(1)}, length)

    def extended(self, emitted: dict[tuple[int, ...], Fraction], length: int) -> dict[tuple[int, ...], Fraction]:
        """The law of the first `length` tokens when the target goes on alone after what was emitted."""
        found: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        rest = list(emitted.items())
        while rest:
            prefix, probability = rest.pop()
            if len(prefix) >= length:
                found[prefix[:length]] += probability
            else:
                rest += [((*prefix, token), probability * p) for token, p in enumerate(self.p(prefix)) if p > 0]
        return dict(found)


def fractions(*weights: int) -> np.ndarray:
    return np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)


def matrix(*rows: np.ndarray) -> np.ndarray:
    return np.array(rows, dtype=object)


def chain(tokens: list[int], q: np.ndarray) -> Draft:
    """Tokens drawn one after another from the same q."""
    return Draft.chain(tokens, CHAIN, q=matrix(*[q] * len(tokens)))


def deviation(counts: Counter, expected: dict) -> float:
    """How far chi-squared lies above its mean, in standard deviations (Wilson and Hilferty 1931). 5: one in 3 million."""
    assert counts.keys() <= expected.keys()
    total, degrees = sum(counts.values()), len(expected) - 1
    chi_squared = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    spread = 2 / (9 * degrees)
    return ((chi_squared / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def joint(*laws: Iterable[float]) -> dict:
    """The law of independent draws."""
    cells = itertools.product(*(enumerate(law) for law in laws))
    return {tuple(v for v, _ in cell): math.prod(p for _, p in cell) for cell in cells}


CHOSEN, CHAIN, WITH, WITHOUT = Drawn.CHOSEN, Drawn.CHAIN, Drawn.WITH_REPLACEMENT, Drawn.WITHOUT_REPLACEMENT
LEAF: Tree = ()

CHAINS = {f"{drawn.value} {gamma}": levels(drawn, *[1] * gamma) for drawn in (CHAIN, CHOSEN) for gamma in (1, 2, 3)}
TREES = {
    f"{drawn.value} {widths}": levels(drawn, *widths)
    for drawn in (CHOSEN, WITH, WITHOUT)
    for widths in ((2,), (3,), (1, 2), (2, 1), (2, 2))
}
UNBALANCED = {
    "first child is a leaf": (Group(WITHOUT, (LEAF, levels(WITHOUT, 2))),),
    "second child is a leaf": (Group(WITHOUT, (levels(CHAIN, 1, 1), LEAF)),),
    "chosen below drawn": (Group(WITHOUT, (levels(CHOSEN, 2), levels(CHAIN, 1))),),
    "drawn below chosen": (Group(CHOSEN, (levels(WITHOUT, 2), levels(WITH, 2))),),
}
MERGED = {
    "two chosen": (Group(CHOSEN, (levels(CHOSEN, 1),)), Group(CHOSEN, (levels(CHOSEN, 2),))),
    "two chains": (Group(CHAIN, (levels(CHAIN, 1),)), Group(CHAIN, (levels(CHAIN, 1),))),
    "chosen, chain": (Group(CHOSEN, (levels(CHOSEN, 1),)), Group(CHAIN, (levels(CHAIN, 1),))),
    "chain, chosen": (Group(CHAIN, (levels(CHAIN, 1),)), Group(CHOSEN, (levels(CHOSEN, 1),))),
    "chosen, without": (Group(CHOSEN, (levels(CHAIN, 1),)), Group(WITHOUT, (levels(CHAIN, 1), LEAF))),
    "without, with": (Group(WITHOUT, (LEAF, levels(CHAIN, 1))), Group(WITH, (LEAF, LEAF))),
    "three kinds": (Group(WITH, (LEAF, LEAF)), Group(CHOSEN, (levels(CHOSEN, 1),)), Group(CHAIN, (LEAF,))),
}
SHAPES = CHAINS | TREES | UNBALANCED | MERGED
