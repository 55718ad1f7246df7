"""Where rules of verification go wrong in practice: u = 0, empty residuals, zeros, duplicates, mislabelled draws, rounding."""

import random
from collections.abc import Callable
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwise import sampling
from draftwise.sampling import Noise
from draftwise.types import VERIFY_RULES, Draft, Drawn
from draftwise.verify import check_rule, verify
from laws import SHAPES, Chance, ExactNoise, World, chain, fractions, law

RATIO_RULES = ("rejection", "block")


class Fixed(Noise):
    """Production noise whose accept uniforms are all `u`."""

    def __init__(self, u: float, seed: int = 0) -> None:
        super().__init__(seed, 0)
        self.u = u

    def _uniform(self, depth: int, candidate: int) -> float:
        return self.u


JUST_BELOW_1 = 1 - 2.0**-53


def rows(*values: list[float]) -> Callable[[int], Tensor]:
    """row(node) out of a list: first the row after the last committed token."""
    made = [torch.tensor(row) for row in values]
    return lambda node: made[node + 1]


def drawn_chain(tokens: list[int], *q: list[float]) -> Draft:
    return Draft.chain(tokens, Drawn.CHAIN, q=torch.tensor(q))


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_uniform_of_zero_does_not_accept_what_the_target_forbids(rule: str) -> None:
    p = [0.0, 0.5, 0.5]
    for draft in (drawn_chain([0], [0.8, 0.1, 0.1]), Draft.chain([0])):
        path, token = verify(draft, rows(p, p), rule, Fixed(0.0))
        assert path == [] and token in (1, 2)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_uniform_just_below_one_accepts_what_is_certain(rule: str) -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    assert verify(drawn_chain([0], q), rows(p, p), rule, Fixed(JUST_BELOW_1)).path == [0]
    assert verify(drawn_chain([2], q), rows(p, p), rule, Fixed(JUST_BELOW_1)).path == [0]
    assert verify(drawn_chain([1], q), rows(p, p), rule, Fixed(JUST_BELOW_1)) == ([], 0)


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("u", [0.0, 0.5, JUST_BELOW_1])
def test_a_token_that_q_says_was_never_drawn_is_rejected(rule: str, u: float) -> None:
    p = [0.5, 0.5, 0.0]
    path, token = verify(drawn_chain([0], [0.0, 0.5, 0.5]), rows(p, p), rule, Fixed(u))
    assert (path, token) == ([], 0)  # all that [p - q]+ holds


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_an_empty_residual_falls_back_to_the_target(rule: str) -> None:
    """q covers p up to rounding, and the token is rejected all the same: then p decides, not token 0."""
    p, q = [0.0, 0.0, 1.0 - 2e-8, 2e-8], [0.0, 0.0, 1.0, 2e-8]
    drafts = [drawn_chain([1], q), drawn_chain([3], [0.0, 0.0, 1.0, 3e-8])]
    for draft in drafts:
        path, token = verify(draft, rows(p, p), rule, Fixed(JUST_BELOW_1))
        assert (path, token) == ([], 2)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_siblings_left_without_support_are_rejected(rule: str) -> None:
    p = [0.25, 0.25, 0.5]
    draft = Draft((0, 0), (-1, -1), (Drawn.WITHOUT_REPLACEMENT,) * 2, torch.tensor([[1.0, 0.0, 0.0]]), (0, 0))
    path, token = verify(draft, rows(p, p, p), rule, Fixed(0.9))
    assert path == [] and token in (1, 2)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_broken_q_accepts_nothing(rule: str) -> None:
    p = [0.5, 0.5]
    path, token = verify(drawn_chain([0], [float("nan")] * 2), rows(p, p), rule, Fixed(0.0))
    assert path == [] and token in (0, 1)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_equal_rows_with_zeros_accept_everything(rule: str) -> None:
    p = [0.0, 0.7, 0.0, 0.3]
    path, token = verify(drawn_chain([1, 3, 1], p, p, p), rows(p, p, p, p), rule, Fixed(JUST_BELOW_1))
    assert path == [0, 1, 2] and token in (1, 3)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_residuals_are_drawn_in_double_precision(rule: str) -> None:
    seen = []

    class Watching(Fixed):
        def draw(self, weights_V: Tensor, depth: int) -> int:
            seen.append(weights_V.dtype)
            return super().draw(weights_V, depth)

    verify(drawn_chain([0], [0.9, 0.1]), rows([0.1, 0.9], [0.5, 0.5]), rule, Watching(0.9))
    assert seen == [torch.float64]


