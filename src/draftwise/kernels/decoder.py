"""All layers of a Llama-like decoder as one call of the compiled kernels.

Knows the C structs, batches and the cache's pool; knows nothing of checkpoints. Legend: N rows, C hidden width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.kernels.chain import Chained, ChainHead, ChainRule, guess_chain
from draftwise.kernels.loader import library
from draftwise.kernels.packed import Packed
from draftwise.types import Batch, Hidden, ModelConfig, Tap

Tables = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From int64 positions [P] to the rotation's cosines and sines, float32 [P, rotary_dim / 2]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedAttention:
    """Weights of a layer's attention.

    norm_C: of what it reads, None for none. beside_norm_C: it reads rows beside the residual stream too, by this norm and
    before the stream, so that queries, keys and values have 2 C inputs.
    """

    norm_C: Tensor | None
    beside_norm_C: Tensor | None = None
    query: Packed
    key: Packed
    value: Packed
    query_norm_D: Tensor | None = None
    key_norm_D: Tensor | None = None
    output: Packed
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedFeedForward:
    """Weights of a layer's feed-forward part."""

    norm_C: Tensor
    gate: Packed
    up: Packed
    down: Packed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayer:
    """A layer's parts; one that is None adds nothing to the residual stream. `index` is the layer's place in the cache."""

    index: int
    attention: PackedAttention | None
    feed_forward: PackedFeedForward | None

    @property
    def nbytes(self) -> int:
        """Bytes of matrices that a pass reads."""
        a, f = self.attention, self.feed_forward
        read = [*((a.query, a.key, a.value, a.output) if a else ()), *((f.gate, f.up, f.down) if f else ())]
        return sum(packed.nbytes for packed in read)


def unsupported(config: ModelConfig) -> str | None:
    """Why the fused decoder cannot run this shape, for people; None where it can."""
    if config.activation != "silu":
        return f"activation {config.activation!r} (only silu)"
    if config.head_dim % 16:
        return f"heads of {config.head_dim} channels (only multiples of 16)"
    if config.num_heads % config.num_kv_heads:
        return f"{config.num_heads} query heads over {config.num_kv_heads} key heads"
    return None


class Tapped(Mapping[Tap, Tensor]):
    """Hidden states of a pass by tap, each cut out when it is asked for: few passes are."""

    def __init__(self, wanted: Sequence[Tap], inner: Sequence[int], states_KNC: Tensor, final_NC: Tensor) -> None:
        self._wanted, self._inner, self._states_KNC, self._final_NC = wanted, inner, states_KNC, final_NC

    def __getitem__(self, tap: Tap) -> Tensor:
        if tap not in self._wanted:
            raise KeyError(tap)
        return self._final_NC if tap == "final_norm" else self._states_KNC[self._inner.index(int(tap))]

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)


