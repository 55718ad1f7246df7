"""Several drafters at once: drafts merged into one trie keep the target's law, and requests their tokens."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter

import numpy as np
import pytest
import torch

import draftwise as dw
from adversaries import Oracle, RandomTree, Sampled
from draftwise.cli import main
from draftwise.drafters import drafter_labels, parse_drafters
from draftwise.drafters.base import Drafter
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.ngram import NgramDrafter
from draftwise.drafters.trees import Trees
from draftwise.engine.experience import Experience
from draftwise.engine.merge import Offer, merge
from draftwise.engine.passes import CostTable
from draftwise.types import NO_DRAFT, Draft, Request, SamplingParams
from draftwise.verify import verify
from laws import CHAIN, CHOSEN, LEAF, WITH, WITHOUT, ExactNoise, Group, World, deviation, law as exact_law, levels
from table_model import TableModel, built, engine
from test_engine import PROMPT, RAGGED, SAMPLING, VOCAB, answer, run
from test_step_law import OTHER, TARGET, TableModel as LastToken, law, sequence
from tiny import tiny_checkpoint

# merging


def chosen(tokens, parents, survival=None):
    return Draft(tuple(tokens), tuple(parents), (CHOSEN,) * len(tokens), survival=survival)


def test_equal_paths_become_one_and_agreement_counts():
    first = chosen([1, 2, 3], [-1, 0, 1], (0.5, 0.4, 0.2))
    second = chosen([1, 5, 2, 4], [-1, -1, 0, 2], (0.5, 0.3, 0.25, 0.1))
    for rule in ("match", "rejection"):
        draft, settled, sources = merge([Offer(first, False, 0), Offer(NO_DRAFT, False, 1), Offer(second, False, 2)], rule)
        assert (draft.tokens, draft.parents) == ((1, 2, 3, 5, 4), (-1, 0, 1, -1, 1))
        # where both offer it, as the surer one says; else where the other is wrong, against that neither is right
        five = 0.5 * (0.3 * 0.5) / (0.3 * 0.5 + 0.5 * 0.2)
        three, four = (0.4 * weight / (0.5 * 0.6 + 0.4 * 0.5 + 0.5 * 0.6) for weight in (0.5 * 0.6, 0.4 * 0.5))
        assert draft.survival == pytest.approx((0.5, 0.4, three, five, four))
        assert (settled, sources) == (0, [(0, 2), (0, 2), (0,), (2,), (2,)])


def test_a_child_is_never_likelier_than_its_parent():
    offers = [Offer(chosen([1], [-1], (0.3,)), False), Offer(chosen([1, 2], [-1, 0], (0.2, 0.2)), False)]
    assert merge(offers, "match").draft.survival == pytest.approx((0.3, 0.3))
    twice = chosen([2, 1, 1], [-1, 0, 0], (0.1, 0.1, 0.1))
    draft = merge([Offer(chosen([2], [-1], (0.3,)), False), Offer(twice, False)], "match").draft
    assert (draft.tokens, draft.survival) == ((2, 1), pytest.approx((0.3, 0.3)))


def test_drawn_nodes_come_first_and_keep_their_rows_and_what_is_whole_comes_next():
    q = torch.eye(6)
    chain = dataclasses.replace(Draft.chain([1, 2], CHAIN, q=q[1:3]), survival=(0.5, 0.2))
    other = Draft((1, 3), (-1, -1), (WITHOUT,) * 2, q[4:5], (0, 0), (0.4, 0.3))
    window = chosen([4, 1], [-1, -1], (0.1, 0.1))
    lookup = chosen([1, 2, 5], [-1, 0, 1], (0.6, 0.5, 0.4))
    offers = [Offer(lookup, False), Offer(window, True), Offer(chain, False), Offer(other, False)]
    draft, settled, _ = merge(offers, "block")
    assert draft.tokens == (1, 2, 1, 3, 4, 5)
    assert draft.parents == (-1, 0, -1, -1, -1, 1), "the window's and the lookup's 1 are the first drafter's"
    assert draft.drawn == (CHAIN, CHAIN, WITHOUT, WITHOUT, CHOSEN, CHOSEN)
    assert draft.q_row == (0, 1, 2, 2, -1, -1) and torch.equal(draft.q, q[[1, 2, 4]])
    assert settled == 5
    draft, settled, _ = merge(offers, "match")
    assert (draft.tokens, settled) == ((4, 1, 2, 5, 3), 2), "under match whatever is equal is joined"


PAIRS = {
    "chain, chosen": (levels(CHAIN, 1, 1), levels(CHOSEN, 1, 1)),
    "chosen, chain": (levels(CHOSEN, 2, 1), levels(CHAIN, 1, 1)),
    "two chains": (levels(CHAIN, 1, 1), levels(CHAIN, 1, 1)),
    "without, chosen": (levels(WITHOUT, 2, 1), levels(CHOSEN, 1, 2)),
    "with, without": (levels(WITH, 2), levels(WITHOUT, 2)),
    "mixed, chosen": ((Group(CHOSEN, (levels(CHAIN, 1),)),), levels(CHOSEN, 2, 1)),
}


def merged_by(world: World, pair: tuple, chance, prefix: tuple[int, ...], join) -> Draft:
    """Two drafters' drafts, merged by `join`; exact rows of q are put back where it left their numbers."""
    second = (Group(pair[1][0].drawn, ()), *pair[1])  # its first level is drawn from another q than the first drafter's
    drafts = [world.draft(tree, chance, prefix) for tree in (pair[0], second)]
    rows = np.concatenate([draft.q for draft in drafts])
    numbered, start = [], 0
    for draft in drafts:
        numbers = torch.arange(start, start + len(draft.q))[:, None]
        start += len(draft.q)
        numbered.append(dataclasses.replace(draft, q=numbers if len(numbers) else None, survival=(0.5,) * len(draft)))
    draft = join(numbered)
    order = draft.q[:, 0].tolist() if draft.q is not None else []
    return dataclasses.replace(draft, q=rows[order])


