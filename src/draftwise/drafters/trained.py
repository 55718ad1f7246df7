"""Trained drafts on disk: a configuration, tensors, and what of the target they rely on.

Knows folders, names and shapes; knows nothing of what a draft computes. Reading is strict: a draft for another algorithm,
size of target or tokenizer is refused, and so is a file with a tensor missing, left over or of another shape, by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftwise.drafters.base import Drafter, Target
from draftwise.drafters.stored import store
from draftwise.models.linear import WeightKind

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def write_draft(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, weights: str = WEIGHTS[0]) -> None:
    """Write the tensors to the file `weights`, replaced whole or not at all, and the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{weights}.part"
    save_file(dict(tensors), part)
    part.chmod(0o644)  # the library keeps it from other users
    part.replace(folder / weights)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_trained(
    folder: Path,
    network: nn.Module,
    tokens_V: Tensor,
    target: Target,
    config: Mapping[str, Any],
    *,
    algorithm: str,
    card: Mapping[str, Any],
    quantize: str | None,
    named: Callable[[str], str] = str,
    beside: Mapping[str, Tensor] | None = None,
    **more: Any,
) -> None:
    """Write a network in our own layout: float32, or groups of int8 or int4, the tokens that it knows, what it is made for.

    tokens_V: those tokens as the target's ids; they are written as offsets, `d2t`. named: the files' name of each tensor.
    beside: further tensors. more: what else of the draft stands under `draftwise` in the configuration.
    """
    tensors = {named(name): tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    tensors = store(tensors, quantize) if quantize else tensors
    tensors |= {"d2t": tokens_V.cpu() - torch.arange(len(tokens_V)), **(beside or {})}
    card = {key: _without_folders(value) if isinstance(value, str) else value for key, value in card.items()}
    own = {"algorithm": algorithm, **more, "quantize": quantize, "target": made_for(target), "card": card}
    write_draft(folder, tensors, {**config, "draftwise": own})


def served_acceptance(config: Mapping[str, Any]) -> float:
    """How often a draft's first token was right when training last served it, as its card says; else what is always guessed."""
    card = (config.get("draftwise") or {}).get("card") or {}
    first = next((entry["first"] for entry in reversed(card.get("curve") or []) if entry.get("first")), None)
    return sum(first) / len(first) if first else Drafter.acceptance


def _without_folders(text: str) -> str:
    """A command or a path with the files that it names, but not where they lay on this machine."""
    words = (word.rpartition("=") for word in text.split(" "))  # KEY=PATH as well
    return " ".join(before + mark + (Path(word).name if word.startswith(("/", "~")) else word) for before, mark, word in words)


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


def read_tensors(folder: Path, names: Seq[str] = WEIGHTS) -> dict[str, Tensor]:
    """All tensors of the first of these files that is there. Raises ValueError where none is, or it is damaged."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder}: there is none of: {', '.join(names)}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: cut short or not a safetensors file ({error})") from error
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path}: cut short or not a file of tensors") from error
    return tensors


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


def stored_kind(config: Mapping[str, Any]) -> str | None:
    """The integers that a draft's matrices are stored in; None for plain numbers."""
    kind: str | None = (config.get("draftwise") or {}).get("quantize")
    return kind


def kind_name(kind: WeightKind) -> str:
    """What a draft's weights are in memory, for people."""
    return kind.quantize or str(kind.dtype).removeprefix("torch.")


def algorithm_of(config: Mapping[str, Any]) -> str | None:
    """The drafter that runs a draft: as we write it, or by the signs of published files."""
    own = (config.get("draftwise") or {}).get("algorithm")
    if own:
        return str(own)
    names = [str(name) for name in config.get("architectures") or ()]
    if "medusa_num_heads" in config:
        return "medusa"
    if any("Eagle3" in name for name in names) or "draft_vocab_size" in config:
        return "eagle3"
    if any("Eagle" in name for name in names) or (config.get("num_hidden_layers") == 1 and "bias" in config):
        return "eagle"
    return None


def check_algorithm(folder: Path, config: Mapping[str, Any], algorithm: str) -> None:
    """Raises ValueError where a draft is another drafter's, naming that one."""
    found = algorithm_of(config)
    if found is None:
        raise ValueError(f"{folder}: this is a draft for no drafter that is known")
    if found != algorithm:
        raise ValueError(f"{folder}: this is a draft for {found}; use --drafter {found}:{folder}")


def take_tokens(folder: Path, tensors: dict[str, Tensor], count: int, vocab: int) -> Tensor | None:
    """The target's ids of the `count` tokens that a draft knows, int64, from its offsets `d2t`; None where it has none."""
    tensors.pop("t2d", None)
    if "d2t" not in tensors:
        return None
    offsets = tensors.pop("d2t")
    if offsets.shape != (count,):
        raise ValueError(f"{folder}: tensor d2t is {tuple(offsets.shape)} where {(count,)} is expected")
    tokens = offsets.long() + torch.arange(count)
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise ValueError(f"{folder}: d2t names tokens beyond the target's {vocab}")
    return tokens


def take_weights(
    folder: Path, network: nn.Module, tensors: dict[str, Tensor], algorithm: str, stored: Mapping[str, str] | None = None
) -> None:
    """Fill a network, in float32, from exactly the tensors that it has. stored: the files' name of each, where another."""
    stored = stored or {}
    state: dict[str, Tensor] = {}
    for name, wanted in network.state_dict().items():
        given = stored.get(name, name)
        if given not in tensors:
            raise ValueError(f"{folder}: tensor {given} is missing; the file is incomplete or of another kind of draft")
        tensor = tensors.pop(given)
        if tensor.shape != wanted.shape:
            raise ValueError(f"{folder}: tensor {given} is {tuple(tensor.shape)} where {tuple(wanted.shape)} is expected")
        state[name] = tensor.float()
    if tensors:
        raise ValueError(f"{folder}: tensor {sorted(tensors)[0]} is not part of a draft for {algorithm}")
    network.load_state_dict(state)