class Decoder:
    """Layers, final norm and embedding of a decoder, run on packed batches over a staged cache.

    dtype bfloat16: products of bfloat16 pairs and a bfloat16 cache; float32: all of it in float32. The residual stream is
    float32 in both. A row's result depends on its own tokens alone, bit for bit: not on the other rows of the pass, nor
    on whether it is fed alone, in a prompt or as a node of a tree. `layers` may be any subset; taps count those run.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Packed | None,
        layers: Sequence[PackedLayer],
        final_norm_C: Tensor,
        tables: Tables,
        dtype: torch.dtype,
        scale: float | None = None,
        condense: Packed | None = None,
    ) -> None:
        """embedding: of tokens, where a pass is given no rows instead. condense: from a pass's features to where the residual
        stream begins."""
        reason = unsupported(config)
        if reason is not None:
            raise ValueError(f"the fused decoder does not run {reason}")
        assert dtype in (torch.float32, torch.bfloat16)
        lib = library() if embedding is None else embedding.lib
        assert lib is not None, "ask available() first"
        self._lib, self._config, self._tables, self.dtype = lib, config, tables, dtype
        self._steps = {place: step for step, place in enumerate([*(layer.index for layer in layers), config.num_layers])}
        self._owned: list[object] = [embedding, condense, *layers]  # what the C structs point into
        self._cosines, self._sines = tables(torch.arange(1))
        structs = (_Layer * len(layers))(*(self._layer(layer) for layer in layers))
        final_norm = self._floats(final_norm_C)
        weights = _Weights(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=2 * self._cosines.shape[-1],
            inner=config.intermediate_size,
            layers=len(layers),
            pool_is_bf16=dtype == torch.bfloat16,
            norm_eps=config.norm_eps,
            scale=scale if scale is not None else config.head_dim**-0.5,
            layer=ctypes.cast(structs, ctypes.c_void_p),
            final_norm=final_norm,
            embedding=None if embedding is None else ctypes.addressof(embedding.struct),
            condense=None if condense is None else ctypes.addressof(condense.struct),
        )
        self._owned += [structs]
        self._condensed = 0 if condense is None else condense.shape[1]
        lib.draftwise_decoder.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(lib.draftwise_decoder(ctypes.byref(weights)))

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._lib.draftwise_decoder_free(self._handle)

    def forward(
        self,
        batch: Batch,
        cache: KVCache,
        taps: Iterable[Tap] = (),
        *,
        inputs_NC: Tensor | None = None,
        beside_NC: Tensor | None = None,
    ) -> Hidden:
        """Run the packed rows, staging their keys and values. Final rows in `dtype`, taps in float32.

        inputs_NC: float32, where the residual stream begins instead of at the embedding. beside_NC: float32, for layers
        that read rows beside the stream.
        """
        rows, width = len(batch), self._config.hidden_size
        final = torch.empty(rows, width, dtype=self.dtype)
        wanted = tuple(taps)
        inner = [tap for tap in wanted if isinstance(tap, int)]
        states_KNC = torch.empty(len(inner), rows, width)
        address = states_KNC.data_ptr()
        tapped = {tap: address + k * 4 * rows * width for k, tap in enumerate(inner)}
        given = [rows_NC if rows_NC is None else rows_NC.float().contiguous() for rows_NC in (inputs_NC, beside_NC)]
        assert all(rows_NC is None or rows_NC.shape == (rows, width) for rows_NC in given)
        self._run(batch, cache, inputs=given[0], beside=given[1], final=final, taps=tapped, stride=width)
        return Hidden(final, Tapped(wanted, inner, states_KNC, final))

    def hand_on(
        self, batch: Batch, cache: KVCache, *, above_NW: Tensor | None = None, features: Sequence[Tensor] = ()
    ) -> Tensor:
        """Run the rows of a draft: what each hands on, float32 [N, W = 2 C], the residual stream's end and that normed.

        above_NW: what the rows above them handed on, where the stream begins; or features, taps [N, E] to be condensed.
        """
        rows, width = len(batch), self._config.hidden_size
        handed_NW = torch.empty(rows, 2 * width)
        last = {self._config.num_layers: handed_NW.data_ptr()}
        self._run(
            batch, cache, inputs=above_NW, features=features, normed=handed_NW[:, width:], taps=last, stride=2 * width
        )
        return handed_NW

    def stage(self, batch: Batch, cache: KVCache, *, features: Sequence[Tensor]) -> None:
        """As `hand_on`, for rows of which only keys and values are wanted: a fraction of the work where layers are few."""
        self._run(batch, cache, features=features, taps={}, stride=2 * self._config.hidden_size, keys_only=True)

    def chain(
        self, batch: Batch, cache: KVCache, *, features: Sequence[Tensor], head: ChainHead, rule: ChainRule
    ) -> Chained:
        """Run rows of committed text as `hand_on` does, and guess a chain below the last of them; the guesses' rows are staged.

        batch: one span, those rows and a row for each guess but the last, whose tokens do not matter. See chain.py.
        """
        width = 2 * self._config.hidden_size
        handed_NW = torch.empty(len(batch), width)
        with self._pass(batch, cache, rows=len(features[0]), features=features, taps={}, stride=width) as given:
            return guess_chain(self._lib, self._handle, given, len(self._steps) - 1, handed_NW, head, rule)

    def _run(self, batch: Batch, cache: KVCache, **given: Any) -> None:
        with self._pass(batch, cache, rows=len(batch), **given) as one:
            self._lib.draftwise_decoder_run(self._handle, ctypes.byref(one))

    @contextmanager
    def _pass(
        self,
        batch: Batch,
        cache: KVCache,
        *,
        rows: int,
        taps: Mapping[int, int],
        stride: int,
        features: Sequence[Tensor] = (),
        keys_only: bool = False,
        **by_row: Tensor | None,
    ) -> Iterator[_Pass]:
        """The first `rows` of a batch as a C struct, and all it points into.

        taps: the address to which each goes, its rows `stride` floats apart. by_row: what it reads and writes row by row.
        """
        pool = cache.pool
        assert pool.dtype == self.dtype and pool.is_contiguous()
        for name in ("inputs", "beside"):
            given = by_row.get(name)
            assert given is None or (given.is_contiguous() and given.dtype == torch.float32 and len(given) == rows)
        self._reach(max(span.committed + span.staged for span in batch.spans))
        outputs = (ctypes.c_void_p * len(self._steps))()
        for tap, address in taps.items():
            outputs[self._steps[tap]] = address
        read = [tap_NE.float().contiguous() for tap_NE in features]
        assert all(len(tap_NE) == rows for tap_NE in read)
        assert sum(tap_NE.shape[1] for tap_NE in read) in (0, self._condensed)
        spans, kept = _spans(batch, cache)
        if rows < len(batch):
            assert len(batch.spans) == 1
            spans[0].stop, spans[0].staged = rows, spans[0].staged - (len(batch) - rows)
        yield _Pass(
            rows=rows,
            spans=len(batch.spans),
            tokens=batch.tokens_N.data_ptr(),
            positions=batch.positions_N.data_ptr(),
            pool_places=batch.rows_N.data_ptr(),
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            features=(ctypes.c_void_p * len(read))(*(tap_NE.data_ptr() for tap_NE in read)) if read else None,
            feature_count=len(read),
            span=ctypes.addressof(spans),
            pool=pool.data_ptr(),
            pool_rows=pool.shape[3],
            taps=ctypes.addressof(outputs),
            stride=stride,
            keys_only=keys_only,
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in by_row.items()},
        )
        del kept

    def _reach(self, length: int) -> None:
        """Grow the rotation's tables to cover positions below `length`."""
        known = self._cosines.shape[0]
        if length > known:
            cosines, sines = self._tables(torch.arange(max(length, 2 * known, 512)))
            self._cosines, self._sines = cosines.contiguous(), sines.contiguous()

    def _floats(self, vector: Tensor) -> int:
        owned = vector.float().contiguous()
        self._owned.append(owned)
        return owned.data_ptr()

    def _layer(self, layer: PackedLayer) -> _Layer:
        struct = _Layer(index=layer.index)
        if (attention := layer.attention) is not None:
            if attention.norm_C is not None:
                struct.input_norm = self._floats(attention.norm_C)
            if attention.beside_norm_C is not None:
                struct.beside_norm = self._floats(attention.beside_norm_C)
            if attention.query_norm_D is not None and attention.key_norm_D is not None:
                struct.query_norm, struct.key_norm = self._floats(attention.query_norm_D), self._floats(attention.key_norm_D)
            struct.query, struct.key = ctypes.addressof(attention.query.struct), ctypes.addressof(attention.key.struct)
            struct.value, struct.output = ctypes.addressof(attention.value.struct), ctypes.addressof(attention.output.struct)
            struct.window = attention.window or 0
        if (feed := layer.feed_forward) is not None:
            struct.feed_norm = self._floats(feed.norm_C)
            struct.gate, struct.up = ctypes.addressof(feed.gate.struct), ctypes.addressof(feed.up.struct)
            struct.down = ctypes.addressof(feed.down.struct)
        return struct


