"""Trees of a draft model: shapes, how children are drawn, which nodes grow, and that no token and no law changes."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from draftwise.drafters.averages import Pace, Rates
from draftwise.drafters.growth import Beam, Fixed, Replanned, Tree, guess, rank_rates
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.shapes import best_shape, levels, parse_places
from draftwise.drafters.trees import Trees
from draftwise.engine.step import decide
from draftwise.types import Draft, Drawn, Limit, Outcome, Request, SamplingParams
from draftwise.verify import verify
from laws import ExactNoise, World, deviation, law as exact_law
from table_model import TableModel, engine
from test_engine import PROMPT, RAGGED, SAMPLING, VOCAB, answer, run
from test_step_law import OTHER, TARGET, TableModel as LastToken, law, sequence

TREES = {
    "fixed": Trees(tree="4,2,1"),
    "fixed, chosen": Trees(tree="3,1,1", draws="chosen"),
    "fixed, with replacement": Trees(tree="2,2", draws="with"),
    "sequoia": Trees(tree="sequoia", max_nodes=10, max_tokens=4),
    "sequoia, with replacement": Trees(tree="sequoia", max_nodes=10, max_tokens=4, draws="with"),
    "dynamic": Trees(tree="dynamic", max_nodes=8, beam=3, max_tokens=4),
    "dynamic, chosen": Trees(tree="dynamic", max_nodes=8, beam=3, max_tokens=4, draws="chosen"),
    "chain": Trees(max_tokens=4),
    "chain, chosen": Trees(max_tokens=4, draws="chosen"),
}


def drafter(trees: Trees, *, model: TableModel | None = None, context: int = 512) -> ModelDrafter:
    return ModelDrafter(model or TableModel(VOCAB, skew=1.0), vocab=VOCAB, context=context, max_batch=8, trees=trees)


# shapes


def sequoia_optimum(rates: tuple[float, ...], nodes: int, depth: int) -> float:
    """Most expected accepted tokens of a tree, its root counted: the dynamic programme of Chen et al. 2024, sec. 4.1."""

    @functools.cache
    def tree(nodes: int, depth: int) -> float:
        return 1 + children(nodes - 1, depth, len(rates)) if nodes else 0.0

    @functools.cache
    def children(nodes: int, depth: int, most: int) -> float:
        if most == 0 or depth == 0:
            return 0.0
        return max(
            children(nodes - below, depth, most - 1) + rates[most - 1] * tree(below, depth - 1) for below in range(nodes + 1)
        )

    return tree(nodes + 1, depth)


@pytest.mark.parametrize("rates", [(0.7, 0.15, 0.05), (0.5, 0.3, 0.1, 0.05), (0.9,), (0.4, 0.4, 0.1)])
def test_the_best_shape_is_the_optimum_of_sequoias_dynamic_programme(rates):
    for nodes, depth in itertools.product((1, 2, 5, 9, 16), (1, 2, 4)):
        shape = best_shape(rates, Limit(nodes, depth), lambda place: len(rates))
        worth = sum(chance(rates, place) * sum(rates[:count]) for place, count in shape.items())
        assert 1 + worth == pytest.approx(sequoia_optimum(rates, nodes, depth))
        assert sum(shape.values()) <= nodes and max(map(len, shape)) < depth


def chance(rates, place):
    return functools.reduce(lambda product, rank: product * rates[rank], place, 1.0)


def test_fixed_widths_are_kept_whole_within_the_limit_and_cut_to_the_best_beyond():
    rates = (0.6, 0.3, 0.1)
    assert best_shape(rates, Limit(63, 3), levels((3, 1))) == {(): 3, (0,): 1, (1,): 1, (2,): 1}
    assert best_shape(rates, Limit(4, 3), levels((3, 1))) == {(): 2, (0,): 1, (1,): 1}
    assert best_shape(rates, Limit(63, 1), levels((3, 1))) == {(): 3}


def test_a_tree_of_given_places_is_kept_whole_within_the_limit_and_cut_to_the_best_beyond():
    assert parse_places("1 0.0 0 0.1 0.0.0") == {(): 2, (0,): 2, (0, 0): 1}
    trees = Trees(tree="0 1 2 0.0 0.1 1.0 0.0.0")
    assert (trees.depth, trees.most_read) == (3, 7)
    seq = sequence(SamplingParams())
    whole = trees.start(seq, Limit(63, 5), Rates(), drafter=0).plan.shape
    assert whole == {(): 3, (0,): 2, (1,): 1, (0, 0): 1}
    assert trees.start(seq, Limit(3, 5), Rates(), drafter=0).plan.shape == {(): 1, (0,): 1, (0, 0): 1}
    wrong = {"0 1.0": "1.0 without 1", "0 0.1": "0.1 without 0.0", "0 2": "2 without 1", "0 .": "list", "0 -1": "list"}
    for text, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            Trees(tree=text)


def test_nodes_and_levels_that_bring_less_than_their_price_are_left_out():
    rates = (0.6, 0.3)
    assert best_shape(rates, Limit(63, 4, node_price=0.25), lambda place: 2) == {(): 2, (0,): 1}
    assert best_shape(rates, Limit(63, 4, 0.25, level_price=0.2), lambda place: 2) == {(): 2}
    assert best_shape(rates, Limit(63, 4, 0.25, level_price=0.5), lambda place: 2) == {}


@pytest.mark.parametrize("options", [{"tree": "4,0"}, {"tree": "bush"}, {"tree": "8,8"}, {"beam": 0}, {"draws": "best"}])
def test_trees_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match="tree|beam|draws"):
        Trees(**options)


# guesses


def test_guesses_are_drawn_as_each_rule_allows():
    logits = torch.tensor([0.5, 2.0, 1.0, -1.0, 2.0])
    for rule in ("match", "rejection", "block"):
        greedy = guess(sequence(SamplingParams(), verify=rule), logits, (), count=3)
        assert (greedy.tokens, greedy.drawn, greedy.q) == ([1, 4, 2], Drawn.CHOSEN, None), "ties go to the lowest id"
    warm = SamplingParams(temperature=1.0, seed=1)
    seq = sequence(warm)
    shared = guess(seq, logits, (3,), count=2)
    assert shared.drawn is Drawn.SHARED_NOISE and shared.tokens == seq.noise().match_top(logits.softmax(0), 1, 2)
    assert 1 > shared.confidences[0] > shared.confidences[1] > 0
    seq = sequence(warm, verify="block")
    for draws, count, drawn in (
        ("without", 1, Drawn.CHAIN),
        ("without", 3, Drawn.WITHOUT_REPLACEMENT),
        ("with", 3, Drawn.WITH_REPLACEMENT),
    ):
        found = guess(seq, logits, (), count=count, draws=draws)
        assert found.drawn is drawn and len(found.tokens) == count and torch.allclose(found.q, logits.softmax(0))
        assert found.tokens != guess(seq, logits, (), count=count, draws=draws, drafter=1).tokens or count == 1
    assert guess(seq, logits, (), count=3, draws="chosen").tokens == [1, 4, 2]


def test_a_truncated_q_has_no_more_children_than_tokens():
    for rule in ("match", "rejection"):
        seq = sequence(SamplingParams(temperature=1.0, top_k=2, seed=3), verify=rule)
        assert sorted(guess(seq, torch.tensor([0.0, 1.0, 2.0, 3.0]), (), count=4).tokens) == [2, 3]


# growth


def grown(params, rule, limit, plan, rows):
    """A tree over a table of logits by path."""
    tree = Tree(sequence(params, verify=rule), limit, plan, Rates())
    tree.branch(-1, rows(()))
    levels = []
    while nodes := tree.frontier():
        levels.append(nodes)
        for node in nodes:
            tree.branch(node, rows(tuple(tree.path(node))))
    return tree, levels


def rows(path):
    return torch.randn(6, generator=torch.Generator().manual_seed(hash(path) % 1000)) * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_beam_expands_its_best_and_keeps_the_likeliest_of_all_it_grew(temperature):
    params = SamplingParams(temperature=temperature, seed=2)
    tree, levels = grown(params, "match", Limit(7, 4), Beam(3), rows)
    draft = tree.draft()
    assert [len(level) for level in levels][:2] == [3, 3] and len(draft) == 7 < len(tree)
    assert max(draft.depths()) <= 4
    kept = sorted(draft.survival)
    lost = sorted(tree.survival)[: len(tree) - 7]
    assert lost[-1] <= kept[0]
    assert all(draft.survival[node] <= draft.survival[parent] for node, parent in enumerate(draft.parents) if parent >= 0)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_drawn_from_q_is_kept_whatever_it_is(rule):
    for seed in range(20):
        params = SamplingParams(temperature=1.0, seed=seed)
        tree, levels = grown(params, rule, Limit(10, 4), Replanned(3), rows)
        assert len(tree.draft()) == len(tree) == 10
        assert len(levels) == 3, "the nodes are spread over all levels"


def test_levels_that_are_not_worth_their_price_are_not_drafted():
    for width in (1, 3):
        params = SamplingParams()
        assert len(grown(params, "match", Limit(12, 6), Beam(width), rows)[1]) >= 3
        assert grown(params, "match", Limit(12, 6, 0.0, 3.0), Beam(width), rows)[1] == []
    few, many = (grown(params, "match", Limit(12, 6, 0.0, price), Beam(3), rows)[1] for price in (0.4, 0.05))
    assert len(few) < len(many)


def test_a_tree_learns_how_often_each_rank_is_right_from_what_was_emitted():
    odds = Rates(forget=1.0)
    shape = {(): 2, (0,): 2}
    for emitted in ([9], [0, 9], [1], [0, 2]):
        tree = Tree(sequence(SamplingParams()), Limit(9, 2), Fixed(shape), odds)
        tree.branch(-1, torch.tensor([3.0, 2.0, 1.0]))
        (node,) = tree.frontier()
        tree.branch(node, torch.tensor([1.0, 2.0, 3.0]))
        tree.learn(emitted)
    # rank 0 was right in 3 of 6 looks (first level 2 of 4, second 1 of 2), rank 1 in 1 of 6; the guess weighs 3
    assert rank_rates(odds, Drawn.CHOSEN, 2) == pytest.approx([(3 + 3 * 0.6) / 9, (1 + 3 * 0.18) / 9])


def test_a_pace_takes_no_notice_of_hiccups_and_follows_what_lasts():
    pace = Pace()
    for seconds in [5.0, *[1.0] * 20, 50.0, *[1.0] * 5]:
        pace.learn(seconds)
    assert pace.seconds == pytest.approx(1.0, rel=0.05)
    for _ in range(60):
        pace.learn(2.0)
    assert pace.seconds == pytest.approx(2.0, rel=0.05)


# with a draft model in the engine


@pytest.mark.parametrize("sampling", ["greedy", "nucleus", "everything", "masked"])
@pytest.mark.parametrize("trees", TREES)
def test_same_tokens_alone_and_in_a_ragged_batch(trees, sampling):
    params = {**SAMPLING[sampling], "max_tokens": 16}
    plain = [answer_to(prompt, sampling) for prompt in RAGGED]
    for draft_tokens in (None, 6):
        together = run(drafter(TREES[trees]), RAGGED, draft_tokens=draft_tokens, **params)
        assert [result.tokens for result in together] == plain
        assert together[0].stats.accepted > 0


@functools.cache
def answer_to(prompt, sampling):
    from draftwise.drafters.none import NoDrafter

    return run(NoDrafter(), [prompt], **{**SAMPLING[sampling], "max_tokens": 16})[0].tokens


@pytest.mark.parametrize("trees", TREES)
def test_the_same_model_as_draft_is_right_to_the_end_of_every_tree(trees):
    depth = TREES[trees].depth
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        for rule in ("match", "rejection", "block"):
            if params and rule != "match" and TREES[trees].draws == "chosen":
                continue  # what is likeliest is not what the target says
            model = TableModel(VOCAB, memory=0)
            same = drafter(TREES[trees], model=TableModel(VOCAB, memory=0))
            result = run(same, [PROMPT], model=model, verify=rule, draft_tokens=63, **params)[0]
            assert result.stats.tokens_per_step > depth, "one path of full depth is always accepted"


def test_trees_give_more_tokens_a_pass_than_a_chain_of_their_depth():
    for params in ({}, {"temperature": 1.0, "seed": 4}):
        for rule in ("match", "rejection"):

            def tokens_per_step(trees, rule=rule, params=params):
                made = run(drafter(trees), RAGGED, verify=rule, draft_tokens=63, max_tokens=100, **params)
                return sum(r.stats.emitted - 1 for r in made) / sum(r.stats.steps for r in made)

            chain = tokens_per_step(Trees(max_tokens=3))
            assert tokens_per_step(Trees(tree="4,2,1")) > 1.08 * chain
            assert tokens_per_step(Trees(tree="sequoia", max_nodes=16, max_tokens=3)) > 1.08 * chain
            assert tokens_per_step(Trees(tree="dynamic", max_nodes=16, max_tokens=3)) > 1.08 * chain


@pytest.mark.parametrize("trees", ["fixed", "sequoia", "dynamic"])
@pytest.mark.parametrize("missing", range(1, 7))
def test_trees_end_with_the_context(missing, trees):
    prompt = tuple(token % VOCAB for token in range(64 - missing))
    made = run(drafter(TREES[trees]), [prompt], draft_tokens=20, engine_options={"context": 64, "capacity": 256})[0]
    assert len(prompt) + len(made.tokens) == 64
    short = run(drafter(TREES[trees], context=30), [PROMPT], draft_tokens=20)[0]
    assert short.tokens == answer() and short.stats.drafted > 0


def test_a_draft_reads_every_token_once_but_for_those_of_rejected_branches():
    model = TableModel(VOCAB, memory=0)
    reading = []

    class Counting(TableModel):
        def forward(self, batch, cache, taps=()):
            reading.append(len(batch))
            return super().forward(batch, cache, taps)

    same = drafter(Trees(tree="2,1,1"), model=Counting(VOCAB, memory=0))
    result = run(same, [PROMPT], model=model, draft_tokens=6, max_tokens=41)[0]
    assert result.stats.steps == 10 and result.stats.accepted == 30
    # the prompt and its answer; then two nodes a level for two levels, and the last accepted token and the one after it
    assert reading == [len(PROMPT) + 1, 2, 2] + [2, 2, 2] * 9


# the law


LAW_TREES = {
    "2,2": Trees(tree="2,2"),
    "2,2 with": Trees(tree="2,2", draws="with"),
    "3,1 chosen": Trees(tree="3,1", draws="chosen"),
    "sequoia": Trees(tree="sequoia", max_nodes=5, max_tokens=2),
    "dynamic": Trees(tree="dynamic", max_nodes=6, max_tokens=2, beam=2),
    "dynamic, priced": Trees(tree="dynamic", max_nodes=7, max_tokens=3, beam=2),
}


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("trees", LAW_TREES)
def test_trees_of_a_draft_model_have_the_law_of_the_target(trees, verify):
    """Three tokens under a history-dependent warper, from one drafter that learns from text to text."""
    found: Counter[tuple[int, ...]] = Counter()
    made = ModelDrafter(LastToken(OTHER), vocab=3, context=64, max_batch=1, trees=LAW_TREES[trees])
    limit = Limit(9, 3, 0.05, 0.3) if "priced" in trees else Limit(9, 3)
    sizes = Counter()
    for seed in range(350):
        params = SamplingParams(temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.5, seed=seed, max_tokens=9)
        seq = sequence(params, verify=verify)
        while len(seq.output) < 3:
            (draft,) = made.propose([seq], [limit])
            sizes[len(draft)] += 1
            logits = TARGET[[seq.tokens[-1], *draft.tokens]]
            path, token = decide(logits, seq, draft)
            emitted = [*(draft.tokens[node] for node in path), token]
            seq.extend(emitted)
            made.observe(seq, Outcome((), tuple(emitted), draft, tuple(path)))
        made.forget(seq)
        found[tuple(seq.output[:3])] += 1
    assert max(sizes) > 2
    if "priced" in trees:
        assert len(sizes) > 1, "trees differ in size by what was drawn before"
    assert deviation(found, law(params, 3)) < 5


def grown_by_what_was_drawn(world: World, chance) -> Draft:
    """A tree in which every node's children depend on what was drawn in the other branch, down to the third level."""
    nodes: list[tuple[int, int]] = []  # token, parent

    def prefix(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*prefix(nodes[node][1]), nodes[node][0])

    rows: dict[int, int] = {}

    def draw(parent: int, count: int) -> list[int]:
        if count:
            rows[parent] = len(rows)
        first = len(nodes)
        nodes.extend([(chance.choose(world.q(prefix(parent), 0)), parent) for _ in range(count)])
        return list(range(first, len(nodes)))

    first, second = draw(-1, 2)
    below_first = draw(first, 2 if nodes[second][0] == 0 else 1)
    below_second = draw(second, 1 if nodes[first][0] == 1 else 0)
    if below_second and nodes[below_second[0]][0] == 1:
        draw(below_first[0], 1)
    elif nodes[below_first[-1]][0] == 0 and below_second:
        draw(below_second[0], 1)
    q = np.array([world.q(prefix(parent), 0) for parent in rows], dtype=object)
    tokens, parents = zip(*nodes, strict=True)
    return Draft(tokens, parents, (Drawn.WITH_REPLACEMENT,) * len(nodes), q, tuple(rows[parent] for parent in parents))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_trees_that_grow_by_what_was_drawn_elsewhere_have_exactly_the_law_of_the_target(rule):
    for seed in range(3):
        world = World(seed, vocab=3 if seed else 2, zeros=0.2 * seed)

        def step(chance, world=world):
            draft = grown_by_what_was_drawn(world, chance)
            path, token = verify(
                draft, lambda node: world.p(tuple(draft.tokens[n] for n in draft.path(node))), rule, ExactNoise(chance)
            )
            return (*(draft.tokens[node] for node in path), token)

        assert world.extended(exact_law(step), 4) == world.sequences(4)


