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
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# letters with case, as of Unicode 12, written by number since some look like others
_CASED = (
    "b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5 "
    "3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 "
    "1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc "
    "1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b "
    "a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_CASED_CLASS = "".join("-".join(rf"\x{{{end}}}" for end in run.split("-")) for run in _CASED.split())
_DEEPSEEK_LETTERS = rf"\s?[A-Za-z{_CASED_CLASS}]+"
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"
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
    "deepseek-llm": _Words((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _CJK, r"\p{N}+")),
    "deepseek-coder": _Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _Words((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
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
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        raise ValueError(f"{path}: unknown pre-tokenizer {pre!r}; those that are known: {', '.join(sorted(PRE_TOKENIZERS))}")
    adds_bos = kind == "llama" or PRE_TOKENIZERS[pre].add_bos
    try:
        if kind == "gpt2":
            backend = _byte_level(tokens, metadata, PRE_TOKENIZERS[pre])
        else:
            backend = _sentencepiece(tokens, types, metadata)
        backend.add_special_tokens(_added(tokens, types, (_UNKNOWN, _CONTROL)))
        backend.add_tokens(_added(tokens, types, (_USER_DEFINED,)))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: the tokenizer in it is damaged ({error!r}); fetch the file again") from error
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _put_around(
        backend,
        before=_token(metadata, "bos", tokens) if adds_bos else None,
        after=_token(metadata, "eos", tokens) if adds_eos else None,
    )
    return backend


def _token(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> str | None:
    """A special token's text; where the file is silent, SentencePiece's own places for them are meant."""
    usual = {"unknown": 0, "bos": 1, "eos": 2} if metadata["tokenizer.ggml.model"] == "llama" else {}
    id = metadata.get(f"tokenizer.ggml.{name}_token_id", usual.get(name))
    return tokens[id] if id is not None and id < len(tokens) else None


def _put_around(backend: Backend, *, before: str | None, after: str | None) -> None:
    """Make the tokenizer put these special tokens, and no others, around a text."""
    around = [token for token in (before, after) if token is not None]
    pieces = [token for token in (before, "$A", after) if token is not None]
    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
    backend.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)


def _added(tokens: Sequence[str], types: Sequence[int], wanted: Sequence[int]) -> list[AddedToken]:
    special = _CONTROL in wanted
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in wanted
    ]


def _byte_level(tokens: list[str], metadata: Mapping[str, Any], words: _Words) -> Backend:
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
    return backend


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
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, left, right in ranked],
            unk_token=_token(metadata, "unknown", tokens),
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
