"""Every rule emits exactly the target's distribution: the production code, enumerated in fractions.

`laws.World` makes targets and drafters that differ from prefix to prefix; a step's output is extended by the target
alone to a common length, and the joint law of those tokens must be the target's, to the last digit.
"""

from fractions import Fraction as F

import pytest

from draftwise.types import VERIFY_RULES, Draft, Drawn
from draftwise.verify import verify
from laws import MERGED, SHAPES, Chance, ExactNoise, Tree, World, chain, fractions, law, matrix

CHOSEN, CHAIN, WITH, WITHOUT = Drawn.CHOSEN, Drawn.CHAIN, Drawn.WITH_REPLACEMENT, Drawn.WITHOUT_REPLACEMENT

TWO_STEPS = ("chain 2", "chosen (2, 1)", "with replacement (2,)", "without replacement (3,)", "chosen, chain")
WIDE = {"with replacement (2, 2)", "without, with"}  # thousands of outcomes each


def depth(tree: Tree) -> int:
    return max((1 + depth(below) for group in tree for below in group.below), default=0)


def assert_lossless(world: World, tree: Tree, rule: str, *, steps: int = 1) -> None:
    def run(chance: Chance) -> tuple[int, ...]:
        emitted: tuple[int, ...] = ()
        for _ in range(steps):
            emitted += world.step(tree, rule, chance, emitted)
        return emitted

    length = steps * (depth(tree) + 1)
    assert world.extended(law(run), length) == world.sequences(length)


def accepted(world: World, tree: Tree, rule: str) -> F:
    """The expected number of accepted nodes."""
    emitted = law(lambda chance: world.step(tree, rule, chance))
    return sum((len(tokens) - 1) * probability for tokens, probability in emitted.items())  # type: ignore[return-value]


@pytest.mark.parametrize("rule", VERIFY_RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_step_has_the_law_of_the_target(shape: str, rule: str) -> None:
    for seed in range(2 if shape in WIDE else 5):
        assert_lossless(World(seed, vocab=2), SHAPES[shape], rule)
        assert_lossless(World(seed, vocab=3, zeros=0.35), SHAPES[shape], rule)
    if shape not in WIDE:
        assert_lossless(World(0, vocab=3), SHAPES[shape], rule)
        assert_lossless(World(1, vocab=4, zeros=0.5), SHAPES[shape], rule)


@pytest.mark.parametrize("rule", VERIFY_RULES)
@pytest.mark.parametrize(
    "shape", ["chain 2", "chosen (2, 1)", "with replacement (2,)", "without replacement (3,)", "chosen, chain"]
)
def test_two_steps_in_a_row_have_the_law_of_the_target(shape: str, rule: str) -> None:
    assert_lossless(World(0, vocab=2), SHAPES[shape], rule, steps=2)
    assert_lossless(World(1, vocab=3, zeros=0.4), SHAPES[shape], rule, steps=2)


@pytest.mark.parametrize("rule", VERIFY_RULES)
@pytest.mark.parametrize("shape", ["chain 3", "with replacement (2, 1)", "without replacement (2, 2)", "chosen, chain"])
def test_a_draft_may_end_by_what_precedes_a_token(shape: str, rule: str) -> None:
    """Here after a token that was kept, whatever its value."""
    for seed in range(2):
        world = World(seed, vocab=2, stops=lambda prefix: sum(prefix) % 2 == 1)
        assert_lossless(world, SHAPES[shape], rule)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_dropping_a_token_for_its_own_value_is_biased(rule: str) -> None:
    """Why the rule above matters: the second of two tokens is never submitted, and comes half as often as it should."""
    p, q = fractions(7, 3), fractions(5, 5)

    def run(chance: Chance) -> int:
        token = chance.choose(q)
        draft = chain([token], q) if token == 0 else Draft()
        verdict = verify(draft, lambda node: p, rule, ExactNoise(chance))
        return token if verdict.path else verdict.token

    assert law(run) == {0: F(85, 100), 1: F(15, 100)}


def test_a_chosen_token_may_give_way_to_earlier_siblings_only() -> None:
    """Merging drafters: a chosen token left out because a sampled one equals it must stand after that one."""
    p, q = fractions(2, 3, 5), fractions(6, 3, 1)

    def run(chance: Chance, *, chosen_first: bool) -> int:
        drawn = chance.choose(q)
        if drawn == 1:
            draft = chain([1], q)
        elif chosen_first:
            draft = Draft((1, drawn), (-1, -1), (CHOSEN, CHAIN), matrix(q), (-1, 0))
        else:
            draft = Draft((drawn, 1), (-1, -1), (CHAIN, CHOSEN), matrix(q), (0, -1))
        verdict = verify(draft, lambda node: p, "rejection", ExactNoise(chance))
        return draft.tokens[verdict.path[0]] if verdict.path else verdict.token

    target = dict(enumerate(p))
    assert law(lambda chance: run(chance, chosen_first=False)) == target
    assert law(lambda chance: run(chance, chosen_first=True)) != target


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in MERGED])
def test_block_accepts_at_least_as_much_as_rejection(shape: str) -> None:
    for seed in range(1 if shape in WIDE else 3):
        world = World(seed, vocab=2, zeros=0.1)
        assert accepted(world, SHAPES[shape], "block") >= accepted(world, SHAPES[shape], "rejection")


