"""Medusa drafts on disk: our folder, and the layout of FasterDecoding's Medusa.

Both have `config.json` and tensors of the same names. Ours, in `model.safetensors`, may end in matrices before the target's
own rows, know part of its vocabulary (`d2t`, offsets as in EAGLE's files) and hold its matrices in int8 or int4; theirs, in
`medusa_lm_head.pt` or `medusa_lm_head.safetensors`, ends in rows for the target's whole vocabulary for each token ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.drafters.base import Target
from draftwise.drafters.medusa_network import MedusaNetwork, MedusaShape
from draftwise.drafters.stored import expand
from draftwise.drafters.trained import (
    WEIGHTS,
    check_algorithm,
    check_target,
    read_config,
    read_tensors,
    take_tokens,
    take_weights,
    write_draft,
    write_trained,
)

LAYOUTS = ("draftwise", "medusa")
PUBLISHED = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


def write_medusa(
    folder: Path, network: MedusaNetwork, target: Target, card: Mapping[str, Any], *, quantize: str | None = None
) -> None:
    """Write a draft and what it is made for; the weights in float32, or in groups of int8 or int4."""
    shape = network.shape
    write_trained(
        folder,
        network,
        network.d2t,
        target,
        _published_config(shape),
        algorithm="medusa",
        card=card,
        quantize=quantize,
        draft_vocab_size=shape.draft_vocab,
        head="own" if shape.own_head else "target",
    )


def write_published(folder: Path, network: MedusaNetwork, target: Target, *, name: str) -> None:
    """Write a draft in the layout of FasterDecoding's Medusa. name: the target's there.

    Heads that borrow the target's rows get all of them. Raises ValueError for heads of their own that know fewer tokens.
    """
    shape, vocab = network.shape, target.model.config.vocab_size
    if shape.own_head and shape.draft_vocab < target.vocab:
        raise ValueError(
            f"the draft's heads know {shape.draft_vocab} tokens; in the medusa layout they must know all {target.vocab}: "
            f"train it with -o vocab={target.vocab}, or without -o own_head"
        )
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in network.state_dict().items()}
    if not shape.own_head:
        rows_VC = target.model.head_rows(torch.arange(vocab, device=target.model.device)).cpu().float()
        ends = {f"{k}.{shape.num_layers}.weight": network.end(k).detach().cpu() for k in range(shape.num_heads)}
        tensors |= {name: rows_VC @ end_CC for name, end_CC in ends.items()}
    write_draft(folder, tensors, _published_config(shape) | {"base_model_name_or_path": name}, weights=PUBLISHED[0])


def _published_config(shape: MedusaShape) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
    }


def read_medusa(folder: Path, target: Target) -> tuple[MedusaNetwork, dict[str, Any]]:
    """The draft of a folder, in either layout, and its configuration.

    Raises ValueError where the folder holds no Medusa draft, where it was made for another target, and for tensors that are
    missing, left over or of another shape, by name.
    """
    config = read_config(folder)
    check_algorithm(folder, config, "medusa")
    own = config.get("draftwise") or {}
    width = target.model.config.hidden_size
    check_target(folder, own.get("target") or {}, {"target_hidden_size": config.get("hidden_size")}, target)
    tensors = read_tensors(folder, WEIGHTS[:1] if own else PUBLISHED)
    if own.get("quantize"):
        tensors = expand(tensors)
    try:
        heads, layers = (int(config[key]) for key in ("medusa_num_heads", "medusa_num_layers"))
        vocab, own_head = (int(own["draft_vocab_size"]), own["head"] == "own") if own else (target.vocab, True)
    except KeyError as error:
        raise ValueError(f"{folder}: config.json has no {error.args[0]}; this is no complete Medusa draft") from None
    if not own:
        # the number of heads in published configurations is often another than that of the heads in the file
        heads = 1 + max((int(name.partition(".")[0]) for name in tensors if name[:1].isdecimal()), default=heads - 1)
        tensors = {name: _cut(tensor, target, layers, name) for name, tensor in tensors.items()}
    shape = MedusaShape(hidden_size=width, num_heads=heads, num_layers=layers, draft_vocab=vocab, own_head=own_head)
    network = MedusaNetwork(shape)
    tokens = take_tokens(folder, tensors, vocab, target.vocab)
    if tokens is not None:
        network.d2t = tokens
    elif vocab != target.vocab:
        raise ValueError(f"{folder}: tensor d2t is missing; it says which {vocab} tokens the draft knows")
    take_weights(folder, network, tensors, "medusa")
    return network, config


def _cut(tensor: Tensor, target: Target, layers: int, name: str) -> Tensor:
    """A published tensor, a head without the rows past the tokens that are ever emitted."""
    padded = name.endswith(f".{layers}.weight") and len(tensor) == target.model.config.vocab_size
    return tensor[: target.vocab].clone() if padded else tensor


def export(source: Path, out: Path, target: Target, *, layout: str, quantize: str | None, name: str) -> None:
    """Write the draft of a folder anew: in our own layout, perhaps quantised, or in FasterDecoding's.

    name: the target's, for layouts that say it. Raises ValueError where the layout cannot hold the draft.
    """
    network, config = read_medusa(source, target)
    if layout == "draftwise":
        write_medusa(out, network, target, (config.get("draftwise") or {}).get("card") or {}, quantize=quantize)
    elif layout != "medusa":
        raise ValueError(f"layout is {layout!r}; it must be one of: {', '.join(LAYOUTS)}")
    elif quantize:
        raise ValueError(f"--quantize goes with the draftwise layout; {layout} files hold plain numbers")
    else:
        write_published(out, network, target, name=name)
