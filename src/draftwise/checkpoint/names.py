"""Which parameters a llama-like decoder has, by their Hugging Face names, and what GGUF calls them."""

from __future__ import annotations

from draftwise.types import ModelConfig

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures that this page describes; every other one is left to whoever builds it."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def huggingface_name(gguf_name: str) -> str | None:
    """blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight; None for a tensor that has no such name."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    block, _, rest = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and block.isdigit() and rest in _LAYER:
        return f"model.layers.{block}.{_LAYER[rest]}.{suffix}"
    return None


def parameters(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter that a llama-like model with this config has, with its shape."""
    assert config.architecture in LLAMA_LIKE
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (q_width, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_width, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_width, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_width, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.query_key_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        for name, width in norms.items():
            shapes[f"{prefix}.{name}.weight"] = (width,)
    return shapes
