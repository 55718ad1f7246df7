"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

Knows the keys under tokenizer.ggml and which words each pre-tokenizer cuts a text into; knows nothing of chats or decoding.
Building it takes as long as loading a finished tokenizer.json would, so nothing is kept on disk.
Source of the expressions: the models' own tokenizer.json files, and src/llama-vocab.cpp of llama.cpp where it adapts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    r"ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Words(NamedTuple):
    """How a text is cut before merging: each expression in turn, on the pieces that the ones before it left."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole
    add_bos: bool = False  # where the file does not say


_PLAIN = _Words((_GPT2,))
_SINGLE_DIGITS = _Words((r"\p{N}", _GPT2))
_OF_LLAMA3 = _Words((_LLAMA3,), ignore_merges=True, add_bos=True)
_OF_QWEN2 = _Words((_QWEN2,))

PRE_TOKENIZERS: dict[str, _Words] = {
    "default": _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4", "trillion", "a.x-4.0"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _Words((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo", "grok-2"), _OF_QWEN2),
    "qwen35": _Words((_QWEN35,)),
    "deepseek-llm": _Words((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")),
    "deepseek-coder": _Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _Words((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    "falcon": _Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "tekken": _Words((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Words((_GPT4O,))),
}
"""By the value of tokenizer.ggml.pre."""


def gguf_backend(metadata: Mapping[str, Any], path: object) -> Backend:
    """Rebuild the tokenizer that the metadata describe; `path` names the file in messages.

    Raises ValueError for a kind of tokenizer or a pre-tokenizer that is not known, naming those that are.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama") or "tokenizer.ggml.tokens" not in metadata:
        raise ValueError(f"{path}: the tokenizer is of kind {kind!r}; those that can be read are gpt2 (BPE) and llama (SPM)")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = metadata.get("tokenizer.ggml.token_type")
    types = [_NORMAL] * len(tokens) if types is None else types.tolist()
    while types and types[-1] == _UNUSED:  # rows that only pad the embedding
        types.pop()
        tokens.pop()
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind == "gpt2":
        backend, adds_bos = _byte_level(tokens, metadata, pre, path)
    else:
        backend, adds_bos = _sentencepiece(tokens, types, metadata), True
    backend.add_special_tokens(_added(tokens, types, (_UNKNOWN, _CONTROL)))
    backend.add_tokens(_added(tokens, types, (_USER_DEFINED,)))
    bos, eos = (_token(metadata, name, tokens) for name in ("bos", "eos"))
    around: list[tuple[str, int | None]] = [("$A", None)]
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        around.insert(0, bos)
    if metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        around.append(eos)
    if len(around) > 1:
        backend.post_processor = processors.TemplateProcessing(
            single=[text for text, _ in around], special_tokens=[(text, id) for text, id in around if id is not None]
        )
    return backend


def _token(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> tuple[str, int] | None:
    """A special token's text and id."""
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return (tokens[id], id) if id is not None and id < len(tokens) else None


def _added(tokens: Sequence[str], types: Sequence[int], wanted: Sequence[int]) -> list[AddedToken]:
    special = _CONTROL in wanted
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in wanted
    ]


def _byte_level(tokens: list[str], metadata: Mapping[str, Any], pre: str, path: object) -> tuple[Backend, bool]:
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"{path}: unknown pre-tokenizer {pre!r}; those that are known: {', '.join(sorted(PRE_TOKENIZERS))}")
    words = PRE_TOKENIZERS[pre]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words.ignore_merges))
    splits: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in words.expressions]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, words.add_bos


def _sentencepiece(tokens: list[str], types: list[int], metadata: Mapping[str, Any]) -> Backend:
    """SentencePiece's BPE has scores instead of merges: the pair whose token has the highest score goes first."""
    scores = metadata["tokenizer.ggml.scores"].tolist()
    vocabulary = {token: id for id, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    ranked = []
    for token in normal:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[vocabulary[token]], -cut, left, right))
    ranked.sort()
    unknown = _token(metadata, "unknown", tokens)
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(content=" ", left=1, right=0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
