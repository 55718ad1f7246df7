"""Medusa drafts: what is trained is what is served, exact under every rule, in both layouts, strict about files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwise as dw
from draftwise.cli import main
from draftwise.drafters.medusa import MedusaRunner
from draftwise.drafters.medusa_files import read_medusa, write_medusa
from draftwise.drafters.medusa_network import MedusaNetwork, MedusaShape
from draftwise.models.linear import WeightKind
from draftwise.train.capture import capture, collate
from draftwise.train.data import Answer, Corpus
from draftwise.train.loop import Plan, train
from draftwise.train.medusa import Options, build
from tiny import tiny_checkpoint, tiny_draft

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def llm(target):
    return dw.load(str(target), dtype="fp32", context=256)


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("draft"), target, "medusa", updates=3, vocab=100)


@pytest.fixture()
def corpus(llm, tmp_path) -> Corpus:
    corpus = Corpus(tmp_path / "answers.jsonl")
    for prompt in (PROMPT, "a", "In the beginning there was a list"):
        tokens = tuple(llm.encode(prompt))
        corpus.add(Answer(tokens, llm.generate(prompt, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True).tokens))
    return corpus


def random_draft(*, heads: int = 3, layers: int = 1, vocab: int = 300, own_head: bool = True) -> MedusaNetwork:
    torch.manual_seed(3)
    shape = MedusaShape(hidden_size=64, num_heads=heads, num_layers=layers, draft_vocab=vocab, own_head=own_head)
    network = MedusaNetwork(shape)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    network.d2t = torch.randperm(300)[:vocab].sort().values
    return network


def said(network: MedusaNetwork, llm: dw.LLM) -> torch.Tensor:
    """Logits of every head after five made-up rows, [heads, rows, vocabulary]."""
    torch.manual_seed(4)
    rows, shape = torch.randn(5, 64), network.shape
    model = llm.target.model
    copy = MedusaNetwork(shape)
    copy.load_state_dict(network.state_dict())
    copy.d2t = network.d2t
    runner = MedusaRunner(copy, model, vocab=llm.target.vocab, kind=WeightKind(torch.float32, compiled=False))
    return torch.stack(runner.logits(rows, shape.num_heads))


# what a head says


@pytest.mark.parametrize("own_head", [True, False])
def test_a_head_is_what_the_paper_says(llm, own_head):
    """x + SiLU(W x + b), block after block, then its rows, or a matrix and the target's; other tokens are impossible."""
    network = random_draft(heads=2, layers=2, vocab=120, own_head=own_head)
    torch.manual_seed(4)
    rows = torch.randn(5, 64)
    logits = said(network, llm)
    state = network.state_dict()
    for k in range(2):
        x = rows
        for block in range(2):
            y = x @ state[f"{k}.{block}.linear.weight"].T + state[f"{k}.{block}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        head = state[f"{k}.2.weight"] if own_head else llm.target.model.head_rows(network.d2t) @ state[f"{k}.2.weight"]
        torch.testing.assert_close(logits[k][:, network.d2t], x @ head.T, rtol=1e-4, atol=1e-4)
        assert int(torch.isinf(logits[k]).sum()) == 5 * 180


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("options", [{}, {"own_head": True, "num_layers": 2, "num_heads": 3}], ids=str)
def test_training_and_serving_compute_the_same(target, corpus, tmp_path, options, kernels):
    """In a batch with padding, against what the drafter makes of the engine's own rows."""
    llm = dw.load(str(target), dtype="fp32", context=256, kernels=kernels)
    lesson = build(Options(vocab=120, **options), llm.target, corpus)
    with torch.no_grad():
        for parameter in lesson.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    shots = capture(llm.target, corpus.answers, lesson.taps, most_tokens=200, dtype=torch.float32)
    with torch.no_grad():
        trained = [rows for _, rows in lesson.guesses(collate(shots, llm.target.model.device))]
    lesson.save(tmp_path / "draft", {})
    served = llm.using(f"medusa:{tmp_path / 'draft'}", draft_tokens=4)
    drafter, seen = served.engine._proposals.drafters[0], []
    propose, logits = drafter.propose, drafter.runner.logits
    drafter.propose = lambda seqs, limits: seen.append([len(seqs[0].tokens)]) or propose(seqs, limits)

    def kept(rows: torch.Tensor, depth: int) -> list[torch.Tensor]:
        drafted = [rows_SV.clone() for rows_SV in logits(rows, depth)]  # the drafter's own hold until it is asked again
        seen[-1].extend([rows[0], drafted])
        return drafted

    drafter.runner.logits = kept
    head, compared = llm.target.model.head_rows(lesson.tokens_V), 0
    for place, answer in enumerate(corpus.answers):
        seen.clear()
        served.generate(list(answer.prompt), raw=True, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
        column = trained[0].shape[1] - (len(answer.tokens) - 1) - (len(answer.prompt) - 1)
        for tokens, row, drafted in (step for step in seen if len(step) == 3):
            at = tokens - 2  # the row before the pending token
            torch.testing.assert_close(row, shots[place].features["final_norm"][at], rtol=1e-3, atol=1e-3)
            for k, rows_of_head in enumerate(drafted):
                own = lesson.network.own_rows(k)
                expected = trained[k][place, column + at] @ (head if own is None else own).T
                torch.testing.assert_close(rows_of_head[0][lesson.tokens_V], expected, rtol=1e-3, atol=1e-3)
                compared += 1
    assert compared > 25


def test_a_head_learns_the_token_at_its_own_distance(llm, corpus):
    """Heads that say what the target says at the right place have the least loss there is; a place off, they have more."""
    lesson = build(Options(vocab=300, num_heads=3), llm.target, corpus)
    batch = collate(capture(llm.target, corpus.answers, lesson.taps, most_tokens=200, dtype=torch.float32), torch.device("cpu"))
    final_BTE = batch.features["final_norm"]

    def told(shift: int) -> dict[str, float]:
        """Heads that read the future: what head k is to foresee, `shift` places on."""
        rows = final_BTE.shape[1] - int(batch.answers_B.max())
        count = int(batch.answers_B.max()) - 1
        padded = torch.cat([final_BTE, final_BTE[:, -1:].expand(-1, 8, -1)], 1)
        lesson.guesses = lambda _: ((k, padded[:, rows + 1 + k + shift :][:, :count]) for k in range(3))
        return {name: float(value) for name, value in lesson(batch).items()}

    right = told(0)
    assert all(right[f"accepted_{k}"] > 0.999 for k in (1, 2, 3))
    for shift in (-1, 1):
        wrong = told(shift)
        assert wrong["loss"] > right["loss"] and all(wrong[f"accepted_{k}"] < 0.9 for k in (1, 2, 3))


# drafting


def test_siblings_of_one_depth_say_the_same_where_nothing_looks_back(llm, draft):
    """Heads do not see each other's guesses: below every node of a depth stand the same tokens."""
    drafted = llm.using(f"medusa:{draft}", options={"tree": "3,2"}, draft_tokens=9)
    drafter, below = drafted.engine._proposals.drafters[0], []
    propose = drafter.propose

    def watched(seqs, limits):
        drafts = propose(seqs, limits)
        for grown in drafts:
            found: dict[int, set[tuple[int, ...]]] = {}
            for node, depth in zip([-1, *range(len(grown))], [0, *grown.depths()], strict=True):
                found.setdefault(depth, set()).add(tuple(grown.tokens[child] for child in grown.children(node)))
            below.append({depth: len(kinds) for depth, kinds in found.items()})
        return drafts

    drafter.propose = watched
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        drafted.generate(PROMPT, raw=True, max_tokens=12, ignore_eos=True, **params)
    assert {0: 1, 1: 1, 2: 1} in below and all(set(kinds.values()) == {1} for kinds in below)


def test_a_draft_that_foresees_is_accepted(target, tmp_path):
    """On a text said over and over all heads come true: more tokens a pass than one head could give."""
    llm = dw.load(str(target), dtype="fp32", context=128, max_batch=4)
    corpus = Corpus(tmp_path / "answers.jsonl")
    prompt = tuple(llm.encode("one two three"))
    for _ in range(3):
        corpus.add(Answer(prompt, llm.generate(list(prompt), max_tokens=40, ignore_eos=True).tokens))
    plan = Plan(updates=60, tokens=1, rows=120, learning_rate=1e-2, precision="fp32", served_prompts=1, served_tokens=4)
    options = Options(num_layers=2, own_head=True)
    train(llm, lambda corpus: build(options, llm.target, corpus), tmp_path, plan, answers=corpus.path)
    drafted = llm.using(f"medusa:{tmp_path}", draft_tokens=4, options={"tree": "chain"})
    assert drafted.generate(list(prompt), max_tokens=40, ignore_eos=True).stats.tokens_per_step > 2.5


# files


def test_published_files_are_read_as_they_are(llm, tmp_path):
    """A pickle, half precision, and a configuration whose number of heads is not that of the file, as the authors' is."""
    network = random_draft(heads=5)
    (tmp_path / "draft").mkdir()
    torch.save({name: tensor.half() for name, tensor in network.state_dict().items()}, tmp_path / "draft" / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    read, _ = read_medusa(tmp_path / "draft", llm.target)
    assert (read.shape.num_heads, read.shape.num_layers, read.shape.own_head) == (5, 1, True)
    torch.testing.assert_close(said(read, llm), said(network, llm), rtol=1e-2, atol=1e-2)
    plain = llm.generate(PROMPT, raw=True, max_tokens=20)
    drafted = llm.using(f"medusa:{tmp_path / 'draft'}", draft_tokens=4).generate(PROMPT, raw=True, max_tokens=20)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0


@pytest.mark.parametrize("own_head", [True, False])
def test_it_comes_back_from_the_published_layout_as_it_went(target, llm, tmp_path, own_head, capsys):
    network = random_draft(layers=2, own_head=own_head)
    write_medusa(tmp_path / "draft", network, llm.target, {})
    command = ["export", f"medusa:{tmp_path / 'draft'}", "--model", str(target), "--out"]
    assert main([*command, str(tmp_path / "theirs"), "--layout", "medusa", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "medusa"
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2)
    assert config["base_model_name_or_path"] == str(target)
    names = {f"{k}.{block}.linear.{part}" for k in range(3) for block in range(2) for part in ("weight", "bias")}
    tensors = load_file(tmp_path / "theirs" / "medusa_lm_head.safetensors")
    assert set(tensors) == names | {f"{k}.2.weight" for k in range(3)}
    assert tensors["1.2.weight"].shape == (300, 64)
    read, _ = read_medusa(tmp_path / "theirs", llm.target)
    torch.testing.assert_close(said(read, llm), said(network, llm), rtol=1e-4, atol=1e-4)
    write_medusa(tmp_path / "again", read, llm.target, {})
    again, _ = read_medusa(tmp_path / "again", llm.target)
    assert torch.equal(said(again, llm), said(read, llm))


def test_heads_padded_past_the_tokens_ever_emitted_are_cut(tmp_path):
    """Published heads are as wide as the model's own, padding included; so are those we write."""
    target = tiny_checkpoint(tmp_path / "target", "llama", vocab_size=320)
    llm = dw.load(str(target), dtype="fp32", context=64)
    assert (llm.target.vocab, llm.target.model.config.vocab_size) == (300, 320)
    write_medusa(tmp_path / "draft", random_draft(own_head=False), llm.target, {})
    assert main(["export", f"medusa:{tmp_path / 'draft'}", "--model", str(target), "--out", str(tmp_path / "theirs"),
                 "--layout", "medusa"]) == 0  # fmt: skip
    assert load_file(tmp_path / "theirs" / "medusa_lm_head.safetensors")["0.1.weight"].shape == (320, 64)
    read, _ = read_medusa(tmp_path / "theirs", llm.target)
    torch.testing.assert_close(said(read, llm), said(random_draft(own_head=False), llm), rtol=1e-4, atol=1e-4)


def test_a_layout_that_cannot_say_it_refuses_by_name(target, llm, draft, tmp_path, capsys):
    write_medusa(tmp_path / "own", random_draft(vocab=120), llm.target, {})
    for source, arguments, message in [
        (tmp_path / "own", ["--layout", "medusa"], "know 120 tokens; in the medusa layout they must know all 300"),
        (draft, ["--layout", "speculators"], "layout is 'speculators'; it must be one of: draftwise, medusa"),
        (draft, ["--layout", "medusa", "--quantize", "int8"], "--quantize goes with the draftwise layout"),
    ]:
        assert main(["export", f"medusa:{source}", "--model", str(target), "--out", str(tmp_path / "x"), *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_small_files_hold_what_they_held_in_memory(target, llm, draft, tmp_path, quantize):
    command = ["export", f"medusa:{draft}", "--model", str(target), "--out", str(tmp_path / "small"), "--quantize", quantize]
    assert main(command) == 0
    small, config = read_medusa(tmp_path / "small", llm.target)
    assert config["draftwise"]["quantize"] == quantize and config["draftwise"]["card"]
    write_medusa(tmp_path / "again", small, llm.target, {}, quantize=quantize)
    first, again = (load_file(path / "model.safetensors") for path in (tmp_path / "small", tmp_path / "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items() if not name.endswith("minima"))
    plain = llm.generate(PROMPT, raw=True, max_tokens=20)
    drafted = llm.using(f"medusa:{tmp_path / 'small'}", draft_tokens=3).generate(PROMPT, raw=True, max_tokens=20)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0


def own(config: dict, **changes) -> dict:
    return config | {"draftwise": config["draftwise"] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": lambda t: {key: v for key, v in t.items() if key != "2.0.linear.bias"}}, "2.0.linear.bias is missing"),
        ({"tensors": lambda t: {key: v for key, v in t.items() if key[0] != "3"}}, "tensor 3.0.linear.weight is missing"),
        ({"tensors": lambda t: {key: v for key, v in t.items() if key != "d2t"}}, "tensor d2t is missing"),
        ({"tensors": lambda t: t | {"d2t": t["d2t"][:50].clone()}}, r"tensor d2t is \(50,\) where \(100,\)"),
        ({"tensors": lambda t: t | {"d2t": t["d2t"] + 250}}, "d2t names tokens beyond the target's 300"),
        ({"tensors": lambda t: t | {"0.3.weight": torch.zeros(1)}}, "tensor 0.3.weight is not part of a draft for medusa"),
        ({"tensors": lambda t: t | {"1.0.linear.weight": torch.zeros(64, 96)}}, r"1.0.linear.weight is \(64, 96\)"),
        ({"config": lambda c: {key: v for key, v in c.items() if key != "medusa_num_layers"}}, "no medusa_num_layers"),
        ({"config": lambda c: own(c, algorithm="eagle3")}, "draft for eagle3; use --drafter eagle3:"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"tokenizer": "0"})}, "another tokenizer"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"num_hidden_layers": 7})}, "num_hidden_layers 7"),
        ({"config": lambda c: {"model_type": "bert"}}, "a draft for no drafter that is known"),
    ],
)
def test_a_wrong_file_is_refused_by_name(llm, draft, tmp_path, change, message):
    tensors, config = load_file(draft / "model.safetensors"), json.loads((draft / "config.json").read_text())
    save_file(change.get("tensors", lambda t: t)(tensors), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(change.get("config", lambda c: c)(config)))
    with pytest.raises(ValueError, match=message):
        llm.using(f"medusa:{tmp_path}")


def test_published_files_that_do_not_fit_are_refused_by_name(llm, tmp_path):
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in random_draft().state_dict().items()}
    for changed, message in [
        ({key: v for key, v in tensors.items() if key != "0.1.weight"}, "tensor 0.1.weight is missing"),
        ({key: v for key, v in tensors.items() if key[0] != "1"}, "tensor 1.0.linear.weight is missing"),
        (tensors | {"2.1.bias": torch.zeros(300)}, "tensor 2.1.bias is not part"),
        (tensors | {"2.1.weight": torch.zeros(310, 64)}, r"2.1.weight is \(310, 64\) where \(300, 64\)"),
        (tensors | {"0.0.linear.weight": torch.zeros(32, 32)}, r"0.0.linear.weight is \(32, 32\) where \(64, 64\)"),
    ]:
        torch.save(changed, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(ValueError, match=message):
            llm.using(f"medusa:{tmp_path}")
    (tmp_path / "medusa_lm_head.pt").write_bytes((tmp_path / "medusa_lm_head.pt").read_bytes()[:1000])
    with pytest.raises(ValueError, match="medusa_lm_head.pt: cut short"):
        llm.using(f"medusa:{tmp_path}")
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(ValueError, match="none of: medusa_lm_head.safetensors, medusa_lm_head.pt"):
        llm.using(f"medusa:{tmp_path}")


def test_a_draft_for_another_target_or_drafter_is_refused(llm, draft, tmp_path):
    with pytest.raises(ValueError, match="draft for medusa; use --drafter medusa:"):
        llm.using(f"eagle3:{draft}")
    with pytest.raises(ValueError, match="hidden_size 64; this one has 128"):
        dw.load(str(tiny_checkpoint(tmp_path / "wide", "llama", hidden_size=128)), drafter=f"medusa:{draft}", context=64)
    with pytest.raises(ValueError, match="needs a draft"):
        llm.using("medusa")


def test_options_say_what_is_wrong(llm, draft):
    for options, message in [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"vocab": 0}, "vocab is 0"),
        ({"decay": -1.0}, "decay is -1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Options(**options)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        llm.using(f"medusa:{draft}", options={"max_tokens": 0})
