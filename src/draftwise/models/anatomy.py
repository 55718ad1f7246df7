"""How a model of the transformers library is put together, found out by running it on shapes alone, before weights are read.

Knows that library's conventions; knows nothing of caches or weights. What cannot be run is refused here, by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftwise.models import native_architectures

TRACE = "draftwise-trace"
TRIED = ("gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "mixtral", "olmo2", "opt", "phi3", "qwen3_moe")
"""Some that the tests run, for the message that says what is possible."""

ALIBI = ("bloom", "mpt")
RECURRENT = ("linear", "mamba", "conv", "recurrent", "ssm", "delta", "rwkv")
ROWS = 5  # of the traced pass


class Refused(ValueError):
    """A model that this library cannot run. The message says why, and what to do."""

    def __init__(self, architecture: str, why: str) -> None:
        super().__init__(
            f"{architecture} models cannot be run: {why}; use one of {', '.join(native_architectures())}, or a decoder-only "
            f"model of transformers whose attention goes through its attention interface, such as {', '.join(TRIED)}"
        )


class Part(NamedTuple):
    """A module that every decoder layer has under `name`. outputs: the length of the tuple it returns, 0 for a tensor."""

    name: str
    outputs: int


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a decoder consists of. `base` and `layers` are paths of modules: tokens to hidden states, and its decoder layers.

    tuples: a layer returns a tuple that starts with the hidden states, not the hidden states alone. attention, feed_forward:
    the two parts of a layer, None where they are no modules of their own.
    """

    base: str
    layers: str
    tuples: bool
    attention: Part | None
    feed_forward: Part | None
    windows: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


class _Call(NamedTuple):
    """One use of the attention function."""

    module: nn.Module
    layer: int
    q: torch.Size
    k: torch.Size
    v: torch.Size
    mask: Tensor | None
    extra: dict[str, Any]


def final_hidden(
    base: nn.Module, tokens_N: Tensor, positions_N: Tensor, inputs_NC: Tensor | None = None, /, **extra: Any
) -> Tensor:
    """The rows after the final norm, [N, width]; extra arguments reach the attention function.

    inputs_NC: what goes into the first layer instead of the tokens' embedding.
    """
    given = {"input_ids": tokens_N[None]} if inputs_NC is None else {"inputs_embeds": inputs_NC[None]}
    out = base(**given, position_ids=positions_N[None], use_cache=False, **extra)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def head_of(model: nn.Module, base: str) -> nn.Module:
    """The model with its base taken out, so that it computes all that follows the base and nothing else."""
    return swapped(model, base.split("."), _Given())


def head_logits(head: nn.Module, hidden_NC: Tensor) -> Tensor:
    """Logits [N, vocab] of rows of `final_hidden`."""
    logits: Tensor = head(inputs_embeds=hidden_NC[None], use_cache=False).logits[0]
    return logits


def swapped(root: nn.Module, path: list[str], new: nn.Module) -> nn.Module:
    """`root` with the module at `path` replaced; everything else is shared with it."""
    if not path:
        return new
    copied = copy.copy(root)
    inner = root.get_submodule(path[0])
    copied._modules = {**root._modules, path[0]: swapped(inner, path[1:], new)}
    return copied