def _spans(batch: Batch, cache: KVCache) -> tuple[ctypes.Array[_Span], list[object]]:
    """The spans as C structs, and what they point into."""
    kept: list[object] = []
    structs = (_Span * len(batch.spans))()
    for struct, span, tree in zip(structs, batch.spans, batch.trees, strict=True):
        table = cache.block_table(span.slot)
        pages = (ctypes.c_int64 * len(table))(*table)
        struct.start, struct.stop, struct.committed, struct.staged = span.start, span.stop, span.committed, span.staged
        struct.pages = ctypes.addressof(pages)
        kept.append(pages)
        if tree is not None:
            visible, positions = tree.visible.contiguous(), tree.positions.contiguous()
            struct.visible, struct.positions = visible.data_ptr(), positions.data_ptr()
            kept += [visible, positions]
    return structs, kept


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "feed_norm", "beside_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        ("window", ctypes.c_int64),
        ("index", ctypes.c_int64),
    ]


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "inner", "layers")),
        ("pool_is_bf16", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("layer", "final_norm", "embedding", "condense")),
    ]


class _Span(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("start", "stop", "committed", "staged")),
        *((name, ctypes.c_void_p) for name in ("pages", "visible", "positions")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("spans", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "pool_places", "inputs")),
        ("features", ctypes.POINTER(ctypes.c_void_p)),
        ("feature_count", ctypes.c_int64),
        ("beside", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "span", "pool")),
        ("pool_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("final", "normed", "taps")),
        ("stride", ctypes.c_int64),
        ("keys_only", ctypes.c_int64),
    ]
