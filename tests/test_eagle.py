"""EAGLE drafts: what is trained is what is served, exact under every rule, strict about files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwise as dw
from draftwise.drafters.eagle import EagleRunner
from draftwise.drafters.eagle_files import read_eagle, write_eagle
from draftwise.drafters.eagle_network import EagleNetwork
from draftwise.models.linear import WeightKind
from draftwise.train import find_kind
from draftwise.train.capture import capture, collate
from draftwise.train.data import Answer, Corpus
from draftwise.types import Feed
from laws import deviation
from tiny import tiny_checkpoint, tiny_draft

KINDS = ["eagle", "eagle3"]
PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def llm(target):
    return dw.load(str(target), dtype="fp32", context=256)


@pytest.fixture(scope="module", params=KINDS)
def draft(request, target, tmp_path_factory) -> str:
    folder = tiny_draft(tmp_path_factory.mktemp("draft"), target, request.param, updates=3, vocab=100)
    return f"{request.param}:{folder}"


@pytest.fixture()
def corpus(llm, tmp_path) -> Corpus:
    corpus = Corpus(tmp_path / "answers.jsonl")
    for prompt in (PROMPT, "a", "In the beginning there was a list"):
        tokens = tuple(llm.encode(prompt))
        corpus.add(Answer(tokens, llm.generate(prompt, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True).tokens))
    return corpus


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("options", [{}, {"own_head": True}, {"taps": "0,2,3"}])
@pytest.mark.parametrize("kind", KINDS)
def test_training_and_serving_compute_the_same(target, corpus, tmp_path, kind, options, kernels):
    """Features, states handed on and draft logits, in a batch with padding against one sequence at a time."""
    if kind == "eagle" and options:
        options = {"vocab": 50}
    llm = dw.load(str(target), dtype="fp32", context=256, kernels=kernels)
    module = find_kind(kind)
    lesson = module.build(module.Options(steps=3, **options), llm.target, corpus)
    with torch.no_grad():
        for parameter in lesson.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    shots = capture(llm.target, corpus.answers, lesson.taps, most_tokens=200, dtype=torch.float32)
    batch = collate(shots, llm.target.model.device)
    with torch.no_grad():
        steps = list(lesson.unroll(batch))
    lesson.save(tmp_path / "draft", {})
    network, _ = read_eagle(tmp_path / "draft", kind, llm.target)
    runner = EagleRunner(
        network, llm.target.model, vocab=llm.target.vocab, kind=WeightKind(torch.float32, compiled=kernels == "auto")
    )
    compared = 0
    for place, (answer, shot) in enumerate(zip(corpus.answers, shots, strict=True)):
        text = [*answer.prompt, *answer.tokens]
        features = [shot.features[tap] for tap in runner.taps]
        for begin in range(len(answer.tokens) - 2):
            read = len(answer.prompt) + begin  # rows of text with true features
            cache = runner.new_cache(256)
            slot = cache.alloc()
            rows = cache.pack([Feed.chain(slot, text[1 : read + 1])])
            handed = runner.read(rows, cache, torch.zeros(1, runner.width), [tap_TE[:read] for tap_TE in features])[-1:]
            cache.commit(slot, range(read))
            column = steps[0].shape[1] - (len(answer.tokens) - 1) + begin
            for depth in range(3):
                if depth:
                    handed = runner.draft(
                        cache.pack([Feed.chain(slot, [text[read + depth]], after=depth - 2)]), cache, handed, depth
                    )
                trained = steps[depth][place, column]
                torch.testing.assert_close(handed[0][..., : trained.shape[-1]].float(), trained, rtol=2e-4, atol=2e-4)
                logits = runner.logits(handed)[0]
                head = lesson.network.lm_head.weight if network.shape.own_head else lesson.head_VE
                expected = lesson.network.before_head(trained[None]) @ head.T
                torch.testing.assert_close(logits[lesson.tokens_V], expected[0], rtol=1e-3, atol=1e-3)
                assert torch.isinf(logits).sum() == llm.target.vocab - len(lesson.tokens_V)
                compared += 1
                if read + depth + 1 >= len(text) - 1:
                    break
    assert compared > 60


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_rules_that_use_q_keep_the_target_s_law(llm, draft, verify):
    """Three tokens of a small vocabulary, from many seeds at once, against the product of the target's own distributions."""
    offsets = load_file(f"{draft.partition(':')[2]}/model.safetensors")["d2t"]
    allowed = tuple((offsets + torch.arange(len(offsets)))[[10, 40, 80]].tolist())
    drafted = llm.using(draft, options={"max_tokens": 2}, verify=verify, draft_tokens=2)
    options = {"raw": True, "max_tokens": 3, "temperature": 1.5, "allowed_tokens": allowed, "ignore_eos": True}
    law = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, chance in law.items():
            prompt = [*llm.encode(PROMPT, raw=True), *path]
            one = llm.generate(prompt, max_tokens=1, logprobs=300, **{"raw": True})
            logits = dict(one.logprobs[0].top)
            weights = torch.tensor([logits[token] for token in allowed]).div(1.5).softmax(0)
            longer |= {(*path, token): chance * float(weight) for token, weight in zip(allowed, weights, strict=True)}
        law = longer
    requests = [drafted.request(PROMPT, seed=seed, **options) for seed in range(800)]
    results = drafted.engine.generate(requests)
    assert llm.pool(results).accepted > 100
    assert deviation(Counter(result.tokens for result in results), law) < 5


