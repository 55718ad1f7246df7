"""A model in a GGUF file: its config out of the metadata, its weights under their Hugging Face names and row order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.checkpoint.blocks import Quantized
from draftwise.checkpoint.gguf_file import GGUFFile, GGUFTensor
from draftwise.checkpoint.names import huggingface_name
from draftwise.types import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""What general.architecture may say; mistral models call themselves llama."""


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The config that the metadata describe. Raises ValueError for another architecture, or one of its variants.

    A file with the tensor rope_freqs.weight gets rope_type "factors" and `factors`, one a rotary frequency, by which
    that frequency is divided; other types are those of Hugging Face.
    """
    architecture = str(file.metadata.get("general.architecture", ""))
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: a GGUF file of architecture {architecture or 'unknown'!r}; those that can be read are "
            f"{', '.join(ARCHITECTURES)} (mistral is stored as llama); give the model's Hugging Face folder instead"
        )
    keys = {
        key.removeprefix(architecture + "."): value
        for key, value in file.metadata.items()
        if key.startswith(architecture + ".")
    }

    def get(key: str, default: Any = None) -> Any:
        value = keys.get(key, default)
        if value is None:
            raise ValueError(f"{file.path}: the metadata lack {architecture}.{key}; fetch or convert the file again")
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise ValueError(f"{file.path}: {key} differs from layer to layer, which is not supported")
            value = value[0].item()
        return value

    def has(tensor: str) -> bool:
        return tensor in file.tensors

    if keys.get("expert_count", 0):
        raise ValueError(f"{file.path}: a mixture of experts; give the model's Hugging Face folder instead")
    if not has("token_embd.weight"):
        raise ValueError(f"{file.path}: there is no token_embd.weight; the file holds no whole model")
    heads, layers = int(get("attention.head_count")), int(get("block_count"))
    hidden = int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if int(get("attention.value_length", head_dim)) != head_dim or int(get("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"{file.path}: keys, values and rotary positions of different widths are not supported")
    max_positions = int(get("context_length"))
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        max_positions=max_positions,
        rope=_rope(file, keys, max_positions),
        windows=(int(keys.get("attention.sliding_window", 0)) or None,) * layers,
        tie_embeddings=not has("output.weight"),
        attention_bias=has("blk.0.attn_q.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_up.bias"),
        query_key_norm=has("blk.0.attn_q_norm.weight"),
        eos_tokens=() if eos is None else (int(eos),),
        bos_token=file.metadata.get("tokenizer.ggml.bos_token_id"),
        raw={key: value for key, value in file.metadata.items() if isinstance(value, (str, int, float, bool))},
    )


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(file: GGUFFile, keys: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _shortest(keys.get("rope.freq_base", 10000.0))}
    kind = keys.get("rope.scaling.type", "linear" if "rope.scale_linear" in keys else "none")
    factor = float(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)))
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{file.path}: rotary scaling {kind!r} is not supported; choose from: none, linear, yarn")
    if kind == "linear" and factor not in (0, 1):
        rope |= {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = int(keys.get("rope.scaling.original_context_length", max_positions))
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for theirs, ours in {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}.items():
            if f"rope.scaling.{theirs}" in keys:
                rope[ours] = float(keys[f"rope.scaling.{theirs}"])
    if "rope_freqs.weight" in file.tensors:
        factors = file.tensors["rope_freqs.weight"].read()
        assert isinstance(factors, Tensor)
        rope |= {"rope_type": "factors", "factors": factors.float().tolist()}
    return rope


class GGUFWeights:
    """The weights of a GGUF file by Hugging Face name."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._config = config
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            name = huggingface_name(tensor.name)
            if name is not None:
                self._tensors[name] = tensor

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def nbytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def tensor(self, name: str) -> Tensor | Quantized:
        tensor = self._tensors[name]
        heads = self._interleaved_heads(name)
        return tensor.read(None if heads is None else _half_rotation(tensor.shape[0], heads))

    def _interleaved_heads(self, name: str) -> int | None:
        """Files of architecture llama store the rows of q and k in pairs (x0, y0, x1, y1, …) a head."""
        if self._config.architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self._config.num_heads
        return self._config.num_kv_heads if ".self_attn.k_proj." in name else None


def _half_rotation(rows: int, heads: int) -> Tensor:
    """Row numbers that turn (x0, y0, x1, y1, …) of every head into (x0, x1, …, y0, y1, …)."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
