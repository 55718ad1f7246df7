"""EAGLE drafts for other engines: SafeAILab's own layout, whole, and the one of vLLM's `speculators` for EAGLE-3.

A draft that leaves here brings what ours borrow: the head, the embedding. What a layout has no word for is refused by name.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from draftwise.drafters.base import Target
from draftwise.drafters.eagle_files import read_eagle, write_eagle
from draftwise.drafters.eagle_network import EagleNetwork, EagleShape
from draftwise.drafters.eagle_speculators import to_speculators
from draftwise.drafters.trained import write_draft
from draftwise.types import Tap

LAYOUTS = ("draftwise", "eagle", "speculators")


def write_layout(
    folder: Path, layout: str, network: EagleNetwork, target: Target, *, verifier: str, draft_tokens: int = 4
) -> None:
    """Write a draft for another engine. verifier: the target's name there. Raises ValueError where the layout cannot say it."""
    shape = network.shape
    if layout == "eagle":
        layers = target.model.config.num_layers
        fixed: tuple[Tap, ...] = (2, layers // 2, layers - 3)
        if shape.joins and shape.taps != fixed:
            raise ValueError(
                f"the draft reads {_listed(shape.taps)}; in the eagle layout it must be {_listed(fixed)}: "
                f"train it with -o taps={_listed(fixed)}"
            )
        write_eagle(folder, with_head(network, target) if shape.joins else network, target, {})
    elif layout == "speculators":
        if not shape.joins:
            raise ValueError("the speculators layout is for EAGLE-3 drafts; this one is EAGLE-1")
        if not all(isinstance(tap, int) for tap in shape.taps):
            raise ValueError(
                f"the draft reads {_listed(shape.taps)}; the speculators layout knows inputs of layers alone: "
                "train it with -o taps=N,N,N"
            )
        config, tensors = to_speculators(with_head(network, target), target, verifier, draft_tokens)
        write_draft(folder, tensors, config)
    else:
        raise ValueError(f"layout is {layout!r}; it must be one of: {', '.join(LAYOUTS)}")


def with_head(network: EagleNetwork, target: Target) -> EagleNetwork:
    """The same draft with a head of its own: the rows that it borrowed."""
    if network.shape.own_head:
        return network
    values = {name: getattr(network.shape, name) for name in EagleShape.__dataclass_fields__}
    whole = EagleNetwork(EagleShape(**values | {"own_head": True}))
    whole.load_state_dict(network.state_dict(), strict=False)
    whole.d2t = network.d2t
    whole.lm_head.weight = nn.Parameter(target.model.head_rows(network.d2t.to(target.model.device)).cpu().clone())
    return whole


def _listed(taps: tuple[Tap, ...]) -> str:
    return ",".join(map(str, taps))


def export(
    algorithm: str, source: Path, out: Path, target: Target, *, layout: str, quantize: str | None, name: str
) -> None:
    """Write the draft of a folder anew: in our own layout, perhaps quantised, or in another engine's.

    name: the target's, for layouts that say it. Raises ValueError where the layout cannot hold the draft.
    """
    network, config = read_eagle(source, algorithm, target)
    if layout == "draftwise":
        write_eagle(out, network, target, (config.get("draftwise") or {}).get("card") or {}, quantize=quantize)
    elif quantize:
        raise ValueError(f"--quantize goes with the draftwise layout; {layout} files hold plain numbers")
    else:
        write_layout(out, layout, network, target, verifier=name)