def test_a_draft_that_was_off_catches_up(llm, draft):
    drafted = llm.using(draft, draft_tokens=3)
    request = drafted.request(PROMPT, raw=True, max_tokens=30, ignore_eos=True)
    identity = drafted.engine.submit(request)
    drafter = drafted.engine._proposals.drafters[0]
    propose, calls = drafter.propose, []

    def sometimes(seqs, limits):
        calls.append(len(seqs[0].tokens))
        off = len(calls) % 5
        return propose(seqs, [limit._replace(nodes=0, depth=0) if off else limit for limit in limits])

    drafter.propose = sometimes
    while drafted.engine.busy:
        for event in drafted.engine.step():
            result = event.result
    assert identity == 0 and result.tokens == llm.generate(PROMPT, raw=True, max_tokens=30, ignore_eos=True).tokens
    assert not drafter._states


def test_far_context_is_dropped_when_features_pile_up(llm, draft, monkeypatch):
    monkeypatch.setattr("draftwise.drafters.features.KEPT", 16)
    drafted = llm.using(draft, draft_tokens=3)
    prompt = PROMPT * 4
    plain = llm.generate(prompt, raw=True, max_tokens=20, ignore_eos=True)
    result = drafted.generate(prompt, raw=True, max_tokens=20, ignore_eos=True)
    assert result.tokens == plain.tokens and result.stats.drafted > 0


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_small_files_hold_what_they_held_in_memory(llm, target, draft, tmp_path, quantize):
    kind, _, folder = draft.partition(":")
    network, _ = read_eagle(Path(folder), kind, llm.target)
    write_eagle(tmp_path / "small", network, llm.target, {}, quantize=quantize)
    small, config = read_eagle(tmp_path / "small", kind, llm.target)
    assert config["draftwise"]["quantize"] == quantize
    write_eagle(tmp_path / "again", small, llm.target, {}, quantize=quantize)
    folders = (Path(folder), tmp_path / "small", tmp_path / "again")
    whole, first, again = (load_file(path / "model.safetensors") for path in folders)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items() if not name.endswith("minima"))
    assert sum(tensor.nbytes for tensor in first.values()) < 0.4 * sum(tensor.nbytes for tensor in whole.values())
    drafted = llm.using(f"{kind}:{tmp_path / 'small'}", draft_tokens=3)
    plain = llm.generate(PROMPT, raw=True, max_tokens=20)
    assert drafted.generate(PROMPT, raw=True, max_tokens=20).tokens == plain.tokens


def changed(folder: str, to: Path, *, tensors=lambda tensors: tensors, config=lambda config: config) -> Path:
    to.mkdir()
    save_file(tensors(load_file(f"{folder}/model.safetensors")), to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config(json.loads(Path(folder, "config.json").read_text()))))
    return to


def without(tensors: dict, name: str) -> dict:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def own(config: dict, **changes) -> dict:
    return config | {"draftwise": config["draftwise"] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": lambda t: without(t, "fc.weight")}, "fc.weight is missing"),
        ({"tensors": lambda t: t | {"extra.weight": torch.zeros(1)}}, "tensor extra.weight is not part"),
        ({"tensors": lambda t: t | {"fc.weight": torch.zeros(64, 96)}}, "fc.weight"),
        ({"config": lambda c: own(c, algorithm="medusa")}, "draft for medusa; use --drafter medusa:"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"tokenizer": "0"})}, "another tokenizer"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"num_hidden_layers": 7})}, "num_hidden_layers 7"),
        ({"config": lambda c: {key: v for key, v in c.items() if key != "hidden_size"}}, "hidden_size is missing"),
    ],
)
def test_a_wrong_file_is_refused_by_name(llm, draft, tmp_path, change, message):
    kind, _, folder = draft.partition(":")
    with pytest.raises(ValueError, match=message):
        llm.using(f"{kind}:{changed(folder, tmp_path / 'wrong', **change)}")


def test_a_draft_of_the_other_kind_or_for_another_target_is_refused(llm, draft, tmp_path):
    kind, _, folder = draft.partition(":")
    other = {"eagle": "eagle3", "eagle3": "eagle"}[kind]
    with pytest.raises(ValueError, match=f"draft for {kind}; use --drafter {kind}:"):
        llm.using(f"{other}:{folder}")
    wide = tiny_checkpoint(tmp_path / "wide", "llama", hidden_size=128)
    with pytest.raises(ValueError, match="hidden_size 64; this one has 128"):
        dw.load(str(wide), drafter=draft, context=64)
    with pytest.raises(ValueError, match="needs a draft"):
        llm.using(kind)
    with pytest.raises(ValueError, match="no config.json"):
        llm.using(f"{kind}:{tmp_path}")


def test_other_weights_of_the_same_model_are_remarked_on(llm, draft, target, tmp_path):
    remarks: list[str] = []
    dw.load(str(target), drafter=draft, quantize="int4", context=64, notice=remarks.append)
    assert not any("other weights" in remark for remark in remarks)  # the embedding stays what it is
    other = tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    dw.load(str(other), drafter=draft, context=64, notice=remarks.append)
    assert any("other weights" in remark for remark in remarks)


def test_a_network_keeps_its_tensors_in_the_published_layout(llm, draft):
    kind, _, folder = draft.partition(":")
    names = set(load_file(f"{folder}/model.safetensors"))
    layer = "midlayer" if kind == "eagle3" else "layers.0"
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    norms = ["post_attention_layernorm"] + (["hidden_norm", "input_layernorm"] if kind == "eagle3" else [])
    expected = {f"{layer}.{part}.weight" for part in parts + norms} | {"fc.weight", "d2t"}
    expected |= {"norm.weight", "t2d"} if kind == "eagle3" else {"fc.bias"}
    assert names == expected
    assert isinstance(read_eagle(Path(folder), kind, llm.target)[0], EagleNetwork)
