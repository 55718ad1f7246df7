"""Distilled drafts on disk: the layers of a Llama-like model without embedding and head, which are the target's.

`config.json` has a Llama model's keys and, under `draftwise`, for which target the draft was made and how it came about;
in `model.safetensors`, `d2t` holds offsets as in EAGLE's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise.checkpoint.config import from_huggingface
from draftwise.checkpoint.names import LLAMA_LIKE
from draftwise.drafters.base import Target
from draftwise.drafters.distilled_network import DistilledNetwork
from draftwise.drafters.stored import expand
from draftwise.drafters.trained import (
    check_algorithm,
    check_target,
    read_config,
    read_tensors,
    take_tokens,
    take_weights,
    write_trained,
)
from draftwise.types import ModelConfig

ALGORITHM = "draft"


def write_distilled(
    folder: Path, network: DistilledNetwork, target: Target, card: Mapping[str, Any], *, quantize: str | None = None
) -> None:
    """Write a draft and what it is made for; the weights in float32, or in groups of int8 or int4."""
    keys = _keys(network.config)
    write_trained(folder, network, network.d2t, target, keys, algorithm=ALGORITHM, card=card, quantize=quantize)


def read_distilled(folder: Path, target: Target) -> tuple[DistilledNetwork, dict[str, Any]]:
    """The draft of a folder and its configuration.

    Raises ValueError where the folder holds none, where it was made for another target, and for tensors that are missing,
    left over or of another shape, by name.
    """
    raw = read_config(folder)
    check_algorithm(folder, raw, ALGORITHM)
    own = raw["draftwise"]
    check_target(folder, own.get("target") or {}, raw, target)
    try:
        config = from_huggingface(raw, {})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if config.architecture not in LLAMA_LIKE:
        raise ValueError(f"{folder}: model_type is {config.architecture!r}; it must be one of: {', '.join(LLAMA_LIKE)}")
    width = target.model.config.hidden_size
    if config.hidden_size != width:
        raise ValueError(f"{folder}: hidden_size is {config.hidden_size} where the target's is {width}")
    tensors = read_tensors(folder)
    if own.get("quantize"):
        tensors = expand(tensors)
    network = DistilledNetwork(config)
    tokens_V = take_tokens(folder, tensors, config.vocab_size, target.vocab)
    if tokens_V is None:
        raise ValueError(f"{folder}: tensor d2t is missing; the file is incomplete")
    network.d2t = tokens_V
    take_weights(folder, network, tensors, ALGORITHM)
    return network, raw


def _keys(config: ModelConfig) -> dict[str, Any]:
    """A shape under the keys that from_huggingface reads; vocab_size counts the tokens that the head knows."""
    keys: dict[str, Any] = {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": dict(config.rope),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    widths = {window for window in config.windows if window is not None}
    if widths:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        keys |= {"sliding_window": widths.pop(), "use_sliding_window": True, "max_window_layers": 0, "layer_types": kinds}
    return keys
