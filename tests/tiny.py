"""Tiny random checkpoints in Hugging Face format, of any architecture the tests need.

The weights are drawn so that a greedy continuation has clear margins and does not fall into one repeated token, that
every norm and bias matters, and that attention to far tokens changes the outcome. The same arguments give the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 300
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
MERGES = (
    "t h|th e|Ġ the|i n|a n|e r|Ġ a|o n|r e|Ġ s|e n|a t|o r|Ġ w|e s|Ġ c|i t|i s|Ġ an|Ġ in|o u|a l|in g|e d|Ġ b|Ġ p|Ġ f|"
    "Ġ m|Ġ o|Ġ d|Ġo f|Ġan d|Ġ t|Ġt o|Ġ h|Ġ is|a r|l e|s t|Ġ l"
).split("|")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": False}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | {"head_dim": 16, "sliding_window": None},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 32},
    "gemma2": GROUPED | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gpt2": {"n_inner": 128},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "gpt_neox": {"intermediate_size": 128},
    "phi3": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def tiny_checkpoint(folder: Path | str, architecture: str, *, seed: int = 0, gain: float = 2.0, **config: Any) -> Path:
    """Write a random model and its tokenizer to `folder`; `config` overrides any key of the architecture's config.

    Raises KeyError for an architecture not in ARCHITECTURES. `gain` scales every matrix: more is less like a bigram model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = SHAPE | ARCHITECTURES[architecture] | config
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() < 2:  # norms and biases: near what they were, but not neutral
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                    if architecture == "gemma2" and "post_" in name:  # else a tied head repeats its input
                        parameter.add_(3)
                elif "embed" in name or "wte" in name or "wpe" in name:
                    parameter.normal_(std=0.25 if model.config.tie_word_embeddings else 0.5)
                else:
                    head = parameter is model.get_output_embeddings().weight
                    parameter.normal_(std=(2 if head else 1) * gain * parameter.shape[-1] ** -0.5)
        model.tie_weights()
        model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def tiny_tokenizer(folder: Path | str, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a byte-level BPE tokenizer of 300 tokens to `folder`: four special tokens, 256 bytes, forty merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    assert len(words) == len(set(words)) == VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[3],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return folder


def tiny_draft(folder: Path | str, target: Path | str, kind: str, *, updates: int = 2, **options: Any) -> Path:
    """Train a draft of a kind for a tiny_checkpoint, as `draftwise train` does, and write it to `folder`."""
    import draftwise
    from draftwise.train import find_kind
    from draftwise.train.loop import Plan, train

    module, folder = find_kind(kind), Path(folder)
    llm = draftwise.load(str(target), dtype="fp32", context=128, max_batch=4)
    plan = Plan(updates=updates, tokens=300, rows=100, max_answer=24, served_prompts=1, served_tokens=4)
    train(llm, lambda corpus: module.build(module.Options(**options), llm.target, corpus), folder, plan)
    return folder


def tiny_gguf(
    path: Path | str,
    folder: Path | str,
    *,
    kind: str = "F32",
    split_tensors: int = 0,
    rope_factors: list[float] | None = None,
    **metadata: Any,
) -> Path:
    """Write a tiny_checkpoint of architecture llama, mistral, qwen2 or qwen3 as a GGUF file, as llama.cpp converts it.

    kind: the block kind of every matrix; one that `gguf.quantize` can make. split_tensors: tensors a part, 0 for one file.
    rope_factors: the tensor rope_freqs.weight. metadata: further keys, dots written as double underscores, or None to
    leave one out. Returns the (first) file's path.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize
    from safetensors.torch import load_file

    path, folder = Path(path), Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    model = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    keys = {
        f"{model}.context_length": config["max_position_embeddings"],
        f"{model}.embedding_length": config["hidden_size"],
        f"{model}.feed_forward_length": config["intermediate_size"],
        f"{model}.block_count": config["num_hidden_layers"],
        f"{model}.attention.head_count": heads,
        f"{model}.attention.head_count_kv": kv_heads,
        f"{model}.attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{model}.attention.value_length": config.get("head_dim") or config["hidden_size"] // heads,
        f"{model}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{model}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(words, key=words.__getitem__),
        "tokenizer.ggml.token_type": [3 if word in SPECIALS else 1 for word in sorted(words, key=words.__getitem__)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | {key.replace("__", "."): value for key, value in metadata.items()}
    writer = GGUFWriter(path, model, split_max_tensors=split_tensors)
    for key, value in keys.items():
        if value is not None:
            put = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            put.get(type(value), writer.add_array)(key, value)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        if model == "llama" and ("q_proj" in name or "k_proj" in name):
            count = heads if "q_proj" in name else kv_heads
            tensor = tensor.view(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        number = GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        writer.add_tensor(name, quantize(tensor.numpy(), number), raw_dtype=number)
    if rope_factors is not None:
        import numpy as np

        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split_tensors else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
