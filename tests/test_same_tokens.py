"""Real arithmetic: plain and drafted runs give the same tokens, on tiny models of every kind of weight and on SmolLM2.

Found by scanning the folder of drafters, so that a new one is covered by existing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import draftwise as dw
from draftwise.drafters import drafter_options
from scanned import DRAFTERS, named
from tiny import tiny_checkpoint

SAMPLING = {
    "greedy": {},
    "nucleus": {"temperature": 0.8, "top_p": 0.95, "seed": 11},
    "penalties": {
        "temperature": 1.0,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0, 6: -1.0, 40: 0.5},
        "seed": 12,
    },
}
WEIGHTS = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}
PROMPTS = [
    "The cat sat on the mat and the cat sat on the",
    "one two three one two three one two",
    "a",
    "In the beginning there was a list of words, and the words were in the list of words. In the beginning there was",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
]
TEXT = (
    "Make this text more formal and give all of it back: Hey Tom, we can't make it to the meeting on Monday because the "
    "train was cancelled, so can we move it to Tuesday at ten in the big meeting room? Bring the numbers for the last "
    "quarter, the list of open orders, and the draft of the new price list, please. Thanks a lot, Anna."
)


KERNELS = ("auto", "torch")
ASKED = {"raw": True, "max_tokens": 32, "ignore_eos": True}


def grid() -> list[Any]:
    """Every drafter on every kind of weight and kernel; by default each on fp32 and on one kind whose activations are bf16,
    one of the two compiled and the other in plain torch, in turn, so that six drafters together meet every pair."""
    cases = []
    for number, drafter in enumerate(DRAFTERS):
        usual = {("fp32", KERNELS[number % 2]), (("bf16", "int8", "int4")[number % 3], KERNELS[(number + 1) % 2])}
        for case in itertools.product(WEIGHTS, KERNELS):
            cases.append(pytest.param(drafter, *case, marks=() if case in usual else pytest.mark.lab))
    return cases


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


def found(drafter: str, tiny: Path) -> str:
    return named(drafter, tiny, checkpoint=tiny, corpus="\n".join(PROMPTS))


@pytest.fixture(scope="module")
def plain(tiny) -> Callable[[str, str], tuple[dw.LLM, dict[str, list[tuple[int, ...]]]]]:
    """plain(weights, kernels): the target, and what it says to each prompt by way of sampling. Made once for all drafters."""

    @functools.cache
    def made(weights: str, kernels: str) -> tuple[dw.LLM, dict[str, list[tuple[int, ...]]]]:
        llm = dw.load(str(tiny), kernels=kernels, **WEIGHTS[weights])
        said = {
            name: [llm.generate(prompt, **ASKED, **params).tokens for prompt in PROMPTS] for name, params in SAMPLING.items()
        }
        return llm, said

    return made


@pytest.mark.parametrize(("drafter", "weights", "kernels"), grid())
def test_every_drafter_on_every_kind_of_weight(tiny, plain, drafter, weights, kernels):
    target, said = plain(weights, kernels)
    name = found(drafter, tiny)
    drafted = target.using(name, draft_quantize="int4" if ":" in name else None)
    nodes = 0
    for sampling, params in SAMPLING.items():
        together = drafted.generate(PROMPTS, draft_tokens=6, **ASKED, **params)
        assert [result.tokens for result in together] == said[sampling]
        alone = drafted.generate(PROMPTS[0], **ASKED, **params)
        assert alone.tokens == said[sampling][0]
        nodes += target.pool(together).drafted
    assert nodes > 0


@pytest.fixture(scope="module")
def smollm2():
    return dw.load("smollm2", context=2048)


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_smollm2_with_prompt_lookup_alone_and_in_a_batch(smollm2, params):
    lookup = smollm2.using("ngram")
    prompts = [TEXT, "Count from one to twenty in words.", "Write a haiku."]
    plain = [smollm2.generate(prompt, max_tokens=32, **params) for prompt in prompts]
    together = lookup.generate(prompts, max_tokens=32, **params)
    assert [result.tokens for result in together] == [result.tokens for result in plain]
    assert lookup.generate(TEXT, max_tokens=32, draft_tokens=8, **params).tokens == plain[0].tokens


def check_pair(target, drafter: str, prompts: list[str], *, max_tokens: int, draft_tokens: int | None, **options) -> None:
    drafted = target.using(drafter, **options)
    for params in SAMPLING.values():
        plain = [target.generate(prompt, max_tokens=max_tokens, **params) for prompt in prompts]
        alone = [drafted.generate(prompt, max_tokens=max_tokens, draft_tokens=draft_tokens, **params) for prompt in prompts]
        assert [result.tokens for result in alone] == [result.tokens for result in plain]
        batch = drafted.generate(prompts, max_tokens=max_tokens, draft_tokens=draft_tokens, **params)
        assert [result.tokens for result in batch] == [result.tokens for result in plain]
        pooled = target.pool(alone)
        assert pooled.drafted > 0 and pooled.emitted == sum(len(result.tokens) for result in plain)


@pytest.mark.lab
@pytest.mark.parametrize("weights", [{}, {"dtype": "bf16"}, {"dtype": "fp32"}, {"quantize": "int8"}], ids=str)
def test_the_grid_on_smollm2(weights):
    target = dw.load("smollm2", context=2048, **weights)
    prompts = [TEXT, *PROMPTS]
    check_pair(target, "ngram", prompts, max_tokens=96, draft_tokens=None)
    check_pair(target, "ngram", prompts, max_tokens=96, draft_tokens=8)
    check_pair(target, "model:smollm2", prompts, max_tokens=96, draft_tokens=4)


@pytest.mark.lab
@pytest.mark.parametrize("drafter", ["ngram", "model:smollm2"])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_a_thousand_tokens(drafter, params):
    target = dw.load("smollm2", context=2048, dtype="bf16")
    plain = target.generate(TEXT, max_tokens=1000, ignore_eos=True, **params)
    drafted = target.using(drafter).generate(TEXT, max_tokens=1000, ignore_eos=True, draft_tokens=5, **params)
    assert len(plain.tokens) == 1000
    assert drafted.tokens == plain.tokens


GROWING = [name for name in DRAFTERS if "tree" in {option for option, *_ in drafter_options(name)}]


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("tree", ["chain", "2,2", "0 1 2 0.0 1.0 0.0.0", "dynamic", "sequoia"])
@pytest.mark.parametrize("drafter", GROWING)
def test_trees_under_every_rule(plain, tiny, drafter, tree, verify):
    """Every drafter that grows trees; the rules that draw promise the same tokens only where nothing is drawn."""
    llm, _ = plain("fp32", "auto")
    options = {"tree": tree, "max_tokens": 4, "max_nodes": 8, "beam": 2}
    drafted = llm.using(found(drafter, tiny), options=options, verify=verify, draft_tokens=6)
    for params in ({}, SAMPLING["nucleus"], {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 6}):
        expected = llm.generate(PROMPTS[1:4], **ASKED, **params)
        results = drafted.generate(PROMPTS[1:4], **ASKED, **params)
        assert llm.pool(results).drafted > 40
        if verify == "match" or not params:
            assert [result.tokens for result in results] == [result.tokens for result in expected]


@pytest.mark.lab
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("weights", [{}, {"dtype": "bf16"}], ids=str)
def test_the_qwen_pair(lab_model, weights):
    target = dw.load(str(lab_model("qwen2.5-coder-1.5b")), context=1024, **weights)
    draft = lab_model("qwen2.5-coder-0.5b")
    prompts = [PROMPTS[4], TEXT]
    check_pair(target, f"model:{draft}", prompts, max_tokens=48, draft_tokens=4)
    check_pair(target, "ngram", prompts, max_tokens=48, draft_tokens=None)


def test_a_draft_of_another_vocabulary_is_refused(tiny):
    with pytest.raises(ValueError, match="another vocabulary"):
        dw.load("smollm2", drafter=f"model:{tiny}", context=64)
