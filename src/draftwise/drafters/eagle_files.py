"""EAGLE drafts on disk, in the layout that SafeAILab's EAGLE and EAGLE-3 checkpoints have.

`config.json` and `model.safetensors` (or `pytorch_model.bin`); `d2t` holds offsets, `t2d` which tokens are known. What that
layout has no word for stands in the configuration under `draftwise`: the taps, where the head comes from, for which target
and tokenizer the draft was made, how it came about. Reading is strict: a missing, extra or misshapen tensor is an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwise.drafters.base import Target
from draftwise.drafters.eagle_network import EagleNetwork, EagleShape
from draftwise.drafters.eagle_speculators import from_speculators
from draftwise.drafters.stored import expand, store
from draftwise.types import Tap

ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "LlamaForCausalLMEagle"}


def write_eagle(
    folder: Path, network: EagleNetwork, target: Target, card: Mapping[str, Any], *, quantize: str | None = None
) -> None:
    """Write a draft and what it is made for; the weights in float32, or in groups of int8 or int4."""
    shape = network.shape
    tensors = {_named(name, shape): tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    if quantize:
        tensors = store(tensors, quantize)
    if shape.joins:
        tensors["d2t"] = network.d2t - torch.arange(shape.draft_vocab)
        tensors["t2d"] = torch.zeros(shape.target_vocab, dtype=torch.bool).index_fill(0, network.d2t, True)
    elif shape.draft_vocab < shape.target_vocab:
        tensors["d2t"] = network.d2t - torch.arange(shape.draft_vocab)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    save_file(tensors, part)
    part.replace(folder / "model.safetensors")
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
        "draftwise": {
            "algorithm": shape.algorithm,
            "taps": list(shape.taps),
            "head": "own" if shape.own_head else "target",
            "quantize": quantize,
            "target": made_for(target),
            "card": dict(card),
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def made_for(target: Target) -> dict[str, Any]:
    """What a draft borrows and relies on: sizes, the tokenizer, and the embedding by a hash of some of its rows."""
    config = target.model.config
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "vocab_size": target.vocab,
        "tokenizer": target.tokenizer.vocabulary_fingerprint,
        "embedding": embedding_hash(target),
    }


def embedding_hash(target: Target) -> str:
    """SHA-256 of 256 rows of the embedding, spread evenly, in bfloat16."""
    count = min(256, target.vocab)
    rows = target.model.embed(torch.arange(count, device=target.model.device) * target.vocab // count)
    return hashlib.sha256(rows.cpu().to(torch.bfloat16).view(torch.int16).numpy().tobytes()).hexdigest()


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
    found = own.get("algorithm") or _algorithm(config)
    if found != algorithm:
        raise ValueError(f"{folder}: this is a draft for {found or 'no drafter that is known'}; use --drafter {found}:{folder}")
    check_target(folder, own.get("target") or {}, config, target)
    if own.get("quantize"):
        tensors = expand(tensors)
    shape = _shape(folder, config, own, tensors, target)
    network = EagleNetwork(shape)
    if "d2t" in tensors:
        network.d2t = tensors.pop("d2t").long() + torch.arange(shape.draft_vocab)
        if not 0 <= int(network.d2t.min()) <= int(network.d2t.max()) < target.vocab:
            raise ValueError(f"{folder}: d2t names tokens beyond the target's {target.vocab}")
    tensors.pop("t2d", None)
    tensors.pop("embed_tokens.weight", None)  # a copy of the target's, which is borrowed
    wanted = {_named(name, shape): name for name in network.state_dict()}
    state: dict[str, Tensor] = {}
    for stored, name in wanted.items():
        if stored not in tensors:
            raise ValueError(f"{folder}: tensor {stored} is missing; the file is incomplete or of another kind of draft")
        shape_wanted, tensor = network.state_dict()[name].shape, tensors.pop(stored)
        if tensor.shape != shape_wanted:
            raise ValueError(f"{folder}: tensor {stored} is {tuple(tensor.shape)} where {tuple(shape_wanted)} is expected")
        state[name] = tensor.float()
    if tensors:
        raise ValueError(f"{folder}: tensor {sorted(tensors)[0]} is not part of a draft for {algorithm}")
    network.load_state_dict(state)
    return network, config


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a draft's folder. Raises ValueError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: there is no config.json; give the folder of a trained draft")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds no object")
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a draft's folder. Raises ValueError where there are none or the file is damaged."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.is_file():
        try:
            return load_file(safe)
        except SafetensorError as error:
            raise ValueError(f"{safe}: cut short or not a safetensors file ({error})") from error
    if pickled.is_file():
        tensors: dict[str, Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
        return tensors
    raise ValueError(f"{folder}: there is neither model.safetensors nor pytorch_model.bin")


def check_target(folder: Path, made: Mapping[str, Any], config: Mapping[str, Any], target: Target) -> None:
    """Raises ValueError where a draft was made for another target; tells the user where only its weights were others."""
    model = target.model.config
    wanted = {
        "hidden_size": made.get("hidden_size") or config.get("target_hidden_size"),
        "num_hidden_layers": made.get("num_hidden_layers"),
        "vocab_size": made.get("vocab_size") or config.get("vocab_size"),
    }
    has = {"hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers, "vocab_size": target.vocab}
    for name, value in wanted.items():
        fits = value in (None, has[name]) or (name == "vocab_size" and value == model.vocab_size)
        if not fits:
            raise ValueError(f"{folder}: the draft was made for a target with {name} {value}; this one has {has[name]}")
    if made.get("tokenizer", target.tokenizer.vocabulary_fingerprint) != target.tokenizer.vocabulary_fingerprint:
        raise ValueError(f"{folder}: the draft was made for a target with another tokenizer")
    if "embedding" in made and made["embedding"] != embedding_hash(target):
        target.notice(f"{folder}: the draft was trained on other weights of this model; less of it may be accepted")


def _algorithm(config: Mapping[str, Any]) -> str | None:
    names = [str(name) for name in config.get("architectures") or ()]
    if any("Eagle3" in name for name in names) or "draft_vocab_size" in config:
        return "eagle3"
    if any("Eagle" in name for name in names) or (config.get("num_hidden_layers") == 1 and "bias" in config):
        return "eagle"
    return None


def _shape(
    folder: Path, config: Mapping[str, Any], own: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target
) -> EagleShape:
    """What the tensors and the configuration say together."""
    try:
        algorithm = own.get("algorithm") or _algorithm(config)
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
            algorithm=str(algorithm),
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
