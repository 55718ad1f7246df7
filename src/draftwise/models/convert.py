"""The matrix products of a transformers model, swapped for ours: row-invariant, and quantised where asked.

Knows modules that multiply by a weight; knows nothing of passes. Shapes: N rows, K inputs, M outputs, T experts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from draftwise.models.layers import by_rows
from draftwise.models.linear import GROUP, Dense, Linear, RowRules, WeightKind, make_linear

EXPERTS = "draftwise"
ELEMENTWISE = (torch.sigmoid, Tensor.sigmoid, F.silu, F.gelu, F.softplus)
ACTIVATIONS = (nn.SiLU, nn.GELU, nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Mish, nn.Hardswish, nn.Softplus)


@dataclass(slots=True)
class Products:
    """What became of a model's products. kept: what was left as it was, and why. nbytes: read by a pass of one row."""

    rules: RowRules = field(default_factory=RowRules)
    linears: list[Linear] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0

    def settled(self, linear: Linear, dtype: torch.dtype, device: torch.device, *, share: float = 1.0) -> Linear:
        """The product under its row rule, entered into the books; `share`: how often a row uses it."""
        self.rules.settle(linear, dtype, device)
        self.linears.append(linear)
        self.nbytes += int(linear.nbytes * share)
        return linear


def convert(model: nn.Module, kind: WeightKind, device: torch.device, *, foreign: bool) -> Products:
    """Swap every product of the model and move it to `device`; what cannot be swapped is kept and named.

    foreign: the weights are quantised by another library, whose modules are kept and given row rules.
    """
    from transformers.integrations.moe import ExpertsInterface
    from transformers.pytorch_utils import Conv1D

    products = Products()
    ExpertsInterface.register(EXPERTS, _run_experts)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear or isinstance(module, Conv1D):
            weight = module.weight.T.contiguous() if isinstance(module, Conv1D) else module.weight
            _replace(model, path, RowLinear(_product(weight, module.bias, kind, device, products), weight.dtype, device))
        elif _is_experts(module):
            _take_experts(module, kind, device, products)
        elif type(module).__module__ == "transformers.activations" or isinstance(module, ACTIVATIONS):
            module.forward = partial(by_rows, module.forward)
        elif foreign and hasattr(module, "in_features") and hasattr(module, "out_features"):
            linear = products.settled(Foreign(module.to(device)), kind.dtype, device)
            _replace(model, path, RowLinear(linear, kind.dtype, device))
        elif not isinstance(module, nn.Embedding) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            if kind.quantize:
                products.kept[type(module).__name__] = "computes by itself"
            products.nbytes += sum(p.nbytes for p in module.parameters(recurse=False))
            module.forward = _ruled(module.forward, products.rules)
    model.to(device)
    return products


class RowLinear(nn.Module):
    """A Linear in the place of a module of the library, for rows of any leading shape."""

    def __init__(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.inputs, linear.outputs
        # modules look here for the type and the place of their weights, never for the weights
        self.weight = torch.empty(0, dtype=dtype, device=device)

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias_M

    def forward(self, x: Tensor) -> Tensor:
        y_NM = self.linear(x.reshape(-1, self.in_features))
        return y_NM.view(*x.shape[:-1], self.out_features)


class Foreign(Linear):
    """A module of another library that multiplies by a weight of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(int(module.in_features), int(module.out_features), None)  # type: ignore[arg-type]
        self.module, self.kind = module, type(module).__name__

    def product(self, x_NK: Tensor) -> Tensor:
        y_NM: Tensor = self.module(x_NK)
        return y_NM

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.module.parameters(), *self.module.buffers()))


class RowRuled(TorchFunctionMode):
    """While this is on, products and activations that modules compute by themselves go by rows too."""

    def __init__(self, rules: RowRules) -> None:
        super().__init__()
        self.rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = (*args, *kwargs.values(), None)[:3]
            linear = Dense(weight, bias)
            self.rules.settle(linear, weight.dtype, weight.device)
            return linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        if func in ELEMENTWISE and args and args[0].dim():
            return by_rows(lambda x: func(x, *args[1:], **kwargs), args[0])
        return func(*args, **kwargs)


def _ruled(forward: Callable[..., Any], rules: RowRules) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with RowRuled(rules):
            return forward(*args, **kwargs)

    return run


def _product(
    weight_MK: Tensor, bias_M: Tensor | None, kind: WeightKind, device: torch.device, products: Products, *, share: float = 1.0
) -> Linear:
    """The product of one weight in the kind asked for, or in its own type where it has no whole number of groups."""
    # some modules are kept in float32 by the library
    kind = replace(kind, dtype=weight_MK.dtype) if not kind.quantize else kind
    if kind.quantize and weight_MK.shape[1] % GROUP:
        products.kept[f"weights of {weight_MK.shape[1]} inputs"] = f"no multiple of {GROUP}"
        kind = replace(kind, quantize=None)
    linear = make_linear(weight_MK.detach(), None if bias_M is None else bias_M.detach(), kind, device)
    return products.settled(linear, kind.dtype, device, share=share)


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)


def _is_experts(module: nn.Module) -> bool:
    """A mixture's experts in the layout that the library's experts interface describes."""
    return all(hasattr(module, name) for name in ("down_proj", "is_transposed", "has_gate", "has_bias", "num_experts"))


def _take_experts(module: Any, kind: WeightKind, device: torch.device, products: Products) -> None:
    """Turn fused expert tensors into a Linear for each expert and product."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    share = float(getattr(module.config, "num_experts_per_tok", None) or module.num_experts) / module.num_experts
    module.draftwise_experts = []
    for expert in range(module.num_experts):
        pair = []
        for name in (up, "down_proj"):
            weight = getattr(module, name)[expert]
            bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
            weight = weight.T.contiguous() if module.is_transposed else weight
            pair.append(_product(weight, bias, kind, device, products, share=share))
        module.draftwise_experts.append(pair)
    for name in (up, "down_proj"):
        delattr(module, name)
    module.config._experts_implementation = EXPERTS


def _run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each expert on the rows that chose it, under its own row rules; a row's experts are added in the order it ranks them."""
    out_NTC = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
    for expert in torch.unique(top_k_index).tolist():
        if expert >= module.num_experts:
            continue
        row, place = torch.where(top_k_index == expert)
        up, down = module.draftwise_experts[expert]
        x_NK = up(hidden_states[row])
        x_NK = down(module._apply_gate(x_NK) if module.has_gate else module.act_fn(x_NK))
        if module.has_post_expert_norm:
            x_NK = module.post_expert_norm(x_NK)
        out_NTC[row, place] = (x_NK * top_k_weights[row, place, None]).to(out_NTC.dtype)
    return out_NTC.sum(1)
