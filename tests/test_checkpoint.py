"""Checkpoints: block kinds against the reference library, both formats against each other, and files that are not right."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from draftwise.checkpoint import Checkpoint, Quantized, available_memory, check_memory, memory_needed, open_checkpoint
from draftwise.checkpoint.blocks import KINDS, unpack
from draftwise.checkpoint.config import from_huggingface
from draftwise.checkpoint.memory import _container
from draftwise.checkpoint.names import huggingface_name
from draftwise.types import ModelConfig

# where a block keeps its half-precision numbers; random bytes there could be NaN
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors by the hundred: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_folder(architecture, **config): a tiny checkpoint, written once."""
    made: dict[str, Path] = {}

    def make(architecture: str, **config: Any) -> Path:
        key = f"{architecture} {sorted(config.items())}"
        if key not in made:
            made[key] = tiny.tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **config)
        return made[key]

    return make


def dense(weight: Tensor | Quantized) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def without_raw(config: ModelConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config, raw={}, **changes)


# block kinds


@pytest.mark.parametrize("name", HALVES)
def test_blocks_are_what_the_reference_library_reads(name: str) -> None:
    [kind] = [kind for kind in KINDS.values() if kind.name == name]
    rng = np.random.default_rng(0)
    rows, blocks = 6, 5
    raw = rng.integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    for start in HALVES[name]:
        raw[:, :, start : start + 2] = rng.normal(scale=0.02, size=(rows, blocks, 1)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(rows, -1)
    weight = unpack(kind, torch.from_numpy(raw))
    expected = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.dequantize(torch.bfloat16), expected.to(torch.bfloat16))
    assert weight.shape == (rows, blocks * kind.size) and weight.kind == name
    assert weight.bits == (4 if name.startswith("Q4") else 8)
    assert weight.group == (16 if name == "Q6_K" else 32)
    assert weight.scales.dtype == torch.float32 and weight.scales.shape == (rows, weight.shape[1] // weight.group)
    assert weight.values.dtype == (torch.uint8 if weight.bits == 4 else torch.int8)
    if weight.bits == 4:
        assert int(weight.values.max()) == 15
    assert (weight.minima is None) == (name in ("Q5_0", "Q8_0", "Q6_K"))
    ids = torch.tensor([4, 0, 4])
    assert torch.equal(weight.rows(ids), expected[ids])


@pytest.mark.usefixtures("one_thread")
def test_every_weight_of_the_real_model_is_what_the_reference_library_reads(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.path == smollm2_path
    theirs = gguf.GGUFReader(smollm2_path).tensors
    assert len(checkpoint.names()) == len(theirs) == 272
    for tensor in theirs:
        name = huggingface_name(tensor.name)
        assert name is not None
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        if "q_proj" in name or "k_proj" in name:  # pairs (x0, y0, x1, y1, …) of a head of 64 rows
            pairs = expected.view(-1, 32, 2, 576)
            expected = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(expected.shape)
        assert torch.equal(dense(checkpoint.tensor(name)), expected), name


def test_the_real_model_is_described_by_its_metadata(smollm2_path: Path) -> None:
    assert without_raw(open_checkpoint(smollm2_path).config) == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-05,
        max_positions=8192,
        rope={"rope_type": "default", "rope_theta": 100000.0},
        windows=(None,) * 30,
        tie_embeddings=True,
        eos_tokens=(2,),
        bos_token=1,
    )


@pytest.mark.lab
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model", ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"])
def test_mixed_kinds_of_a_large_model_are_what_the_reference_library_reads(
    model: str, lab_model: Callable[[str], Path]
) -> None:
    path = lab_model(model)
    checkpoint = open_checkpoint(path)
    kinds = set()
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in ("token_embd.weight", "output.weight") or tensor.name.startswith("blk.3."):
            name = huggingface_name(tensor.name)
            assert name is not None
            expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
            assert torch.equal(dense(checkpoint.tensor(name)), expected), tensor.name
            kinds.add(tensor.tensor_type.name)
    assert kinds >= {"F32", "Q4_K", "Q6_K"} if "1.5b" in model else kinds >= {"F32", "Q5_0", "Q8_0"}


