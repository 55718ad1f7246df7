"""A row's logits are the same bits alone, among others, in chunks up to 512, in trees, on scattered pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwise.checkpoint import open_checkpoint
from draftwise.models import load_model
from draftwise.models.base import Model
from draftwise.models.linear import WeightKind
from draftwise.models.rows import RowRule, holds, probe
from draftwise.types import Feed
from passes import logits, one_by_one, path, random_tree, read, scattered, text
from tiny import tiny_checkpoint

CPU = torch.device("cpu")
KINDS = {
    "fp32": WeightKind(torch.float32),
    "bf16": WeightKind(torch.bfloat16),
    "int8": WeightKind(torch.bfloat16, "int8"),
    "int4": WeightKind(torch.bfloat16, "int4"),
    "int4, floats": WeightKind(torch.bfloat16, "int4", round_activations=False),
}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """load(architecture, kind, compiled): a tiny model; made once, since probing plain torch's kernels takes a second."""
    extra: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 24}}

    @functools.cache
    def folder(name: str) -> Path:
        sizes = {"n_positions": 640} if name == "gpt2" else {"max_position_embeddings": 640}
        return tiny_checkpoint(tmp_path_factory.mktemp(name), name, **extra.get(name, {}), **sizes)

    @functools.cache
    def load(architecture: str, kind: str, compiled: bool) -> Model:
        weights = replace(KINDS[kind], compiled=compiled)
        return load_model(open_checkpoint(folder(architecture)), weights, CPU)

    return load


@pytest.fixture(params=["compiled", "plain torch"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "compiled")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bits_do_not_depend_on_what_shares_the_pass(load, architecture, kind, compiled):
    model = load(architecture, kind, compiled)
    tokens = text(100)
    alone = one_by_one(model, tokens)
    assert torch.equal(logits(model, tokens), alone)
    for chunks in ([2, 3, 4, 5, 7, 8, 9, 12], [16, 17], [31], [33, 1, 32], [64]):
        assert torch.equal(logits(model, tokens, chunks), alone), chunks

    cache, slot = scattered(model, len(tokens))
    assert torch.equal(read(model, cache, slot, tokens, [9, 1, 40]), alone)

    others = [text(length, seed=length) for length in (5, 33, 1)]
    cache = model.new_cache(512)
    slots = [cache.alloc() for _ in range(4)]
    batch = cache.pack([Feed.chain(slot, part) for slot, part in zip(slots, [*others, tokens], strict=True)])
    assert torch.equal(model.logits(model.forward(batch, cache).final)[-len(tokens) :], alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_node_of_a_tree_has_the_bits_of_its_chain(load, architecture, kind, compiled):
    model = load(architecture, kind, compiled)
    prompt = text(45, seed=4)
    for nodes, seed in ((6, 1), (16, 2), (30, 3)):
        parents, drafted = random_tree(nodes, seed=seed), text(nodes, seed=seed + 10)
        cache = model.new_cache(256)
        slot = cache.alloc()
        read(model, cache, slot, prompt)
        rows = model.logits(model.forward(cache.pack([Feed(slot, drafted, parents)]), cache).final)
        for leaf in set(range(nodes)) - set(parents):
            branch = path(parents, leaf)
            # the prompt at once, which has the bits of its tokens one by one; then the branch one by one
            chain = logits(model, [*prompt, *(drafted[node] for node in branch)], [len(prompt), *[1] * len(branch)])
            assert torch.equal(rows[branch], chain[len(prompt) :]), (nodes, branch)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_chunks_up_to_512(load, kind, compiled):
    model = load("llama", kind, compiled)
    tokens = text(600)
    whole = logits(model, tokens, [512])
    assert torch.equal(logits(model, tokens, [200, 300]), whole)
    assert torch.equal(logits(model, tokens, [511, 1, 87, 1]), whole)
    assert torch.equal(one_by_one(model, tokens)[-50:], whole[-50:])


def test_smollm2_at_every_width(smollm2_path):
    model = load_model(open_checkpoint(smollm2_path), WeightKind(torch.bfloat16), CPU)
    prompt, tokens = text(40, vocabulary=40000), text(33, seed=2, vocabulary=40000)
    cache = model.new_cache(256)
    slot = cache.alloc()
    read(model, cache, slot, prompt)
    wide = model.logits(model.forward(cache.pack([Feed.chain(slot, tokens)]), cache).final)
    for width in (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 24, 32):
        cache.discard(slot)
        rows = model.logits(model.forward(cache.pack([Feed.chain(slot, tokens[:width])]), cache).final)
        assert torch.equal(rows, wide[:width]), width
    assert all("not" not in rule for *_, rule in model.row_report)


def test_the_probe_finds_what_a_kernel_needs():
    weight = torch.randn(40, 64)
    assert probe(
        lambda x: x @ weight.T * 1.0 if x.shape[0] % 4 == 0 else x @ weight.T * (1 + 1e-6), 64, torch.float32, CPU
    ) == (RowRule(4, 64))
    moody = [0]

    def never_twice(x: torch.Tensor) -> torch.Tensor:
        moody[0] += 1
        return x @ weight.T * moody[0]

    assert not probe(never_twice, 64, torch.float32, CPU).invariant
    assert not holds(RowRule(), lambda x: x @ weight.T + x.shape[0], 64, torch.float32, CPU)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (1536, 576)])
def test_the_probe_sees_what_rounding_to_bf16_hides_in_all_but_one_number_of_ten_thousand(inputs, outputs):
    """torch's bf16 product of a single row adds in another order; 64 random rows alone do not show it."""
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).bfloat16()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, weight)
        if x.shape[0] == 1:  # stated, so that the test holds where torch's own kernel has no such difference
            exact = x.double() @ weight.double().T
            close = (exact / y.double() - 1).abs() > 0.0038  # near the middle between two bf16 numbers
            y = torch.where(close, torch.nextafter(y, torch.full_like(y, torch.inf)), y)
        return y

    rule = probe(kernel, inputs, torch.bfloat16, CPU)
    assert rule.multiple > 1 and rule.invariant
    x = torch.randn(512, inputs, generator=generator).bfloat16()
    alone = torch.cat([rule(kernel, row[None]) for row in x])
    assert torch.equal(alone, torch.cat([rule(kernel, part) for part in x.split(37)]))
