"""From logits to a distribution: each parameter by a written-out value, all of them against a full sort."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwise.sampling import History, Noise, choice_seed, distribution, token_logprobs
from draftwise.types import SamplingParams

INF = math.inf
LOGITS = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]


def probabilities(
    logits: list[float],
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    end_tokens: tuple[int, ...] = (),
    **params,
) -> list[float]:
    params.setdefault("temperature", 1.0)
    row_V = distribution(torch.tensor(logits), SamplingParams(**params), History(prompt, output), end_tokens=end_tokens)
    assert row_V.dtype == torch.float32 and row_V.shape == (len(logits),)
    return row_V.tolist()


def close(expected: list[float]) -> object:
    return pytest.approx(expected, abs=1e-6)


def test_greedy_is_one_hot_at_the_lowest_id_of_the_largest_logit() -> None:
    assert probabilities([1.0, 3.0, 3.0, 2.0], temperature=0) == [0, 1, 0, 0]
    assert probabilities([-INF, -INF, -2.0, -INF], temperature=0) == [0, 0, 1, 0]


def test_temperature_divides_the_logits() -> None:
    assert probabilities(LOGITS) == close([0.4, 0.3, 0.2, 0.1])
    assert probabilities(LOGITS, temperature=0.5) == close([16 / 30, 9 / 30, 4 / 30, 1 / 30])


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert probabilities([1e4, 2e4, 2e4, -1e4], temperature=1e-30) == [0, 0.5, 0.5, 0]


def test_top_k_keeps_exactly_k_the_lowest_ids_of_equals() -> None:
    assert probabilities(LOGITS, top_k=2) == close([4 / 7, 3 / 7, 0, 0])
    assert probabilities([0.0, 1.0, 1.0, 1.0], top_k=2) == close([0, 0.5, 0.5, 0])
    assert probabilities([1.0, 0.0, 0.0, 0.0], temperature=0.001, top_k=3) == close([1, 0, 0, 0])
    assert probabilities(LOGITS, top_k=9) == close([0.4, 0.3, 0.2, 0.1])


def test_top_p_keeps_the_fewest_that_hold_the_mass_the_lowest_ids_of_equals() -> None:
    assert probabilities(LOGITS, top_p=0.69) == close([4 / 7, 3 / 7, 0, 0])
    assert probabilities(LOGITS, top_p=0.71) == close([4 / 9, 3 / 9, 2 / 9, 0])
    assert probabilities([0.0] * 4, top_p=0.5) == close([0.5, 0.5, 0, 0])
    assert probabilities(LOGITS, top_p=1e-9) == [1, 0, 0, 0]


def test_min_p_keeps_what_reaches_a_share_of_the_largest() -> None:
    assert probabilities([0.0, math.log(0.5), math.log(0.25), -9.0], min_p=0.5) == close([2 / 3, 1 / 3, 0, 0])
    assert probabilities([1.0, 1.0, 0.9, 0.0], min_p=1.0) == close([0.5, 0.5, 0, 0])


def test_order_is_temperature_then_top_k_then_top_p_then_min_p() -> None:
    # at temperature 1 three tokens would hold .75; at .5 the first two hold .83
    assert probabilities(LOGITS, temperature=0.5, top_p=0.75) == close([16 / 25, 9 / 25, 0, 0])
    # of the two of top-k the first holds .57; of all four it holds .4
    assert probabilities(LOGITS, top_k=2, top_p=0.5) == close([1, 0, 0, 0])
    # min-p .3 alone would keep .4, .3 and .2; top-p has already dropped .2
    assert probabilities(LOGITS, top_p=0.6, min_p=0.3) == close([4 / 7, 3 / 7, 0, 0])


def test_repetition_penalty_sees_prompt_and_output() -> None:
    logits = [2.0, -2.0, 2.0, 0.0]
    assert probabilities(logits, prompt=(0,), output=(1, 1), repetition_penalty=2.0) == close(softmax([1.0, -4.0, 2.0, 0.0]))


def test_presence_and_frequency_penalties_see_the_output_only() -> None:
    logits = [1.0, 1.0, 1.0]
    assert probabilities(logits, prompt=(0, 0), output=(1, 2, 2), presence_penalty=0.5) == close(softmax([1.0, 0.5, 0.5]))
    assert probabilities(logits, prompt=(0, 0), output=(1, 2, 2), frequency_penalty=0.5) == close(softmax([1.0, 0.5, 0.0]))


def test_logit_bias_moves_and_forbids() -> None:
    assert probabilities([0.0, 0.0, 0.0], logit_bias={1: 2.0, 2: -INF}) == close(softmax([0.0, 2.0, -INF]))
    assert probabilities([5.0, 0.0, 0.0], temperature=0, logit_bias={0: -100.0}) == [0, 1, 0]
    assert probabilities([5.0, 0.0, 1.0], logit_bias={1: INF}) == [0, 1, 0]


def test_bad_words_are_never_completed_even_when_the_prompt_began_them() -> None:
    logits = [0.0, 0.0]
    assert probabilities(logits, bad_words=((1,),)) == [1, 0]
    assert probabilities(logits, output=(0,), bad_words=((0, 1),)) == [1, 0]
    assert probabilities(logits, output=(1,), bad_words=((0, 1),)) == [0.5, 0.5]
    assert probabilities(logits, prompt=(1, 0), output=(0,), bad_words=((0, 0, 1),)) == [1, 0]
    assert probabilities(logits, prompt=(0,), bad_words=((0, 0, 1),)) == [0.5, 0.5]


def test_allowed_tokens_are_the_only_ones() -> None:
    assert probabilities([9.0, 1.0, 1.0], allowed_tokens=(1, 2, 2)) == [0, 0.5, 0.5]


def test_mask_hook_sees_the_output_with_the_path() -> None:
    seen = []

    def mask(output: tuple[int, ...]) -> Tensor | None:
        seen.append(output)
        return torch.tensor([False, True, True]) if output else None

    assert probabilities([0.0, 0.0, 0.0], prompt=(2,), output=(0, 1), mask=mask) == [0, 0.5, 0.5]
    assert probabilities([0.0, 0.0, 0.0], mask=mask) == close([1 / 3] * 3)
    assert seen == [(0, 1), ()]
    with pytest.raises(ValueError, match=r"mask hook returned shape \(2,\); it must be \(3,\)"):
        probabilities([0.0, 0.0, 0.0], mask=lambda output: torch.tensor([True, True]))


def test_min_tokens_forbids_end_and_stop_tokens_until_then() -> None:
    rows = [
        probabilities([0.0] * 4, output=(3,) * n, end_tokens=(0,), stop_tokens=(1,), min_tokens=2) for n in range(3)
    ]  # fmt: skip
    assert rows == [[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0.25] * 4]


def test_nothing_left_is_an_error_that_names_the_parameters() -> None:
    with pytest.raises(ValueError, match="no token can follow: bad_words, min_tokens forbid all of them"):
        probabilities([0.0, 0.0], bad_words=((1,),), min_tokens=1, end_tokens=(0,))
    with pytest.raises(ValueError, match="allowed_tokens forbid"):
        probabilities([0.0, -INF], temperature=0, allowed_tokens=(1,))
    with pytest.raises(ValueError, match="the logits forbid"):
        probabilities([-INF, -INF])


def test_logits_that_are_not_numbers_are_an_error() -> None:
    for temperature in (0, 1):
        with pytest.raises(ValueError, match="NaN"):
            probabilities([0.0, math.nan], temperature=temperature)


def test_the_logits_are_not_changed() -> None:
    logits_V = torch.zeros(4)
    params = SamplingParams(temperature=1, repetition_penalty=2, frequency_penalty=1, logit_bias={0: 3}, bad_words=((1,),))
    distribution(logits_V, params, History((0,), (1,)))
    assert logits_V.tolist() == [0, 0, 0, 0]


def test_low_precision_logits_are_widened_first() -> None:
    logits_V = torch.tensor(LOGITS).bfloat16()
    row_V = distribution(logits_V, SamplingParams(temperature=1), History())
    assert row_V.tolist() == close(softmax(logits_V.tolist()))


@pytest.mark.parametrize("vocab", [5, 33, 1000])
@pytest.mark.parametrize("spread", [0.0, 0.2, 3.0, 40.0])
def test_every_truncation_equals_the_one_by_a_full_sort(vocab: int, spread: float) -> None:
    """Logits rounded to quarters, so that ties are everywhere; flat, usual and spiked."""
    random = np.random.default_rng(vocab)
    for _ in range(40):
        logits = np.round(random.normal(size=vocab) * spread * 4) / 4
        params = SamplingParams(
            temperature=float(random.choice([0.3, 1.0, 2.0])),
            top_k=int(random.choice([0, 1, 4, 50, 900])),
            top_p=float(random.choice([1.0, 0.999, 0.9, 0.3])),
            min_p=float(random.choice([0.0, 0.02, 0.5])),
        )
        row_V = distribution(torch.tensor(logits, dtype=torch.float32), params, History())
        expected = by_full_sort(logits, params)
        assert (row_V > 0).tolist() == [p > 0 for p in expected]
        assert row_V.tolist() == pytest.approx(expected, rel=1e-5)


def by_full_sort(logits: np.ndarray, params: SamplingParams) -> list[float]:
    """Truncation as its definitions say. Probabilities are kept in float32 up to the sums, as a tie is one in float32."""
    scaled = (logits - logits.max()).astype(np.float32) / np.float32(params.temperature)
    weights = torch.tensor(scaled).exp().double().numpy()
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    mass = np.cumsum(weights[order])
    if params.top_p < 1:
        order = order[: int(np.argmax(mass >= params.top_p * mass[-1])) + 1]
    kept = [v for v in order if weights[v] >= params.min_p and weights[v] > 0]
    total = weights[kept].sum()
    return [weights[v] / total if v in kept else 0.0 for v in range(len(logits))]


def test_choices_of_a_request_have_seeds_of_their_own() -> None:
    seeds = {choice_seed(seed, index) for seed in (0, 1, -1, 2**63) for index in range(4)}
    assert len(seeds) == 16
    assert choice_seed(5, 2) == choice_seed(5, 2)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_without_a_seed_every_request_draws_its_own() -> None:
    assert len({choice_seed(None, 0) for _ in range(8)}) == 8


def test_logprobs_are_of_the_raw_logits_best_first_ties_to_the_lowest_id() -> None:
    report = token_logprobs(torch.tensor([0.0, math.log(2), 0.0, 0.0]), 3, 3)
    assert report.token == 3
    assert report.logprob == pytest.approx(math.log(1 / 5))
    assert [token for token, _ in report.top] == [1, 0, 2]
    assert [value for _, value in report.top] == pytest.approx([math.log(2 / 5), math.log(1 / 5), math.log(1 / 5)])
    assert token_logprobs(torch.zeros(3), 0, 0).top == ()
    assert len(token_logprobs(torch.zeros(3), 0, 20).top) == 3


def test_a_row_of_one_token_needs_no_noise() -> None:
    row_V = distribution(torch.tensor(LOGITS), SamplingParams(), History())
    assert {Noise(seed, 3).target(row_V, 0) for seed in range(20)} == {0}


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]
