"""Multi-token prediction on disk, as `draftwise train mtp` writes it: `config.json` and `model.safetensors`.

The configuration says how large modules are and, under `draftwise`, for which target they were made and how they came about;
`d2t` holds offsets, as EAGLE's files do. Reading is strict. Published layouts are read by mtp_layouts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise.drafters.base import Target
from draftwise.drafters.mtp_network import MtpNetwork, MtpShape
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

BLOCK = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_nextn_predict_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
    "rope_parameters": "rope",
}
"""The configuration's key for each part of a module's shape."""


def write_mtp(
    folder: Path, network: MtpNetwork, target: Target, card: Mapping[str, Any], *, quantize: str | None = None
) -> None:
    """Write modules and what they are made for; the weights in float32, or in groups of int8 or int4."""
    shape = network.shape
    config = {
        "architectures": ["MtpModules"],
        **{key: getattr(shape.block, name) for key, name in BLOCK.items()},
        "rope_parameters": dict(shape.block.rope),
        "vocab_size": shape.target_vocab,
        "draft_vocab_size": shape.draft_vocab,
    }
    write_trained(folder, network, network.d2t, target, config, algorithm="mtp", card=card, quantize=quantize)


def read_mtp(folder: Path, target: Target, *, modules: int = 0) -> tuple[MtpNetwork, dict[str, Any]]:
    """The modules of a folder, the first so many or all, and its configuration.

    Raises ValueError where the folder holds none or fewer, where they were made for another target, and for tensors that are
    missing, left over or of another shape, by name.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    own = config.get("draftwise") or {}
    check_algorithm(folder, config, "mtp")
    check_target(folder, own.get("target") or {}, config, target)
    if own.get("quantize"):
        tensors = expand(tensors)
    network = MtpNetwork(_shape(folder, config, target))
    tokens = take_tokens(folder, tensors, network.shape.draft_vocab, target.vocab)
    if tokens is not None:
        network.d2t = tokens
    take_weights(folder, network, tensors, "mtp")
    return network.first(modules), config


def _shape(folder: Path, config: Mapping[str, Any], target: Target) -> MtpShape:
    try:
        block = ModelConfig(
            architecture="mtp", vocab_size=target.vocab, **{name: config[key] for key, name in BLOCK.items()}
        )
        return MtpShape(block=block, target_vocab=target.vocab, draft_vocab=int(config["draft_vocab_size"]))
    except KeyError as error:
        raise ValueError(f"{folder}: {error.args[0]} is missing; these are no complete MTP modules") from error
