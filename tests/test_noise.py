"""The keyed noise: its bits, its law, its independence, and two steps in a row through the keys that production uses."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from draftwise import kernels
from draftwise.kernels import loader
from draftwise.sampling import (
    History,
    Noise,
    Purpose,
    _arrivals,
    _first_arrivals,
    _hashes,
    _key,
    distribution,
    likeliest,
    shared_arrivals,
    target_token,
)
from draftwise.types import Draft, Drawn, SamplingParams
from draftwise.verify import verify
from laws import deviation, joint
from libraries import OTHERS

P = [0.4, 0.3, 0.2, 0.1]
ROW = torch.tensor(P)


def test_the_integers_are_splitmix64() -> None:
    """The first outputs of the published generator for seed 0 (Steele, Lea and Flood 2014)."""
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [z % 2**64 for z in _hashes(0, torch.arange(3)).tolist()] == words
    assert _key(0) == words[0]


def test_a_seed_means_the_same_tokens_for_ever() -> None:
    """Frozen: a change here breaks the promise that a seed gives the same text from version to version."""
    assert [Noise(1, 0).target(ROW, depth) for depth in range(16)] == [1, 2, 0, 2, 0, 1, 0, 0, 1, 2, 3, 2, 2, 3, 1, 1]
    tops = [Noise(seed, 7).match_top(ROW, 0, 3) for seed in (0, -1, 2**63, 2**64 - 1)]
    assert tops == [[2, 1, 3], [0, 2, 1], [0, 3, 1], [0, 2, 1]]


def arrivals_in_full(weights: list[float], key: int, count: int) -> list[int]:
    """The definition, without pruning or tensors: exponential arrivals at each token's rate, ties to the lowest id."""
    times = []
    for token, weight in enumerate(weights):
        if weight > 0:
            z = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
            w = (((z ^ z >> 31) >> 12) + 0.5) / 2**52
            times.append((-math.log1p(-w) / weight, token))
    return [token for _, token in sorted(times)[:count]]


@pytest.mark.parametrize("vocab", [1, 2, 7, 500])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 60.0])
def test_pruning_changes_nothing(vocab: int, spread: float) -> None:
    source = random.Random(vocab)
    for trial in range(30):
        weights = [math.exp(source.gauss(0, spread)) * (source.random() > 0.3) for _ in range(vocab)]
        if not any(weights):
            weights[0] = 1.0
        row_V = torch.tensor(weights, dtype=torch.float64)
        for count in (1, 2, 5):
            assert _first_arrivals(row_V, trial, count) == arrivals_in_full(weights, trial, count)


def test_pruning_changes_nothing_on_a_large_vocabulary() -> None:
    for trial, spread in enumerate((0.0, 2.0, 5.0)):
        row_V = torch.softmax(torch.randn(60_000, generator=torch.Generator().manual_seed(trial)) * spread, 0)
        assert _first_arrivals(row_V, trial, 1) == arrivals_in_full(row_V.tolist(), trial, 1)


@pytest.mark.parametrize("library", [pytest.param(loader.library, id="the best"), *OTHERS])
def test_the_compiled_draw_finds_what_torch_finds(library: Callable[[], CDLL | None]) -> None:
    """Flat, usual and spiked weights with zeros, whole and as a few tokens out of order; ties go to the lowest token."""
    lib = library()
    assert lib is not None
    random_V = torch.Generator().manual_seed(0)
    for trial in range(300):
        vocab = (1, 3, 255, 256, 257, 5000)[trial % 6]
        weights = torch.exp(torch.randn(vocab, generator=random_V) * (0.0, 1.0, 8.0, 40.0)[trial % 4])
        weights[torch.rand(vocab, generator=random_V) < 0.2] = 0.0
        weights[trial % vocab] = 1.0
        tokens = torch.randperm(70_000, generator=random_V)[:vocab]
        for ids, count in itertools.product((None, tokens), (1, 2, 7, 300)):
            found, expected = kernels.arrivals(weights, ids, trial, count, lib=lib), _arrivals(weights, trial, count, ids)
            assert found is not None
            assert [token for _, token in found] == [token for _, token in expected]
            if len(expected) > 1:
                assert [time for time, _ in found] == pytest.approx([time for time, _ in expected], rel=1e-12)
    ((_, twin),) = kernels.arrivals(torch.ones(4), torch.tensor([9, 5, 5, 9]), 1, lib=lib) or [(0.0, -1)]
    assert twin in (5, 9)
    assert kernels.arrivals(weights.double(), None, 0, lib=lib) is None, "left to torch"