def test_block_gains_on_a_chain_what_the_paper_says() -> None:
    """Sun et al. 2024, section 1: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens."""
    p, q = fractions(1, 2), fractions(2, 1)

    def count(rule: str) -> F:
        def run(chance: Chance) -> int:
            draft = chain([chance.choose(q), chance.choose(q)], q)
            return len(verify(draft, lambda node: p, rule, ExactNoise(chance)).path)

        return sum(length * probability for length, probability in law(run).items())  # type: ignore[return-value]

    assert count("rejection") == F(10, 9)
    assert count("block") == F(11, 9)


@pytest.mark.parametrize(
    ("drawn", "rule", "by_width"),
    [
        (WITHOUT, "match", ["0.29", "1717/2800", "1"]),
        (WITH, "rejection", ["0.7", "0.76", "0.808"]),
        (WITHOUT, "rejection", ["0.7", "0.82", "1"]),
        (WITHOUT, "block", ["0.7", "0.82", "1"]),
        (CHOSEN, "rejection", ["0.5", "0.8", "1"]),
        (CHOSEN, "match", ["0.5", "0.8", "1"]),
    ],
)
def test_acceptance_at_one_node(drawn: Drawn, rule: str, by_width: list[str]) -> None:
    """p = (.5, .3, .2), q = (.2, .3, .5); chosen children are the likeliest of p. By 1, 2 and 3 children."""
    p, q = fractions(5, 3, 2), fractions(2, 3, 5)

    def run(chance: Chance, width: int) -> bool:
        left, tokens = q.copy(), []
        for number in range(width):
            tokens.append(number if drawn is CHOSEN else chance.choose(left))
            if drawn is WITHOUT:
                left[tokens[-1]] = 0
        draft = Draft(tuple(tokens), (-1,) * width, (drawn,) * width, matrix(q), (0,) * width)
        return bool(verify(draft, lambda node: p, rule, ExactNoise(chance)).path)

    for width, expected in enumerate(by_width, start=1):
        assert law(lambda chance, width=width: run(chance, width))[True] == F(expected)  # type: ignore[misc]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_worked_example(rule: str) -> None:
    """The example of docs/lossless.md."""
    q, p = fractions(50, 20, 20, 10, 0), fractions(40, 10, 30, 15, 5)

    def run(chance: Chance) -> tuple[int, bool, int]:
        drawn = chance.choose(q)
        path, token = verify(chain([drawn], q), lambda node: p, rule, ExactNoise(chance))
        return drawn, bool(path), drawn if path else token

    joint = law(run)
    acceptance = [sum(w for (drawn, ok, _), w in joint.items() if drawn == token and ok) / q[token] for token in range(4)]
    assert acceptance == [F("0.8"), F("0.5"), 1, 1]
    rejected = sum(w for (_, ok, _), w in joint.items() if not ok)
    assert rejected == F("0.2")
    residual = [sum(w for (_, ok, out), w in joint.items() if not ok and out == token) / rejected for token in range(5)]
    assert residual == [0, 0, F("0.5"), F("0.25"), F("0.25")]
    assert [sum(w for (_, _, out), w in joint.items() if out == token) for token in range(5)] == list(p)
