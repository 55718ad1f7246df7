"""Any other decoder-only model of the transformers library, on the same packed pass, cache and tree mask.

That library computes everything but attention, which reaches our cache through its attention interface, and the matrix
products, which are ours. Shapes: N rows, C hidden width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.cache import KVCache
from draftwise.checkpoint import Checkpoint
from draftwise.models.anatomy import Anatomy, Refused, examine, final_hidden, head_logits, head_of, swapped
from draftwise.models.convert import Products, RowLinear, RowRuled, convert
from draftwise.models.layers import AttentionMasks, attend
from draftwise.models.linear import WeightKind, activations
from draftwise.models.rows import RowRule
from draftwise.types import Batch, Feed, Hidden, ModelConfig, Tap

ATTENTION = "draftwise"


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """What the attention function needs to know of the pass it is called in."""

    batch: Batch
    cache: KVCache
    masks: AttentionMasks
    windows: tuple[int | None, ...]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    draftwise_pass: _Pass,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function of the interface: [1, heads, N, D] in, [1, N, heads, D] out."""
    now, layer = draftwise_pass, int(module.layer_idx)  # type: ignore[arg-type]
    q_NHD, k_NKD, v_NKD = (part[0].transpose(0, 1) for part in (query, key, value))
    now.cache.stage(layer, now.batch, k_NKD, v_NKD)
    q_NHD, looks = q_NHD.to(now.cache.pool.dtype), now.masks.of(now.windows[layer])
    out_NHD = attend(q_NHD, layer, now.batch, now.cache, looks, scale=scaling, soft_cap=softcap, sinks_H=s_aux)
    return out_NHD[None].to(query.dtype), None


