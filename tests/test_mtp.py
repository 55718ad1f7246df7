"""Multi-token prediction: what is trained is what is served, module behind module, exact under every rule, strict about files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftwise as dw
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
                    handed = runner.read(rows, cache, handed, features[start:stop])[-1:]
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


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("tree", ["chain", "2,2", "dynamic", "sequoia"])
def test_trees_under_every_rule(llm, draft, verify, tree):
    options = {"tree": tree, "max_tokens": 4, "max_nodes": 8, "beam": 2}
    drafted = llm.using(draft, options=options, verify=verify, draft_tokens=6)
    prompts = [PROMPT, "a", "In the beginning there was"]
    for params in ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}):
        plain = llm.generate(prompts, raw=True, max_tokens=40, ignore_eos=True, **params)
        results = drafted.generate(prompts, raw=True, max_tokens=40, ignore_eos=True, **params)
        assert llm.pool(results).drafted > 100
        if verify == "match" or not params:
            assert [result.tokens for result in results] == [result.tokens for result in plain]
