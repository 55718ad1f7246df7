"""A distilled draft: some of the target's layers, taught to foresee it, between the target's own embedding and head rows.

It drafts alone, from tokens, like any smaller model; `draftwise train draft` makes it.
Sources: DistillSpec, Zhou et al. 2023, arXiv 2310.08461; a head of the most frequent tokens: FR-Spec, Zhao et al. 2025,
arXiv 2502.14856.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftwise.drafters.base import DraftSource, Target
from draftwise.drafters.distilled_files import read_distilled, write_distilled
from draftwise.drafters.distilled_network import DistilledNetwork
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.trained import stored_kind
from draftwise.drafters.trees import Trees
from draftwise.models.base import InMemory, Model
from draftwise.models.linear import WeightKind
from draftwise.models.llama import build as build_llama


@dataclass(frozen=True, slots=True)
class Options(Trees):
    """Options of distilled drafts."""


def serve(network: DistilledNetwork, target: Model, kind: WeightKind) -> Model:
    """The draft as a model of the tokens that its head knows, on the target's device, beside the target's embedding.

    What stands between final norm and head is multiplied into the head's rows.
    """
    adapter_CC = network.adapter.weight.detach()
    weights = {f"model.{name}": tensor for name, tensor in network.state_dict().items() if not name.startswith("adapter.")}
    weights["lm_head.weight"] = target.head_rows(network.d2t.to(target.device)).cpu() @ adapter_CC
    return build_llama(InMemory(network.config, weights), kind, target.device, embed=target.embed)


def build(options: Options, target: Target, source: DraftSource | None) -> ModelDrafter:
    """Raises ValueError where no draft is named, or it is another algorithm's or another target's."""
    if source is None:
        raise ValueError("the draft drafter needs a draft: --drafter draft:FOLDER, as `draftwise train` writes it")
    network, config = read_distilled(Path(source.path).expanduser(), target)
    model = serve(network, target.model, source.kind(target, stored_kind(config)))
    target.notice(f"draft {source.path}: {model.weights}")
    return ModelDrafter(
        model,
        vocab=target.vocab,
        context=min(target.context, network.config.max_positions),
        max_batch=target.max_batch,
        trees=options,
        tokens_v=network.d2t,
    )


def export(source: Path, out: Path, target: Target, *, layout: str, quantize: str | None, name: str) -> None:
    """Write the draft of a folder anew, perhaps quantised. Raises ValueError for a layout other than our own."""
    if layout != "draftwise":
        raise ValueError(f"layout is {layout!r}; distilled drafts have one: draftwise")
    network, config = read_distilled(source, target)
    write_distilled(out, network, target, config["draftwise"].get("card") or {}, quantize=quantize)