@pytest.mark.parametrize("library", [pytest.param(loader.library, id="the best"), *OTHERS])
def test_the_compiled_draw_from_logits_is_the_one_from_their_weights(library: Callable[[], CDLL | None]) -> None:
    lib = library()
    assert lib is not None
    random_V = torch.Generator().manual_seed(0)
    for trial in range(300):
        logits_V = torch.randn((1, 3, 255, 256, 257, 5000, 20_000)[trial % 7], generator=random_V) * (0.1, 3.0, 30.0)[trial % 3]
        logits_V[torch.rand(len(logits_V), generator=random_V) < 0.2] = -math.inf
        logits_V[trial % len(logits_V)] = 1.0
        temperature = (0.3, 1.0, 2.0)[trial % 3]
        weights = ((logits_V - logits_V.max()).double() / temperature).exp()
        for count in (1, 5):
            found = kernels.draw(logits_V, temperature, trial, count, lib=lib)
            assert found is not None
            assert [token for _, token in found] == [token for _, token in _arrivals(weights, trial, count)]
        assert kernels.draw(logits_V, 0.0, trial, 3, lib=lib) == [(0.0, int(logits_V.argmax()))]
    assert kernels.draw(torch.tensor([1.0, 3.0, 3.0]), 0.0, 0, lib=lib) == [(0.0, 1)], "ties go to the lowest token"
    for strange in ([math.nan, 0.0], [0.0, math.inf], [-math.inf, -math.inf]):
        assert kernels.draw(torch.tensor(strange * 20), 1.0, 0, lib=lib) is None


def test_a_long_row_is_drawn_from_by_all_threads_as_by_one() -> None:
    lib = loader.library()
    assert lib is not None
    random_V, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    rows = [torch.randn(60_000, generator=random_V) * size for size in (0.1, 3.0, 30.0)]
    try:
        drawn = {}
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            drawn[threads] = [kernels.draw(row_V, 0.8, key, 4, lib=lib) for row_V in rows for key in range(20)]
        assert drawn[1] == drawn[2] == drawn[3]
        weights = ((rows[0] - rows[0].max()).double() / 0.8).exp()
        assert [token for _, token in drawn[1][0]] == [token for _, token in _arrivals(weights, 0, 4)]
    finally:
        torch.set_num_threads(before)
    long_V = torch.zeros(60_000)
    assert kernels.draw(long_V, 0.0, 0, lib=lib) == [(0.0, 0)]
    for place in (59_999, 0, 31_000):
        long_V[place] = 1.0
        assert kernels.draw(long_V, 0.0, 0, lib=lib) == [(0.0, place)]
        long_V[place] = math.nan
        assert kernels.draw(long_V, 0.0, 0, lib=lib) is None and kernels.draw(long_V, 1.0, 0, lib=lib) is None
        long_V[place] = 0.5


@pytest.mark.parametrize("library", [pytest.param(loader.library, id="the best"), *OTHERS])
def test_the_compiled_largest_are_those_of_a_sort(library: Callable[[], CDLL | None]) -> None:
    """Random, tied, rising logits and some that are forbidden; then the sums, which chances are taken by."""
    lib = library()
    assert lib is not None
    random_NV = torch.Generator().manual_seed(0)
    for trial in range(60):
        vocab = (1, 3, 255, 256, 257, 5000)[trial % 6]
        logits_NV = torch.randn(3, vocab, generator=random_NV) * 4
        if trial % 4 == 1:
            logits_NV = logits_NV.round()
        if trial % 4 == 2:
            logits_NV = logits_NV.sort(-1).values
        logits_NV[:, 1:][torch.rand(3, vocab - 1, generator=random_NV) < 0.2] = -math.inf
        for count in (1, 4, 300):
            values, ids = kernels.largest(logits_NV, count, lib=lib)
            order = logits_NV.sort(dim=-1, descending=True, stable=True)
            assert values.equal(order.values[:, :count])
            assert ids.equal(order.indices[:, :count])
            found = kernels.likeliest(logits_NV[0], count, lib=lib)
            assert found is not None
            possible = ids[0][values[0] > -math.inf].tolist()
            assert [token for token, _ in found] == possible
            expected_V = logits_NV[0].double().softmax(0)
            assert [chance for _, chance in found] == pytest.approx(expected_V[possible].tolist(), rel=1e-5)
    odd = torch.tensor([[1.0, math.inf, 0.0]])
    assert kernels.largest(odd, 1, lib=lib)[1].tolist() == [[1]], "left to torch"
    assert kernels.likeliest(odd[0], 1, lib=lib) is None


