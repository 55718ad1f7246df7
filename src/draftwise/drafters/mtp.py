"""Multi-token prediction: modules that look one token further each, chained; the last one goes on where depth goes on.

A row of text hands on what every module made: module k at a row reads what module k - 1 made at the row before it, and the
row's own token. So each module's keys and values stand in the cache one row later than the module's before it, and a drafted
token needs those modules only that its depth has left. Before the text begins all states are zero.
Source: DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.cache import KVCache
from draftwise.drafters.base import DraftSource, Target
from draftwise.drafters.decoder_layer import cached_attention
from draftwise.drafters.draft_head import DraftHead
from draftwise.drafters.features import Chain, FeatureDrafter, Features, Skim
from draftwise.drafters.mtp_files import read_mtp, write_mtp
from draftwise.drafters.mtp_layouts import Published, read_published
from draftwise.drafters.mtp_network import Module, MtpNetwork
from draftwise.drafters.trained import kind_name, read_config, served_acceptance, stored_kind
from draftwise.drafters.trees import Trees
from draftwise.models.base import Model
from draftwise.models.linear import Embedding, WeightKind
from draftwise.models.transformers import TransformersModel, build_layer
from draftwise.types import Batch, Tap

MISSING = "the mtp drafter needs a draft: --drafter mtp:FOLDER, of `draftwise train mtp` or of a model that brings modules"

BlockPass = Callable[[Batch, KVCache, Tensor], tuple[Tensor, Tensor]]
"""A module's block over the residual stream [N, C] of a pass: the stream after it, and the same normed for the head."""


@dataclass(frozen=True, slots=True)
class Options(Trees):
    """Options of multi-token prediction."""

    modules: int = field(default=0, metadata={"help": "modules to use, the first ones; 0: all there are"})

    def __post_init__(self) -> None:
        Trees.__post_init__(self)
        if self.modules < 0:
            raise ValueError(f"modules is {self.modules}; it must be 0 or more")


class MtpRunner:
    """An MtpNetwork on packed rows over a staged cache, in some kind of weight, with what it borrows of the target.

    What a row hands on is [what the head reads, output of each module that it ran, in order], with zeros for the rest.
    foreign: the modules' blocks where the network has none, each a model of one layer.
    """

    taps: tuple[Tap, ...] = ("final_norm",)
    skim: Skim | None = None  # a module reads what the one before made of every row
    chain: Chain | None = None

    def __init__(
        self,
        network: MtpNetwork,
        target: Model,
        *,
        vocab: int,
        kind: WeightKind,
        foreign: Sequence[TransformersModel] = (),
    ) -> None:
        shape = network.shape
        self.shape, self.kind, self.target = shape, kind, target
        self.width = (shape.modules + 1) * shape.block.hidden_size
        self.embed = target.embed
        if shape.own_embedding:
            self.embed = Embedding(network.embed_tokens.weight.detach(), kind.dtype, target.device)
        own = network.lm_head.weight.detach() if shape.own_head else None
        self.head = DraftHead(target, network.d2t, own, vocab=vocab, kind=kind)
        network.serve(kind, target.device)
        self.modules = network.chain
        self.blocks = [_foreign(model) for model in foreign]
        if not foreign:
            self.blocks = [_block(module, index, kind, target.device) for index, module in enumerate(self.modules)]
        self.layer = foreign[0].config if foreign else shape.block

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(
            layers=self.shape.modules,
            kv_heads=self.layer.num_kv_heads,
            head_dim=self.layer.head_dim,
            capacity=capacity,
            dtype=self.kind.dtype,
            device=self.target.device,
        )

    def read(self, batch: Batch, cache: KVCache, above: Sequence[Tensor | None], features: Features) -> Tensor:
        (final_NE,), embedded_NC = features, self._embed(batch)
        firsts = [span.start for span in batch.spans]
        above_SW = torch.stack([final_NE.new_zeros(self.width) if row_W is None else row_W for row_W in above])
        _, *above_each = above_SW.to(self.kind.dtype).chunk(self.shape.modules + 1, -1)
        made: list[tuple[Tensor, Tensor]] = []
        state_NC = final_NE.to(self.kind.dtype)
        for index, above_SC in enumerate(above_each):
            made.append(self._run(index, batch, cache, embedded_NC, state_NC))
            # the next module reads what this one made at the row before
            state_NC = made[-1][0].roll(1, 0)
            state_NC[firsts] = above_SC
        return self._handed_on(made)

    def draft(self, batch: Batch, cache: KVCache, above_NW: Tensor, depth: int) -> Tensor:
        embedded_NC = self._embed(batch)
        first = min(depth, self.shape.modules - 1)
        _, *above = above_NW.to(self.kind.dtype).chunk(self.shape.modules + 1, -1)
        left = zip(range(first, self.shape.modules), above, strict=False)
        return self._handed_on([self._run(index, batch, cache, embedded_NC, state_NC) for index, state_NC in left])

    def logits(self, rows_NW: Tensor) -> Tensor:
        return self.head(rows_NW[:, : self.shape.block.hidden_size])

    def _embed(self, batch: Batch) -> Tensor:
        return self.embed(batch.tokens_N).to(self.kind.dtype)

    def _run(self, index: int, batch: Batch, cache: KVCache, embedded_NC: Tensor, state_NC: Tensor) -> tuple[Tensor, Tensor]:
        """A module on all rows: what it makes for the next one, and what the head reads."""
        x_NC = self.modules[index].mix(embedded_NC, state_NC.to(self.kind.dtype))
        out_NC, normed_NC = self.blocks[index](batch, cache, x_NC)
        return (normed_NC if self.shape.recycle_normed else out_NC).to(self.kind.dtype), normed_NC

    def _handed_on(self, made: list[tuple[Tensor, Tensor]]) -> Tensor:
        rows_NW = torch.cat([made[0][1], *(state_NC for state_NC, _ in made)], -1)
        return F.pad(rows_NW, (0, self.width - rows_NW.shape[1]))


