"""Self-speculation: what is left out and how it is said, drafts in the target's own cache, and the search for what pays."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import draftwise as dw
from draftwise.cli import main
from draftwise.drafters.none import NoDrafter
from draftwise.drafters.skip import SkipDrafter, by_rule
from draftwise.drafters.skipset import NOTHING, SkipSet, after, parts
from draftwise.drafters.trees import Trees
from draftwise.engine.skip_search import DEPTH, Costs, Judge, Text, Trial, find, search, write
from draftwise.engine.step import decide
from draftwise.types import Feed, Limit, Outcome, Request, SamplingParams
from laws import deviation
from table_model import TableModel, engine
from test_engine import PROMPT, RAGGED, SAMPLING, VOCAB, run
from test_step_law import OTHER, TARGET, TableModel as LastToken, law, sequence
from tiny import tiny_checkpoint

TREES = {
    "chain": {"max_tokens": 4},
    "chain, confident": {"max_tokens": 6, "min_confidence": 0.3},
    "fixed": {"tree": "3,2,1"},
    "sequoia": {"tree": "sequoia", "max_nodes": 10, "max_tokens": 4},
    "dynamic": {"tree": "dynamic", "max_nodes": 8, "beam": 3, "max_tokens": 4},
}


def sets(attention=(), feed_forward=()) -> SkipSet:
    return SkipSet(frozenset(attention), frozenset(feed_forward))


# what is left out


@pytest.mark.parametrize(
    ("text", "attention", "feed_forward"),
    [
        ("3", {3}, {3}),
        ("10-12,25", {10, 11, 12, 25}, {10, 11, 12, 25}),
        ("a12", {12}, set()),
        ("m0-2, a1-1", {1}, {0, 1, 2}),
        ("2,a3-4,m7", {2, 3, 4}, {2, 7}),
    ],
)
def test_a_set_is_read_and_written(text, attention, feed_forward):
    found = SkipSet.parse(text)
    assert found == sets(attention, feed_forward)
    assert SkipSet.parse(str(found)) == found and len(found) == len(attention) + len(feed_forward)


def test_a_set_is_written_in_ranges():
    assert str(sets({1, 2, 3, 5, 9}, {2, 3, 4, 5})) == "2-3,5,a1,a9,m4"
    assert str(NOTHING) == ""


@pytest.mark.parametrize("text", ["", "x", "3-", "5-3", "a", "am3", "-2", "1.5", "3,,4", "a3-m5"])
def test_a_text_that_is_no_set_is_refused(text):
    with pytest.raises(ValueError, match="no layer or range of layers; write what to leave out as in 10-20,25,a12,m3"):
        SkipSet.parse(text)


def test_what_is_kept():
    assert SkipSet.parse("1,a0").kept(3) == ({2}, {0, 2})
    assert after(4, 2).kept(4) == ({0, 1}, {0, 1}) and after(4, 4) == NOTHING
    with pytest.raises(ValueError, match="layer 3 cannot be skipped: the model has layers 0 to 2"):
        SkipSet.parse("m3").kept(3)
    with pytest.raises(ValueError, match="skipping 0-2 leaves nothing of a model of 3 layers"):
        SkipSet.parse("0-2").kept(3)


def test_the_rule_of_thumb_fits_every_model():
    for layers in range(1, 100):
        skip = by_rule(layers)
        attention, feed_forward = skip.kept(layers)
        assert len(skip) == max(layers // 5, 1) and len(feed_forward) == layers


# in the engine, on a model without arithmetic


def target_with(trees=None, *, capacity: int = 4096, reduced: TableModel | None = None, **model):
    """A drafter that shares the cache of a table model, and what an engine needs to run the two."""
    target = TableModel(VOCAB, **model)
    cache = target.new_cache(capacity)
    drafter = Watched(reduced or TableModel(VOCAB, skew=1.0, **model), cache, vocab=VOCAB, trees=Trees(**trees or {}))
    return drafter, {"model": target, "engine_options": {"cache": cache}}


class Watched(SkipDrafter):
    """Holds the drafter to leaving every slot as it found it."""

    def propose(self, seqs, limits):
        lengths = [self.cache.length(seq.slot) for seq in seqs]
        tables = [self.cache.block_table(seq.slot) for seq in seqs]
        rows = [self.committed(seq.slot) for seq in seqs]
        try:
            return super().propose(seqs, limits)
        finally:
            assert [self.cache.length(seq.slot) for seq in seqs] == lengths
            assert [self.cache.block_table(seq.slot) for seq in seqs] == tables
            assert not any(self.cache.staged(seq.slot) for seq in seqs), "what was staged is discarded"
            assert all(torch.equal(self.committed(seq.slot), before) for seq, before in zip(seqs, rows, strict=True))

    def committed(self, slot):
        rows = [page * 16 + row for page in self.cache.block_table(slot) for row in range(16)][: self.cache.length(slot)]
        return self.cache.pool[..., rows, :].clone()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("trees", TREES)
def test_same_tokens_alone_and_in_a_ragged_batch(trees, sampling):
    params = {**SAMPLING[sampling], "max_tokens": 24}
    plain = [run(NoDrafter(), [prompt], **params)[0].tokens for prompt in RAGGED]
    for draft_tokens in (None, 6):
        drafter, setting = target_with(TREES[trees])
        together = run(drafter, RAGGED, draft_tokens=draft_tokens, **setting, **params)
        assert [result.tokens for result in together] == plain
        assert sum(result.stats.accepted for result in together) > 0
    drafter, setting = target_with(TREES[trees])
    assert run(drafter, [PROMPT], draft_tokens=6, **setting, **params)[0].tokens == plain[0]


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("trees", ["chain", "fixed", "dynamic"])
def test_a_subset_that_is_the_whole_model_is_always_right(trees, verify):
    """Its drafts come from the committed rows, the pending token and its own staged rows, so each row must be in place."""
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        drafter, setting = target_with(TREES[trees], reduced=TableModel(VOCAB, memory=0), memory=0)
        result = run(drafter, [PROMPT], verify=verify, draft_tokens=63, **setting, **params)[0]
        assert result.stats.tokens_per_step > Trees(**TREES[trees]).depth


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_other_rules_are_greedy_when_greedy(verify):
    plain = [run(NoDrafter(), [prompt])[0].tokens for prompt in RAGGED]
    drafter, setting = target_with(TREES["fixed"])
    together = run(drafter, RAGGED, verify=verify, draft_tokens=6, **setting)
    assert [result.tokens for result in together] == plain


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("trees", [{"max_tokens": 2, "min_confidence": 0.4}, {"tree": "2,2"}, {"tree": "dynamic", "beam": 2}])
def test_the_law_is_the_targets(trees, verify):
    found: Counter[tuple[int, ...]] = Counter()
    cache = LastToken(TARGET).new_cache(256)
    drafter = SkipDrafter(LastToken(OTHER), cache, vocab=3, trees=Trees(**trees))
    for seed in range(350):
        params = SamplingParams(temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.5, seed=seed, max_tokens=9)
        seq = sequence(params, verify=verify)
        seq.slot = cache.alloc()
        while len(seq.output) < 3:
            (draft,) = drafter.propose([seq], [Limit(9, 3)])
            path, token = decide(TARGET[[seq.tokens[-1], *draft.tokens]], seq, draft)
            emitted = [*(draft.tokens[node] for node in path), token]
            cache.pack([Feed.chain(seq.slot, [seq.tokens[-1], *emitted[:-1]])])
            cache.commit(seq.slot, range(len(emitted)))
            seq.extend(emitted)
            drafter.observe(seq, Outcome((), tuple(emitted), draft, tuple(path)))
        drafter.forget(seq)
        cache.free(seq.slot)
        found[tuple(seq.output[:3])] += 1
    assert deviation(found, law(params, 3)) < 5


@pytest.mark.parametrize("trees", ["chain", "fixed", "dynamic"])
@pytest.mark.parametrize("missing", range(1, 9))
def test_the_context_is_used_to_its_last_position_and_not_beyond(missing, trees):
    prompt = tuple(token % VOCAB for token in range(64 - missing))
    drafter, setting = target_with(TREES[trees], capacity=128)  # the context and what a step may stage, no row more
    setting["engine_options"]["context"] = 64
    made = run(drafter, [prompt], draft_tokens=20, **setting)[0]
    assert len(prompt) + len(made.tokens) == 64 and made.finish_reason == "length"


def test_the_largest_draft_fits_the_rows_that_a_request_was_promised():
    drafter, setting = target_with({"tree": "dynamic", "beam": 7, "max_tokens": 9, "max_nodes": 63}, capacity=144)
    setting["engine_options"] |= {"context": 72}
    made = run(drafter, [PROMPT], draft_tokens=63, max_tokens=64, **setting)[0]
    assert made.tokens == run(NoDrafter(), [PROMPT], max_tokens=64)[0].tokens
    assert made.stats.drafted > 63


def test_requests_wait_for_room_and_all_come_out_right():
    plain = [run(NoDrafter(), [prompt], temperature=1.0, seed=9)[0].tokens for prompt in RAGGED]
    drafter, setting = target_with(TREES["fixed"], capacity=272)
    setting["engine_options"]["max_batch"] = 2
    together = run(drafter, RAGGED, temperature=1.0, seed=9, draft_tokens=6, **setting)
    assert [result.tokens for result in together] == plain


def test_a_long_prompt_is_read_in_chunks_beside_requests_that_draft():
    long = tuple(token % VOCAB for token in range(1200))
    plain = [run(NoDrafter(), [prompt], engine_options={"context": 2048})[0].tokens for prompt in (PROMPT, long)]
    drafter, setting = target_with(TREES["fixed"])
    made = engine(setting["model"], drafter, context=2048, **setting["engine_options"])
    params = SamplingParams(max_tokens=60)
    first = made.submit(Request(prompt=PROMPT, params=params, draft_tokens=6))
    for _ in range(3):
        made.step()
    second = made.submit(Request(prompt=long, params=params, draft_tokens=6))
    results = {}
    while made.busy:
        results |= {event.request_id: event.result.tokens for event in made.step() if event.result}
    assert [results[first], results[second]] == plain


def test_cancel_while_drafting_leaves_the_others_alone():
    plain = [run(NoDrafter(), [prompt])[0].tokens for prompt in RAGGED[:3]]
    drafter, setting = target_with(TREES["fixed"])
    made = engine(setting["model"], drafter, **setting["engine_options"])
    params = SamplingParams(max_tokens=60)
    ids = [made.submit(Request(prompt=prompt, params=params, draft_tokens=6)) for prompt in RAGGED[:3]]
    for _ in range(4):
        made.step()
    partial = made.cancel(ids[1]).result.tokens
    assert partial == plain[1][: len(partial)] and partial
    results = {}
    while made.busy:
        results |= {event.request_id: event.result.tokens for event in made.step() if event.result}
    assert [results[ids[0]], results[ids[2]]] == [plain[0], plain[2]]
    assert made.cache.free_rows == made.cache.pages * 16


def test_a_draft_that_is_interrupted_leaves_nothing_staged():
    class Interrupted(TableModel):
        def forward(self, batch, cache, taps=()):
            if self.passes == 6:
                self.passes = 0
                raise KeyboardInterrupt
            return super().forward(batch, cache, taps)

    drafter, setting = target_with(TREES["chain"], reduced=Interrupted(VOCAB, skew=1.0))
    made = engine(setting["model"], drafter, **setting["engine_options"])
    identity = made.submit(Request(prompt=PROMPT, params=SamplingParams(max_tokens=60), draft_tokens=4))
    interrupted, tokens = 0, []
    while made.busy:
        try:
            tokens += [token for event in made.step() for token in event.tokens]
        except KeyboardInterrupt:  # Watched saw that the slot is as it was; the step is taken again
            interrupted += 1
    assert interrupted > 2 and made.cancel(identity) is None
    assert tuple(tokens) == run(NoDrafter(), [PROMPT])[0].tokens


def test_all_that_the_target_has_not_read_is_fed():
    """As after a request was put back: the slot is shorter by several tokens, or empty."""
    target = TableModel(VOCAB, memory=0)
    seq = sequence(SamplingParams(max_tokens=20), prompt=PROMPT)
    wanted = run(NoDrafter(), [PROMPT], model=target)[0].tokens[:4]
    for read in (0, 3, len(PROMPT) - 1):
        cache = target.new_cache(256)
        seq.slot = cache.alloc()
        if read:
            target.forward(cache.pack([Feed.chain(seq.slot, PROMPT[:read])]), cache)
            cache.commit(seq.slot, range(read))
        (draft,) = SkipDrafter(target, cache, vocab=VOCAB).propose([seq], [Limit(4, 4)])
        assert draft.tokens == wanted
        assert cache.length(seq.slot) == read and cache.staged(seq.slot) == 0


def test_two_of_them_draft_together_and_beside_a_free_one():
    from draftwise.drafters.ngram import NgramDrafter

    plain = [run(NoDrafter(), [prompt], temperature=1.0, seed=4)[0].tokens for prompt in RAGGED]
    drafter, setting = target_with(TREES["chain"])
    other = Watched(TableModel(VOCAB, skew=0.7), drafter.cache, vocab=VOCAB, trees=Trees(tree="2,2"))
    together = run([drafter, NgramDrafter(), other], RAGGED, temperature=1.0, seed=4, draft_tokens=9, **setting)
    assert [result.tokens for result in together] == plain


def test_it_learns_what_it_costs_and_forgets_its_requests():
    drafter, setting = target_with(TREES["chain"])
    assert drafter.seconds_per_depth(1) == drafter.seconds_to_begin(1) == 0
    run(drafter, RAGGED, draft_tokens=4, **setting)
    assert drafter.seconds_per_depth(1) > 0 and not drafter._states


# on real arithmetic


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("skip"), "qwen3", num_hidden_layers=5))


@pytest.fixture(scope="module", params=["auto", "torch"])
def llm(tiny, request) -> dw.LLM:
    return dw.load(tiny, kernels=request.param, context=256)


@pytest.mark.parametrize("options", [{}, {"skip": "a1-3,m2"}, {"skip": "1", "exit": 4, "tree": "3,2"}, {"exit": "5"}])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 11}], ids=["greedy", "sampled"])
def test_same_tokens_on_a_tiny_model(llm, options, params):
    prompts = ["The cat sat on the mat and the cat", "one two three", "a"]
    settings = {"raw": True, "max_tokens": 32, "ignore_eos": True, **params}
    alone = [llm.generate(prompt, **settings) for prompt in prompts]
    drafted = llm.using("skip", options=options)
    together = drafted.generate(prompts, draft_tokens=5, **settings)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    stats = llm.pool(together)
    assert stats.drafted > 0
    if options == {"exit": "5"}:  # nothing is left out
        assert stats.accepted == stats.drafted or params


def test_the_universal_backend_skips_too(tmp_path):
    plain = dw.load(str(tiny_checkpoint(tmp_path / "gpt2", "gpt2")), context=128)
    options = {"raw": True, "max_tokens": 24, "ignore_eos": True}
    for skip in ("1", "a1,m2"):
        drafted = plain.using("skip", options={"skip": skip}).generate(["the cat", "a"], draft_tokens=4, **options)
        assert [r.tokens for r in drafted] == [plain.generate(prompt, **options).tokens for prompt in ("the cat", "a")]
    opt = str(tiny_checkpoint(tmp_path / "opt", "opt"))
    assert dw.load(opt, drafter="skip", options={"skip": "1"}, context=128).generate("a", max_tokens=4, raw=True).tokens
    with pytest.raises(ValueError, match="opt models cannot be left out alone; leave out whole layers"):
        dw.load(opt, drafter="skip", options={"skip": "m1"}, context=128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": "a1-"}, "'a1-' is no layer or range of layers"),
        ({"skip": "7"}, "layer 7 cannot be skipped: the model has layers 0 to 4"),
        ({"skip": "0-4"}, "leaves nothing of a model of 5 layers"),
        ({"exit": "0"}, "exit is 0; it must be at least 1"),
        ({"exit": "6"}, "exit is 6; the model has 5 layers"),
        ({"exit": "two"}, "option exit of skip is 'two'; it must be int"),
        ({"file": "no-such.json"}, "no-such.json: no such file or directory"),
        ({"file": "x.json", "skip": "1"}, "give it, or skip and exit, but not both"),
        ({"max_tokens": "0"}, "max_tokens is 0"),
    ],
)
def test_bad_options_are_one_clear_line(tiny, capsys, options, message):
    arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    assert main(["generate", "a", "--model", tiny, "--drafter", "skip", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in line


def test_a_checkpoint_is_not_wanted(tiny):
    with pytest.raises(ValueError, match="takes no checkpoint; its options say what is left out"):
        dw.load(tiny, drafter=f"skip:{tiny}", context=64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no set of layers to skip; make one with `draftwise tune skip`"),
        ("skip", "holds no set of layers to skip"),
        ('{"skip": "a1"}', "holds no set of layers to skip"),
        ('{"skip": 3, "architecture": "qwen3", "num_layers": 5, "hidden_size": 64}', "holds no set of layers to skip"),
        (
            '{"skip": "a1", "architecture": "qwen3", "num_layers": 28, "hidden_size": 64}',
            "was found for another model: its num_layers is 28 and the target's is 5",
        ),
    ],
)
def test_files_that_hold_no_set_for_this_model_are_refused(tiny, tmp_path, content, message):
    path = tmp_path / "set.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        dw.load(tiny, drafter="skip", options={"file": str(path)}, context=64)


# the search


def test_what_a_set_is_worth():
    """Four layers of 1 ms attention and 2 ms feed-forward, 3 ms of head; the target 15, 16 and 17."""
    judge = Judge.__new__(Judge)
    judge.costs = Costs(1.0, 2.0, 3.0, (15.0, 16.0, 17.0))
    judge.model = TableModel(VOCAB)
    object.__setattr__(judge.model.config, "num_layers", 4)
    skip = sets({0, 1}, {1, 2})  # 3 + 2 + 4 = 9 ms a draft
    trial = judge.weigh(skip, [0.8, 0.6])
    assert trial.length == 1  # 1.8 tokens in 9 + 16 ms; 2.4 in 18 + 17 would be less
    assert trial.tokens_per_step == pytest.approx(1.8) and trial.speedup == pytest.approx(1.8 * 15 / 25)
    assert judge.weigh(skip, [0.9, 0.765]).length == 2  # 2.665 in 35 ms


def test_the_search_finds_the_best_of_all_sets():
    """Against every set of four layers: parts gain each for itself, and some pairs spoil what either gains."""
    single = parts(4)
    worth = dict(zip(single, (0.2, -0.3, 0.15, 0.1, 0.05, -0.1, 0.25, -0.05), strict=True))
    spoilt = {(0, 2): 0.3, (2, 3): 0.2, (1, 7): -0.6}  # the last two gain only together

    def judge(skip: SkipSet) -> Trial:
        tried.append(skip)
        chosen = [number for number, part in enumerate(single) if part | skip == skip]
        speed = 1 + sum(worth[single[number]] for number in chosen)
        speed -= sum(cost for pair, cost in spoilt.items() if set(pair) <= set(chosen))
        return Trial(skip, (), 1, 1.0, speed)

    tried: list[SkipSet] = []
    every = [
        judge(sets((n for n in chosen if n < 4), (n - 4 for n in chosen if n >= 4)))
        for size in range(1, 8)
        for chosen in itertools.combinations(range(8), size)
    ]
    best = max(trial.speedup for trial in every)
    tried.clear()
    assert search(judge, single, go_on=lambda: True).speedup == pytest.approx(best)
    assert len(set(tried)) < 0.6 * len(every) and tried[0] == NOTHING
    left = iter(range(3))
    tried.clear()
    assert search(judge, single, go_on=lambda: next(left, None) is not None).speedup == pytest.approx(1.2)
    assert len(tried) == 5, "it stops when it is told to, with what it has"


def test_a_set_that_leaves_out_something_is_found_where_nothing_gains():
    def judge(skip: SkipSet) -> Trial:
        return Trial(skip, (), 1, 1.0, 0.9 - 0.1 * len(skip) + 0.05 * (2 in skip.feed_forward))

    found = search(judge, parts(4), go_on=lambda: True)
    assert (found.skip, found.speedup) == (SkipSet.parse("m2"), pytest.approx(0.85))


def texts_of(llm: dw.LLM) -> list[Text]:
    return write(llm, ["The cat sat on", "one two three four", "a"], max_tokens=3 * DEPTH + 2, raw=True)


COSTS = Costs(1.0, 1.0, 1.0, tuple(10.0 + n for n in range(DEPTH + 1)))


@torch.inference_mode()
def test_a_set_is_judged_as_it_would_draft(llm):
    """Against the subset fed a token at a time after the rows that the target committed."""
    texts, model, vocab = texts_of(llm), llm.engine.model, llm.engine.vocab
    assert len(texts) > 1
    judge = Judge(model, texts, COSTS, vocab=vocab)
    assert judge(NOTHING).survival == (1.0,) * DEPTH
    for skip in (SkipSet.parse("a1"), SkipSet.parse("2,m4"), after(5, 4)):
        subset = model.subset(*skip.kept(5))
        windows = []
        for text in texts:
            for known in range(text.prompt_length, len(text.tokens) - DEPTH + 1, DEPTH):
                cache = model.new_cache(256)
                slot = cache.alloc()
                if known > 1:
                    model.forward(cache.pack([Feed.chain(slot, text.tokens[: known - 1])]), cache)
                    cache.commit(slot, range(known - 1))
                right = []
                for k in range(DEPTH):
                    feed = Feed.chain(slot, [text.tokens[known - 1 + k]], after=k - 1)
                    logits = subset.logits(subset.forward(cache.pack([feed]), cache).final)
                    right.append(int(logits[0, :vocab].argmax()) == text.tokens[known + k])
                windows.append(right)
        survival = [
            sum(all(window[at : at + k]) for window in windows for at in range(DEPTH - k + 1)) / len(windows) / (DEPTH - k + 1)
            for k in range(1, DEPTH + 1)
        ]
        assert judge(skip).survival == pytest.approx(survival)
        assert 0 < survival[0] < 1
    assert len(judge.trials) == 4


def test_a_whole_search_ends_in_time_and_its_set_drafts(llm):
    clock = itertools.count()
    seen = []
    found = find(
        llm,
        ["The cat sat on", "one two three four", "in the", "the other"],
        max_tokens=2 * DEPTH,
        raw=True,
        seconds=20,
        progress=lambda trials, best, seconds: seen.append((trials, best.speedup, seconds)),
        clock=lambda: float(next(clock)),
    )
    assert 1 <= found.trials <= 20 and seen[-1][0] == found.trials
    best = [speedup for _, speedup, _ in seen[1:]]  # the first set leaves out nothing
    assert best and best == sorted(best)
    assert len(found.trial.survival) == DEPTH and 1 <= found.trial.length <= DEPTH
    with pytest.raises(ValueError, match="no prompt got an answer of 8 tokens or more"):
        find(llm, ["a"], max_tokens=3, raw=True)


def test_models_whose_parts_hang_together_lose_whole_layers(tmp_path):
    opt = dw.load(str(tiny_checkpoint(tmp_path, "opt")), context=128)
    found = find(opt, ["The cat", "one two"], max_tokens=DEPTH, raw=True, seconds=1000)
    assert found.trial.skip.attention == found.trial.skip.feed_forward and found.trials > 3


def test_the_command_writes_a_file_that_the_drafter_takes(tiny, tmp_path, capsys):
    out, prompts = tmp_path / "set.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The cat sat on"}\n{"turns": ["one two three"]}\n', encoding="utf-8")
    arguments = ["tune", "skip", "--model", tiny, "--prompts", str(prompts), "--raw", "--minutes", "0.02", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert printed["file"] == str(out) and printed["skip"] == saved["skip"]
    assert saved["model"] == tiny and (saved["architecture"], saved["num_layers"]) == ("qwen3", 5)
    assert set(saved) >= {"draft_tokens", "tokens_per_step", "speedup", "survival", "trials"}
    assert main(["generate", "a", "--model", tiny, "--drafter", "skip", "-o", f"file={out}", "--max-tokens", "4"]) == 0
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "sets tried" in shown and "tokens a pass" in shown and "-o file=" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["skip"], "Missing option '--out'"),
        (["ngram", "--out", "x.json"], "'ngram' is not 'skip'"),
        (["skip", "--out", "no/such/folder/x.json"], "x.json cannot be written: there is no folder"),
        (["skip", "--out", "x.json", "--prompts", "no-such.jsonl"], "no-such.jsonl: no such file or directory"),
        (["skip", "--out", "x.json", "--minutes", "-1"], "-1.0 is not in the range x>=0"),
    ],
)
def test_bad_input_to_the_command_is_one_clear_line(capsys, arguments, message):
    assert main(["tune", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.lab
def test_a_set_that_was_found_drafts_on_smollm2(tmp_path):
    llm = dw.load("smollm2", context=1024)
    prompts = ["Write a short story about a dog.", "List five fruits.", "Why is the sky blue?", "Explain what a noun is."]
    found = find(llm, prompts, seconds=120)
    path: Path = tmp_path / "set.json"
    found.trial.skip.save(path, llm.config)
    drafted = llm.using("skip", options={"file": str(path)})
    for params in ({}, {"temperature": 0.8, "seed": 1}):
        plain = llm.generate("Describe a city at night.", max_tokens=96, **params)
        result = drafted.generate("Describe a city at night.", max_tokens=96, draft_tokens=3, **params)
        assert result.tokens == plain.tokens and result.stats.tokens_per_step > 1.15
