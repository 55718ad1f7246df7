"""Logits against the transformers library in fp32: every architecture, however its tokens are fed."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwise.checkpoint import open_checkpoint
from draftwise.models import load_model, native_architectures
from draftwise.models.base import Model
from draftwise.models.linear import WeightKind
from draftwise.models.transformers import TransformersModel
from draftwise.types import Feed
from passes import logits, path, random_tree, read, scattered, text
from tiny import ARCHITECTURES, tiny_checkpoint

CPU = torch.device("cpu")
NATIVE = native_architectures()
UNIVERSAL = sorted(ARCHITECTURES.keys() - set(NATIVE))
WINDOW = 24  # shorter than the texts
LENGTH = 90
CHUNKS = (1, 3, 7)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        {"num_key_value_heads": 4, "head_dim": 32},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_parameters": YARN, "max_position_embeddings": 128},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
    "mistral": [{"sliding_window": WINDOW}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, {"tie_word_embeddings": True}],
    "qwen3": [{"attention_bias": True}, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}],
    "opt": [{"word_embed_proj_dim": 32, "do_layer_norm_before": False}],
    "gpt2": [{"scale_attn_by_inverse_layer_idx": True}],
    "gpt_neox": [{"use_parallel_residual": False, "rotary_pct": 1.0}],
    "phi3": [{"sliding_window": WINDOW, "partial_rotary_factor": 0.5}],
    "mixtral": [{"sliding_window": WINDOW}],
}
CASES = [(name, extra) for name in (*NATIVE, *UNIVERSAL) for extra in ({}, *VARIANTS.get(name, []))]


def name_of(case: Any) -> str:
    if not isinstance(case, dict):
        return str(case)
    rope = case.get("rope_parameters", {}).get("rope_type", "")
    return "-".join(filter(None, [*(key for key in case if key != "rope_parameters"), rope])) or "plain"


cases = pytest.mark.parametrize(("architecture", "extra"), CASES, ids=name_of)


@functools.cache
def _library(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module", params=["compiled", "plain torch"])
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """pair(architecture, extra): our model and the library's. Made twice: on the compiled kernels, and in plain torch."""
    folder = functools.cache(lambda architecture, _: tmp_path_factory.mktemp(architecture))

    @functools.cache
    def load(architecture: str, extra: str, compiled: bool) -> tuple[Model, Any]:
        where = folder(architecture, extra)
        if not any(where.iterdir()):
            tiny_checkpoint(where, architecture, **json.loads(extra))
        return load_model(open_checkpoint(where), WeightKind(torch.float32, compiled=compiled), CPU), _library(where)

    return lambda architecture, extra: load(architecture, json.dumps(extra), request.param == "compiled")


