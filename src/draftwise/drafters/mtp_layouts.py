"""Multi-token prediction that models are published with: DeepSeek-V3's layout, which GLM-4-MoE has too, and MiMo's.

Knows their tensors' names, the order in which embedding and hidden state enter, and what the next module reads. A module's
block is one more layer of the model's own architecture: ours where the engine has that, else the transformers library's.
Sources: DeepSeek-V3's README_WEIGHTS.md and MiMo's published code. Reading is strict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from draftwise.checkpoint.config import from_huggingface
from draftwise.checkpoint.folder import FolderWeights, quantization
from draftwise.drafters.base import Target
from draftwise.drafters.mtp_network import MtpNetwork, MtpShape
from draftwise.drafters.trained import read_config, take_weights
from draftwise.models import native_architectures
from draftwise.types import ModelConfig

SAMPLE = 256
"""Rows of a table that tell whether it is the model's own."""
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
MODEL_S = {HEAD: ("lm_head.weight", "model.embed_tokens.weight"), EMBEDDING: ("model.embed_tokens.weight",)}
"""What a module may bring again: where the model has it, under the first of these names that there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a family writes its modules.

    prefix: of a module's tensors, with its number. parts: their names behind it by ours; what else there is is the block's.
    counts_on: modules are numbered on from the model's layers.
    """

    prefix: str
    parts: Mapping[str, str]
    counts_on: bool = False
    hidden_first: bool = False
    recycle_normed: bool = False

    def number(self, name: str, layers: int) -> int | None:
        """The module that a tensor belongs to; None where it is none's."""
        found = re.match(re.escape(self.prefix).replace(r"\{\}", r"(\d+)"), name)
        number = int(found[1]) - (layers if self.counts_on else 0) if found else -1
        return number if number >= 0 else None

    def named(self, ours: str, number: int, layers: int) -> str:
        """What they call a part of a module."""
        prefix = self.prefix.format(number + (layers if self.counts_on else 0))
        return prefix + self.parts.get(ours, ours.removeprefix("block."))


