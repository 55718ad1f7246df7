"""A model's shape, out of Hugging Face's config.json. Knows that format's keys and defaults; opens nothing.

Keys as written by transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.types import ModelConfig

# What a file may leave out, by model_type: the defaults of transformers' configuration classes.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
    | {"head_dim": 128},
}

# Other names of an architecture: MiMo is Qwen 2 with modules for multi-token prediction.
_SAME = {"mimo": "qwen2"}

# Names that other architectures use for the same thing.
_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_sequence_length", "max_seq_len"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "hidden_act": ("activation_function", "hidden_activation"),
}


def from_huggingface(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The config of a folder. raw: its config.json; generation: its generation_config.json, which may add end tokens.

    Exact for llama, mistral, qwen2 and qwen3; for others filled as far as the usual names go, 0 where nothing is known.
    Raises ValueError for a file that names no model_type, or a llama-like one without its main sizes.
    """
    text = raw.get("text_config") or raw
    architecture = str(raw.get("model_type") or "")
    architecture = _SAME.get(architecture, architecture)
    if not architecture:
        raise ValueError("config.json names no model_type; it is not the configuration of a transformers model")
    known = architecture in _DEFAULTS
    keys = _DEFAULTS.get(architecture, {}) | dict(text)

    def get(key: str, default: Any = None) -> Any:
        found = next((keys[name] for name in (key, *_ALIASES.get(key, ())) if keys.get(name) is not None), default)
        if found is None and known:
            raise ValueError(f"config.json of a {architecture} model has no {key}")
        return found

    hidden, heads, layers = (int(get(k) or 0) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = int(get("num_key_value_heads", heads))
    if known and (not heads or heads % kv_heads):
        raise ValueError(f"config.json has {heads} attention heads for {kv_heads} key/value heads; one must divide the other")
    eos = _ids(text.get("eos_token_id", raw.get("eos_token_id"))) + _ids(generation.get("eos_token_id"))
    attention_bias = architecture == "qwen2" or bool(keys.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(get("vocab_size") or 0),
        hidden_size=hidden,
        intermediate_size=int(get("intermediate_size") or 0),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(get("head_dim", hidden // heads if heads else 0)),
        norm_eps=float(get("rms_norm_eps", 1e-6)),
        max_positions=int(get("max_position_embeddings", 0)),
        rope=_rope(text),
        windows=_windows(architecture, keys, layers),
        # a nested text_config may leave this to the outer file
        tie_embeddings=bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", not known))),
        attention_bias=attention_bias and architecture != "mistral",
        output_bias=attention_bias and architecture in ("llama", "qwen3"),
        mlp_bias=architecture == "llama" and bool(keys.get("mlp_bias", False)),
        query_key_norm=architecture == "qwen3",
        activation=str(get("hidden_act", "silu")),
        eos_tokens=tuple(dict.fromkeys(eos)),
        bos_token=next(iter(_ids(text.get("bos_token_id", raw.get("bos_token_id")))), None),
        raw=dict(raw),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope(keys: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping whatever wrote the file: always rope_type and rope_theta, and what the type needs.

    A mapping with one entry a layer type (Gemma 3) is passed on as it is.
    """
    rope = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        return rope
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = keys.get("rope_theta") or 10000.0
    if keys.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", keys["partial_rotary_factor"])
    if rope["rope_type"] != "default":
        original = keys.get("original_max_position_embeddings") or keys.get("max_position_embeddings")
        if keys.get("original_max_position_embeddings") or original and "original_max_position_embeddings" not in rope:
            rope["original_max_position_embeddings"] = original
    return rope


def _windows(architecture: str, keys: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = keys.get("sliding_window")
    if architecture in ("qwen2", "qwen3") and not keys.get("use_sliding_window", False):
        window = None
    if architecture == "llama" or window is None:
        return (None,) * layers
    types = keys.get("layer_types") if architecture != "mistral" else None
    if types is None and architecture in ("qwen2", "qwen3"):
        first = int(keys["max_window_layers"])
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if types is None:
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)