def emitted_by(world: World, pair: tuple, rule: str, chance, join) -> tuple[int, ...]:
    draft = merged_by(world, pair, chance, (), join)

    def row(node: int):
        return world.p(tuple(draft.tokens[n] for n in draft.path(node)))

    path, token = verify(draft, row, rule, ExactNoise(chance))
    return (*(draft.tokens[node] for node in path), token)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("pair", PAIRS)
def test_merged_drafts_have_exactly_the_law_of_the_target(pair, rule):
    for seed in range(3):
        world = World(seed, vocab=2, zeros=0.15 * seed)

        def join(drafts):
            return merge([Offer(draft, False) for draft in drafts], rule).draft

        found = exact_law(lambda chance, world=world, join=join: emitted_by(world, PAIRS[pair], rule, chance, join))
        assert world.extended(found, 3) == world.sequences(3)


def test_leaving_out_a_chosen_token_that_stands_before_an_equal_drawn_one_would_be_biased():
    def join(drafts):
        first, second = drafts  # the chosen token, then one drawn: the chosen one is left out where they are equal
        if first.tokens[0] == second.tokens[0]:
            return second
        return Draft((*first.tokens, *second.tokens), (-1, -1), (CHOSEN, CHAIN), second.q, (-1, 0))

    wrong = 0
    for seed in range(4):
        world = World(seed)
        pair = ((Group(CHOSEN, (LEAF,)),), (Group(CHAIN, (LEAF,)),))
        found = exact_law(lambda chance, world=world, pair=pair: emitted_by(world, pair, "rejection", chance, join))
        wrong += world.extended(found, 1) != world.sequences(1)
    assert wrong


# in the engine


def draft_model(skew: float = 1.0, **trees) -> ModelDrafter:
    return ModelDrafter(TableModel(VOCAB, skew=skew), vocab=VOCAB, context=512, max_batch=8, trees=Trees(**trees))


SEVERAL = {
    "ngram, model": lambda: [NgramDrafter(), draft_model(max_tokens=4)],
    "two models": lambda: [draft_model(max_tokens=3), draft_model(0.5, max_tokens=3)],
    "tree and chain of models, ngram": lambda: [draft_model(tree="2,2"), draft_model(0.5, max_tokens=3), NgramDrafter()],
    "two free ones": lambda: [NgramDrafter(max_ngram=2), RandomTree(VOCAB)],
    "drawn, unsure and free": lambda: [Sampled(VOCAB, "tree"), NgramDrafter(), draft_model(tree="dynamic", max_nodes=6)],
}


@pytest.mark.parametrize("sampling", ["greedy", "nucleus", "everything", "masked"])
@pytest.mark.parametrize("drafters", SEVERAL)
def test_same_tokens_alone_and_in_a_ragged_batch(drafters, sampling):
    params = {**SAMPLING[sampling], "max_tokens": 16}
    plain = plain_tokens(sampling)
    for draft_tokens in (None, 8):
        together = run(SEVERAL[drafters](), RAGGED, draft_tokens=draft_tokens, **params)
        assert [result.tokens for result in together] == plain
    assert run(SEVERAL[drafters](), [PROMPT], **params)[0].tokens == plain[0]