class TransformersModel:
    """A model of the transformers library behind the Model protocol."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        config: ModelConfig,
        products: Products,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[int] | None = None,
        ruled: bool = False,
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.weights = _describe(products)
        self.weight_bytes = products.nbytes
        self.row_report = products.rules.report()
        self._model, self._anatomy, self._products = model, anatomy, products
        self._layers = list(range(config.num_layers) if layers is None else sorted(set(layers)))
        self._ruled = ruled  # every product and activation of a pass by rows, which costs some time
        self._base = model.get_submodule(anatomy.base)
        self._head = head_of(model, anatomy.base)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = (), *, inputs_NC: Tensor | None = None
    ) -> Hidden:
        """Run the packed rows, staging their keys and values. Taps as in types.Tap.

        inputs_NC: where the residual stream begins instead of at the embedding.
        """
        taps = set(taps)
        tapped: dict[Tap, Tensor] = {}
        windows = self._anatomy.windows
        now = _Pass(batch, cache, AttentionMasks(batch, cache, windows, heads=self._anatomy.heads), windows)
        ruled = RowRuled(self._products.rules) if self._ruled else nullcontext()
        with self._listening(taps, tapped), ruled:
            final = final_hidden(self._base, batch.tokens_N, batch.positions_N, inputs_NC, draftwise_pass=now)
        if "final_norm" in taps:
            tapped["final_norm"] = final
        return Hidden(final, tapped)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The head's rows for final hidden states [n, width]: float32 [n, vocab_size], before any warping."""
        return head_logits(self._head, hidden).float()

    @torch.inference_mode()
    def embed(self, tokens_N: Tensor) -> Tensor:
        """Rows of the embedding, [N, width]."""
        rows: Tensor = self._model.get_input_embeddings()(tokens_N)  # type: ignore[operator]
        return rows.to(self.dtype)

    @torch.inference_mode()
    def head_rows(self, tokens_n: Tensor) -> Tensor:
        """The head's weights for these tokens, float32 [n, width]."""
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(head, RowLinear):
            name = self.config.architecture
            raise ValueError(f"the head of {name} models is no plain product, so its rows cannot be borrowed")
        return head.linear.rows(tokens_n, self.dtype, self.device)

    def weight(self, name: str) -> Tensor:
        """Raises ValueError: the layers of such a model are its library's own."""
        raise ValueError(f"weights of {self.config.architecture} models cannot be taken one by one, only the Llama family's")

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of this model's shape with room for `capacity` rows."""
        return KVCache(
            layers=max(self._layers) + 1,
            kv_heads=self._anatomy.kv_heads,
            head_dim=self._anatomy.head_dim,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
        )

    def subset(self, attention: Collection[int], feed_forward: Collection[int] | None = None) -> TransformersModel:
        """The same weights with the attention and the feed-forward of some layers, as in Model.

        A part that is left out puts out zeros. Raises ValueError where parts of this architecture are not modules of their own.
        """
        chosen = self._chosen(attention), self._chosen(attention if feed_forward is None else feed_forward)
        stack = self._model.get_submodule(self._anatomy.layers)
        kept = [self._only(layer, index in chosen[0], index in chosen[1]) for index, layer in enumerate(stack.children())]
        model = swapped(self._model, self._anatomy.layers.split("."), nn.ModuleList(kept))
        return TransformersModel(
            model,
            self._anatomy,
            self.config,
            self._products,
            dtype=self.dtype,
            device=self.device,
            layers=sorted(chosen[0] | chosen[1]),
            ruled=self._ruled,
        )

    def _chosen(self, layers: Collection[int]) -> set[int]:
        return set(self._layers) & set(layers)

    def _only(self, layer: nn.Module, attends: bool, feeds: bool) -> nn.Module:
        """The layer with one of its parts, both or none."""
        if not attends and not feeds:
            return _Skipped(layer, self._anatomy.tuples)
        anatomy = self._anatomy
        for name, wanted, part in (("attention", attends, anatomy.attention), ("feed-forward", feeds, anatomy.feed_forward)):
            if not wanted:
                if part is None:
                    which = f"the {name} of {self.config.architecture} models"
                    raise ValueError(f"{which} cannot be left out alone; leave out whole layers")
                layer = swapped(layer, [part.name], _Zeros(part.outputs))
        return layer

    @contextmanager
    def _listening(self, taps: set[Tap], tapped: dict[Tap, Tensor]) -> Iterator[None]:
        """Keep what enters the tapped layers, and what leaves the last one."""
        stack = list(self._model.get_submodule(self._anatomy.layers).children())

        def keep(tap: int, hidden: Tensor) -> None:
            if hidden.dim() != 3:
                raise ValueError(
                    f"hidden states of {self.config.architecture} are not one row a token; use a drafter without taps"
                )
            tapped[tap] = hidden[0]

        def entering(tap: int) -> Any:
            return lambda _, args, kwargs: keep(tap, args[0] if args else kwargs["hidden_states"])

        def leaving(_: nn.Module, __: Any, output: Any) -> None:
            keep(len(stack), output[0] if isinstance(output, tuple) else output)

        hooks = [
            stack[tap].register_forward_pre_hook(entering(tap), with_kwargs=True)
            for tap in taps
            if isinstance(tap, int) and tap < len(stack)
        ]
        if len(stack) in taps:
            hooks.append(stack[-1].register_forward_hook(leaving))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Skipped(nn.Module):
    """A decoder layer that is left out; what a model asks of it besides is answered by the layer."""

    def __init__(self, layer: nn.Module, tuples: bool) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule: its weights are not this model's
        self.tuples = tuples

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.tuples else hidden_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class _Zeros(nn.Module):
    """Stands in for a part of a layer that is left out: `outputs` is the length of the tuple it returns, 0 for a tensor."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *given: Any, **named: Any) -> Tensor | tuple[Tensor | None, ...]:
        zeros = torch.zeros_like(given[0] if given else named["hidden_states"])
        return (zeros, *[None] * (self.outputs - 1)) if self.outputs else zeros


def build(checkpoint: Checkpoint, kind: WeightKind, device: torch.device) -> TransformersModel:
    """Load a checkpoint that has no file of its own here. Raises ValueError, before weights are read, for what cannot run."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    name = checkpoint.config.architecture
    if checkpoint.config.raw.get("auto_map"):
        raise Refused(name, "the checkpoint brings code of its own, which is not run")
    try:
        config = AutoConfig.from_pretrained(checkpoint.path)
    except (ValueError, KeyError, ImportError) as error:
        raise Refused(name, "the transformers library here does not know them") from error
    settings = _unquantised(checkpoint, config, device)
    anatomy = examine(config)
    AttentionInterface.register(ATTENTION, _attention)
    with _quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=kind.dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            local_files_only=True,
            **settings,
        )
    wrong = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if wrong:
        raise ValueError(
            f"{checkpoint.path}: {wrong[0]} is missing or of another shape; the checkpoint is incomplete, fetch it again"
        )
    model.eval()
    model.config.pad_token_id = None  # else that library warns of padding, which a packed pass has none of
    found = replace(
        checkpoint.config,
        vocab_size=anatomy.vocab_size,
        hidden_size=int(config.hidden_size),
        num_layers=len(anatomy.windows),
        num_heads=anatomy.heads,
        num_kv_heads=anatomy.kv_heads,
        head_dim=anatomy.head_dim,
        max_positions=anatomy.max_positions,
        windows=anatomy.windows,
    )
    foreign = checkpoint.quantization is not None and not getattr(settings["quantization_config"], "dequantize", False)
    products = convert(model, kind, device, foreign=foreign)
    for ruled in (False, True):
        built = TransformersModel(model, anatomy, found, products, dtype=kind.dtype, device=device, ruled=ruled)
        same = _rows_stand_alone(built)
        if same:
            break
    built.row_report.append(("whole pass", int(config.hidden_size), anatomy.vocab_size, RowRule(invariant=same).describe()))
    return built