def test_a_draft_that_shares_the_noise_looks_for_the_target_token() -> None:
    """With the target's own logits its first guess is the target's token, whatever truncates, but for the far tail."""
    history = History((), (3,))
    for params in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05, "frequency_penalty": 0.5}, {"temperature": 0}):
        params = SamplingParams(**{"temperature": 0.8, **params})
        for seed in range(60):
            logits_V = torch.randn(700, generator=torch.Generator().manual_seed(seed)) * 3
            noise = Noise(seed, 3)
            arrivals = shared_arrivals(logits_V, params, history, noise, 1, 4)
            assert arrivals[0][1] == target_token(logits_V, params, history, noise, 1)
            assert arrivals == sorted(arrivals)


def test_the_likeliest_come_with_their_probabilities() -> None:
    params = SamplingParams(logit_bias={0: 5.0}, bad_words=((2,),))
    tokens, chances = likeliest(torch.tensor([0.0, 1.0, 9.0, 3.0]), params, History(), 4)
    expected_V = torch.tensor([5.0, 1.0, -math.inf, 3.0]).softmax(0)
    assert tokens == [0, 3, 1]
    assert chances == pytest.approx(expected_V[tokens].tolist(), rel=1e-5)
    with pytest.raises(ValueError, match="no token can follow"):
        likeliest(torch.full((3,), -math.inf), params, History(), 2)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {}, {"temperature": 0}])
def test_the_target_token_is_drawn_from_the_distribution(params: dict) -> None:
    params = SamplingParams(**{"temperature": 0.8, **params})
    for seed in range(200):
        logits_V = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 2
        noise = Noise(seed, 3)
        token = target_token(logits_V, params, History(), noise, 1)
        assert token == noise.target(distribution(logits_V, params, History()), 1)


def test_the_target_token_is_the_argmax_of_log_p_plus_gumbel_noise() -> None:
    for depth in range(200):
        w = (((_hashes(_key(3, Purpose.TARGET, 10 + depth), torch.arange(4)) >> 12) & (2**52 - 1)).double() + 0.5) / 2**52
        gumbel_V = -torch.log(-torch.log1p(-w))
        assert Noise(3, 10).target(ROW, depth) == int((ROW.double().log() + gumbel_V).argmax())


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: Noise(n, 5).target(ROW, 0),
        lambda n: Noise(5, n).target(ROW, 0),
        lambda n: Noise(5, 5).target(ROW, n),
        lambda n: Noise(n, 5).draw(ROW, 1),
        lambda n: Noise(5, n).draw(ROW, 1),
        lambda n: Noise(5, n).draft(ROW, 1),
        lambda n: Noise(5, 5).draft(ROW, 1, parent=n),
        lambda n: Noise(5, 5).draft(ROW, 1, candidate=n),
        lambda n: Noise(5, 5).draft(ROW, 1, drafter=n),
    ],
)
def test_single_draws_have_the_law_of_the_row_by_whichever_part_of_the_key(draw: Callable[[int], int]) -> None:
    draws = [draw(n) for n in range(4001)]
    assert deviation(Counter(draws), dict(enumerate(P))) < 5
    assert deviation(Counter(itertools.pairwise(draws)), joint(P, P)) < 5


def test_draws_for_different_purposes_are_independent() -> None:
    def run(seed: int) -> tuple[int, ...]:
        noise = Noise(seed, 0)
        return noise.target(ROW, 0), noise.draw(ROW, 0), noise.draft(ROW, 0), int(noise.accept(0.5, 0, 0))

    assert deviation(Counter(run(seed) for seed in range(6000)), joint(P, P, P, [0.5, 0.5])) < 5


def test_draws_without_replacement_have_their_law_in_order() -> None:
    expected = {(a, b): P[a] * P[b] / (1 - P[a]) for a in range(4) for b in range(4) if a != b}
    found = Counter(tuple(Noise(seed, 0).draft_distinct(ROW, 0, 2)) for seed in range(6000))
    assert deviation(found, expected) < 5


def test_draws_without_replacement_end_with_the_support() -> None:
    assert sorted(Noise(0, 0).draft_distinct(torch.tensor([0.0, 0.5, 0.0, 0.5]), 0, 3)) == [1, 3]


def test_weights_need_no_normalising_and_zero_is_never_drawn() -> None:
    weights_V = torch.tensor([0.0, 1e-300, 0.0, 3e-300], dtype=torch.float64)
    found = Counter(Noise(seed, 0).draw(weights_V, 0) for seed in range(4000))
    assert deviation(found, {1: 0.25, 3: 0.75}) < 5