class _Given(nn.Module):
    """Stands in for a base: answers with the hidden states it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Answer:
        return _Answer((inputs_embeds,))


class _Answer(tuple[Tensor, ...]):
    """A base's output that holds the hidden states; all else that a head might pass on is None."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def examine(config: Any) -> Anatomy:
    """Trace the architecture of a transformers configuration. Raises Refused for what cannot be run exactly."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    name = str(config.model_type)
    _check_kind(name, config)
    AttentionInterface.register(TRACE, _traced_attention)
    AttentionMaskInterface.register(TRACE, _traced_mask)
    calls: list[_Call] = []
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=TRACE).eval()
    except Exception as error:  # whatever a foreign constructor raises, the answer is the same
        raise Refused(name, f"transformers does not build one with another attention ({_line(error)})") from error
    if type(model)._is_stateful:
        raise Refused(name, "they keep a recurrent state, which drafted tokens cannot be taken back from")
    layers = _layers_of(model, config.num_hidden_layers)
    if layers is None:
        raise Refused(name, "their decoder layers cannot be found")
    base = layers.rpartition(".")[0]
    try:
        model.set_experts_implementation("batched_mm")  # the only one that does not look at values
    except (ValueError, AttributeError):
        pass
    outputs: dict[str, Any] = {}  # of the first layer, "", and of what it consists of
    layer = model.get_submodule(f"{layers}.0")
    for part, module in (("", layer), *layer.named_children()):
        module.register_forward_hook(lambda _, __, output, part=part: outputs.setdefault(part, output))
    try:
        with torch.inference_mode(), torch.device("meta"):
            extra = {"attention_mask": torch.ones(1, ROWS, dtype=torch.int64), "draftwise_pass": calls}
            rows = torch.zeros(ROWS, dtype=torch.int64)
            hidden = final_hidden(model.get_submodule(base), rows, torch.arange(ROWS), **extra)
            vocab_size = head_logits(head_of(model, base), hidden).shape[-1]
    except Exception as error:  # a foreign forward pass may raise anything
        raise Refused(name, f"their layers and their head cannot be run apart ({_line(error)})") from error
    _check_calls(name, model, layers, calls, config)
    positions = _positions(config)
    shape = calls[0]
    attention, feed_forward = _parts(layer, calls, outputs)
    return Anatomy(
        base=base,
        layers=layers,
        tuples=isinstance(outputs[""], tuple),
        attention=attention,
        feed_forward=feed_forward,
        windows=tuple(_window(name, call, positions) for call in sorted(calls, key=lambda call: call.layer)),
        heads=shape.q[1],
        kv_heads=shape.k[1],
        head_dim=shape.q[3],
        vocab_size=vocab_size,
        max_positions=positions,
    )


def _check_kind(name: str, config: Any) -> None:
    if config.is_encoder_decoder:
        raise Refused(name, "they have an encoder")
    if config.get_text_config() is not config or any("vision" in key or "audio" in key for key in config.sub_configs):
        raise Refused(name, "they read more than text; give a checkpoint of the language model alone")
    attention = getattr(config, "attn_config", None)
    if name in ALIBI or getattr(config, "alibi", False) or getattr(attention, "alibi", False):
        raise Refused(name, "their attention is biased by distance (ALiBi)")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    recurrent = sorted(kind for kind in kinds if any(word in kind for word in RECURRENT))
    if recurrent:
        raise Refused(name, f"layers of kind {recurrent[0]} keep a state, which drafted tokens cannot be taken back from")


def _layers_of(model: nn.Module, count: int) -> str | None:
    """The path of the outermost list of as many modules as there are layers."""
    lists = (path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return next(lists, None)


def _parts(layer: nn.Module, calls: list[_Call], outputs: dict[str, Any]) -> tuple[Part | None, Part | None]:
    """The child of a layer that attends, and the only other one that has matrices; None where there is no such child."""
    attending = {call.module for call in calls}
    with_matrices = {
        name: not attending.isdisjoint(child.modules())
        for name, child in layer.named_children()
        if any(parameter.dim() > 1 for parameter in child.parameters())
    }
    found = []
    for attends in (True, False):
        names = [name for name, does in with_matrices.items() if does is attends and name in outputs]
        lengths = [len(outputs[name]) if isinstance(outputs[name], tuple) else 0 for name in names]
        found.append(Part(names[0], lengths[0]) if len(names) == 1 else None)
    return found[0], found[1]


def _traced_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **extra: Any
) -> tuple[Tensor, None]:
    calls = extra.pop("draftwise_pass", None)
    if calls is not None:
        calls.append(_Call(module, int(getattr(module, "layer_idx", -1)), q.shape, k.shape, v.shape, attention_mask, extra))
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None


def _traced_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> Tensor:
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.draftwise_sees = mask_function  # type: ignore[attr-defined]  # the mask carries what it stands for
    return mask


def _check_calls(name: str, model: nn.Module, layers: str, calls: list[_Call], config: Any) -> None:
    if not calls:
        raise Refused(name, "their attention does not go through that interface, or is not given its arguments")
    if sorted(call.layer for call in calls) != list(range(config.num_hidden_layers)):
        raise Refused(name, "not every layer is one attention of its own")
    names = {module: path for path, module in model.named_modules()}
    if any(not names[call.module].startswith(f"{layers}.{call.layer}.") for call in calls):
        raise Refused(name, "their layers are not numbered as they stand")
    if len({(call.q[1], call.q[3], *call.k, *call.v) for call in calls}) > 1:
        raise Refused(name, "their layers have heads of different number or size")
    if calls[0].k[3] != calls[0].v[3]:
        raise Refused(
            name, f"keys of {calls[0].k[3]} and values of {calls[0].v[3]} numbers (latent attention) fit no one cache"
        )
    for call in calls:
        known = ("position_ids", "s_aux")
        wants = [key for key, value in call.extra.items() if isinstance(value, Tensor) and key not in known]
        if wants:
            raise Refused(name, f"their attention needs {wants[0]}, which is not known here")
        if isinstance(getattr(call.module, "sinks", None), Tensor) and call.extra.get("s_aux") is None:
            raise Refused(name, "their attention sinks are not handed to the attention interface")


def _window(name: str, call: _Call, positions: int) -> int | None:
    """The sliding window of the mask that a layer was given; None for all that came before."""
    sees = getattr(call.mask, "draftwise_sees", None)
    refused = Refused(name, f"layer {call.layer} masks otherwise than causally or by a sliding window")
    if sees is None:
        raise refused
    columns = torch.arange(positions)
    zero = torch.tensor(0)
    widths: set[int] = set()
    for position in (positions - 1, positions // 2, positions // 3):
        try:
            visible = torch.as_tensor(sees(zero, zero, torch.tensor(position), columns)).expand(positions)
        except (RuntimeError, IndexError) as error:  # looks at the text
            raise refused from error
        first = int(visible.int().argmax())
        if not torch.equal(visible, (columns >= first) & (columns <= position)):
            raise refused
        if first:
            widths.add(position - first + 1)
    if len(widths) > 1:
        raise refused
    return widths.pop() if widths else None


def _positions(config: Any) -> int:
    """The longest text. With rotary scaling that looks at the longest row of a pass, as far as it leaves rows alone."""
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, int(original or longest))
    return longest


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
