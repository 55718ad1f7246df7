"""Distilled drafts: what is trained is what is served, strict about files, exact, and small on disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwise as dw
from draftwise.cli import main
from draftwise.drafters.distilled_files import read_distilled, write_distilled
from draftwise.drafters.draft import serve
from draftwise.models.linear import WeightKind
from draftwise.train.capture import capture, collate
from draftwise.train.data import Answer, Corpus
from draftwise.train.draft import Options, build, learning, parse_layers
from draftwise.train.lesson import AT_ONCE, DIVERGENCES, ROWS, distributions, divergence, match
from draftwise.types import Feed
from tiny import tiny_checkpoint, tiny_draft, tiny_gguf

PROMPTS = ("one two three one two three one two", "a", "In the beginning there was a list")
FAMILY = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def llm(target):
    return dw.load(str(target), dtype="fp32", context=256)


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Path:
    return tiny_draft(tmp_path_factory.mktemp("draft"), target, "draft", updates=2, vocab=100, layers="0,2")


def answered(llm, path: Path) -> Corpus:
    corpus = Corpus(path)
    for prompt in PROMPTS:
        tokens = tuple(llm.encode(prompt))
        corpus.add(Answer(tokens, llm.generate(prompt, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True).tokens))
    return corpus


# one network, trained and served


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("architecture", FAMILY)
def test_training_and_serving_compute_the_same(tmp_path, architecture, kernels):
    """Logits in a batch with padding against one sequence at a time, written and read again."""
    folder = tiny_checkpoint(tmp_path / "target", architecture, **FAMILY[architecture])
    llm = dw.load(str(folder), dtype="fp32", context=256, kernels=kernels)
    corpus = answered(llm, tmp_path / "answers.jsonl")
    lesson = build(Options(layers="0,2", vocab=60, inner=96 if architecture == "qwen2" else 0), llm.target, corpus)
    with torch.no_grad():
        for parameter in lesson.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    shots = capture(llm.target, corpus.answers, lesson.taps, most_tokens=200, dtype=torch.float32)
    batch = collate(shots, torch.device("cpu"))
    with torch.no_grad():
        trained = lesson.network(*lesson.inputs(batch)) @ lesson.head_VC.T
    lesson.save(tmp_path / "draft", {})
    network, _ = read_distilled(tmp_path / "draft", llm.target)
    assert network.config.windows == lesson.network.config.windows and network.d2t.tolist() == lesson.tokens_V.tolist()
    model = serve(network, llm.target.model, WeightKind(torch.float32, compiled=kernels == "auto"))
    for place, shot in enumerate(shots):
        cache = model.new_cache(256)
        batch_alone = cache.pack([Feed.chain(cache.alloc(), shot.tokens_T[:-1].tolist())])
        served = model.logits(model.forward(batch_alone, cache).final)
        torch.testing.assert_close(served, trained[place, -len(served) :], rtol=2e-3, atol=2e-3)
        assert served.shape[1] == 60 and served.std() > 0.1


def test_the_lens_is_the_best_linear_map_and_all_layers_need_none(llm, tmp_path):
    """With all layers of the target it is nearly the identity, and the draft says what the target says."""
    corpus = answered(llm, tmp_path / "answers.jsonl")
    whole = build(Options(layers="0,1,2", vocab=300), llm.target, corpus)
    batch = collate(capture(llm.target, corpus.answers, whole.taps, most_tokens=99, dtype=torch.float32), torch.device("cpu"))
    with torch.no_grad():
        assert whole(batch)["accepted_1"] > 0.9
        some = build(Options(layers="1"), llm.target, corpus)
        lensed = some(batch)["accepted_1"]
        some.network.adapter.weight.copy_(torch.eye(64))
        assert lensed > some(batch)["accepted_1"] + 0.05


def test_layers_of_a_gguf_are_dequantised(target, tmp_path):
    path = tiny_gguf(tmp_path / "tiny.gguf", target, kind="Q8_0")
    llm = dw.load(str(path), dtype="fp32", context=128)
    lesson = build(Options(layers="0,2"), llm.target, answered(llm, tmp_path / "answers.jsonl"))
    plain = load_file(target / "model.safetensors")
    for own, theirs in (("layers.0.", "model.layers.0."), ("layers.1.", "model.layers.2.")):
        for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
            begun = lesson.network.state_dict()[own + name]
            torch.testing.assert_close(begun, plain[theirs + name].float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_gradient_of_a_divergence_is_its_own(kind):
    torch.manual_seed(0)
    count = AT_ONCE + ROWS + 5  # more than pass at once, and no round number
    hidden, head = torch.randn(count, 8, requires_grad=True), torch.randn(20, 8)
    p = distributions(torch.randn(count, 8), torch.randn(20, 8), torch.float32)
    place = torch.randint(count, (count,))
    loss, accepted = match(hidden, head, p, place, kind=kind)
    loss.backward()
    mine, hidden.grad = hidden.grad, None
    log_q, p = (hidden @ head.T).log_softmax(-1), p[place]
    overlap = torch.minimum(p, log_q.exp()).sum()
    plain = {
        "forward": lambda: -(p * log_q).sum(),
        "reverse": lambda: (log_q.exp() * (log_q - p.log())).sum(),
        "tv": lambda: count - overlap,
    }[kind]()
    plain.backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(accepted, overlap)
    torch.testing.assert_close(mine, hidden.grad, rtol=1e-4, atol=1e-5)
    assert divergence("reverse", p, p.log())[0].abs() < 1e-4 and divergence("tv", p, p.log())[0].abs() < 1e-4


def test_prompts_teach_by_their_weight(llm, tmp_path):
    """Every token of a text is learnt from once, whatever lies between texts side by side."""
    corpus = answered(llm, tmp_path / "answers.jsonl")
    shots = capture(llm.target, corpus.answers, ("final_norm",), most_tokens=99, dtype=torch.float32)
    batch = collate(shots, torch.device("cpu"))
    alone, both = (build(Options(layers="1", prompt_weight=weight), llm.target, corpus)(batch) for weight in (0.0, 1.0))
    assert alone["accepted_1"] == both["accepted_1"]
    whole = dataclasses.replace(batch, answers_B=torch.tensor([len(shot.tokens_T) - 1 for shot in shots]))
    every = build(Options(layers="1", prompt_weight=0.0), llm.target, corpus)(whole)
    torch.testing.assert_close(both["loss"], every["loss"])
    assert (both["loss"] - alone["loss"]).abs() > 1e-3


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_each_loss_lessens(llm, tmp_path, kind):
    corpus = answered(llm, tmp_path / "answers.jsonl")
    lesson = build(Options(layers="1", loss=kind, feature_weight=0.0), llm.target, corpus)
    batch = collate(capture(llm.target, corpus.answers, lesson.taps, most_tokens=99, dtype=torch.float32), torch.device("cpu"))
    with torch.no_grad():
        lesson.network.adapter.weight.zero_()
    optimizer = torch.optim.Adam(lesson.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = lesson(batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05


def test_only_answers_are_learnt(llm, tmp_path):
    corpus = answered(llm, tmp_path / "answers.jsonl")
    shots = capture(llm.target, corpus.answers, ("final_norm",), most_tokens=99, dtype=torch.float32)
    batch = collate(shots, torch.device("cpu"))
    learns = learning(batch)
    for row, tokens, answer in zip(learns, batch.tokens_BT, corpus.answers, strict=True):
        assert tokens[1:][row].tolist() == list(answer.tokens)


# served


def test_a_draft_of_all_layers_is_nearly_always_right(target, tmp_path):
    folder = tiny_draft(tmp_path / "whole", target, "draft", updates=1, layers="0,1,2", vocab=300)
    llm = dw.load(str(target), dtype="fp32", context=256)
    network, config = read_distilled(folder, llm.target)
    with torch.no_grad():
        network.adapter.weight.copy_(torch.eye(64))
        for name, parameter in network.layers.named_parameters():
            parameter.copy_(llm.target.model.weight(f"model.layers.{name}"))
        network.norm.weight.copy_(llm.target.model.weight("model.norm.weight"))
    write_distilled(tmp_path / "same", network, llm.target, {})
    drafted = llm.using(f"draft:{tmp_path / 'same'}", options={"max_tokens": 3}, draft_tokens=3)
    stats = drafted.generate(PROMPTS[0], raw=True, max_tokens=40, ignore_eos=True).stats
    assert stats.acceptance_rate == 1 and stats.tokens_per_step > 3.5


def test_a_token_that_the_head_lacks_is_never_drafted(llm, draft):
    known = set(read_distilled(draft, llm.target)[0].d2t.tolist())
    drafted = llm.using(f"draft:{draft}", draft_tokens=4)
    drafter = drafted.engine._proposals.drafters[0]
    propose, guessed = drafter.propose, []

    def noted(seqs, limits):
        drafts = propose(seqs, limits)
        guessed.extend(token for draft in drafts for token in draft.tokens)
        return drafts

    drafter.propose = noted
    result = drafted.generate(PROMPTS[0], raw=True, max_tokens=60, temperature=1.5, seed=1, ignore_eos=True)
    assert set(result.tokens) - known and len(known) == 100
    assert len(guessed) > 60 and set(guessed) <= known


def test_the_target_s_embedding_is_borrowed(llm, draft, monkeypatch):
    network, _ = read_distilled(draft, llm.target)
    model, asked = serve(network, llm.target.model, WeightKind(torch.float32)), []
    embed = llm.target.model.embed
    monkeypatch.setattr(type(llm.target.model), "embed", lambda self, tokens: asked.append(tokens) or embed(tokens))
    torch.testing.assert_close(model.embed(torch.tensor([5, 6])), embed(torch.tensor([5, 6])))
    assert model.weight_bytes < 4 * (sum(p.numel() for p in network.parameters()) + 100 * 64)


# files


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_draft_in_small_numbers_is_smaller_and_says_the_same(llm, target, draft, tmp_path, quantize, capsys):
    out = tmp_path / quantize
    command = ["export", f"draft:{draft}", "--model", str(target), "--out", str(out), "--quantize", quantize, "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["quantize"] == quantize
    share = (out / "model.safetensors").stat().st_size / (draft / "model.safetensors").stat().st_size
    assert share < {"int8": 0.35, "int4": 0.25}[quantize]
    remarks: list[str] = []
    llm = dw.load(str(target), dtype="fp32", context=256, notice=remarks.append)
    plain = llm.generate(PROMPTS[0], raw=True, max_tokens=30, ignore_eos=True)
    for folder, asked in ((out, None), (draft, quantize)):
        drafted = llm.using(f"draft:{folder}", draft_tokens=4, draft_quantize=asked)
        result = drafted.generate(PROMPTS[0], raw=True, max_tokens=30, ignore_eos=True)
        assert result.tokens == plain.tokens and result.stats.drafted > 20
        assert f"draft {folder}: {quantize}, head {quantize}" in remarks
    whole, small = (read_distilled(folder, llm.target)[0].state_dict() for folder in (draft, out))
    for name, tensor in whole.items():
        assert (small[name] - tensor).norm() <= {"int8": 0.01, "int4": 0.12}[quantize] * tensor.norm()


def test_another_layout_is_refused(target, draft, tmp_path, capsys):
    command = ["export", f"draft:{draft}", "--model", str(target), "--out", str(tmp_path / "a"), "--layout", "eagle"]
    assert main(command) == 2
    assert "layout is 'eagle'; distilled drafts have one: draftwise" in capsys.readouterr().err


def changed(folder: Path, to: Path, *, tensors=lambda tensors: tensors, config=lambda config: config) -> Path:
    to.mkdir()
    save_file(tensors(load_file(folder / "model.safetensors")), to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config(json.loads((folder / "config.json").read_text()))))
    return to


def own(config: dict, **changes) -> dict:
    return config | {"draftwise": config["draftwise"] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": lambda t: {k: v for k, v in t.items() if k != "adapter.weight"}}, "adapter.weight is missing"),
        ({"tensors": lambda t: {k: v for k, v in t.items() if k != "d2t"}}, "d2t is missing"),
        ({"tensors": lambda t: t | {"lm_head.weight": torch.zeros(1)}}, "tensor lm_head.weight is not part"),
        ({"tensors": lambda t: t | {"norm.weight": torch.zeros(32)}}, "norm.weight is \\(32,\\) where \\(64,\\)"),
        ({"tensors": lambda t: t | {"d2t": t["d2t"] + 300}}, "d2t names tokens beyond the target's 300"),
        ({"config": lambda c: own(c, algorithm="medusa")}, "draft for medusa; use --drafter medusa:"),
        ({"config": lambda c: {k: v for k, v in c.items() if k != "draftwise"}}, "no drafter that is known"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"tokenizer": "0"})}, "another tokenizer"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"num_hidden_layers": 7})}, "num_hidden_layers 7"),
        ({"config": lambda c: {k: v for k, v in c.items() if k != "hidden_size"}}, "has no hidden_size"),
        ({"config": lambda c: c | {"hidden_size": 32}}, "hidden_size is 32 where the target's is 64"),
        ({"config": lambda c: c | {"model_type": "gpt2"}}, "model_type is 'gpt2'; it must be one of: llama"),
    ],
)
def test_a_wrong_file_is_refused_by_name(llm, draft, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        llm.using(f"draft:{changed(draft, tmp_path / 'wrong', **change)}")


def test_a_draft_for_another_target_is_refused_and_other_weights_remarked_on(draft, llm, tmp_path):
    wide = tiny_checkpoint(tmp_path / "wide", "llama", hidden_size=128)
    with pytest.raises(ValueError, match="hidden_size 64; this one has 128"):
        dw.load(str(wide), drafter=f"draft:{draft}", context=64)
    with pytest.raises(ValueError, match="needs a draft"):
        llm.using("draft")
    with pytest.raises(ValueError, match="no config.json"):
        llm.using(f"draft:{tmp_path}")
    remarks: list[str] = []
    other = tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    dw.load(str(other), drafter=f"draft:{draft}", context=64, notice=remarks.append)
    assert any("other weights" in remark for remark in remarks)


def test_what_cannot_be_trained_is_refused_by_name(llm, tmp_path):
    assert parse_layers("2", 30) == (0, 1) and parse_layers("0,15,29", 30) == (0, 15, 29)
    for text in ("0,15,30", "31", "0", "3,1", "1,1", "x", ""):
        with pytest.raises(ValueError, match=f"layers is {text!r}; it must be ascending numbers from 0 to 29"):
            parse_layers(text, 30)
    refused = [("loss", "l2", "forward, reverse, tv"), ("vocab", 0, "vocab is 0"), ("inner", -1, "inner is -1")]
    for name, wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            Options(**{name: wrong})
    gemma = dw.load(str(tiny_checkpoint(tmp_path / "gemma", "gemma2")), context=64)
    with pytest.raises(ValueError, match="gemma2 models have others; train eagle3 instead"):
        build(Options(), gemma.target, Corpus(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="weights of gemma2 models cannot be taken one by one"):
        gemma.target.model.weight("model.norm.weight")
