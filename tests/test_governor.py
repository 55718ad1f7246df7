"""The governor, on simulated acceptance and time: near the best length, never much below plain, and blind to what it must
not see. One row of a pass takes one second unless a test says otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from adversaries import Oracle
from draftwise.drafters.base import Drafter
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.trees import Trees
from draftwise.engine.balance import EVERY, Balance
from draftwise.engine.engine import Engine
from draftwise.engine.experience import Experience
from draftwise.engine.governor import Choice, Governor, Load
from draftwise.engine.passes import CostTable, PassTimes
from draftwise.sequence import Sequence
from draftwise.types import Draft, Limit, Request, SamplingParams
from simulated import Clock, Known, TimedTarget, oracle
from table_model import TableModel, engine
from test_engine import VOCAB, answer, run
from test_trees import drafter as draft_model

GENTLE = CostTable((1, 2, 4, 8, 16, 32), (1.0, 1.02, 1.1, 1.25, 1.6, 2.4))
STEEP = CostTable((1, 2, 4, 8, 16, 32), (1.0, 1.4, 2.2, 3.6, 6.5, 12.0))
STEPS = CostTable((1, 4, 5, 8, 9, 12, 13, 16, 17, 32), (1.0, 1.0, 1.3, 1.3, 1.6, 1.6, 1.9, 1.9, 2.2, 3.4))
COSTS = {"gentle": GENTLE, "steep": STEEP, "steps": STEPS}

Right = Callable[[int, int], float]


def simulated(
    right: Right | list[Right], cost: CostTable, *, seconds: float | list[float] = 0.2, batch: int = 1, **options
) -> tuple[Engine, TimedTarget, list[Known]]:
    """An engine whose drafters are right with the given chances; those of 0 seconds are free and know their chances."""
    slow = options.pop("slow", lambda now: 1.0)
    target = TimedTarget(Clock(), cost, slow=slow)
    rights = right if isinstance(right, list) else [right]
    times = seconds if isinstance(seconds, list) else [seconds] * len(rights)
    drafters = [
        Known(target, chance, seconds=time, sure=not time, seed=seed, **options)
        for seed, (chance, time) in enumerate(zip(rights, times, strict=True))
    ]
    made = engine(target, drafters, context=4096, capacity=32768, cost=cost, clock=target.clock, max_batch=batch)
    return made, target, drafters


def requests(count: int, tokens: int, *, prompt: int = 3, **options) -> list[Request]:
    params = SamplingParams(max_tokens=tokens)
    return [
        Request(prompt=tuple((7 * i + j) % VOCAB for j in range(prompt)), params=params, **options) for i in range(count)
    ]


# one text


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 0.5])
def test_regret_against_the_best_length_is_below_five_percent(seconds, cost):
    for alpha in (0.0, 0.3, 0.6, 0.9):
        made, target, _ = simulated(lambda said, depth, alpha=alpha: alpha, COSTS[cost], seconds=seconds)
        made.generate(requests(1, 600))
        expected = sum(alpha**k for rows in target.sizes[1:] for k in range(rows))  # free of the luck of single draws
        rate = expected / (target.clock.now - target.cost(target.sizes[0]))
        assert rate > 0.95 * oracle(alpha, seconds, COSTS[cost])


def windows(right: Right, seconds: float, tokens: int, size: int) -> list[float]:
    """Expected tokens a second in windows of `size` tokens, over the rate of the best length there."""
    made, target, _ = simulated(right, GENTLE, seconds=seconds)
    made.submit(requests(1, tokens)[0])
    said = sum(len(event.tokens) for event in made.step())
    sums = [[0.0, 0.0] for _ in range(tokens // size)]
    while made.busy:
        window = sums[min(said // size, len(sums) - 1)]
        before, alpha = target.clock.now, right(said, 0)
        said += sum(len(event.tokens) for event in made.step())
        window[0] += sum(alpha**k for k in range(target.sizes[-1]))
        window[1] += target.clock.now - before
    best = [oracle(right(i * size, 0), seconds, GENTLE) for i in range(len(sums))]
    return [tokens / time / rate for (tokens, time), rate in zip(sums, best, strict=True)]


@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_no_cliff_and_no_oscillation_when_acceptance_steps(seconds):
    phase, size = 400, 50
    found = windows(lambda said, depth: 0.9 if said // phase % 2 == 0 else 0.1, seconds, 4 * phase, size)
    first_of_phase = range(0, len(found), phase // size)
    for i, share in enumerate(found):
        assert share > (0.6 if i in first_of_phase else 0.85), f"window {i}: {found}"
    assert sum(found) / len(found) > 0.95


def test_a_drafter_that_does_not_pay_is_asked_rarely_and_at_once_again_when_it_does():
    made, _, (drafter,) = simulated(lambda said, depth: 0.9 if said >= 600 else 0.0, GENTLE, seconds=0.3)
    made.submit(requests(1, 800)[0])
    said = steps = late = 0
    while made.busy:
        if said < 100:
            drafter.asked.clear()
        said += sum(len(event.tokens) for event in made.step())
        if said < 600:
            steps += said >= 100
            rare = list(drafter.asked)
        else:
            late += len(drafter.asked) == len(rare)
    assert 10 < len(rare) < 0.06 * steps and set(rare) == {1}
    assert late < 80, "a probe that succeeds is followed by another at once"
    assert max(drafter.asked) > 4


# many texts


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("catching_up", [0.0, 0.01, 0.1])
def test_where_nothing_can_be_gained_it_is_hardly_slower_than_plain(catching_up, batch):
    """The draft's prompts are read on its own time; a drafter that is never right reads few of them."""
    for alpha in (0.0, 0.25) if catching_up else (0.1,):
        times = []
        for drafters in (True, False):
            made, target, _ = simulated(
                lambda said, depth, alpha=alpha: alpha, GENTLE, seconds=0.3, batch=batch, row_seconds=catching_up
            )
            many = requests(12, 100, prompt=200) if drafters else requests(12, 100, prompt=200, draft_tokens=0)
            results = made.generate(many)
            times.append(target.clock.now)
        assert times[1] > 0.97 * times[0]
        assert all(result.stats.drafted == 0 for result in results)