@functools.cache
def plain_tokens(sampling):
    return [run([], [prompt], **{**SAMPLING[sampling], "max_tokens": 16})[0].tokens for prompt in RAGGED]


@pytest.mark.parametrize("verify", ["rejection", "block"])
@pytest.mark.parametrize("drafters", SEVERAL)
def test_other_rules_are_greedy_when_greedy_and_repeat_with_their_seed(drafters, verify):
    assert run(SEVERAL[drafters](), [PROMPT], verify=verify, draft_tokens=8)[0].tokens == answer()
    options = {"verify": verify, "draft_tokens": 8, "max_tokens": 20, "temperature": 1.0, "seed": 1}
    first, second = ([result.tokens for result in run(SEVERAL[drafters](), RAGGED, **options)] for _ in range(2))
    assert first == second


def test_two_draft_models_give_more_tokens_a_pass_than_either():
    """SpecInfer: of two drafts that err apart, one is right more often; both go through one pass of a ragged batch."""
    prompts = [tuple((5 * i + j * j) % VOCAB for j in range(2 + i)) for i in range(6)]

    def tokens_per_step(*models, **options):
        drafters = [
            ModelDrafter(model, vocab=VOCAB, context=512, max_batch=8, trees=Trees(max_tokens=3)) for model in models
        ]
        made = run(drafters, prompts, model=TableModel(VOCAB, memory=3), draft_tokens=6, max_tokens=100, **options)
        return sum(result.stats.emitted - 1 for result in made) / sum(result.stats.steps for result in made)

    for params in ({}, {"temperature": 1.0, "seed": 2}):
        for rule in ("match", "rejection"):
            first, second = TableModel(VOCAB, memory=3, skew=1.2), Shifted(VOCAB, memory=3, skew=1.2)
            alone = [tokens_per_step(model, verify=rule, **params) for model in (first, second)]
            assert tokens_per_step(first, second, verify=rule, **params) > 1.1 * max(alone)


class Shifted(TableModel):
    """A draft that errs in other places than a TableModel of the same skew."""

    def row(self, code):
        row = torch.randn(self.config.vocab_size, generator=torch.Generator().manual_seed(code)) * self.peak
        return row + torch.randn(self.config.vocab_size, generator=torch.Generator().manual_seed(code + 2)) * self.skew


def test_two_samplers_of_one_q_draw_apart():
    """With equal keys their draws would be equal, which is not what their q says."""
    heard = []

    class Heard(ModelDrafter):
        def propose(self, seqs, limits):
            drafts = super().propose(seqs, limits)
            heard.append(drafts[0].tokens)
            return drafts

    pair = [Heard(TableModel(VOCAB), vocab=VOCAB, context=512, max_batch=8, trees=Trees(max_tokens=1)) for _ in range(2)]
    run(pair, [PROMPT], verify="rejection", draft_tokens=2, temperature=3.0, seed=3)
    assert sum(first != second for first, second in zip(heard[::2], heard[1::2], strict=True)) > 0.7 * len(heard) / 2


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
def test_drafters_together_have_the_law_of_the_target(verify):
    """Through the whole engine, which chooses drafters and sizes by what it has learnt: three tokens of many requests."""
    found: Counter[tuple[int, ...]] = Counter()
    cost = CostTable((1, 2, 4, 8), (1.0, 1.1, 1.2, 1.6))

    def model(trees):
        return ModelDrafter(LastToken(OTHER), vocab=3, context=64, max_batch=4, trees=trees)

    class Costly(Drafter):
        """Prompt lookup as if it took time, without an estimate of its own."""

        max_depth = 2

        def __init__(self):
            self.lookup = NgramDrafter(max_tokens=2)

        def propose(self, seqs, limits):
            return [dataclasses.replace(draft, survival=None) for draft in self.lookup.propose(seqs, limits)]

        def seconds_per_depth(self, batch):
            return 0.15

    made = engine(
        Last(TARGET),
        [NgramDrafter(max_tokens=2), model(Trees(tree="2,1")), model(Trees(max_tokens=2)), Costly()],
        context=64,
        cost=cost,
        vocab=3,
        max_batch=4,
    )
    sizes: Counter[int] = Counter()
    params = {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "max_tokens": 5}
    for start in range(0, 900, 4):
        requests = [
            Request(prompt=(0,), params=SamplingParams(seed=seed, **params), verify=verify) for seed in range(start, start + 4)
        ]
        for result in made.generate(requests):
            found[result.tokens[:3]] += 1
            sizes[result.stats.drafted] += 1
    assert len(sizes) > 3
    assert deviation(found, law(SamplingParams(**params), 3)) < 5


