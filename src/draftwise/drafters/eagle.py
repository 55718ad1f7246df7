"""EAGLE drafts: a layer that continues the target's hidden states. `eagle` reads EAGLE-1 files, `eagle3` EAGLE-3 files.

Chains, fixed trees and EAGLE-2's dynamic trees are all grown alike. The target's embedding, and its head where the draft has
none, are the target's own rows.
Sources: Li et al. 2024, arXiv 2401.15077; EAGLE-2, Li et al. 2024, arXiv 2406.16858; EAGLE-3, Li et al. 2025, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.cache import KVCache
from draftwise.drafters import eagle_layouts
from draftwise.drafters.base import DraftSource, Target
from draftwise.drafters.decoder_layer import cached_attention, packed_linear
from draftwise.drafters.draft_head import DraftHead
from draftwise.drafters.eagle_files import read_eagle
from draftwise.drafters.eagle_network import EagleNetwork
from draftwise.drafters.features import Chain, FeatureDrafter, Features, Skim
from draftwise.drafters.trained import kind_name, served_acceptance, stored_kind
from draftwise.drafters.trees import Trees
from draftwise.kernels import Chained, ChainRule
from draftwise.models.base import Model
from draftwise.models.fused import packed_embedding
from draftwise.models.linear import WeightKind
from draftwise.types import Batch


@dataclass(frozen=True, slots=True)
class Options(Trees):
    """Options of EAGLE drafts."""


class EagleRunner:
    """An EagleNetwork on packed rows over a staged cache, in some kind of weight, with what it borrows of the target."""

    def __init__(self, network: EagleNetwork, target: Model, *, vocab: int, kind: WeightKind) -> None:
        shape = network.shape
        self.taps = shape.taps
        self.target, self.shape, self.kind = target, shape, kind
        own = network.lm_head.weight.detach() if shape.own_head else None
        self.head = DraftHead(target, network.d2t, own, vocab=vocab, kind=kind)
        self.network = network.serve(kind, target.device)
        table = packed_embedding(target)
        # all but the head in one call: rows hand on their state and, behind it, what the head reads
        fits = table is not None and table.shape[1] == shape.hidden_size and shape.target_hidden % 32 == 0
        self.whole = shape.joins and not shape.recycle_normed and fits
        self.decoder = _compiled(self.network, kind, target.device, table if self.whole else None)
        self.whole = self.whole and self.decoder is not None
        self.width = shape.width * (2 if self.whole else 1)
        # of one layer, rows that nobody else reads are keys and values alone
        self.skim: Skim | None = self._stage if self.whole else None
        self.chain_head = self.head.chain_head if self.whole else None
        self.chain: Chain | None = None if self.chain_head is None else self._chain

    def new_cache(self, capacity: int) -> KVCache:
        shape = self.shape
        return KVCache(
            layers=1,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            capacity=capacity,
            dtype=self.kind.dtype,
            device=self.target.device,
        )

    def read(self, batch: Batch, cache: KVCache, above: Seq[Tensor | None], features: Features) -> Tensor:
        if self.whole and self.decoder is not None:
            return self.decoder.hand_on(batch, cache, features=features)
        return self._run(batch, cache, self.network.condense(torch.cat(features, -1).to(self.kind.dtype)))

    def _stage(self, batch: Batch, cache: KVCache, features: Features) -> None:
        assert self.decoder is not None
        self.decoder.stage(batch, cache, features=features)

    def _chain(self, batch: Batch, cache: KVCache, features: Features, rule: ChainRule) -> Chained:
        assert self.decoder is not None and self.chain_head is not None
        return self.decoder.chain(batch, cache, features=features, head=self.chain_head, rule=rule)

    def draft(self, batch: Batch, cache: KVCache, above_NW: Tensor, depth: int) -> Tensor:
        if self.whole and self.decoder is not None:
            return self.decoder.hand_on(batch, cache, above_NW=above_NW)
        return self._run(batch, cache, above_NW)

    def logits(self, rows_NW: Tensor) -> Tensor:
        return self.head(rows_NW[:, self.shape.width :] if self.whole else self.network.before_head(rows_NW))

    def _run(self, batch: Batch, cache: KVCache, state_NC: Tensor) -> Tensor:
        embedded_NC = self.target.embed(batch.tokens_N)
        if self.decoder is not None:
            inputs_NC = self.network.mix(embedded_NC, state_NC)
            beside_NC = embedded_NC if self.shape.joins else None
            hidden = self.decoder.forward(batch, cache, (1,), inputs_NC=inputs_NC, beside_NC=beside_NC)
            return hidden.final if self.shape.recycle_normed else hidden.taps[1]
        attention = cached_attention(self.network.midlayer.config, batch, cache, 0)
        tables = self.network.midlayer.rotary.tables(batch.positions_N, self.kind.dtype)
        handed_NC: Tensor = self.network(embedded_NC.to(self.kind.dtype), state_NC.to(self.kind.dtype), tables, attention)
        return handed_NC


def _compiled(
    network: EagleNetwork, kind: WeightKind, device: torch.device, embedding: kernels.Packed | None
) -> kernels.Decoder | None:
    """The layer as one call of the compiled kernels, its fast version; None where they do not run it.

    embedding: the target's, where the call is to look tokens up and to condense features as well.
    """
    shape, layer = network.shape, network.midlayer
    if shape.residual_after_norm or not layer.runs_compiled(kind, device):
        return None
    norms = [layer.hidden_norm.weight, layer.input_layernorm.weight] if shape.joins else [None, None]
    return kernels.Decoder(
        layer.config,
        embedding=embedding,
        condense=None if embedding is None else packed_linear(network.fc),
        layers=[layer.packed(0, norm_C=norms[0], beside_norm_C=norms[1])],
        final_norm_C=network.norm.weight if shape.joins else torch.ones(shape.hidden_size),
        tables=layer.rotary.half_tables,
        dtype=kind.dtype,
    )


def build(options: Options, target: Target, source: DraftSource | None) -> FeatureDrafter:
    """Raises ValueError where no draft is named, or it is another algorithm's or another target's."""
    return build_eagle("eagle", options, target, source)


def build_eagle(algorithm: str, options: Options, target: Target, source: DraftSource | None) -> FeatureDrafter:
    """The drafter for a folder of either kind."""
    if source is None:
        raise ValueError(f"the {algorithm} drafter needs a draft: --drafter {algorithm}:FOLDER, as `draftwise train` writes it")
    network, config = read_eagle(Path(source.path).expanduser(), algorithm, target)
    kind = source.kind(target, stored_kind(config))
    runner = EagleRunner(network, target.model, vocab=target.vocab, kind=kind)
    target.notice(f"draft {source.path}: {kind_name(kind)}")
    return FeatureDrafter(
        runner, context=target.context, max_batch=target.max_batch, trees=options, acceptance=served_acceptance(config)
    )


def export(source: Path, out: Path, target: Target, *, layout: str, quantize: str | None, name: str) -> None:
    """See eagle_layouts.export."""
    eagle_layouts.export("eagle", source, out, target, layout=layout, quantize=quantize, name=name)
