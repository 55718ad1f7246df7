"""Multi-token prediction: what is trained is what is served, module by module, exact under every rule, strict about files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwise as dw
from draftwise.cache import PAGE
from draftwise.cli import main
from draftwise.drafters.mtp import MtpRunner
from draftwise.drafters.mtp_files import read_mtp, write_mtp
from draftwise.models.linear import WeightKind
from draftwise.train.capture import capture, collate
from draftwise.train.data import Answer, Corpus
from draftwise.train.mtp import Options, build
from draftwise.types import Feed
from tiny import tiny_checkpoint, tiny_draft

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def llm(target):
    return dw.load(str(target), dtype="fp32", context=256)


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> str:
    return f"mtp:{tiny_draft(tmp_path_factory.mktemp('draft'), target, 'mtp', updates=3, vocab=100)}"


@pytest.fixture()
def corpus(llm, tmp_path) -> Corpus:
    corpus = Corpus(tmp_path / "answers.jsonl")
    for prompt in (PROMPT, "a", "In the beginning there was a list"):
        tokens = tuple(llm.encode(prompt))
        corpus.add(Answer(tokens, llm.generate(prompt, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True).tokens))
    return corpus


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("modules", "steps"), [(1, 3), (2, 2), (2, 4), (3, 4)])
def test_training_and_serving_compute_the_same(target, corpus, tmp_path, modules, steps, kernels):
    """Draft logits at every depth, in a batch with padding against one sequence at a time, read in uneven parts."""
    llm = dw.load(str(target), dtype="fp32", context=256, kernels=kernels)
    lesson = build(Options(modules=modules, steps=steps, vocab=60), llm.target, corpus)
    with torch.no_grad():
        for parameter in lesson.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    shots = capture(llm.target, corpus.answers, lesson.taps, most_tokens=200, dtype=torch.float32)
    batch = collate(shots, llm.target.model.device)
    with torch.no_grad():
        guesses = list(lesson.guesses(batch))
    lesson.save(tmp_path / "draft", {})
    network, _ = read_mtp(tmp_path / "draft", llm.target)
    kind = WeightKind(torch.float32, compiled=kernels == "auto")
    runner = MtpRunner(network, llm.target.model, vocab=llm.target.vocab, kind=kind)
    compared = 0
    for place, (answer, shot) in enumerate(zip(corpus.answers, shots, strict=True)):
        text, features = [*answer.prompt, *answer.tokens], shot.features["final_norm"]
        for begin in range(len(answer.tokens) - 1):
            read = len(answer.prompt) + begin  # rows of text with true features
            cache = runner.new_cache(256)
            slot = cache.alloc()
            handed = torch.zeros(1, runner.width)
            for start, stop in ((0, 1), (1, read // 2), (read // 2, read)):
                if start < stop:
                    rows = cache.pack([Feed.chain(slot, text[start + 1 : stop + 1])])
                    handed = runner.read(rows, cache, handed, (features[start:stop],))[-1:]
                    cache.commit(slot, range(stop - start))
            for depth in range(steps):
                if read + depth > len(text) - 2:
                    break
                if depth:
                    drafted = cache.pack([Feed.chain(slot, [text[read + depth]], after=depth - 2)])
                    handed = runner.draft(drafted, cache, handed, depth)
                ahead, before_head = guesses[depth]
                assert ahead == max(depth - modules + 1, 0)
                column = before_head.shape[1] - (len(answer.tokens) - 1) + begin + depth - ahead
                expected = before_head[place, column] @ lesson.head_VE.T
                logits = runner.logits(handed)[0]
                torch.testing.assert_close(logits[lesson.tokens_V], expected, rtol=1e-3, atol=1e-3)
                assert torch.isinf(logits).sum() == llm.target.vocab - 60
                compared += 1
    assert compared > 50


@pytest.mark.parametrize("modules", [1, 2])
def test_modules_that_were_off_catch_up(llm, draft, modules):
    """Drafting is the same whether a text was read step by step or at once, by some modules or by all."""
    drafted = llm.using(draft, options={"modules": modules}, draft_tokens=3)
    request = drafted.request(PROMPT, raw=True, max_tokens=30, ignore_eos=True)
    drafted.engine.submit(request)
    drafter = drafted.engine._proposals.drafters[0]
    assert drafter.network.shape.modules == modules
    propose, calls = drafter.propose, []

    def sometimes(seqs, limits):
        calls.append(len(seqs[0].tokens))
        return propose(seqs, [limit._replace(nodes=0, depth=0) if len(calls) % 5 else limit for limit in limits])

    drafter.propose = sometimes
    while drafted.engine.busy:
        for event in drafted.engine.step():
            result = event.result
    assert result.tokens == llm.generate(PROMPT, raw=True, max_tokens=30, ignore_eos=True).tokens
    assert result.stats.drafted > 0 and not drafter._states


def rows_of(cache, slot: int) -> torch.Tensor:
    """Keys and values of a slot's committed rows, in every layer."""
    pages = cache.block_table(slot)
    return cache.pool[:, :, :, [pages[row // PAGE] * PAGE + row % PAGE for row in range(cache.length(slot))]]


@torch.inference_mode()
def test_accepted_tokens_leave_every_module_s_rows_as_if_read_at_once(llm, draft):
    """After uneven acceptance in a ragged batch the cache of each module holds what reading the text anew puts there."""
    drafted = llm.using(draft, options={"tree": "2,2,1"}, draft_tokens=6)
    drafter = drafted.engine._proposals.drafters[0]
    for prompt in (PROMPT, "a", "In the beginning there was a list"):
        drafted.engine.submit(drafted.request(prompt, raw=True, max_tokens=40, ignore_eos=True))
    texts: dict[int, list[int]] = {}
    propose = drafter.propose

    def seen(seqs, limits):
        texts.update({seq.id: list(seq.tokens) for seq in seqs})
        return propose(seqs, limits)

    drafter.propose = seen
    for _ in range(14):
        drafted.engine.step()
    runner, model = drafter.network, llm.target.model
    assert len(texts) == 3
    for identity, text in texts.items():
        cache = model.new_cache(128)
        features = model.forward(cache.pack([Feed.chain(cache.alloc(), text[:-1])]), cache, ("final_norm",)).taps["final_norm"]
        fresh = runner.new_cache(128)
        slot = fresh.alloc()
        whole = runner.read(fresh.pack([Feed.chain(slot, text[1:])]), fresh, torch.zeros(1, runner.width), (features,))
        fresh.commit(slot, range(len(text) - 1))
        state = drafter._states[identity]
        assert drafter.cache.length(state.slot) == len(text) - 1

        kept, expected = (rows_of(*place) for place in ((drafter.cache, state.slot), (fresh, slot)))
        torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state.above, whole[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_small_files_hold_what_they_held_in_memory(llm, target, draft, tmp_path, quantize, capsys):
    folder, small = draft.partition(":")[2], tmp_path / "small"
    assert main(["export", draft, "--model", str(target), "--out", str(small), "--quantize", quantize]) == 0
    network, config = read_mtp(small, llm.target)
    assert config["draftwise"]["quantize"] == quantize
    write_mtp(tmp_path / "again", network, llm.target, {}, quantize=quantize)
    whole, first, again = (load_file(Path(path, "model.safetensors")) for path in (folder, small, tmp_path / "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items() if not name.endswith("minima"))
    assert sum(tensor.nbytes for tensor in first.values()) < 0.4 * sum(tensor.nbytes for tensor in whole.values())
    plain = llm.generate(PROMPT, raw=True, max_tokens=20)
    result = llm.using(f"mtp:{small}", draft_tokens=3).generate(PROMPT, raw=True, max_tokens=20)
    assert result.tokens == plain.tokens and result.stats.drafted > 0
    assert main(["export", draft, "--model", str(target), "--out", str(tmp_path / "x"), "--layout", "eagle"]) == 2
    assert "layout is 'eagle'; for mtp it must be draftwise" in capsys.readouterr().err


def changed(folder: str, to: Path, *, tensors=lambda tensors: tensors, config=lambda config: config) -> Path:
    to.mkdir()
    save_file(tensors(load_file(f"{folder}/model.safetensors")), to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config(json.loads(Path(folder, "config.json").read_text()))))
    return to


def own(config: dict, **changes) -> dict:
    return config | {"draftwise": config["draftwise"] | changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": lambda t: {k: v for k, v in t.items() if "1.eh_proj" not in k}}, "mtp_layers.1.eh_proj.weight is missing"),
        ({"tensors": lambda t: t | {"extra.weight": torch.zeros(1)}}, "tensor extra.weight is not part"),
        ({"tensors": lambda t: t | {"mtp_layers.0.enorm.weight": torch.ones(7)}}, "mtp_layers.0.enorm.weight is .7,."),
        ({"config": lambda c: own(c, algorithm="eagle3")}, "draft for eagle3; use --drafter eagle3:"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"tokenizer": "0"})}, "another tokenizer"),
        ({"config": lambda c: own(c, target=c["draftwise"]["target"] | {"num_hidden_layers": 7})}, "num_hidden_layers 7"),
        ({"config": lambda c: {key: v for key, v in c.items() if key != "head_dim"}}, "head_dim is missing"),
    ],
)
def test_a_wrong_file_is_refused_by_name(llm, draft, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        llm.using(f"mtp:{changed(draft.partition(':')[2], tmp_path / 'wrong', **change)}")


def test_options_say_what_is_wrong(llm, draft):
    with pytest.raises(ValueError, match="steps is 2; with 3 modules it must be at least as many"):
        Options(modules=3, steps=2)
    with pytest.raises(ValueError, match="modules is 0; it must be at least 1"):
        Options(modules=0)
    with pytest.raises(ValueError, match="feature_weight is -1"):
        Options(feature_weight=-1)
    with pytest.raises(ValueError, match="modules is -1; it must be 0 or more"):
        llm.using(draft, options={"modules": -1})
    with pytest.raises(ValueError, match="modules is 5; the draft has 2"):
        llm.using(draft, options={"modules": 5})
    with pytest.raises(ValueError, match="no config.json"):
        llm.using("mtp:/nowhere")