def build_layer(
    folder: Path,
    known: ModelConfig,
    tensors: Mapping[str, Tensor],
    norm_C: Tensor,
    index: int,
    kind: WeightKind,
    device: torch.device,
) -> TransformersModel:
    """One more decoder layer of the architecture in a folder, and a final norm, as a model that is handed its inputs.

    tensors: the layer's, by the names that the checkpoint's own layers have within it. index: its place in the cache. Raises
    ValueError for a tensor that is missing, left over or of another shape, by name, and for layers that cannot run.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    mixture = any(".experts." in name for name in tensors)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 1, 1, None, False
    changes = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if mixture else "dense"],
        "first_k_dense_replace": 0 if mixture else 1,
        "mlp_only_layers": [] if mixture else [0],
        "decoder_sparse_step": 1,
    }
    for key, value in changes.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    anatomy = examine(config)
    AttentionInterface.register(ATTENTION, _attention)
    table = torch.zeros(1, config.hidden_size)
    state = {f"{anatomy.layers}.0.{name}": tensor for name, tensor in tensors.items()}
    state |= {f"{anatomy.base}.norm.weight": norm_C, f"{anatomy.base}.embed_tokens.weight": table, "lm_head.weight": table}
    with torch.device("meta"):
        kind_of_model = type(AutoModelForCausalLM.from_config(copy.deepcopy(config)))
    with _quiet():
        model, report = kind_of_model.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=kind.dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    for key, what in (
        ("missing_keys", "is missing"),
        ("mismatched_keys", "is of another shape"),
        ("unexpected_keys", "is not part of a layer"),
    ):
        for name in sorted(map(str, report[key])):
            raise ValueError(f"tensor {name.removeprefix(f'{anatomy.layers}.0.')} {what}")
    model.eval()
    model.config.pad_token_id = None
    attending = [module for module in model.modules() if hasattr(module, "layer_idx")]
    for module in attending:
        module.layer_idx = index
    products = convert(model, kind, device, foreign=False)
    anatomy = replace(anatomy, windows=anatomy.windows * (index + 1))
    known = replace(known, num_layers=1, num_kv_heads=anatomy.kv_heads, head_dim=anatomy.head_dim)
    return TransformersModel(model, anatomy, known, products, dtype=kind.dtype, device=device, layers=[index])


def _unquantised(checkpoint: Checkpoint, config: Any, device: torch.device) -> dict[str, Any]:
    """Take the quantisation out of `config`; returns how from_pretrained is to read the weights.

    Weights whose method can be undone are expanded, so that ours apply. Raises ValueError where they cannot be read here.
    """
    if checkpoint.quantization is None:
        return {}
    from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

    settings = config.quantization_config
    del config.quantization_config
    try:
        method = AutoQuantizationConfig.from_dict(dict(settings))
        if hasattr(method, "dequantize"):
            method.dequantize = True
        AutoHfQuantizer.from_config(method, pre_quantized=True).validate_environment(device_map={"": device})
    except Exception as error:  # every method has its own way to say what it lacks
        why = str(error).strip().splitlines()
        raise ValueError(
            f"{checkpoint.path}: the weights are quantised by {checkpoint.quantization}, which cannot be read on this machine"
            f" ({why[0] if why else type(error).__name__}); use the unquantised checkpoint with --quantize int4, or a GGUF file"
        ) from error
    return {"quantization_config": method}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without that library's progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _rows_stand_alone(model: TransformersModel) -> bool:
    """Read a text whole, then in parts beside another one: True where every row comes out bit for bit alike.

    Raises Refused where rows come out as others altogether: they hold a state we know nothing of.
    """
    tokens = [(7 * i + 3) % model.config.vocab_size for i in range(41)]
    whole, parts = model.new_cache(len(tokens)), model.new_cache(4 * len(tokens))
    expected = model.forward(whole.pack([Feed.chain(whole.alloc(), tokens)]), whole).final
    other, slot = parts.alloc(), parts.alloc()
    found = []
    for start, stop in ((0, 1), (1, 3), (3, 10), (10, 11), (11, 30), (30, 41)):
        feeds = [Feed.chain(other, tokens[start:stop][::-1]), Feed.chain(slot, tokens[start:stop])]
        found.append(model.forward(parts.pack(feeds), parts).final[stop - start :])
        for fed in (other, slot):
            parts.commit(fed, range(stop - start))
    rows = torch.cat(found)
    if (rows.float() - expected.float()).norm() > 0.1 * expected.float().norm():
        raise Refused(model.config.architecture, "a row of theirs depends on more than the tokens before it")
    return torch.equal(rows, expected)


def _describe(products: Products) -> str:
    text = " and ".join(sorted({linear.kind for linear in products.linears})) + activations(products.linears)
    worst = max((linear.rounding for linear in products.linears), default=0.0)
    if worst > 1e-4:
        text += f"; weights differ by up to {worst:.2%} from the file's"
    if products.kept:
        text += "; as they were: " + ", ".join(f"{name} ({why})" for name, why in products.kept.items())
    return text