class Last(LastToken):
    """A target whose logits depend on the last token, as the engine asks for one."""

    config = TableModel(3).config


# which are told what


class Listening(Oracle):
    def __init__(self, answer, length):
        super().__init__(answer, length)
        self.heard = []

    def observe(self, seq, outcome):
        self.heard.append(outcome)


def test_every_drafter_hears_of_every_pass_and_finds_its_own_by_the_tokens():
    tokens = answer()
    right, wrong = Listening(tokens, 3), Listening([(token + 1) % VOCAB for token in tokens], 3)
    result = run([wrong, right], [PROMPT], draft_tokens=6)[0]
    assert result.tokens == tokens
    assert right.heard == wrong.heard and len(right.heard) == result.stats.steps + 1
    assert result.stats.accepted == result.stats.drafted / 2
    outcome = right.heard[3]
    assert outcome.draft.follow(outcome.emitted) == list(outcome.path) and len(outcome.path) == 3
    assert Draft.chain(outcome.emitted[:2]).follow(outcome.emitted) == [0, 1]
    assert Draft.chain([VOCAB]).follow(outcome.emitted) == [] == NO_DRAFT.follow(outcome.emitted)


def test_with_a_given_number_of_nodes_the_likeliest_are_verified():
    tokens = answer()

    class Sure(Oracle):
        def __init__(self, answer, length, chance):
            super().__init__(answer, length)
            self.chance = chance

        def propose(self, seqs, limits):
            return [
                dataclasses.replace(draft, survival=tuple(self.chance ** (k + 1) for k in range(len(draft))))
                for draft in super().propose(seqs, limits)
            ]

    right, wrong = Sure(tokens, 4, 0.9), Sure([(token + 1) % VOCAB for token in tokens], 4, 0.1)
    result = run([wrong, right], [PROMPT], draft_tokens=4)[0]
    assert result.stats.accepted > 0.9 * result.stats.drafted


def test_taps_of_all_drafters_are_read_once():
    heard = []

    class Tapping(Listening):
        def observe(self, seq, outcome):
            heard.append(outcome)

    first, second = Tapping(answer(), 2), Tapping(answer(), 2)
    first.taps, second.taps = (0, "final_norm"), ("final_norm", 1)
    run([first, second], [PROMPT], draft_tokens=2, max_tokens=9)
    assert list(heard[-1].features) == [0, "final_norm", 1]


def test_a_drafter_without_a_file_of_weights_by_name_beside_another():
    model = TableModel(VOCAB)
    both = [built("ngram", model, model.new_cache(64), max_tokens=4), built("none", model, model.new_cache(64))]
    assert run(both, [PROMPT])[0].tokens == answer()


# on real arithmetic, and from the command line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama"))


@pytest.mark.parametrize("weights", [{"dtype": "bf16"}, {"quantize": "int4"}], ids=str)
def test_trees_and_several_drafters_say_the_same_on_real_arithmetic(tiny, weights):
    plain = dw.load(tiny, **weights)
    prompts = ["one two three one two three one two", "a", "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"]
    settings = {
        f"ngram,model:{tiny}": {"tree": "dynamic", "max_nodes": 8, "beam": 3, "model.max_tokens": 4},
        f"model:{tiny},model:{tiny}": {"model1.tree": "3,2", "model2.max_tokens": 3},
        f"model:{tiny}": {"tree": "sequoia", "max_tokens": 3},
    }
    for drafter, options in settings.items():
        drafted = plain.using(drafter, options=options, draft_quantize="int8")
        for params in ({}, {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 2}):
            asked = {"raw": True, "max_tokens": 24, "ignore_eos": True, **params}
            alone = [plain.generate(prompt, **asked).tokens for prompt in prompts]
            for draft_tokens in (None, 9):
                together = drafted.generate(prompts, draft_tokens=draft_tokens, **asked)
                assert [result.tokens for result in together] == alone
            assert together[0].stats.drafted > 0 and together[0].drafter == ",".join(drafter_labels(drafter).values())