def _block(module: Module, index: int, kind: WeightKind, device: torch.device) -> BlockPass:
    """A module's block at its place in the cache: one call of the compiled kernels where they run it, else plain torch."""
    block, after = module.block, index + 1
    if block.runs_compiled(kind, device):
        decoder = kernels.Decoder(
            replace(block.config, num_layers=after),
            embedding=None,
            layers=[block.packed(index, norm_C=block.input_layernorm.weight)],
            final_norm_C=module.norm.weight,
            tables=block.rotary.half_tables,
            dtype=kind.dtype,
        )

        def compiled(batch: Batch, cache: KVCache, x_NC: Tensor) -> tuple[Tensor, Tensor]:
            hidden = decoder.forward(batch, cache, (after,), inputs_NC=x_NC)
            return hidden.taps[after], hidden.final

        return compiled

    def plain(batch: Batch, cache: KVCache, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        tables = block.rotary.tables(batch.positions_N, kind.dtype)
        out_NC = module.run(x_NC, tables, cached_attention(block.config, batch, cache, index))
        normed_NC: Tensor = module.norm(out_NC)
        return out_NC, normed_NC

    return plain


def _foreign(model: TransformersModel) -> BlockPass:
    """A block that is a model of one layer, with the norm that follows."""

    def run(batch: Batch, cache: KVCache, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model.forward(batch, cache, (1,), inputs_NC=x_NC)
        return hidden.taps[1], hidden.final

    return run


def build(options: Options, target: Target, source: DraftSource | None) -> FeatureDrafter:
    """A draft that was trained, or modules that a model brings: of the folder named, or with none the target's own.

    Raises ValueError where there are none, or they are another target's.
    """
    given = source or target.own
    if given is None:
        raise ValueError(MISSING)
    folder = Path(given.path).expanduser()
    published = None if "draftwise" in read_config(folder) else read_published(folder, target, modules=options.modules)
    layers: list[TransformersModel] = []
    if published is not None:
        network, kind = published.network, given.kind(target)
        layers = [_layer(published, index, kind, target) for index in range(len(published.blocks))]
    elif source is None:
        raise ValueError(f"{given.path} brings no modules for multi-token prediction; {MISSING}")
    else:
        network, config = read_mtp(folder, target, modules=options.modules)
        kind = given.kind(target, stored_kind(config))
    runner = MtpRunner(network, target.model, vocab=target.vocab, kind=kind, foreign=layers)
    target.notice(f"draft {given.path}: {network.shape.modules} modules, {kind_name(kind)}")
    acceptance = served_acceptance(read_config(folder))
    return FeatureDrafter(
        runner, context=target.context, max_batch=target.max_batch, trees=options, acceptance=acceptance
    )


def _layer(published: Published, index: int, kind: WeightKind, target: Target) -> TransformersModel:
    block = published.blocks[index]
    try:
        return build_layer(published.folder, published.config, block.tensors, block.norm_C, index, kind, target.model.device)
    except ValueError as error:
        raise ValueError(f"{published.folder}: module {index}: {error}") from error


def export(source: Path, out: Path, target: Target, *, layout: str, quantize: str | None, name: str) -> None:
    """Write the draft of a folder anew, perhaps quantised. Raises ValueError for a layout that cannot hold it."""
    if layout != "draftwise":
        raise ValueError(f"layout is {layout!r}; for mtp it must be draftwise")
    network, config = read_mtp(source, target)
    write_mtp(out, network, target, (config.get("draftwise") or {}).get("card") or {}, quantize=quantize)
