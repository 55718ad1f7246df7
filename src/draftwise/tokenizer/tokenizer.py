"""Text to tokens and back: encoding, decoding token by token, chats, and whether two vocabularies are the same.

Knows strings and ids; knows nothing of the files they come from, nor of what a model does with them.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from draftwise.tokenizer.chat import compile_template


class Tokenizer:
    """A model's tokenizer. `size`: ids below it have a name; rows of the head from there on are padding.

    eos_tokens: every id that ends a text. bos_token: the id put before a text, if there is one.
    Not to be changed after construction; safe to use from several threads.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_tokens: Iterable[int] = (),
        names: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._names = dict(names or {})
        self._template_source = chat_template
        self._added = {id: (token.content, token.special) for id, token in backend.get_added_tokens_decoder().items()}
        self._spell, self._drops_first_space = _spelling(backend)
        self._bytes: dict[int, bytes | None] = {}
        self.size = _size(backend, self._added)
        self.eos_tokens = frozenset(eos_tokens)
        self.bos_token: int | None = backend.token_to_id(self._names["bos_token"]) if "bos_token" in self._names else None

    def encode(self, text: str, *, special: bool = True, around: bool = True) -> list[int]:
        """The ids of a text.

        special: names of special tokens in the text become those tokens; else they are text like any other.
        around: with the BOS (and whatever else) that the model's own tokenizer puts around a text.
        """
        backend = self._backend if special else self._literal
        try:
            return list(backend.encode(text, add_special_tokens=around).ids)
        except TypeError as error:
            raise ValueError("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, special ones left out; bytes that are no UTF-8 become U+FFFD."""
        decoder = self.decoder()
        return "".join([*(decoder.push(token) for token in tokens), decoder.flush()])

    def decoder(self, *, continues: bool = False) -> TextDecoder:
        """A new incremental decoder; what it returns adds up to `decode` of all tokens.

        continues: the tokens follow a text, so that a space before the first word belongs to it (SentencePiece only).
        """
        return TextDecoder(self.token_bytes, drop_first_space=self._drops_first_space and not continues)

    def token_bytes(self, token: int) -> bytes | None:
        """The exact bytes that a token adds to a text; None for special tokens and for ids without a name."""
        if token not in self._bytes:
            content, special = self._added.get(token, (None, False))
            if content is not None:
                self._bytes[token] = None if special else self._spell(content, True)
            else:
                text = self._backend.id_to_token(token)
                self._bytes[token] = None if text is None else self._spell(text, False)
        return self._bytes[token]

    def token_text(self, token: int) -> str | None:
        """The vocabulary's own spelling of an id, special tokens included; None for ids without a name."""
        return self._backend.id_to_token(token)

    def token_id(self, text: str) -> int | None:
        """The id with this spelling in the vocabulary."""
        return self._backend.token_to_id(text)

    # chats

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """The ids of a conversation in the model's own format. messages: mappings with `role` and `content`.

        variables: whatever else the template knows, such as `tools` or `enable_thinking`. Raises ValueError when there is
        no template or it refuses the messages.
        """
        return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt, **variables), around=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as the text that `chat` encodes."""
        settings = {"tools": None, "documents": None, **self._names, **variables}
        return self._template(messages, add_generation_prompt=add_generation_prompt, **settings)

    @cached_property
    def _template(self) -> Callable[..., str]:
        if self._template_source is None:
            raise ValueError("the model has no chat template; give a plain prompt, or use an instruction-tuned model")
        return compile_template(self._template_source)

    # vocabularies

    @cached_property
    def vocabulary(self) -> tuple[str | None, ...]:
        """The spelling of every id below `size`."""
        return tuple(map(self._backend.id_to_token, range(self.size)))

    @cached_property
    def vocabulary_fingerprint(self) -> str:
        """Equal for two tokenizers exactly when every id has the same spelling."""
        return hashlib.sha256("\0".join(token or "" for token in self.vocabulary).encode()).hexdigest()

    def mismatch(self, other: Tokenizer, upto: int | None = None) -> str | None:
        """Why ids do not mean the same in both, in one sentence; None when they do, on the ids that both have.

        upto: compare only the ids below it.
        """
        count = min(self.size, other.size, *(() if upto is None else (upto,)))
        pairs = zip(self.vocabulary[:count], other.vocabulary[:count], strict=True)
        differ = [id for id, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if not differ:
            return None
        first = ", ".join(f"{id} is {self.vocabulary[id]!r} and {other.vocabulary[id]!r}" for id in differ[:3])
        return f"the vocabularies differ in {len(differ)} of {count} ids: {first}"

    @cached_property
    def _literal(self) -> Backend:
        """The same tokenizer, for which special tokens are text."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


class TextDecoder:
    """Turns tokens into text as they come; bytes of an unfinished character are held back."""

    def __init__(self, token_bytes: Callable[[int], bytes | None], *, drop_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._drop_first_space = drop_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that became certain with this token, perhaps none."""
        return self._take(self._utf8.decode(self._token_bytes(token) or b""))

    def flush(self) -> str:
        """What was held back, at the end; an unfinished character becomes U+FFFD."""
        return self._take(self._utf8.decode(b"", final=True))

    def _take(self, text: str) -> str:
        if self._drop_first_space and text:
            self._drop_first_space = False
            return text.removeprefix(" ")
        return text


def _size(backend: Backend, added: Mapping[int, Any]) -> int:
    base = backend.get_vocab_size(with_added_tokens=False)
    if base and backend.id_to_token(base - 1) is None:  # ids with gaps
        base = max(backend.get_vocab(with_added_tokens=False).values()) + 1
    return max([base, *(id + 1 for id in added)])


def _spelling(backend: Backend) -> tuple[Callable[[str, bool], bytes], bool]:
    """How a vocabulary spells bytes (text, is it an added token), and whether a text's first space is dropped."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in steps:
        return _spell_byte_level, False
    if "Metaspace" in steps:
        return _spell_sentencepiece, steps["Metaspace"].get("prepend_scheme", "always") != "never"
    if "Replace" in steps or "ByteFallback" in steps:
        return _spell_sentencepiece, "Strip" in steps
    if "WordPiece" in steps:
        return _spell_wordpiece, True
    raise ValueError(
        f"tokens are decoded by {decoder['type']}, which is not supported; byte-level BPE, SentencePiece and WordPiece are"
    )


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes every byte as a printable character: itself where it is one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE = _byte_of_character()


def _spell_byte_level(text: str, added: bool) -> bytes:
    if added or not all(character in _BYTE for character in text):
        return text.encode()
    return bytes(_BYTE[character] for character in text)


def _spell_sentencepiece(text: str, added: bool) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">") and not added:
        return bytes.fromhex(text[3:5])
    return text.replace("▁", " ").encode()


def _spell_wordpiece(text: str, added: bool) -> bytes:
    return text.removeprefix("##").encode() if text.startswith("##") else f" {text}".encode()