DEEPSEEK = Layout(
    prefix="model.layers.{}.",
    parts={"norm.weight": "shared_head.norm.weight", HEAD: "shared_head.head.weight"},
    counts_on=True,
)
MIMO = Layout(
    prefix="model.mtp_layers.{}.",
    parts={
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
    hidden_first=True,
    recycle_normed=True,
)
UNREAD = "mtp."
"""What Qwen3-Next and its kin call theirs; those models keep a recurrent state and are not run."""


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """The block of a module that is a layer of the transformers library: its tensors, by their names within it, and the norm
    that follows."""

    tensors: Mapping[str, Tensor]
    norm_C: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """The modules of a model, read from `folder`. blocks: what the network itself lacks, one a module, or none."""

    folder: Path
    config: ModelConfig
    network: MtpNetwork
    blocks: list[Foreign]


def read_published(folder: Path, target: Target, *, modules: int = 0) -> Published | None:
    """The modules that a checkpoint's folder brings, the first so many or all; None where it brings none.

    Raises ValueError where they are another model's, for tensors that are missing, left over or of another shape, by name,
    and for what cannot be run.
    """
    raw, weights = read_config(folder), FolderWeights(folder)
    config = from_huggingface(raw, {})
    names = sorted(weights.names())
    unread = next((name for name in names if name.startswith(UNREAD)), None)
    if unread is not None:
        raise ValueError(f"{folder}: modules as Qwen3-Next has them ({unread}) cannot be run; train a draft, or use ngram")
    for layout in (DEEPSEEK, MIMO):
        found = {name: number for name in names if (number := layout.number(name, config.num_layers)) is not None}
        if found:
            break
    else:
        return None
    method = quantization(raw)
    if method is not None:
        raise ValueError(f"{folder}: modules quantised by {method} cannot be read; use the unquantised checkpoint")
    _check_model(folder, config, target)
    return _Reader(folder, config, weights, target, layout, found).read(modules)


def _check_model(folder: Path, config: ModelConfig, target: Target) -> None:
    """Raises ValueError where modules are another model's, or have layers that are not run here."""
    for key in ("architecture", "hidden_size", "num_layers"):
        theirs, ours = getattr(config, key), getattr(target.model.config, key)
        if theirs != ours:
            raise ValueError(f"{folder}: the modules are for a model with {key} {theirs}; this one has {ours}")
    if config.architecture in native_architectures() and (config.activation != "silu" or any(config.windows)):
        what = "a sliding window" if any(config.windows) else f"activation {config.activation!r}"
        raise ValueError(f"{folder}: modules with {what} cannot be run; train a draft, or use ngram")


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """One checkpoint's tensors of modules, by number, in one layout."""

    folder: Path
    config: ModelConfig
    weights: FolderWeights
    target: Target
    layout: Layout
    numbers: Mapping[str, int]

    def read(self, modules: int) -> Published:
        count = max(self.numbers.values()) + 1
        native = self.config.architecture in native_architectures()
        tensors = {name: self.weights.tensor(name) for name in self.numbers if not name.endswith("rotary_emb.inv_freq")}
        own = {ours: self._take_table(tensors, ours, count) for ours in MODEL_S}
        shape = MtpShape(
            block=replace(self.config, num_layers=count),
            target_vocab=self.target.vocab,
            draft_vocab=self.target.vocab,
            own_head=own[HEAD] is not None,
            own_embedding=own[EMBEDDING] is not None,
            hidden_first=self.layout.hidden_first,
            recycle_normed=self.layout.recycle_normed,
            foreign=not native,
        )
        network = MtpNetwork(shape)
        blocks = [] if native else [self._take_block(tensors, number) for number in range(count)]
        stored: dict[str, str] = {}
        for ours in network.state_dict():
            _, number, part = ours.split(".", 2) if ours not in MODEL_S else ("", "0", ours)
            stored[ours] = self._named(part, int(number))
        for ours, table in own.items():
            if table is not None:
                tensors[stored[ours]] = table
        take_weights(self.folder, network, tensors, "mtp", stored)
        return Published(self.folder, self.config, network.first(modules), blocks[: modules or count])

    def _named(self, ours: str, number: int) -> str:
        return self.layout.named(ours, number, self.config.num_layers)

    def _take_table(self, tensors: dict[str, Tensor], ours: str, count: int) -> Tensor | None:
        """A head or an embedding that all modules bring, where it is not the model's again."""
        found = {name: tensors.pop(name) for number in range(count) if (name := self._named(ours, number)) in tensors}
        if not found:
            return None
        (first, table), *others = found.items()
        for name, other in others:
            if not _alike(other, table):
                raise ValueError(f"{self.folder}: {name} is another than {first}; modules of different heads cannot be run")
        known = next((self.weights.tensor(name) for name in MODEL_S[ours] if name in self.weights.names()), None)
        return None if known is not None and _alike(table, known) else table[: self.target.vocab]

    def _take_block(self, tensors: dict[str, Tensor], number: int) -> Foreign:
        """What the library runs of a module: all that is no part of ours, and the norm."""
        start = self._named("block.", number)
        ours = {self._named(part, number) for part in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
        norm = self._named("norm.weight", number)
        if norm not in tensors:
            raise ValueError(f"{self.folder}: tensor {norm} is missing; the file is incomplete")
        norm_C = tensors.pop(norm)
        names = [name for name in tensors if name.startswith(start) and name not in ours]
        return Foreign({name.removeprefix(start): tensors.pop(name) for name in names}, norm_C)


def _alike(table: Tensor, other: Tensor) -> bool:
    """True where rows spread over two tables are the same."""
    if table.shape != other.shape:
        return False
    rows = torch.arange(min(SAMPLE, len(table))) * len(table) // min(SAMPLE, len(table))
    return torch.equal(table[rows].to(other.dtype), other[rows])