def test_a_drafter_after_which_passes_take_longer_is_charged_for_it():
    """As one does whose weights push the target's out of the processor's caches."""
    told = 0

    def slow(now: float) -> float:
        nonlocal told
        asked, told = len(drafter.asked) > told, len(drafter.asked)
        return 2.5 if asked else 1.0

    made, target, (drafter,) = simulated(lambda said, depth: 0.6, GENTLE, seconds=0.05, slow=slow)
    made.generate(requests(1, 60, draft_tokens=0))  # what passes take without it
    begun = target.clock.now
    made.generate(requests(1, 600))
    assert target.clock.now - begun < 1.1 * 600 and len(drafter.asked) > 5


def test_catching_up_is_paid_only_where_what_is_left_to_say_earns_it():
    drafted = {}
    for row_seconds in (0.0, 0.5):
        made, _, _ = simulated(lambda said, depth: 0.6, GENTLE, seconds=0.2, row_seconds=row_seconds)
        made.generate(requests(4, 40, prompt=100))
        drafted[row_seconds] = sum(result.stats.drafted for result in made.generate(requests(4, 40, prompt=100)))
    assert drafted[0.5] == 0 < drafted[0.0]


def test_a_new_request_starts_from_what_earlier_ones_taught():
    sizes = {}
    for alpha in (0.1, 0.95):
        made, target, _ = simulated(lambda said, depth, alpha=alpha: alpha, GENTLE, seconds=0.2)
        made.generate(requests(3, 100))
        before = len(target.sizes)
        made.generate(requests(1, 20))
        sizes[alpha] = target.sizes[before + 1] - 1
    assert sizes[0.1] == 0 and sizes[0.95] >= 7


def test_each_request_of_a_batch_gets_its_own_length():
    made, target, (drafter,) = simulated(lambda said, depth: 0.0, GENTLE, seconds=0.1, batch=4)
    chances: dict[int, float] = {}
    asked: dict[int, list[int]] = {}
    alone = drafter.propose

    def propose(seqs, limits):
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            drafter.right = lambda said, depth, chance=chances[seq.id]: chance
            drafts += alone([seq], [limit])
            asked.setdefault(seq.id, []).append(limit.depth)
        return drafts

    drafter.propose = propose
    for request, chance in zip(requests(4, 200), (0.95, 0.0, 0.6, 0.0), strict=True):
        chances[made.submit(request)] = chance
    while made.busy:
        made.step()
    assert max(len(asked[1]), len(asked[3])) < 35, "they are mostly left alone although others draft"
    often, seldom = (sum(asked[i]) / len(asked[i]) for i in (0, 2))
    assert often > 5 and 1 <= seldom < 4