def test_accept_follows_its_probability() -> None:
    expected = dict.fromkeys(range(16), 1 / 16)
    found = Counter(int(Noise(seed, 0)._uniform(1, seed % 3) * 16) for seed in range(8000))
    assert deviation(found, expected) < 5
    assert all(Noise(seed, 0).accept(1.0, 0, 0) and not Noise(seed, 0).accept(0.0, 0, 0) for seed in range(100))
    assert not any(Noise(seed, 0).accept(math.nan, 0, 0) for seed in range(100))


def test_match_noise_is_keyed_by_position_and_all_other_noise_by_step() -> None:
    rows = [torch.tensor(P).roll(i) for i in range(4)]
    for row_V, position in itertools.product(rows, range(20)):
        assert len({Noise(1, root).target(row_V, position - root) for root in range(position + 1)}) == 1
    for drawn in (Noise.draw, Noise.draft):
        assert len({drawn(Noise(1, root), ROW, 20 - root) for root in range(20)}) > 1
    assert len({Noise(1, root).accept(0.5, 20 - root, 0) for root in range(20)}) == 2


def test_the_top_of_the_shared_noise_begins_with_the_target_token() -> None:
    for seed in range(100):
        top = Noise(seed, 4).match_top(ROW, 2, 3)
        assert top[0] == Noise(seed, 4).target(ROW, 2)
        assert len(set(top)) == 3


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_a_draft_that_shares_the_noise_matches_as_often_as_it_should(scale: float) -> None:
    """At least (1 - TV) / (1 + TV), and exactly sum of 1 / sum of max(p_y / p_x, q_y / q_x) (Daliri et al. 2024)."""
    random_V = torch.Generator().manual_seed(1)
    logits_V = torch.randn(12, generator=random_V)
    p = torch.softmax(logits_V, 0)
    q = torch.softmax(logits_V + scale * torch.randn(12, generator=random_V), 0)
    exact = sum(1 / torch.maximum(p / p[x], q / q[x]).sum().item() for x in range(12))
    distance = (p - q).abs().sum().item() / 2
    trials = 6000
    matched = sum(Noise(seed, 0).target(p, 0) == Noise(seed, 0).target(q, 0) for seed in range(trials)) / trials
    assert exact >= (1 - distance) / (1 + distance)
    assert abs(matched - exact) < 5 * math.sqrt(exact * (1 - exact) / trials)


class KeyedByPosition(Noise):
    """What `block` must not use: random numbers named by where a token stands in the text."""

    def __init__(self, seed: int, root: int) -> None:
        super().__init__(seed, 0)
        self.first = root

    def accept(self, probability: float, depth: int, candidate: int) -> bool:
        return super().accept(probability, self.first + depth, 0)

    def draw(self, weights_V: Tensor, depth: int) -> int:
        return super().draw(weights_V, self.first + depth)

    def draft(self, q_V: Tensor, depth: int, *, parent: int = -1, candidate: int = 0, drafter: int = 0) -> int:
        return super().draft(q_V, self.first + depth)


HALVES, TILTED = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])


def drawn_chain(noise: Noise) -> Draft:
    return Draft.chain([noise.draft(TILTED, 0), noise.draft(TILTED, 1, parent=0)], Drawn.CHAIN, q=torch.stack([TILTED] * 2))


def drawn_tree(noise: Noise) -> Draft:
    """Two draws without replacement, and a chain of one below each."""
    first, second = noise.draft_distinct(TILTED, 0, 2)
    tokens = (first, second, noise.draft(TILTED, 1, parent=0), noise.draft(TILTED, 1, parent=1))
    drawn = (Drawn.WITHOUT_REPLACEMENT,) * 2 + (Drawn.CHAIN,) * 2
    return Draft(tokens, (-1, -1, 0, 1), drawn, TILTED[None], (0, 0, 0, 0))


def deviation_over_steps(rule: str, draw: Callable[[Noise], Draft], noise: type[Noise]) -> float:
    """Of the first three tokens' law, decided by two steps or three."""
    found: Counter = Counter()
    for seed in range(2500):
        text: list[int] = []
        while len(text) < 3:
            step = noise(seed, len(text))
            draft = draw(step)
            path, token = verify(draft, lambda node: HALVES, rule, step)
            text += [*(draft.tokens[node] for node in path), token]
        found[tuple(text[:3])] += 1
    return deviation(found, joint(*[[0.5, 0.5]] * 3))


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("draw", [drawn_chain, drawn_tree])
def test_several_steps_through_the_keys_have_the_law_of_the_target(rule: str, draw: Callable[[Noise], Draft]) -> None:
    assert deviation_over_steps(rule, draw, Noise) < 5


def test_noise_keyed_by_position_would_bias_block() -> None:
    assert deviation_over_steps("block", drawn_chain, KeyedByPosition) > 5
