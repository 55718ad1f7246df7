"""Training of drafts: answers, captured rows, the loop, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import draftwise as dw
from draftwise.cli import main
from draftwise.train import draft_kinds, find_kind, parse_kind_options
from draftwise.train.batches import Place, Shots, endless, epoch_batches, is_held_out, spread
from draftwise.train.capture import capture, collate
from draftwise.train.card import model_card
from draftwise.train.data import Answer, Corpus, make_answers, user_turn
from draftwise.train.lesson import distributions, match, rounded
from draftwise.train.loop import CHECKPOINT, LOG, Plan, train
from draftwise.train.optimizer import schedule
from draftwise.train.rows import Rows
from draftwise.types import Feed
from tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def llm(target):
    return dw.load(str(target), dtype="fp32", context=128, max_batch=4)


def answered(llm, path: Path, count: int) -> Corpus:
    corpus = Corpus(path)
    for seed in range(count):
        prompt = tuple(range(10 + seed, 14 + 2 * seed))
        corpus.add(Answer(prompt, llm.generate(list(prompt), max_tokens=5 + seed % 7, temperature=1.0, seed=seed).tokens))
    return corpus


# answers


def test_answers_are_what_the_model_says_to_the_user_s_prompts(llm, tmp_path):
    corpus = Corpus(tmp_path / "answers.jsonl")
    make_answers(llm, corpus, ["a", "b"], done=lambda: len(corpus.answers) >= 6, max_tokens=8, invented=0.0, longer=0.0)
    prompts = {tuple(llm.encode(text)) for text in ("a", "b")}
    assert {answer.prompt for answer in corpus.answers} == prompts
    assert not llm.engine.busy
    greedy = {prompt: llm.generate(list(prompt), max_tokens=8).tokens for prompt in prompts}
    assert any(answer.tokens == greedy[answer.prompt] for answer in corpus.answers)
    assert corpus.tokens == sum(len(answer.tokens) for answer in corpus.answers)


def test_a_model_makes_up_prompts_and_longer_ones_of_its_answers(llm, target, tmp_path):
    corpus = Corpus(tmp_path / "answers.jsonl")
    for _ in range(8):
        corpus.add(Answer((1, 2), tuple(llm.encode("the cat sat on the mat and " * 8, raw=True))))
    llm = dw.load(str(target), dtype="fp32", context=500, max_batch=2)
    make_answers(llm, corpus, ["question"], done=lambda: len(corpus.answers) >= 14, max_tokens=4, invented=0.0, longer=1.0)
    longer = [llm.tokenizer.decode(answer.prompt) for answer in corpus.answers[8:]]
    assert any("the cat sat on the mat" in text for text in longer)
    assert llm.tokenizer.decode(user_turn(llm)) == "user\n"


def test_prompts_that_all_are_too_long_are_an_error(llm, tmp_path):
    with pytest.raises(ValueError, match="100 prompts one after another cannot be answered; the last: the prompt has"):
        make_answers(llm, Corpus(tmp_path / "answers.jsonl"), ["x" * 400], done=lambda: False, invented=0.0, longer=0.0)


def test_without_prompts_all_are_made_up(llm, tmp_path):
    corpus = Corpus(tmp_path / "answers.jsonl")
    asked = []
    submit = llm.engine.submit
    llm.engine.submit = lambda request: asked.append(request.prompt) or submit(request)
    try:
        make_answers(llm, corpus, [], done=lambda: len(asked) > 20, max_tokens=4)
    finally:
        llm.engine.submit = submit
    assert asked[0] == user_turn(llm)


def test_a_corpus_survives_a_kill_in_the_middle_of_a_line(tmp_path):
    path = tmp_path / "answers.jsonl"
    corpus = Corpus(path)
    corpus.add(Answer((1, 2), (3, 4)))
    with open(path, "a") as file:
        file.write('{"prompt": [1], "ans')
    again = Corpus(path)
    assert again.answers == [Answer((1, 2), (3, 4))]
    again.add(Answer((5,), (6, 7, 8)))
    assert Corpus(path).answers == [Answer((1, 2), (3, 4)), Answer((5,), (6, 7, 8))]
    corpus.refresh()
    assert corpus.tokens == 5


# captured rows


def test_captured_rows_are_those_of_a_pass_alone(llm, tmp_path):
    corpus = answered(llm, tmp_path / "answers.jsonl", 5)
    shots = capture(llm.target, corpus.answers, (0, 2, "final_norm"), most_tokens=9, dtype=torch.float32)
    for answer, shot in zip(corpus.answers, shots, strict=True):
        text = [*answer.prompt, *answer.tokens]
        cache = llm.target.model.new_cache(64)
        hidden = llm.target.model.forward(cache.pack([Feed.chain(cache.alloc(), text[:-1])]), cache, (0, 2, "final_norm"))
        kept = min(len(text), 9)
        assert shot.tokens_T.tolist() == text[-kept:] and shot.answer == min(len(answer.tokens), kept - 1)
        for tap, rows in hidden.taps.items():
            assert torch.equal(shot.features[tap], rows[len(text) - kept :].float())
    batch = collate(shots, torch.device("cpu"))
    assert batch.tokens_BT.shape == (5, 9) and batch.rows == sum(shot.answer for shot in shots)
    for i, shot in enumerate(shots):
        assert batch.tokens_BT[i, batch.starts_B[i] :].tolist() == shot.tokens_T.tolist()
        assert torch.equal(batch.features[2][i, batch.starts_B[i] :], shot.features[2])


def test_an_epoch_has_every_answer_once_and_none_that_is_held_out(llm, tmp_path):
    answers = [Answer((1,), (2,) * (2 + i % 30)) for i in range(600)]
    batches = epoch_batches(answers, seed=1, epoch=0, rows=64)
    places = [place for batch in batches for place in batch]
    assert sorted(places) == [place for place in range(600) if not is_held_out(place)]
    assert max(sum(len(answers[place].tokens) for place in batch) for batch in batches) <= 64
    assert batches == epoch_batches(answers, seed=1, epoch=0, rows=64) != epoch_batches(answers, seed=1, epoch=1, rows=64)


def test_kept_rows_stay_within_their_memory_and_are_the_same(llm, tmp_path):
    corpus = answered(llm, tmp_path / "answers.jsonl", 6)
    options = {"most_tokens": 64, "dtype": torch.float32}
    fresh = Shots(llm.target, corpus.answers, (1,), memory=0, **options)
    some = Shots(llm.target, corpus.answers, (1,), memory=6000, **options)
    for _ in range(2):
        for places in ([0, 3], [1, 2, 5]):
            assert torch.equal(some.batch(places).features[1], fresh.batch(places).features[1])
    assert 0 < some._bytes <= 6000 and not fresh._kept


def test_batches_go_on_where_they_were_even_when_answers_were_added(llm, tmp_path):
    corpus = answered(llm, tmp_path / "answers.jsonl", 12)
    place = Place()
    batches = endless(corpus, place, seed=3, rows=16)
    before = [next(batches) for _ in range(2)]
    halfway = Place(**{"epoch": place.epoch, "batch": place.batch, "answers": place.answers})
    after = [next(batches) for _ in range(2)]
    corpus.add(Answer((1,), (2, 3)))
    again = endless(corpus, halfway, seed=3, rows=16)
    assert [next(again) for _ in range(2)] == after != before


# the loss


@pytest.mark.parametrize("own_head", [True, False])
def test_the_loss_without_logits_in_memory_is_cross_entropy(own_head):
    torch.manual_seed(0)
    hidden, head = torch.randn(600, 8, requires_grad=True), torch.randn(20, 8, requires_grad=own_head)
    p = distributions(torch.randn(50, 8), torch.randn(20, 8), torch.float32)
    place = torch.randint(50, (600,))
    loss, accepted = match(hidden, head, p, place)
    (loss * 0.5).backward()
    mine = [hidden.grad.clone()] + ([head.grad.clone()] if own_head else [])
    hidden.grad = head.grad = None
    log_q = (hidden @ head.T).log_softmax(-1)
    plain = -(p[place] * log_q).sum()
    (plain * 0.5).backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(accepted, torch.minimum(p[place], log_q.exp()).sum())
    for found, expected in zip(mine, [hidden.grad] + ([head.grad] if own_head else []), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_schedule_rises_stays_and_falls():
    assert schedule(0.0) < schedule(0.02) < schedule(0.03) == schedule(0.4) == 1
    assert schedule(0.7) == pytest.approx(0.5) and schedule(1.0) == 0


# the loop


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", draft_kinds())
def test_a_killed_run_goes_on_with_the_same_curve(target, tmp_path, kind):
    llm = dw.load(str(target), dtype="fp32", context=128, max_batch=4)
    module = find_kind(kind)
    answered(llm, tmp_path / "answers.jsonl", 30)
    plan = Plan(updates=6, tokens=1, rows=40, precision="fp32", save_every=0, served_prompts=1, served_tokens=8)

    def run(out: str, *, resume: bool = False, killed_at: int | None = None) -> list[dict]:
        def report(figures):
            if killed_at is not None and figures.get("update") == killed_at and figures["phase"] == "train":
                raise Killed

        options = {"answers": tmp_path / "answers.jsonl", "resume": resume, "report": report}
        train(llm, lambda corpus: module.build(module.Options(), llm.target, corpus), tmp_path / out, plan, **options)
        rows = [json.loads(line) for line in (tmp_path / out / LOG).read_text().splitlines()]
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    torch.manual_seed(5)
    whole = run("whole")
    torch.manual_seed(5)
    with pytest.raises(Killed):
        run("killed", killed_at=4)
    torch.manual_seed(99)
    resumed = run("killed", resume=True)
    assert [row for row in resumed if "loss" in row] == [row for row in whole if "loss" in row]
    assert [row["update"] for row in resumed if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert resumed[-1]["served"] == whole[-1]["served"]
    with pytest.raises(ValueError, match="holds a run already; give --resume"):
        run("whole")
    with pytest.raises(ValueError, match="no run to resume"):
        run("nowhere", resume=True)


@pytest.mark.parametrize("kind", draft_kinds())
def test_training_learns_and_the_served_draft_gains(target, tmp_path, kind):
    """On one text said over and over, acceptance rises from next to nothing, as trained and as served."""
    llm = dw.load(str(target), dtype="fp32", context=128, max_batch=4)
    corpus = Corpus(tmp_path / "answers.jsonl")
    prompt = tuple(llm.encode("one two three"))
    for _ in range(3):
        corpus.add(Answer(prompt, llm.generate(list(prompt), max_tokens=40, ignore_eos=True).tokens))
    module, told = find_kind(kind), []

    def spoilt(corpus):  # some kinds begin with what the target knows
        lesson = module.build(module.Options(), llm.target, corpus)
        with torch.no_grad():
            for matrix in (parameter for parameter in lesson.parameters() if parameter.dim() > 1):
                matrix.mul_(1 + torch.randn_like(matrix))
        return lesson

    plan = Plan(updates=40, tokens=1, rows=120, learning_rate=1e-2, precision="fp32", served_prompts=1, served_tokens=24)
    train(llm, spoilt, tmp_path / "out", plan, answers=corpus.path, report=told.append)
    losses = [figures["loss"] for figures in told if figures["phase"] == "train"]
    served = [figures for figures in told if figures["phase"] == "served"]
    assert losses[-1] < 0.7 * losses[0]
    assert served[-1]["served"][0] > 1.3
    assert told[-1]["phase"] == "done"


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_draft_begins_with_a_mixture_that_foretells_the_next_hidden_state(llm, tmp_path, kind):
    """Nearer than no state at all, which is as near as an arbitrary mixture comes."""
    corpus, module = answered(llm, tmp_path / "answers.jsonl", 12), find_kind(kind)
    lesson = module.build(module.Options(), llm.target, corpus)
    shots = capture(llm.target, spread(corpus.answers, 64), lesson.taps, most_tokens=128, dtype=torch.float32)
    batch = collate(shots, llm.target.model.device)
    mixture = lesson.network.fc if kind == "eagle" else lesson.network.chain[0].eh_proj
    rows, mixed = Rows.of(batch), []
    mixture.register_forward_hook(lambda _, given, made: mixed.append(made))
    scale = 1.0 if kind == "eagle" else lesson.final_scale

    def missed() -> float:
        mixed.clear()
        next(iter(lesson.unroll(batch)))
        return float((scale * mixed[0][:, rows.first :][rows.learns_BA] - wanted).square().mean())

    with torch.no_grad():
        wanted = rows.following(batch.features["final_norm"])
        assert missed() < 0.7 * wanted.square().mean()
        mixture.weight.copy_(mixture.weight[torch.randperm(len(mixture.weight))])
        assert missed() > wanted.square().mean()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_training_begins_with_an_earlier_draft(target, llm, tmp_path, kind):
    corpus = answered(llm, tmp_path / "answers.jsonl", 6)
    module, plan = find_kind(kind), Plan(updates=3, tokens=1, rows=40, precision="fp32", served_prompts=1, served_tokens=4)
    options = module.Options(vocab=64)
    train(llm, lambda corpus: module.build(options, llm.target, corpus), tmp_path / "a", plan, answers=corpus.path)
    begun = module.build(module.Options(start=str(tmp_path / "a")), llm.target, corpus)
    begun.save(tmp_path / "b", {"command": "train -o start=/home/me/a"})
    assert json.loads((tmp_path / "b" / "config.json").read_text())["draftwise"]["card"] == {"command": "train -o start=a"}
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert before.keys() == after.keys() and len(before["d2t"]) == 64
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-6)
    other = {"eagle": "eagle3", "eagle3": "eagle"}[kind]
    with pytest.raises(ValueError, match=kind):
        find_kind(other).build(find_kind(other).Options(start=str(tmp_path / "a")), llm.target, corpus)


@pytest.mark.parametrize("kind", draft_kinds())
def test_a_draft_that_learns_rounded_is_stored_as_it_learnt(llm, tmp_path, kind):
    """Rounding what was saved changes nothing; the weights that are trained are others."""
    corpus = answered(llm, tmp_path / "answers.jsonl", 6)
    module = find_kind(kind)
    plan = Plan(updates=2, tokens=1, rows=40, precision="fp32", served_prompts=1, served_tokens=4, quantize="int4")
    train(llm, lambda corpus: module.build(module.Options(), llm.target, corpus), tmp_path / "a", plan, answers=corpus.path)
    saved = load_file(tmp_path / "a" / "model.safetensors")
    matrices = [tensor for tensor in saved.values() if tensor.dim() == 2 and tensor.shape[1] % 32 == 0]
    assert matrices
    for matrix in matrices:
        torch.testing.assert_close(rounded(matrix, "int4"), matrix, rtol=1e-3, atol=1e-4)
    trained = torch.load(tmp_path / "a" / CHECKPOINT, weights_only=True)["lesson"]
    assert any(tensor.dim() == 2 and not torch.allclose(rounded(tensor, "int4"), tensor) for tensor in trained.values())


def test_a_plan_says_what_is_wrong():
    with pytest.raises(ValueError, match="budget"):
        Plan()
    with pytest.raises(ValueError, match="rows is 0"):
        Plan(updates=1, rows=0)
    with pytest.raises(ValueError, match="bf16, fp32"):
        Plan(updates=1, precision="fp8")
    with pytest.raises(ValueError, match="unknown kind of draft 'eagle9'; choices: .*eagle3"):
        find_kind("eagle9")
    with pytest.raises(ValueError, match="unknown option 'size' for eagle3; it has: vocab"):
        parse_kind_options("eagle3", {"size": "3"})
    with pytest.raises(ValueError, match="steps is 0"):
        parse_kind_options("eagle3", {"steps": "0"})
    with pytest.raises(ValueError, match="the draft of start has its own inner, taps"):
        parse_kind_options("eagle3", {"start": "x", "taps": "1,2,3", "inner": "3"})
    with pytest.raises(ValueError, match="taps is '99'"):
        find_kind("eagle3").parse_taps("99", 30)


# the command


def test_the_command_trains_and_generate_loads_it(target, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "the cat"}\n')
    out = tmp_path / "draft"
    command = ["train", "eagle3", "--model", str(target), "--out", str(out), "--prompts", str(prompts), "--context", "128"]
    sizes = ["--tokens", "60", "--updates", "2", "--rows", "40", "--max-tokens", "8", "--batch", "4"]
    assert main([*command, *sizes, "-o", "vocab=64", "--json"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == 64
    card = config["draftwise"]["card"]
    assert card["prompts"][0]["count"] == 2 and card["trained"]["update"] == 2 and len(card["curve"]) == 1
    printed = capsys.readouterr()
    assert "served tokens a pass" in printed.err
    shown = json.loads(printed.out)
    assert shown["draft"] == str(out) and [point["greedy"] >= 1 for point in shown["served"]] == [True]
    assert (out / CHECKPOINT).exists()
    assert main([*command, *sizes]) == 2
    assert "holds a run already" in capsys.readouterr().err
    generate = ["generate", "the cat", "--model", str(target), "--max-tokens", "4", "--context", "64"]
    assert main([*generate, "--drafter", f"eagle3:{out}"]) == 0
    assert main([*generate, "--drafter", f"eagle:{out}"]) == 2
    assert f"use --drafter eagle3:{out}" in capsys.readouterr().err


def test_the_command_trains_a_draft_further_and_its_card_says_so(target, tmp_path, capsys):
    sizes = ["--tokens", "60", "--updates", "2", "--rows", "40", "--max-tokens", "8", "--batch", "4", "--context", "128"]
    command = ["train", "eagle", "--model", str(target), *sizes]
    assert main([*command, "--out", str(tmp_path / "a"), "-o", "vocab=64"]) == 0
    assert main([*command, "--out", str(tmp_path / "b"), "-o", f"start={tmp_path / 'a'}"]) == 0
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["draft_vocab_size"] == 64
    assert "| begun with | a draft trained for " in model_card(config) and ", 2 updates, " in model_card(config)
    assert main([*command, "--out", str(tmp_path / "d"), "-o", f"start={tmp_path / 'a'}", "-o", "vocab=20"]) == 0
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path / "a"), "--resume", "-o", "vocab=30"]) == 2
    assert "the run was begun with other options" in capsys.readouterr().err
    wide, narrow = (load_file(tmp_path / name / "model.safetensors")["d2t"] for name in "ad")
    assert len(narrow) == 20 and set((narrow + torch.arange(20)).tolist()) < set((wide + torch.arange(64)).tolist())
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path / "c"), "-o", f"start={tmp_path / 'nowhere'}"]) == 2
    assert "there is no config.json" in capsys.readouterr().err
    assert main(["train", "eagle3", *command[2:], "--out", str(tmp_path / "c"), "-o", f"start={tmp_path / 'a'}"]) == 2
    assert "eagle:" in capsys.readouterr().err and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle9", "--out", "x"], "unknown kind of draft 'eagle9'"),
        (["eagle3"], "Missing option '--out'"),
        (["eagle3", "--out", "x", "-o", "size=3"], "unknown option 'size'"),
        (["eagle3", "--out", "x", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        (["eagle3", "--out", "x", "--model", "/nowhere"], "/nowhere"),
        (["eagle3", "--out", "x", "--minutes", "0"], "minutes"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and not (tmp_path / "x").exists()
