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