def test_dropping_drawn_nodes_for_their_rank_would_not_have_that_law():
    """The mistake that the rules of growth forbid: of the drawn siblings, only the one that q likes best is verified."""
    found: Counter[tuple[int, ...]] = Counter()
    made = ModelDrafter(LastToken(OTHER), vocab=3, context=64, max_batch=1, trees=Trees(tree="2"))
    for seed in range(700):
        seq = sequence(SamplingParams(temperature=0.8, seed=seed, max_tokens=9), verify="rejection")
        (draft,) = made.propose([seq], [Limit(9, 3)])
        best = max(range(2), key=lambda node: float(draft.q[0, draft.tokens[node]]))
        wrong = Draft((draft.tokens[best],), (-1,), (Drawn.CHAIN,), draft.q, (0,))
        path, token = decide(TARGET[[seq.tokens[-1], *wrong.tokens]], seq, wrong)
        found[(wrong.tokens[0] if path else token,)] += 1
        made.forget(seq)
    assert deviation(found, law(seq.params, 1)) > 5


def test_one_engine_serves_requests_of_every_rule_with_trees():
    made = engine(TableModel(VOCAB), drafter(TREES["dynamic"]))
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=30)
    rules = ("match", "rejection", "block", "match")
    results = made.generate([Request(prompt=PROMPT, params=params, verify=rule, draft_tokens=8) for rule in rules])
    assert results[0].tokens == results[3].tokens == answer(temperature=1.0, seed=2)[:30]
    assert all(result.stats.accepted for result in results)
