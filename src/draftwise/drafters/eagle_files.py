"""EAGLE drafts on disk, in the layout that SafeAILab's EAGLE and EAGLE-3 checkpoints have.

`config.json` and `model.safetensors` (or `pytorch_model.bin`); `d2t` holds offsets, `t2d` which tokens are known. What that
layout has no word for stands in the configuration under `draftwise`: the taps, where the head comes from, for which target
and tokenizer the draft was made, how it came about. Reading is strict: a missing, extra or misshapen tensor is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.drafters.base import Target
from draftwise.drafters.eagle_network import EagleNetwork, EagleShape
from draftwise.drafters.eagle_speculators import from_speculators
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
from draftwise.types import Tap

ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "LlamaForCausalLMEagle"}


def write_eagle(
    folder: Path, network: EagleNetwork, target: Target, card: Mapping[str, Any], *, quantize: str | None = None
) -> None:
    """Write a draft and what it is made for; the weights in float32, or in groups of int8 or int4."""
    shape = network.shape
    known = torch.zeros(shape.target_vocab, dtype=torch.bool).index_fill(0, network.d2t, True)
    config = {
        "architectures": [ARCHITECTURES[shape.algorithm]],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.get("rope_theta", 10000.0),
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.target_vocab,
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": shape.target_hidden,
        "bias": shape.fc_bias,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "norm_before_residual": shape.residual_after_norm,
        "norm_output": shape.recycle_normed,
    }
    write_trained(
        folder,
        network,
        network.d2t,
        target,
        config,
        algorithm=shape.algorithm,
        card=card,
        quantize=quantize,
        named=lambda name: _named(name, shape),
        beside={"t2d": known} if shape.joins else {},
        taps=list(shape.taps),
        head="own" if shape.own_head else "target",
    )


def read_eagle(folder: Path, algorithm: str, target: Target) -> tuple[EagleNetwork, dict[str, Any]]:
    """The draft of a folder and its configuration.

    Raises ValueError where the folder holds no draft of this algorithm, where it was made for another target, and for
    tensors that are missing, left over or of another shape, by name.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    if "speculators_model_type" in config:
        try:
            config, tensors = from_speculators(config, tensors)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
    own = config.get("draftwise") or {}
    check_algorithm(folder, config, algorithm)
    check_target(folder, own.get("target") or {}, config, target)
    if own.get("quantize"):
        tensors = expand(tensors)
    shape = _shape(folder, algorithm, config, own, tensors, target)
    network = EagleNetwork(shape)
    tokens = take_tokens(folder, tensors, shape.draft_vocab, target.vocab)
    if tokens is not None:
        network.d2t = tokens
    tensors.pop("embed_tokens.weight", None)  # a copy of the target's, which is borrowed
    take_weights(folder, network, tensors, algorithm, {name: _named(name, shape) for name in network.state_dict()})
    return network, config


def _shape(
    folder: Path,
    algorithm: str,
    config: Mapping[str, Any],
    own: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: Target,
) -> EagleShape:
    """What the tensors and the configuration say together."""
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        fc = tensors["fc.weight"]
        layers = target.model.config.num_layers
        taps: list[Tap]
        if algorithm == "eagle":
            taps = ["final_norm"]
        elif own.get("taps") or config.get("eagle_aux_hidden_state_layer_ids"):
            taps = list(own.get("taps") or config["eagle_aux_hidden_state_layer_ids"])
        else:
            taps = [2, layers // 2, layers - 3]
        if algorithm == "eagle3" and fc.shape[1] != len(taps) * target.model.config.hidden_size:
            raise ValueError(
                f"{folder}: fc.weight reads {fc.shape[1]} numbers where {len(taps)} hidden states of the target have "
                f"{len(taps) * target.model.config.hidden_size}"
            )
        theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10000.0
        scaling = config.get("rope_scaling") or {}
        return EagleShape(
            algorithm=algorithm,
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope={"rope_type": "default", **scaling, "rope_theta": theta},
            max_positions=int(config.get("max_position_embeddings") or 2048),
            target_hidden=target.model.config.hidden_size,
            target_vocab=target.vocab,
            taps=tuple(taps),
            draft_vocab=len(tensors["d2t"]) if "d2t" in tensors else target.vocab,
            own_head="lm_head.weight" in tensors,
            fc_bias="fc.bias" in tensors,
            residual_after_norm=bool(config.get("norm_before_residual", False)),
            recycle_normed=bool(config.get("norm_output", False)),
        )
    except KeyError as error:
        raise ValueError(f"{folder}: {error.args[0]} is missing; this is no complete EAGLE draft") from error


def _named(name: str, shape: EagleShape) -> str:
    """A parameter's name in the files: EAGLE-1 numbers its layer."""
    return name if shape.joins else name.replace("midlayer.", "layers.0.")