# both formats


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_holds_what_its_folder_holds(architecture: str, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder(architecture)
    ours, theirs = open_checkpoint(tiny.tiny_gguf(tmp_path / "tiny.gguf", folder)), open_checkpoint(folder)
    assert (ours.format, theirs.format) == ("gguf", "safetensors")
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert torch.equal(dense(ours.tensor(name)), dense(theirs.tensor(name))), name
        assert ours.shape(name) == theirs.shape(name)
    name = {"mistral": "llama"}.get(architecture, architecture)
    assert without_raw(ours.config) == without_raw(theirs.config, architecture=name)


def test_biases_of_llama_are_put_in_order_too(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder("llama", attention_bias=True, mlp_bias=True)
    ours, theirs = open_checkpoint(tiny.tiny_gguf(tmp_path / "tiny.gguf", folder)), open_checkpoint(folder)
    assert without_raw(ours.config) == without_raw(theirs.config)
    assert theirs.config.attention_bias and theirs.config.output_bias and theirs.config.mlp_bias
    biases = [name for name in theirs.names() if name.endswith(".bias")]
    assert len(biases) == 3 * 7
    for name in biases:
        assert torch.equal(dense(ours.tensor(name)), dense(theirs.tensor(name))), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rows_of_blocks_are_put_in_order_without_touching_them(
    kind: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_folder("llama")
    ours, theirs = open_checkpoint(tiny.tiny_gguf(tmp_path / "tiny.gguf", folder, kind=kind)), open_checkpoint(folder)
    number = gguf.GGMLQuantizationType[kind]
    for name in theirs.names():
        weight, original = ours.tensor(name), dense(theirs.tensor(name))
        if original.dim() > 1:
            original = torch.from_numpy(gguf.dequantize(gguf.quantize(original.numpy(), number), number))
        assert torch.equal(dense(weight).float(), original), name
    stored = ours.tensor("lm_head.weight")
    assert stored.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}[kind] if isinstance(stored, Tensor) else True


def test_a_file_in_parts_is_one_checkpoint(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder("qwen2")
    first = tiny.tiny_gguf(tmp_path / "tiny.gguf", folder, split_tensors=16)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3 and parts[0] == first
    whole = open_checkpoint(folder)
    for part in parts:  # whichever is named
        checkpoint = open_checkpoint(part)
        assert checkpoint.path == first and checkpoint.names() == whole.names()
    assert all(torch.equal(dense(checkpoint.tensor(name)), dense(whole.tensor(name))) for name in whole.names())
    parts[1].unlink()
    with pytest.raises(ValueError, match=r"part tiny-00002-of-00003.gguf of 3 is missing"):
        open_checkpoint(first)


def test_writing_to_a_tensor_leaves_the_file_alone(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny.tiny_gguf(tmp_path / "tiny.gguf", tiny_folder("llama"))
    before = path.read_bytes()
    dense(open_checkpoint(path).tensor("model.norm.weight")).zero_()
    assert path.read_bytes() == before


def test_a_sharded_folder_is_one_checkpoint(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_folder("llama")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="150KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    ours, theirs = open_checkpoint(tmp_path), open_checkpoint(folder)
    assert ours.names() == theirs.names()
    assert all(torch.equal(dense(ours.tensor(name)), dense(theirs.tensor(name))) for name in theirs.names())
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"the index names {shards[1].name}, which is missing"):
        open_checkpoint(tmp_path)


def test_the_fingerprint_follows_the_files(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny.tiny_gguf(tmp_path / "tiny.gguf", tiny_folder("llama"))
    first = open_checkpoint(path).fingerprint
    assert open_checkpoint(path).fingerprint == first
    path.touch()
    assert open_checkpoint(path).fingerprint != first


# configurations

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("llama", {"num_key_value_heads": 1}),
    "own head width": ("llama", {"head_dim": 32}),
    "linear scaling": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}),
    "llama 3.1": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            "rope_theta": 500000.0,
        },
    ),
    "yarn": ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "transformers 5": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "window": ("mistral", {"sliding_window": 64}),
    "no window": ("mistral", {"sliding_window": None}),
    "window not used": ("qwen2", {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 1}),
    "window from a layer on": ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}),
    "window by layer type": (
        "qwen3",
        {
            "sliding_window": 64,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "biases": ("qwen3", {"attention_bias": True}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "several ends": ("llama", {"eos_token_id": [2, 5]}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_configuration_means_what_it_means_to_transformers(variant: str) -> None:
    from transformers import AutoConfig

    architecture, changes = VARIANTS[variant]
    # only what a file of transformers 4 would hold: defaults are left out
    raw = tiny.SHAPE | {"intermediate_size": 128} | changes
    if architecture != "llama":
        raw.setdefault("num_key_value_heads", 2)
    ours = from_huggingface(raw | {"model_type": architecture}, {})
    theirs = AutoConfig.for_model(architecture, **json.loads(json.dumps(raw)))
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    expected = {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    assert {key: ours.rope.get(key) for key in expected} == expected
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 3
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.max_positions == theirs.max_position_embeddings and ours.norm_eps == theirs.rms_norm_eps
    assert ours.eos_tokens == tuple(theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id])


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "opt", "gpt_neox", "phi3", "mixtral"])
def test_any_other_architecture_opens_for_the_universal_backend(architecture: str, tiny_folder: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_folder(architecture))
    config = checkpoint.config
    assert (config.architecture, config.vocab_size, config.hidden_size, config.num_layers) == (architecture, 300, 64, 3)
    assert (config.num_heads, config.max_positions, config.eos_tokens) == (4, 512, (2,))
    assert config.raw["model_type"] == architecture


def test_generation_settings_add_end_tokens(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny.tiny_checkpoint(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert open_checkpoint(folder).config.eos_tokens == (2, 7)


def test_rotary_scaling_of_a_file_is_in_the_terms_of_hugging_face(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    scaled = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    path = tiny.tiny_gguf(tmp_path / "linear.gguf", tiny_folder("llama"), **scaled)
    assert open_checkpoint(path).config.rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    scaled = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    scaled |= {"llama__rope__scaling__original_context_length": 128}
    path = tiny.tiny_gguf(tmp_path / "yarn.gguf", tiny_folder("llama"), **scaled)
    assert open_checkpoint(path).config.rope == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    path = tiny.tiny_gguf(tmp_path / "window.gguf", tiny_folder("llama"), llama__attention__sliding_window=24)
    assert open_checkpoint(path).config.windows == (24, 24, 24)
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    path = tiny.tiny_gguf(tmp_path / "factors.gguf", tiny_folder("llama"), rope_factors=factors)
    assert open_checkpoint(path).config.rope == {
        "rope_type": "factors",
        "rope_theta": 10000.0,
        "factors": factors,
    }


@pytest.mark.parametrize(
    ("settings", "method"),
    [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "fp8"}, "fp8"), ({"bits": 4}, "unknown")],
)
def test_quantised_folders_say_by_what(
    settings: dict[str, Any], method: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny.tiny_checkpoint(tmp_path, "llama")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    assert open_checkpoint(folder).quantization == method
    assert open_checkpoint(tiny_folder("llama")).quantization is None


# what is not right is said in one line, before any weight is read


def broken(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "not a GGUF file"),
        (lambda data: b"PK" + data[2:], "not a GGUF file"),
        (lambda data: data[:20], "cut short at 20 bytes"),
        (lambda data: data[:700], "cut short at 700 bytes"),
        (lambda data: data[: len(data) // 2], "cut short"),
        (lambda data: data[:-40], "cut short"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "of version 1; versions 2 and 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "of big-endian; versions 2 and 3, little-endian"),
        (lambda data: data.replace(b"general.architecture" + struct.pack("<I", 8), b"general.architecture" + b"\x63\0\0\0"),
         "damaged metadata (a value of unknown type 99)"),
        (lambda data: data.replace(b"attn_q.weight", b"attn_x.weight", 1), "self_attn.q_proj.weight is missing"),
        (lambda data: data.replace(b"token_embd", b"token_embx"), "there is no token_embd.weight"),
        (lambda data: data.replace(b"rms_epsilon", b"rms_epsilom"), "lack llama.attention.layer_norm_rms_epsilon"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_what_to_do(
    change: Callable[[bytes], bytes], message: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    path = broken(tiny.tiny_gguf(tmp_path / "tiny.gguf", tiny_folder("llama")), change)
    with pytest.raises(ValueError) as error:
        open_checkpoint(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_honoured_name_the_choices(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    cases = [
        ({"general__architecture": None}, "architecture 'unknown'"),
        ({"llama__expert_count": 8}, "a mixture of experts"),
        ({"llama__attention__value_length": 8}, "different widths"),
        (
            {"llama__rope__scaling__type": "longrope"},
            "rotary scaling 'longrope' is not supported; choose from: none",
        ),
        ({"llama__attention__head_count_kv": [2, 1, 2]}, "attention.head_count_kv differs from layer to layer"),
        ({"llama__embedding_length": 32}, "model.embed_tokens.weight is (300, 64) where the config promises (300, 32)"),
    ]
    for number, (metadata, message) in enumerate(cases):
        path = tiny.tiny_gguf(tmp_path / f"{number}.gguf", tiny_folder("llama"), **metadata)
        if "general__architecture" in metadata:
            broken(path, lambda data: data.replace(b"general.architecture", b"general.architectura"))
        with pytest.raises(ValueError) as error:
            open_checkpoint(path)
        assert message in str(error.value)
    path = tiny.tiny_gguf(tmp_path / "other.gguf", tiny_folder("llama"))
    broken(path, lambda data: data.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba", 1))
    with pytest.raises(ValueError, match=r"architecture 'mamba'; those that can be read are llama, qwen2, qwen3 \(mistral"):
        open_checkpoint(path)


def test_a_kind_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "kind.gguf", "llama")
    writer.add_tensor("x.weight", np.zeros((2, 98), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ3_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="x.weight is stored as IQ3_XXS, which is not read; kinds read: F32, F16, Q4_0"):
        open_checkpoint(tmp_path / "kind.gguf")


def test_a_folder_that_is_not_right_is_named_with_what_to_do(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(ValueError) as error:
            open_checkpoint(tmp_path)
        assert message in str(error.value) and str(tmp_path) in str(error.value)

    fails("there is no config.json; give a folder in Hugging Face format or a .gguf file")
    (tmp_path / "model.gguf").touch()
    fails(f"there is no config.json; give the file itself: {tmp_path / 'model.gguf'}")
    (tmp_path / "config.json").write_text("{")
    fails("not valid JSON")
    (tmp_path / "config.json").write_text("[]")
    fails("holds a list where an object is expected")
    (tmp_path / "config.json").write_text("{}")
    fails("names no model_type")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    fails("config.json of a llama model has no num_attention_heads")
    folder = tiny_folder("llama")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    fails("there is no model.safetensors; fetch the folder again")
    (tmp_path / "pytorch_model.bin").touch()
    fails("there is no model.safetensors; only pytorch_model.bin; save it as safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    fails("cut short or not a safetensors file")
    (tmp_path / "model.safetensors").write_bytes(whole.replace(b"layers.1.mlp.up_proj.weight", b"layers.1.mlp.up_porj.weight"))
    fails("model.layers.1.mlp.up_proj.weight is missing")


def test_a_parameter_that_is_not_there_is_an_error(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="there is no parameter model.layers.9.x"):
        open_checkpoint(tiny_folder("llama")).tensor("model.layers.9.x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing", r"no such folder or .gguf file, and neither a hub id \(owner/name\) nor an alias \(smollm2\)"),
        ("./missing/model.gguf", "no such folder or .gguf file"),
        ("~/missing", "no such folder or .gguf file"),
    ],
)
def test_a_source_that_means_nothing_names_the_choices(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(source)


def test_a_revision_of_something_local_is_an_error(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="a local path has no revision 'main'"):
        open_checkpoint(tiny_folder("llama"), revision="main")
    with pytest.raises(ValueError, match="revision 'main' means nothing for the alias smollm2"):
        open_checkpoint("smollm2", revision="main")


# memory


def test_memory_needed_counts_weights_and_cache(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama"))
    # 2 tables of 300 x 64, 3 layers of (64 x 64 + 2 x 32 x 64 + 64 x 64 + 3 x 128 x 64), 7 norms of 64
    matrices, norms = 2 * 300 * 64 + 3 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64), 7 * 64
    assert memory_needed(checkpoint) == 4 * (matrices + norms)
    assert memory_needed(checkpoint, 16) == 2 * matrices + 4 * norms
    assert memory_needed(checkpoint, 4.5) == int(matrices * 4.5 / 8) + 4 * norms
    # keys and values of 3 layers, 2 heads of 16, 100 rows of 2 bytes
    assert memory_needed(checkpoint, cache_rows=100, cache_bytes=2) - memory_needed(checkpoint) == 2 * 3 * 2 * 16 * 100 * 2
    blocks = open_checkpoint(tiny.tiny_gguf(tmp_path / "tiny.gguf", tiny_folder("llama"), kind="Q8_0"))
    assert memory_needed(blocks) == matrices // 32 * 34 + 4 * norms


def test_a_model_too_large_is_refused_with_both_numbers() -> None:
    check_memory("x", 10, 10)
    with pytest.raises(ValueError, match=r"^x needs 12.00 GB of memory and 3.50 GB are free; use fewer bits a weight"):
        check_memory("x", 12_000_000_000, 3_500_000_000)
    with pytest.raises(ValueError, match="needs 1000000000.00 GB"):
        check_memory("x", 10**18)


def test_available_memory_is_what_a_container_leaves(tmp_path: Path) -> None:
    free = available_memory()
    assert free is not None and 10_000_000 < free < 10**14
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert _container(tmp_path) == 1000 - 600 + 200
    (tmp_path / "memory.max").write_text("max\n")
    assert _container(tmp_path) is None
    assert _container(tmp_path / "none") is None


def test_importing_checkpoints_loads_no_heavy_library() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import sys, draftwise.checkpoint; print({'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_opening_reads_no_weight(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert isinstance(checkpoint, Checkpoint) and checkpoint.gguf is not None
    part = next(iter(checkpoint.gguf.tensors.values())).file
    assert "data" not in vars(part)