@torch.inference_mode()
def expected(library: Any, tokens: list[int]) -> torch.Tensor:
    return library(torch.tensor([tokens])).logits[0]


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for the order of additions in fp32."""
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 5e-5 * wanted.abs().max()


def test_every_native_architecture_has_a_tiny_model():
    assert set(NATIVE) <= ARCHITECTURES.keys(), "add the new architecture to tests/tiny.py"
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(NATIVE)


@cases
def test_one_pass_and_chunks(pair, architecture, extra):
    model, library = pair(architecture, extra)
    assert isinstance(model, TransformersModel) == (architecture in UNIVERSAL)
    tokens = text(LENGTH)
    wanted = expected(library, tokens)
    assert_same(logits(model, tokens), wanted)
    assert_same(logits(model, tokens, CHUNKS), wanted)


@cases
def test_several_texts_at_once_over_scattered_pages(pair, architecture, extra):
    model, library = pair(architecture, extra)
    texts = [text(LENGTH, seed=1), text(37, seed=2), text(61, seed=3)]
    cache, first = scattered(model, sum(map(len, texts)))
    slots = [first, cache.alloc(), cache.alloc()]
    found: list[list[torch.Tensor]] = [[], [], []]
    at = 0
    while at < LENGTH:
        feeds = [Feed.chain(slot, tokens[at : at + 13]) for slot, tokens in zip(slots, texts, strict=True) if at < len(tokens)]
        batch = cache.pack(feeds)
        rows = model.logits(model.forward(batch, cache).final)
        for span in batch.spans:
            found[slots.index(span.slot)].append(rows[span.start : span.stop])
            cache.commit(span.slot, range(span.stop - span.start))
        at += 13
    for rows, tokens in zip(found, texts, strict=True):
        assert_same(torch.cat(rows), expected(library, tokens))
    tables = [cache.block_table(slot) for slot in slots]
    assert any(later != page + 1 for table in tables for page, later in zip(table, table[1:], strict=False))


@cases
def test_a_tree_says_what_its_paths_say_and_one_is_gone_on_with(pair, architecture, extra):
    model, library = pair(architecture, extra)
    prompt, parents = text(40, seed=4), random_tree(14, seed=5)
    nodes, more = text(14, seed=6), text(9, seed=7)
    cache = model.new_cache(256)
    slot = cache.alloc()
    read(model, cache, slot, prompt)
    # in two passes: the second one's rows hang off the first one's
    rows = torch.cat(
        [
            model.logits(model.forward(cache.pack([Feed(slot, nodes[part], parents[part])]), cache).final)
            for part in (slice(0, 8), slice(8, 14))
        ]
    )
    for leaf in set(range(14)) - set(parents):
        branch = path(parents, leaf)
        wanted = expected(library, prompt + [nodes[node] for node in branch])[len(prompt) :]
        assert_same(rows[branch], wanted)
    deepest = max((path(parents, node) for node in range(14)), key=len)
    assert deepest != list(range(len(deepest)))
    cache.commit(slot, deepest)
    taken = prompt + [nodes[node] for node in deepest]
    assert_same(read(model, cache, slot, more), expected(library, taken + more)[len(taken) :])


@cases
def test_taps_are_the_residual_stream(pair, architecture, extra):
    model, library = pair(architecture, extra)
    tokens, layers = text(30), model.config.num_layers
    cache = model.new_cache(64)
    hidden = model.forward(cache.pack([Feed.chain(cache.alloc(), tokens)]), cache, (*range(layers + 1), "final_norm"))
    with torch.inference_mode():
        wanted = library(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for k in range(layers):  # the library's last one is taken after the final norm
        assert_same(hidden.taps[k], wanted[k][0])
    assert torch.equal(hidden.taps["final_norm"], hidden.final)
    assert hidden.taps[layers].shape == hidden.taps[0].shape and not torch.equal(hidden.taps[layers], hidden.taps[layers - 1])


@cases
def test_fewer_layers(pair, architecture, extra):
    model, library = pair(architecture, extra)
    some = model.subset([0, 2])
    cache = some.new_cache(64)
    tokens = text(30)
    batch = cache.pack([Feed.chain(cache.alloc(), tokens)])
    hidden = some.forward(batch, cache, (0, 2, 3))
    full = model.new_cache(64)
    whole = model.forward(full.pack([Feed.chain(full.alloc(), tokens)]), full, (0, 1, 3))
    assert torch.equal(hidden.taps[0], whole.taps[0])
    assert torch.equal(hidden.taps[2], whole.taps[1])  # what enters layer 2 is what left layer 0
    assert cache.pool[1].count_nonzero() == 0 and cache.pool[2].count_nonzero() > 0
    assert torch.equal(cache.pool[0], full.pool[0])
    assert_same(logits(model, tokens), expected(library, tokens))  # the whole model is as it was


@contextmanager
def without(library: Any, attention: set[int], feed_forward: set[int]) -> Iterator[None]:
    """The library's model while these layers' attention and feed-forward put out zeros."""
    stack = next(module for module in library.modules() if isinstance(module, torch.nn.ModuleList))
    names = ("self_attn", "attn", "attention")
    silent = [next(part for name, part in stack[index].named_children() if name in names) for index in attention]
    silent += [stack[index].mlp for index in feed_forward]

    def silence(_: Any, __: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    hooks = [part.register_forward_hook(silence) for part in silent]
    yield
    for hook in hooks:
        hook.remove()


@cases
def test_a_layer_without_attention_or_without_feed_forward(pair, architecture, extra):
    model, library = pair(architecture, extra)
    tokens = text(LENGTH)
    if architecture == "opt":  # its feed-forward is spread over the layer
        with pytest.raises(ValueError, match="opt models cannot be left out alone; leave out whole layers"):
            model.subset([0, 1, 2], [0, 2])
    else:
        with without(library, {1}, {2}):
            wanted = expected(library, tokens)
        some = model.subset([0, 2], [0, 1])
        assert_same(logits(some, tokens), wanted)
        assert_same(logits(some, tokens, CHUNKS), wanted)
        assert some.subset([2], []).new_cache(16).pool.shape[0] == 3
    assert_same(logits(model, tokens), expected(library, tokens))  # the whole model is as it was


@cases
def test_a_subset_reads_what_the_whole_model_committed(pair, architecture, extra):
    model, _ = pair(architecture, extra)
    tokens, more = text(50), text(9, seed=1)
    some = model.subset([0, 2])
    cache = model.new_cache(128)
    slot = cache.alloc()
    read(model, cache, slot, tokens)
    before = cache.pool.clone()
    batch = cache.pack([Feed.chain(slot, more)])
    some.forward(batch, cache)
    written = torch.zeros(cache.pool.shape[3], dtype=torch.bool)
    written[batch.rows_N] = True
    assert torch.equal(cache.pool[1], before[1]), "a layer that is left out writes nothing"
    assert torch.equal(cache.pool[:, :, :, ~written], before[:, :, :, ~written]), "nothing that was committed changes"
    assert (cache.pool[2][:, :, written] != before[2][:, :, written]).any()
    cache.discard(slot)
    whole = read(model, cache, slot, more)
    assert torch.equal(whole, logits(model, tokens + more)[50:])


def test_dynamic_rotary_scaling_past_the_original_length_is_that_of_tokens_fed_one_at_a_time(tmp_path):
    from transformers import DynamicCache

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = tiny_checkpoint(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=48)
    model, library, tokens = load_model(open_checkpoint(folder), WeightKind(torch.float32), CPU), _library(folder), text(80)
    past = DynamicCache()
    with torch.inference_mode():  # the cache by place: its name differs between versions
        rows = [library(torch.tensor([[token]]), None, None, past, use_cache=True).logits[0] for token in tokens]
    assert_same(logits(model, tokens, CHUNKS), torch.cat(rows))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_quantised_weights_of_the_universal_backend_stay_close(tmp_path, architecture, quantize):
    folder, tokens = tiny_checkpoint(tmp_path, architecture, gain=1.0), text(40)
    checkpoint = open_checkpoint(folder)
    wanted = logits(load_model(checkpoint, WeightKind(torch.float32), CPU), tokens)
    model = load_model(checkpoint, WeightKind(torch.bfloat16, quantize), CPU)
    found = logits(model, tokens)
    assert quantize in model.weights
    assert model.weight_bytes < load_model(checkpoint, WeightKind(torch.bfloat16), CPU).weight_bytes
    # the median row: a router that changes its mind moves a row far
    error = ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median()
    assert error < (0.35 if quantize == "int4" else 0.06)


def test_smollm2_is_what_the_library_makes_of_the_file(smollm2_path):
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(smollm2_path)
    library = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = text(48, vocabulary=checkpoint.config.vocab_size)
    wanted = expected(library.eval(), tokens)
    exact = load_model(checkpoint, WeightKind(torch.float32, keep_blocks=False), CPU)
    assert_same(logits(exact, tokens, CHUNKS), wanted)
    as_stored = load_model(checkpoint, WeightKind(torch.bfloat16), CPU)
    assert (logits(as_stored, tokens, CHUNKS) - wanted).norm() < 0.05 * wanted.norm()
