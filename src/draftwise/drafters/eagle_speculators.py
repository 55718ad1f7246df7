"""EAGLE-3 drafts in the layout of vLLM's `speculators`: a configuration of its own kind, and layers that are numbered.

Knows that library's names and keys, as of its version 0.9; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftwise.drafters.base import Target
from draftwise.drafters.eagle_network import EagleNetwork


def to_speculators(
    network: EagleNetwork, target: Target, verifier: str, draft_tokens: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a draft that has its head."""
    shape = network.shape
    tensors = {_theirs(name): tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    tensors["d2t"] = network.d2t - torch.arange(shape.draft_vocab)
    tensors["t2d"] = torch.zeros(shape.target_vocab, dtype=torch.bool).index_fill(0, network.d2t, True)
    embedding = target.model.embed(torch.arange(shape.target_vocab, device=target.model.device))
    tensors["embed_tokens.weight"] = embedding.cpu().float().contiguous()
    raw = target.model.config.raw
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "model_type": "speculator_model",
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": shape.residual_after_norm,
        "norm_output": shape.recycle_normed,
        "target_hidden_size": None if shape.hidden_size == shape.target_hidden else shape.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "tie_word_embeddings": False,
        "dtype": "float32",
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "max_position_embeddings": shape.max_positions,
            "rope_parameters": dict(shape.rope),
            "vocab_size": shape.target_vocab,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": draft_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(raw.get("architectures") or ["LlamaForCausalLM"])},
        },
    }
    return config, tensors


def from_speculators(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Such a draft in SafeAILab's words. Raises ValueError for what those drafts may have and ours do not."""
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(f"a speculators draft of kind {kind} cannot be read; eagle3 can")
    for flag in ("norm_before_fc", "fc_norm"):
        if config.get(flag):
            raise ValueError(f"a speculators draft with {flag} cannot be read")
    layer = dict(config.get("transformer_layer_config") or {})
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"a draft of {layer['num_hidden_layers']} layers cannot be read; it must be 1")
    flat = layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.get("draft_vocab_size"),
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_output": config.get("norm_output", False),
        "target_hidden_size": config.get("target_hidden_size") or layer.get("hidden_size"),
        "eagle_aux_hidden_state_layer_ids": config.get("eagle_aux_hidden_state_layer_ids"),
    }
    return flat, {_ours(name): tensor for name, tensor in tensors.items()}


def _theirs(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def _ours(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")