@pytest.mark.parametrize("bits", [0, -1])
def test_extreme_hashes_draw_a_token_of_the_support(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_hashes", lambda key, ids: torch.full_like(ids, bits))
    assert Noise(0, 0).target(torch.tensor([0.0, 0.5, 0.5]), 0) == 1
    assert Noise(0, 0).draw(torch.tensor([0.0, 0.25, 0.75]), 0) == 2


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_chosen_token_called_drawn_is_not_lossless(rule: str) -> None:
    """Why kinds matter: the draft's likeliest token, weighed as if it had been sampled from softmax."""
    p, q = fractions(5, 3, 2), fractions(6, 3, 1)

    def run(chance: Chance, draft: Draft) -> int:
        verdict = verify(draft, lambda node: p, rule, ExactNoise(chance))
        return draft.tokens[verdict.path[0]] if verdict.path else verdict.token

    assert law(lambda chance: run(chance, Draft.chain([0]))) == dict(enumerate(p))
    assert law(lambda chance: run(chance, chain([0], q))) == {0: F(5, 6), 2: F(1, 6)}


class Scripted:
    """The same uniforms for tensors and fractions; draws by the inverse of the cumulative sum."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _uniform(self, *key: Any) -> float:
        return random.Random(f"{self.seed} {key}").random()

    def accept(self, probability: Any, depth: int, candidate: int) -> bool:
        return self._uniform("accept", depth, candidate) < probability

    def draw(self, weights_V: Any, depth: int) -> int:
        weights = [float(w) for w in weights_V]
        return random.Random(f"{self.seed} draw {depth}").choices(range(len(weights)), weights)[0]

    def target(self, row_V: Any, depth: int) -> int:
        return self.draw(row_V, depth)


@pytest.mark.parametrize("rule", VERIFY_RULES)
def test_tensors_decide_as_fractions_do(rule: str) -> None:
    for trial, (shape, tree) in enumerate(sorted(SHAPES.items()) * 5):
        world = World(trial, vocab=4, zeros=0.2)
        exact = world.draft(tree, Sampled(trial))
        draft = Draft(exact.tokens, exact.parents, exact.drawn, torch.tensor(np.asarray(exact.q, float)).float(), exact.q_row)

        def row(node: int, world: World = world, draft: Draft = draft) -> np.ndarray:
            return world.p(tuple(draft.tokens[n] for n in draft.path(node)))

        verdicts = [
            verify(exact, row, rule, Scripted(trial)),
            verify(draft, lambda node, row=row: torch.tensor(row(node).astype(float)).float(), rule, Scripted(trial)),
        ]
        assert verdicts[0] == verdicts[1], shape


class Sampled(Chance):
    """One random run."""

    def __init__(self, seed: int) -> None:
        super().__init__([])
        self._source = random.Random(seed)

    def choose(self, weights: Any) -> int:
        weights = [float(w) for w in weights]
        return self._source.choices(range(len(weights)), weights)[0]


@pytest.mark.parametrize("rule", VERIFY_RULES)
def test_rows_are_asked_for_once_and_only_where_the_walk_goes(rule: str) -> None:
    draft = Draft((0, 1, 0, 1), (-1, -1, 0, 1), (Drawn.CHOSEN,) * 4)
    asked = []

    def row(node: int) -> Tensor:
        asked.append(node)
        return torch.tensor([0.0, 1.0])

    assert verify(draft, row, rule, Noise(0, 0)) == ([1, 3], 1)
    # from the leaves up, the first branch is weighed by its parent's row alone
    assert asked == ([-1, 0, 1, 3] if rule == "block" else [-1, 1, 3])


@pytest.mark.parametrize("rule", VERIFY_RULES)
def test_equal_siblings_are_one_and_the_deepest_continuation_counts(rule: str) -> None:
    """As when a window and its n-grams agree for a while: 5 6, 5 7 8 and 5 7 9 under three children of one token."""
    tokens, parents = (5, 6, 5, 7, 8, 5, 7, 9), (-1, 0, -1, 2, 3, -1, 5, 6)
    draft = Draft(tokens, parents, (Drawn.CHOSEN,) * 8)
    text = [5, 7, 9, 1]

    def row(node: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(text[len(draft.path(node))]), 10).float()

    assert verify(draft, row, rule, Noise(0, 0)) == ([5, 6, 7], 1)
    text[2] = 8
    assert verify(draft, row, rule, Noise(0, 0)) == ([2, 3, 4], 1)
    text[1:3] = [6, 1]
    assert verify(draft, row, rule, Noise(0, 0)) == ([0, 1], 1)


def table(prefix: tuple[int, ...]) -> Tensor:
    """The row of a target over six tokens that remembers three."""
    generator = torch.Generator().manual_seed(hash(prefix[-3:]) % 2**31)
    return torch.softmax(2 * torch.randn(6, generator=generator), 0)


def plain(seed: int, length: int) -> list[int]:
    text: list[int] = []
    while len(text) < length:
        text.append(Noise(seed, len(text)).target(table(tuple(text)), 0))
    return text


def adversaries(truth: list[int], source: random.Random) -> dict[str, Callable[[int], Draft]]:
    """Drafts by position, for a target that will say `truth`."""

    def tree(place: int) -> Draft:
        parents = tuple(source.randrange(-1, node) for node in range(12))
        return Draft(tuple(source.randrange(6) for _ in parents), parents, (source.choice(list(Drawn)),) * 12)

    def right_but_for_the_last(place: int) -> Draft:
        tokens = truth[place : place + 4]
        return Draft.chain([*tokens[:-1], (tokens[-1] + 1) % 6])

    return {
        "none": lambda place: Draft(),
        "right": lambda place: Draft.chain(truth[place : place + 5]),
        "wrong": lambda place: Draft.chain([(token + 1) % 6 for token in truth[place : place + 5]]),
        "right but for the last": right_but_for_the_last,
        "one token for ever": lambda place: Draft.chain([3] * 8, Drawn.CHAIN),
        "all siblings, twice": lambda place: Draft(tuple(range(6)) * 2, (-1,) * 12, (Drawn.WITH_REPLACEMENT,) * 12),
        "random trees": tree,
        "anything": lambda place: source.choice([tree(place), Draft(), Draft.chain(truth[place : place + 2])]),
    }


@pytest.mark.parametrize("name", adversaries([0], random.Random(0)))
def test_match_says_what_plain_sampling_says_whatever_is_drafted(name: str) -> None:
    for seed in range(3):
        truth = plain(seed, 140)
        draw = adversaries(truth, random.Random(seed))[name]
        text: list[int] = []
        steps = 0
        while len(text) < 120:
            draft = draw(len(text))

            def row(node: int, draft: Draft = draft, before: tuple[int, ...] = tuple(text)) -> Tensor:
                return table((*before, *(draft.tokens[n] for n in draft.path(node))))

            path, token = verify(draft, row, "match", Noise(seed, len(text)))
            assert path == (draft.path(path[-1]) if path else [])
            text += [*(draft.tokens[node] for node in path), token]
            steps += 1
        assert text == truth[: len(text)]
        if name in ("right", "none", "wrong", "right but for the last"):
            assert steps == {"right": 20, "none": 120, "wrong": 120, "right but for the last": 30}[name]


def test_shared_noise_is_refused_where_a_ratio_decides() -> None:
    draft = Draft.chain([1], Drawn.SHARED_NOISE)
    check_rule("match", draft)
    for rule in RATIO_RULES:
        with pytest.raises(
            ValueError, match=f"verify='{rule}' cannot verify node 0.*use verify='match', or a draft that is chosen"
        ):
            verify(draft, rows([0.5, 0.5]), rule, Noise(0, 0))


def test_drawn_tokens_need_their_distribution() -> None:
    for rule in RATIO_RULES:
        for draft in (Draft.chain([1], Drawn.CHAIN), Draft((1,), (-1,), (Drawn.CHAIN,), torch.ones(1, 2), (-1,))):
            with pytest.raises(ValueError, match=f"verify='{rule}' needs the q that node 0 was drawn from"):
                check_rule(rule, draft)
        check_rule(rule, Draft.chain([1]))


def test_two_children_of_one_chain_are_refused() -> None:
    q = torch.full((2, 2), 0.5)
    draft = Draft((0, 1), (-1, -1), (Drawn.CHAIN,) * 2, q, (0, 0))
    for rule in RATIO_RULES:
        with pytest.raises(ValueError, match="node 1 is not an only child"):
            check_rule(rule, draft)
        check_rule(rule, Draft((0, 1), (-1, -1), (Drawn.CHAIN,) * 2, q, (0, 1)))  # two drafters'


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="verify is 'typical'; it must be one of: match, rejection, block"):
        verify(Draft(), rows([1.0]), "typical", Noise(0, 0))