def test_several_drafters_from_the_command_line(tiny, capsys):
    run = ["--model", tiny, "--max-tokens", "12", "--raw", "--json", "-o", "model.tree=2,1", "-o", "max_ngram=3"]
    assert main(["generate", "one two one two", "--drafter", f"ngram,model:{tiny}", *run]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["drafter"] == "ngram,model"
    compared = ["--drafters", f"ngram,ngram+model:{tiny}", "--limit", "1", *run]
    assert main(["bench", *compared]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["options"] for run in runs] == [{}, {"max_ngram": "3"}, {"model.tree": "2,1", "max_ngram": "3"}]
    assert main(["generate", "x", "--drafter", "ngram,model:x", "-o", "max_tokens=3"]) == 2
    assert "say which: ngram.max_tokens, model.max_tokens" in capsys.readouterr().err


# naming them


def test_options_find_the_drafter_that_has_them():
    chosen = parse_drafters("ngram,model:a/b.gguf", {"max_ngram": "4", "tree": "3,1", "model.max-tokens": 5})
    assert [(name, path) for name, path, _ in chosen] == [("ngram", None), ("model", "a/b.gguf")]
    assert (chosen[0].options.max_ngram, chosen[0].options.max_tokens) == (4, 16)
    assert (chosen[1].options.tree, chosen[1].options.max_tokens) == ("3,1", 5)
    assert list(drafter_labels("model:x, ngram ,model:y")) == ["model1", "ngram", "model2"]
    twice = parse_drafters("model:x,model:y", {"model2.max_tokens": "3"})
    assert [options.max_tokens for _, _, options in twice] == [8, 3]
    assert parse_drafters("ngram", {"ngram.max_tokens": "3"})[0].options.max_tokens == 3


@pytest.mark.parametrize(
    "drafters, options, message",
    [
        ("ngram,model:x", {"max_tokens": "3"}, r"say which: ngram.max_tokens, model.max_tokens"),
        ("ngram,model:x", {"suffix.max_tokens": "3"}, r"names no drafter here; there are: ngram, model"),
        ("ngram,model:x", {"colour": "3"}, r"unknown option 'colour' for ngram, model; they have: ngram.max_ngram, "),
        ("ngram,model:x", {"model.max_ngram": "3"}, r"unknown option 'max_ngram' for model; it has: max_tokens, tree"),
        ("ngram", {"colour": "3"}, r"unknown option 'colour' for ngram; it has: max_ngram, "),
        ("ngram,wishes", {}, r"unknown drafter 'wishes'; choices: "),
        ("none,ngram", {}, "'none' drafts nothing"),
        ("ngram,", {}, r"unknown drafter ''; choices: "),
    ],
)
def test_names_and_options_that_do_not_fit_are_errors_that_name_the_choices(drafters, options, message):
    with pytest.raises(ValueError, match=message):
        parse_drafters(drafters, options)


def test_estimates_are_corrected_by_what_came_of_such() -> None:
    """Each drafter is right as often as it says, but never where both speak: the governor soon stops believing the pair."""
    experience = Experience()
    seq = sequence(SamplingParams())
    offers = [Offer(chosen([1], [-1], (0.5,)), False, 0), Offer(chosen([2], [-1], (0.5,)), False, 1)]
    merged = merge(offers, "match")
    before = experience.together(seq, merged)
    for _ in range(60):
        experience.learn_together(seq, merged, merged.draft, [3])
        experience.learn_estimates(merged.draft.surviving([0.4, 0.4]), merged.draft, [3])
    after = experience.together(seq, merged)
    assert all(late < early / 4 for early, late in zip(before, after, strict=True))
    assert max(experience.sober(merged.draft.surviving([0.4, 0.4]))) < 0.15
    assert experience.sober(chosen([1], [-1], (0.8,))) == pytest.approx([0.8]), "estimates of another size are left alone"


def test_right_guesses_that_come_in_runs_are_foreseen() -> None:
    """Half of them right: nine of ten after a right one, one of ten after a wrong one; after a step without one, half."""
    experience, seq, flip = Experience(), sequence(SamplingParams()), np.random.default_rng(0)
    draft, right, asked = chosen([1], [-1], (0.5,)), True, False

    def expected() -> float:
        (first,) = experience.outlook(0, seq, 1)
        return first.chance

    for step in range(3000):
        right = bool(flip.random() < (0.5 if not asked else 0.9 if right else 0.1))
        experience.learn(0, seq, draft, draft, 1, [1 if right else 2, 3])
        asked = step % 4 != 3
        if not asked:
            experience.passed_over(0, seq)
    assert 0.35 < expected() < 0.65
    for token, low, high in ((1, 0.7, 1.0), (2, 0.0, 0.3)):
        experience.learn(0, seq, draft, draft, 1, [token, 3])
        assert low < expected() < high