def test_the_more_requests_share_a_pass_the_less_is_drafted():
    drafted = []
    for batch in (1, 4, 16):
        made, target, _ = simulated(lambda said, depth: 0.8, STEEP, seconds=0.1, batch=batch)
        results = made.generate(requests(16, 60))
        drafted.append(sum(r.stats.drafted for r in results) / sum(r.stats.steps for r in results))
    assert drafted[0] > 1.2 * drafted[1] and drafted[1] > 2 * drafted[2] and drafted[2] < 0.2


# several drafters


def test_free_offers_and_a_costly_drafter_together_are_as_good_as_the_better_and_mostly_better():
    source = random.Random(3)
    copying = [source.random() < 0.4 for _ in range(200)]

    def offer(said: int, depth: int) -> float:
        return 0.97 if copying[(said + depth) // 12 % 200] else 0.1

    def rate(rights, seconds, cost):
        made, target, _ = simulated(rights, cost, seconds=seconds)
        made.generate(requests(1, 1000))
        return 1000 / target.clock.now

    for cost, time, least in ((GENTLE, 0.2, 1.15), (GENTLE, 0.6, 0.96), (STEEP, 0.2, 0.95)):
        free, costly = rate([offer], [0.0], cost), rate([lambda said, depth: 0.75], [time], cost)
        assert rate([offer, lambda said, depth: 0.75], [0.0, time], cost) > least * max(free, costly)


def test_of_two_costly_drafters_the_better_one_is_asked():
    made, _, (poor, good) = simulated([lambda said, depth: 0.3, lambda said, depth: 0.9], GENTLE, seconds=[0.2, 0.2])
    made.generate(requests(1, 500))
    assert sum(good.asked) > 8 * sum(poor.asked)


def test_an_offer_that_promises_too_much_is_not_believed_for_long():
    made, target, (boasting,) = simulated([lambda said, depth: 0.9], STEEP, seconds=[0.0])
    boasting.random = random.Random(1)
    honest = boasting.propose

    def propose(seqs, limits):
        drafts = honest(seqs, limits)
        return [Draft.chain([(token + 1) % VOCAB for token in d.tokens], survival=d.survival) for d in drafts]

    boasting.propose = propose
    made.generate(requests(1, 300))
    assert sum(rows > 1 for rows in target.sizes[1:]) < 40


def test_a_draft_of_which_nothing_is_known_is_taken_whole_or_not_at_all():
    for alpha in (0.0, 0.9):
        made, target, (drafter,) = simulated([lambda said, depth, alpha=alpha: alpha], GENTLE, seconds=[0.0], max_depth=5)
        drafter.sure = False
        made.generate(requests(1, 200))
        sizes = target.sizes[1:-6]
        assert set(sizes) <= {1, 6} and (sizes.count(6) > 0.9 * len(sizes) if alpha else sizes.count(6) < 0.2 * len(sizes))


# what it may see


class Spy(ModelDrafter):
    """Draws from a good q and says of every node that it is hopeless, so that whoever may will leave it out."""

    def __init__(self, trees: Trees) -> None:
        super().__init__(TableModel(VOCAB, skew=0.7), vocab=VOCAB, context=512, max_batch=8, trees=trees)
        self.drawn: list[Draft] = []
        self.verified: list[tuple[int, ...]] = []

    def propose(self, seqs, limits):
        drafts = [replace(draft, survival=(1e-3,) * len(draft)) for draft in super().propose(seqs, limits)]
        self.drawn += drafts
        return drafts

    def observe(self, seq, outcome):
        super().observe(seq, outcome)
        if len(outcome.draft):
            self.verified.append(outcome.draft.tokens)


@pytest.mark.parametrize("tree", ["chain", "2,2", "dynamic"])
def test_nothing_that_was_drawn_is_left_out_afterwards(tree):
    prompts = [(1, 2, 3), (4, 5)]
    options = {"temperature": 1.0, "seed": 1, "max_tokens": 60, "engine_options": {"cost": STEEP}}
    for rule in ("rejection", "block"):
        spy = Spy(Trees(tree=tree, max_tokens=3))
        run([spy], prompts, verify=rule, **options)
        assert len(spy.verified) > 5 and spy.verified == [draft.tokens for draft in spy.drawn if len(draft)]
    spy = Spy(Trees(tree=tree, max_tokens=3))
    run([spy], prompts, verify="match", **options)
    assert sum(map(len, spy.verified)) < sum(map(len, spy.drawn)), "under match they are"


class Unseen(Drafter):
    """A drafter that is asked what it costs and no more."""

    def __init__(self, seconds: float, late: float = 0.0) -> None:
        self.seconds, self.late = seconds, late

    def propose(self, seqs, limits):
        raise AssertionError("nothing is drawn while planning")

    def seconds_per_depth(self, batch):
        return self.seconds

    def seconds_to_catch_up(self, seq):
        return self.late


def running() -> Sequence:
    """A request that may say 50 tokens."""
    made = engine(TimedTarget(Clock(), GENTLE), Oracle([], 1))
    return made._sequences[made.submit(requests(1, 50)[0])]


def asked(governor: Governor, drafter: Drafter, seq: Sequence) -> int:
    return governor.plan(0, drafter, [Choice(seq, Limit(63, 16))], Load(1, 1))[0].depth


@pytest.mark.parametrize(("beside", "asks"), [(0.0, True), (1.6, False)])
def test_what_asking_takes_beside_the_drafter_is_found_by_going_without(beside, asks):
    """Steps in which a drafter was asked, in turns with plain ones, which alone can tell that something else is slow too."""
    governor = Governor(GENTLE)
    for _ in range(60):
        governor.passed(Load(1, 1), 1, 1.0, 1, 0.0, 0.0)
        governor.passed(Load(1, 1), 2, GENTLE(2) + beside / 2, 2, 0.05, beside / 2)
    assert (asked(governor, Unseen(0.05), running()) > 0) == asks


@pytest.mark.parametrize(("slower", "asks"), [(1.0, True), (2.0, False)])
def test_a_drafter_that_takes_longer_than_it_says_is_charged_for_it(slower, asks):
    made, target, (drafter,) = simulated(lambda said, depth: 0.6, GENTLE, seconds=0.3)
    drafter.seconds_per_depth = lambda batch: 0.3
    drafter.seconds = 0.3 * slower
    made.generate(requests(1, 600))
    late = len(drafter.asked)
    made.generate(requests(1, 600))
    assert (len(drafter.asked) - late > 150) == asks
    assert target.clock.now < (1.0 if asks else 1.1) * 1200


def test_a_drafter_that_is_never_worth_it_is_thought_of_less_and_less():
    made, _, _ = simulated(lambda said, depth: 0.0, GENTLE, seconds=0.3)
    with mock.patch.object(Experience, "outlook", autospec=True, side_effect=Experience.outlook) as thought:
        (result,) = made.generate(requests(1, 600))
    assert 20 < thought.call_count < 0.2 * result.stats.steps


def test_now_and_then_a_step_goes_without_a_drafter_that_is_always_asked():
    governor, seq = Governor(GENTLE), running()
    steps = []
    for _ in range(300):
        steps.append(asked(governor, Unseen(0.05), seq) > 0)
        governor.passed(Load(1, 1), 1 + steps[-1], GENTLE(1 + steps[-1]), 1 + steps[-1], 0.05 * steps[-1], 0.0)
    assert not steps[0] and 4 <= steps.count(False) <= 12


def test_catching_up_must_pay_in_the_steps_that_a_drafter_gets():
    """Of two worlds in which it takes as long to catch up, the drafter is only of use where it was in use lately."""
    for used in (True, False):
        governor, seq = Governor(GENTLE), running()
        for _ in range(200):
            asked(governor, Unseen(0.05 if used else 9.0), seq)
            governor.passed(Load(1, 1), 1, 1.0, 1, 0.0, 0.0)
        assert (asked(governor, Unseen(0.05, late=3.0), running()) > 0) == used


def test_what_to_ask_does_not_depend_on_what_will_be_drawn():
    """Two worlds with one past: the governor is asked before the drafter draws, and knows no more than that past."""
    governor, seq = Governor(GENTLE), running()
    governor.passed(Load(1, 1), 1, 1.0, 1, 0.0, 0.0)  # the plain one that comes first
    plans = [governor.plan(0, Unseen(0.1), [Choice(seq, Limit(63, 16))], Load(1, 1)) for _ in range(2)]
    assert plans[0] == plans[1] and plans[0][0].depth > 0


def test_an_exact_number_of_draft_tokens_is_drafted_whatever_it_costs():
    for drafters in ([draft_model(Trees(max_tokens=8))], [Oracle(answer(), 8)]):
        result = run(drafters, [(3, 1, 4, 1, 5, 9, 2, 6)], draft_tokens=5, engine_options={"cost": STEEP})[0]
        assert result.stats.drafted >= 5 * (result.stats.steps - 5) and result.tokens == answer()


def test_prices_make_a_draft_model_stop_where_it_is_unsure():
    """A chain that knows when it is unsure is cheaper than one of fixed length: it drafts less for the same acceptance."""

    def stats(**options):
        return run([draft_model(Trees(max_tokens=4))], [(3, 1, 4, 1, 5, 9, 2, 6)], max_tokens=400, **options)[0].stats

    unsure, fixed = stats(engine_options={"cost": STEEP}), stats(draft_tokens=4)
    assert unsure.acceptance_rate > 1.2 * fixed.acceptance_rate


# the cost of a pass


def test_pass_times_follow_the_machine_but_not_its_hiccups():
    source = random.Random(0)
    times = PassTimes(GENTLE)
    for step in range(600):
        rows = source.choice((1, 4, 8))
        noise = source.gauss(1, 0.05) * (20 if source.random() < 0.02 else 1)
        times.learn(rows, 0.01 * GENTLE(rows) * max(noise, 0.5) * (2 if step > 200 else 1))
    for rows in (1, 4, 8):
        assert times(rows) == pytest.approx(0.02 * GENTLE(rows), rel=0.1)


def test_pass_times_correct_the_shape_of_the_table_by_neighbouring_passes():
    source = random.Random(0)
    times, true = PassTimes(GENTLE), STEEP
    for step in range(1500):
        rows = source.choice((1, 2, 4, 8))
        slow = 1 + (step // 100 % 2)  # a machine that is busy by turns tells nothing of the shape
        times.learn(rows, true(rows) * slow)
    for rows in (2, 4, 8):
        assert times(rows) / times(1) == pytest.approx(true(rows) / true(1), rel=0.1)


def test_a_machine_that_slows_down_changes_no_choice():
    drafted = []
    for slow in (lambda now: 1.0, lambda now: 3.0):
        made, target, (drafter,) = simulated(lambda said, depth: 0.8, GENTLE, seconds=0.2, slow=slow)
        drafter.seconds *= slow(0)
        made.generate(requests(1, 400))
        drafted.append(sum(target.sizes[100:]) / len(target.sizes[100:]))
    assert drafted[0] == pytest.approx(drafted[1], rel=0.1)


# whole requests


def test_a_drafter_that_does_not_pay_is_left_out_of_most_requests_until_it_does():
    balance, heard = Balance(), []
    for request in range(600):
        heard.append(balance.takes_part(0, request))
        for step in range(40):
            balance.step()
            if heard[-1] and step % 4 == 0:
                balance.learn(0, request, 0 if request < 300 else 1, 0.5)
        balance.forget(request)
    assert heard[0] and sum(heard[60:300]) == pytest.approx(240 / EVERY, abs=1)
    assert all(heard[-100:])


def test_requests_that_a_drafter_is_left_out_of_cost_nothing_for_it():
    made, target, (drafter,) = simulated(lambda said, depth: 0.0, GENTLE, seconds=0.5)
    told, observe = set(), drafter.observe
    drafter.observe = lambda seq, outcome: (told.add(seq.id), observe(seq, outcome))[1]
    drafter.taps = (0,)
    wanted, forward = [], made.model.forward
    made.model.forward = lambda batch, cache, taps=(): (wanted.append(tuple(taps)), forward(batch, cache, ()))[1]
    results = [made.generate(requests(1, 60))[0].tokens for _ in range(60)]
    assert all(tokens == results[0] for tokens in results)
    assert 1 <= len(told) < 20 and wanted.count(()) > wanted.count((0,)) > 0
    before = len(told)
    made.generate(requests(1, 60, draft_tokens=2))
    assert len(told) == before + 1, "a size was given, so the drafter is wanted"
