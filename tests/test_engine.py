"""The loop, on a model without arithmetic: same tokens whatever is drafted, and every end exactly where it belongs."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from adversaries import Oracle, RandomTree, Sampled
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.ngram import NgramDrafter
from draftwise.drafters.none import NoDrafter
from draftwise.drafters.trees import Trees
from draftwise.engine.passes import CostTable
from draftwise.types import Request, SamplingParams
from table_model import TableModel, built, engine

VOCAB = 24
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
RAGGED = [PROMPT, (7,), (2, 7, 1, 8, 2, 8, 1, 8, 2, 8), (0, 0, 0), tuple(range(20)) * 3]
SAMPLING = {
    "greedy": {},
    "nucleus": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
    "everything": {
        "temperature": 1.0,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 1.5, 4: -2.0},
        "bad_words": ((1, 2), (9,)),
        "min_tokens": 12,
        "stop_tokens": (11,),
        "seed": 6,
    },
    "top_k": {"temperature": 1.3, "top_k": 5, "seed": 7},
    "masked": {"temperature": 0.9, "seed": 8, "mask": lambda path: torch.arange(VOCAB) % 3 != len(path) % 3},
    "allowed": {"temperature": 0.9, "seed": 8, "allowed_tokens": (1, 2, 3, 5, 8, 13, 21), "frequency_penalty": 1.0},
}


def run(drafter, prompts, *, model=None, verify="match", draft_tokens=None, max_tokens=60, engine_options=None, **params):
    params = {"max_tokens": max_tokens, **params}
    made = engine(model or TableModel(VOCAB), drafter, **(engine_options or {}))
    requests = [
        Request(prompt=prompt, params=SamplingParams(**params), verify=verify, draft_tokens=draft_tokens) for prompt in prompts
    ]
    results = made.generate(requests)
    assert made.cache.free_rows == made.cache.pages * 16, "every page came back"
    return results


def draft_model(**trees):
    return ModelDrafter(TableModel(VOCAB, skew=1.0), vocab=VOCAB, context=512, max_batch=8, trees=Trees(**trees))


DRAFTERS = {
    "ngram": lambda: NgramDrafter(),
    "ngram short": lambda: NgramDrafter(max_ngram=2, max_tokens=3),
    "model": draft_model,
    "model, confident": lambda: draft_model(min_confidence=0.3, max_tokens=4),
    "random trees": lambda: RandomTree(VOCAB),
    "sampled chains": lambda: Sampled(VOCAB, "chain"),
    "sampled trees": lambda: Sampled(VOCAB, "tree"),
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_tokens_alone_and_in_a_ragged_batch(drafter, sampling):
    params = {**SAMPLING[sampling], "max_tokens": 40}
    plain = plain_results(sampling)
    assert len({result.tokens for result in plain}) > 1
    for draft_tokens in (None, 5):
        together = run(DRAFTERS[drafter](), RAGGED, draft_tokens=draft_tokens, **params)
        assert [result.tokens for result in together] == [result.tokens for result in plain]
        assert [result.text for result in together] == [result.text for result in plain]
        assert [result.finish_reason for result in together] == [result.finish_reason for result in plain]
    alone = run(DRAFTERS[drafter](), [PROMPT], **params)
    assert alone[0].tokens == plain[0].tokens


@functools.cache
def plain_results(sampling):
    return [run(NoDrafter(), [prompt], **{**SAMPLING[sampling], "max_tokens": 40})[0] for prompt in RAGGED]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_that_are_often_right_change_nothing_but_the_steps(temperature):
    model = TableModel(VOCAB, memory=0)
    plain = run(NoDrafter(), [PROMPT], model=model, temperature=temperature, seed=1)[0]
    answer = [*PROMPT, *plain.tokens]
    drafter = RandomTree(VOCAB, oracle=lambda seen: answer[len(seen)] if len(seen) < len(answer) else 0)
    drafted = run(drafter, [PROMPT], model=TableModel(VOCAB, memory=0), draft_tokens=12, temperature=temperature, seed=1)[0]
    assert drafted.tokens == plain.tokens
    assert drafted.stats.steps < 0.8 * plain.stats.steps
    consumed = [token for outcome in drafter.seen for token in outcome.consumed]
    assert consumed == [*PROMPT, *plain.tokens[:-1]], "an observer is told every committed token once, in order"


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_drafter_that_is_always_right_is_always_accepted(length):
    plain = run(NoDrafter(), [PROMPT])[0]
    drafted = run(Oracle(plain.tokens, length), [PROMPT], draft_tokens=length)[0]
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted == drafted.stats.drafted
    assert drafted.stats.steps == math.ceil((len(plain.tokens) - 1) / (length + 1))


def test_the_same_model_as_draft_is_always_accepted_greedy_and_sampled():
    for params in (
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 4},
    ):
        for verify in ("match", "rejection", "block"):
            drafter = ModelDrafter(TableModel(VOCAB), vocab=VOCAB, context=512, max_batch=8)
            result = run(drafter, [PROMPT], verify=verify, draft_tokens=4, **params)[0]
            assert result.stats.accepted == result.stats.drafted > 0
            assert result.stats.tokens_per_step > 4


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("drafter", ["model", "sampled chains", "sampled trees", "random trees", "ngram"])
def test_other_rules_run_to_the_end_and_are_greedy_when_greedy(drafter, verify):
    plain = run(NoDrafter(), [PROMPT])[0]
    assert run(DRAFTERS[drafter](), [PROMPT], verify=verify, draft_tokens=5)[0].tokens == plain.tokens
    sampled = run(DRAFTERS[drafter](), RAGGED, verify=verify, draft_tokens=5, temperature=1.0, seed=1)
    assert all(len(result.tokens) == 60 for result in sampled)
    again = run(DRAFTERS[drafter](), RAGGED, verify=verify, draft_tokens=5, temperature=1.0, seed=1)
    assert [result.tokens for result in again] == [result.tokens for result in sampled], "a seed repeats itself"


def test_seeds():
    same = run(NoDrafter(), [PROMPT] * 2, temperature=1.0, seed=3)
    assert same[0].tokens == same[1].tokens
    other = run(NoDrafter(), [PROMPT], temperature=1.0, seed=4)[0]
    assert other.tokens != same[0].tokens
    unseeded = run(NoDrafter(), [PROMPT] * 8, temperature=1.0)
    assert len({result.tokens for result in unseeded}) == 8


def test_choices_of_one_request_differ_and_repeat():
    made = engine(TableModel(VOCAB), NoDrafter())
    request = Request(prompt=PROMPT, params=SamplingParams(temperature=1.0, seed=1, max_tokens=20))
    ids = [made.submit(request, choice=choice) for choice in (0, 1, 0)]
    results = {}
    while made.busy:
        results |= {event.request_id: event.result.tokens for event in made.step() if event.result}
    assert results[ids[0]] == results[ids[2]] != results[ids[1]]


# ends


def answer(**params):
    return run(NoDrafter(), [PROMPT], **params)[0].tokens


@pytest.mark.parametrize("offset", range(7))
def test_an_end_token_inside_a_draft_ends_the_request_there(offset):
    tokens = answer()
    end = tokens[10 + offset]
    first = tokens.index(end)
    made = run(Oracle(tokens, 7), [PROMPT], draft_tokens=7, engine_options={"end_tokens": [end]})[0]
    assert made.tokens == tokens[: first + 1]
    assert (made.finish_reason, made.stop_reason) == ("stop", end)
    assert made.text == "".join(chr(97 + token) for token in tokens[:first])
    assert made.stats.emitted == len(made.tokens)
    ignored = run(Oracle(tokens, 7), [PROMPT], draft_tokens=7, ignore_eos=True, engine_options={"end_tokens": [end]})[0]
    assert ignored.tokens == tokens


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("start", range(6, 13))
def test_a_stop_string_across_tokens_and_blocks(start, length):
    tokens = answer()
    letters = "".join(chr(97 + token) for token in tokens)
    stop = letters[start : start + length]
    place = letters.find(stop)
    for drafter in (NoDrafter(), Oracle(tokens, 3), Oracle(tokens, 7)):
        made = run(drafter, [PROMPT], draft_tokens=7, stop=("zzzz", stop), logprobs=0)[0]
        assert made.text == letters[:place]
        assert made.tokens == tokens[: place + length]
        assert (made.finish_reason, made.stop_reason) == ("stop", stop)
        assert len(made.logprobs) == len(made.tokens) == made.stats.emitted


def test_streamed_text_never_shows_what_a_stop_string_cuts():
    tokens = answer()
    letters = "".join(chr(97 + token) for token in tokens)
    stop = letters[20:24]
    made = engine(TableModel(VOCAB), Oracle(tokens, 5))
    params = SamplingParams(max_tokens=60, stop=(stop,))
    events = list(made.stream(Request(prompt=PROMPT, params=params, draft_tokens=5)))
    shown = "".join(event.text for event in events)
    assert shown == letters[: letters.find(stop)] == events[-1].result.text
    assert any(piece.drafted for event in events for piece in event.pieces)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 8, 9])
def test_max_tokens_is_never_passed(max_tokens):
    tokens = answer()
    made = run(Oracle(tokens, 7), [PROMPT], max_tokens=max_tokens, draft_tokens=7)[0]
    assert made.tokens == tokens[:max_tokens]
    assert made.finish_reason == "length"


def test_a_stop_and_max_tokens_in_the_same_block():
    tokens = answer()
    end = next(token for token in tokens[4:] if token not in tokens[:4])
    place = tokens.index(end)
    for max_tokens in range(place - 1, place + 4):
        made = run(Oracle(tokens, 15), [PROMPT], max_tokens=max_tokens, draft_tokens=15, stop_tokens=(end,))[0]
        assert made.tokens == tokens[: min(max_tokens, place + 1)]
        assert made.finish_reason == ("stop" if max_tokens > place else "length")


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("missing", range(1, 9))
def test_the_context_is_used_to_its_last_position_and_not_beyond(missing, drafter):
    prompt = tuple(token % VOCAB for token in range(64 - missing))
    made = run(DRAFTERS[drafter](), [prompt], draft_tokens=5, engine_options={"context": 64, "capacity": 256})[0]
    assert len(prompt) + len(made.tokens) == 64
    assert made.finish_reason == "length"


def test_a_draft_of_shorter_context_falls_silent_and_the_target_goes_on():
    drafter = ModelDrafter(TableModel(VOCAB), vocab=VOCAB, context=30, max_batch=8)
    made = run(drafter, [PROMPT], draft_tokens=4)[0]
    assert made.tokens == answer()
    assert 0 < made.stats.drafted < 60


def test_a_draft_with_a_narrower_or_wider_head():
    for vocab in (VOCAB - 4, VOCAB + 8):
        drafter = ModelDrafter(TableModel(vocab), vocab=VOCAB, context=512, max_batch=8)
        for verify in ("match", "rejection", "block"):
            made = run(drafter, [PROMPT], draft_tokens=3, verify=verify, temperature=1.0, seed=2)[0]
            assert max(made.tokens) < VOCAB
    assert run(drafter, [PROMPT], draft_tokens=3, temperature=1.0, seed=2)[0].tokens == answer(temperature=1.0, seed=2)


def test_padding_ids_of_the_head_are_never_emitted():
    prompt = tuple(token % 5 for token in PROMPT)
    made = run(NgramDrafter(), [prompt], temperature=3.0, seed=1, max_tokens=200, engine_options={"vocab": 5})[0]
    assert max(made.tokens) < 5


# several requests


def test_requests_wait_for_room_and_all_come_out_right():
    plain = [run(NoDrafter(), [prompt], temperature=1.0, seed=9)[0].tokens for prompt in RAGGED]
    options = {"capacity": 272, "max_batch": 2}
    for drafter in (NoDrafter(), NgramDrafter(), RandomTree(VOCAB)):
        together = run(drafter, RAGGED, temperature=1.0, seed=9, engine_options=options)
        assert [result.tokens for result in together] == plain


def test_a_request_that_can_never_fit_is_refused():
    made = engine(TableModel(VOCAB), NoDrafter(), capacity=96)
    with pytest.raises(ValueError, match="lower max_tokens"):
        made.submit(Request(prompt=PROMPT, params=SamplingParams(max_tokens=100)))
    with pytest.raises(ValueError, match="the prompt has 600 tokens and the context is 512"):
        made.submit(Request(prompt=(1,) * 600))
    with pytest.raises(ValueError, match="token id 24"):
        made.submit(Request(prompt=(24,)))
    with pytest.raises(ValueError, match="logit_bias names token id 99"):
        short = [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, logit_bias={99: 1.0})]
        made.generate([Request(prompt=PROMPT, params=params) for params in short])
    assert not made.busy, "the request submitted before the bad one is taken back"


def test_a_long_prompt_is_read_in_chunks_beside_requests_that_decode():
    long = tuple(token % VOCAB for token in range(1200))
    plain = [run(NoDrafter(), [prompt], engine_options={"context": 2048})[0].tokens for prompt in (PROMPT, long)]
    made = engine(TableModel(VOCAB), NgramDrafter(), context=2048)
    first = made.submit(Request(prompt=PROMPT, params=SamplingParams(max_tokens=60)))
    for _ in range(3):
        made.step()
    second = made.submit(Request(prompt=long, params=SamplingParams(max_tokens=60)))
    results = {}
    while made.busy:
        results |= {event.request_id: event.result.tokens for event in made.step() if event.result}
    assert [results[first], results[second]] == plain


def test_plain_and_speculative_requests_share_a_batch():
    plain = [run(NoDrafter(), [prompt])[0].tokens for prompt in RAGGED]
    made = engine(TableModel(VOCAB), draft_model())
    params = SamplingParams(max_tokens=60)
    wanted = [0, 4, None, 0, 2]
    requests = [Request(prompt=p, params=params, draft_tokens=n) for p, n in zip(RAGGED, wanted, strict=True)]
    results = made.generate(requests)
    assert [result.tokens for result in results] == plain
    assert [result.stats.drafted > 0 for result in results] == [False, True, True, False, True]


def test_cancel_gives_back_what_there_was_and_leaves_the_others_alone():
    made = engine(TableModel(VOCAB), NgramDrafter())
    ids = [made.submit(Request(prompt=prompt, params=SamplingParams(max_tokens=60))) for prompt in RAGGED[:3]]
    waiting = engine(TableModel(VOCAB), NgramDrafter(), max_batch=1)
    for _ in range(5):
        made.step()
    event = made.cancel(ids[1])
    assert event.result.finish_reason == "cancelled" and len(event.result.tokens) >= 5
    assert made.cancel(ids[1]) is None
    results = {}
    while made.busy:
        results |= {event.request_id: event.result.tokens for event in made.step() if event.result}
    assert results[ids[0]] == answer()
    queued = [waiting.submit(Request(prompt=PROMPT)) for _ in range(2)]
    waiting.step()
    assert waiting.cancel(queued[1]).result.tokens == ()
    assert made.cache.free_rows == made.cache.pages * 16


def test_closing_a_stream_cancels_the_request():
    made = engine(TableModel(VOCAB), NgramDrafter())
    stream = made.stream(Request(prompt=PROMPT))
    next(stream)
    stream.close()
    assert not made.busy and made.cache.free_rows == made.cache.pages * 16


def test_a_request_whose_mask_fails_ends_alone():
    def broken(path):
        if len(path) == 5:
            return torch.zeros(VOCAB, dtype=torch.bool)
        return None

    made = engine(TableModel(VOCAB), NgramDrafter())
    results = made.generate(
        [
            Request(prompt=PROMPT, params=SamplingParams(max_tokens=60, mask=broken)),
            Request(prompt=PROMPT, params=SamplingParams(max_tokens=60)),
        ]
    )
    assert results[0].finish_reason == "error" and "mask" in results[0].error and results[0].tokens == answer()[:5]
    assert results[1].tokens == answer()


# figures


def test_logprobs_are_of_the_targets_raw_rows_whatever_was_drafted():
    model = TableModel(VOCAB)
    plain = run(NoDrafter(), [PROMPT], temperature=0.7, top_p=0.8, seed=2, logprobs=3)[0]
    for drafter in (NgramDrafter(), draft_model(), RandomTree(VOCAB)):
        made = run(drafter, [PROMPT], temperature=0.7, top_p=0.8, seed=2, logprobs=3)[0]
        assert made.logprobs == plain.logprobs
    seen = [*PROMPT]
    for token, entry in zip(plain.tokens, plain.logprobs, strict=True):
        row = model.row(model._code(seen)).double().log_softmax(-1)
        assert entry.token == token and entry.logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
        seen.append(token)


def test_stats_add_up():
    for drafter in (NoDrafter(), NgramDrafter(), draft_model(), RandomTree(VOCAB)):
        for result in run(drafter, RAGGED, temperature=0.9, seed=3):
            stats = result.stats
            assert stats.emitted == len(result.tokens) == 1 + stats.steps + stats.accepted
            assert stats.accepted == sum(stats.accepted_at)
            assert all(a <= r for a, r in zip(stats.accepted_at, stats.reached_at, strict=True))
            assert all(later <= earlier for earlier, later in zip(stats.accepted_at, stats.reached_at[1:], strict=False))
            assert stats.tokens_per_step == pytest.approx((stats.emitted - 1) / stats.steps)


def test_nothing_is_drafted_where_rows_cost_too_much():
    steep = CostTable((1, 2, 3), (1.0, 2.0, 3.0))
    result = run(NgramDrafter(), [PROMPT], engine_options={"cost": steep}, max_tokens=100)[0]
    flat = run(NgramDrafter(), [PROMPT], max_tokens=100)[0]
    assert result.stats.drafted < 0.1 * flat.stats.drafted
    assert result.tokens == flat.tokens


def test_drafters_by_name_need_no_more_than_their_file():
    model = TableModel(VOCAB)
    assert run(built("ngram", model, model.new_cache(64), max_tokens=4), [PROMPT])[0].tokens == answer()
    assert run(built("none", model, model.new_cache(64)), [PROMPT])[0].tokens == answer()
