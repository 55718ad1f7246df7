"""A target's tokens as a draft with another tokenizer reads them: as text, in its own tokens and its own chat format.

Knows tokenizers and text; knows nothing of models. Only the last word is ever encoded anew.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence as Seq

from draftwise.drafters.vocabularies import INSIDE, SharedTokens, border, chat_phrases, continuation, spelled
from draftwise.tokenizer import Tokenizer

LOOK_BEHIND = 24
"""Characters (of the draft's text) or bytes (of the target's) before the open ones that are encoded with them."""
LONGEST = 24
"""Ids that may stay open where a text has no words."""
_WORD = re.compile(r"(?<=\S) (?=\w)|(?<=\n)(?=\w)")
"""Where tokenizers cut a text whatever comes after: before the space that leads a word, and before a line's first word."""


class Reader:
    """How a draft's tokenizer reads what a target's tokenizer wrote. Shared by all requests."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, shared: SharedTokens) -> None:
        self.target, self.draft, self.shared = target, draft, shared
        theirs, ours = chat_phrases(target), chat_phrases(draft)
        self._target_start, self._draft_start = _start(target), _start(draft)
        pairs = {theirs[roles].removeprefix(self._target_start): ours[roles] for roles in theirs if roles in ours}
        self._target_spaces = _spaces_first(target)
        self._phrases = {phrase: pairs[phrase] for phrase in sorted(pairs, key=len, reverse=True)}

    def opening(self, prompt: Seq[int]) -> str:
        """A prompt as the draft would be given it.

        What the target's chat template puts around messages becomes what the draft's own would put there, its default
        system prompt included. Special tokens that the draft has not are left out: their names would be noise to it.
        """
        text = b"".join(spelled(self.target, token) for token in prompt).decode("utf-8", "replace")
        text = text.removeprefix(self._target_start).removeprefix(" " * self._target_spaces)
        text = _replaced(text, self._phrases)
        specials = {token for token in prompt if self.target.token_bytes(token) is None}
        text = _replaced(text, {spelled(self.target, token).decode(): self.write(token).decode() for token in specials})
        return text if text.startswith(self._draft_start) else self._draft_start + text

    def write(self, token: int) -> bytes:
        """What a target's token writes in a draft's text: for a special one the name of its counterpart, if there is one."""
        text = self.target.token_bytes(token)
        if text is None:
            text = spelled(self.draft, self.shared.to_draft[token]) if token in self.shared.to_draft else b""
        return text

    def rewrite(self, tokens: Seq[int], text: bytes) -> list[int]:
        """The target's ids of `text` where it follows `tokens`."""
        before = b""
        for token in reversed(tokens[-LOOK_BEHIND:]):
            written = self.target.token_bytes(token)
            if written is None or len(before) >= LOOK_BEHIND:
                break
            before = written + before
        return continuation(self.target, before.lstrip(bytes(INSIDE)), text)


class Transcript:
    """One request's text in the draft's tokens.

    `settled` are the ids that no further text changes; the open ones, of the last word as a rule, come from `ids`.
    """

    def __init__(self, reader: Reader, prompt: Seq[int]) -> None:
        self._reader = reader
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._before = self._open = ""
        self._rest: list[int] = []  # the ids of the open text
        self.settled: list[int] = []
        self._grow(reader.opening(prompt))

    def append(self, tokens: Seq[int]) -> None:
        """Take in target tokens that were emitted."""
        self._grow("".join(self._utf8.decode(self._reader.write(token)) for token in tokens))

    def ids(self) -> list[int]:
        """All of the text, an unfinished character included."""
        return self.settled + self._rest + self._pieces(self._utf8.getstate()[0])

    def _grow(self, text: str) -> None:
        """Encode the open text anew and settle what stands before its last word."""
        self._open += text
        written = self._open.encode()
        ids = continuation(self._reader.draft, self._before.encode(), written)
        word = max((found.start() for found in _WORD.finditer(self._open)), default=0)
        left = len(self._open[word:].encode())
        place = border(self._reader.draft, ids, left) if word else 0
        if place is None or len(ids) - place > LONGEST:
            place, left = self._middle(ids, written)
        cut = len(written[: len(written) - left].decode())
        self.settled += ids[:place]
        self._rest = ids[place:]
        self._before = (self._before + self._open[:cut])[-LOOK_BEHIND:]
        self._open = self._open[cut:]

    def _middle(self, ids: list[int], written: bytes) -> tuple[int, int]:
        """Where to settle a text without words: how many ids, and the bytes left after them; nothing while it is short."""
        if len(ids) <= LONGEST:
            return 0, len(written)
        for place in range(len(ids) - LONGEST // 2, len(ids)):
            left = sum(len(spelled(self._reader.draft, id)) for id in ids[place:])
            if left <= len(written) and written[-left] not in INSIDE:
                return place, left
        return len(ids), 0

    def _pieces(self, unfinished: bytes) -> list[int]:
        """The bytes of an unfinished character, in the largest tokens there are."""
        ids, known = [], self._reader.shared.draft_bytes
        while unfinished:
            size = next((size for size in range(len(unfinished), 0, -1) if unfinished[:size] in known), 0)
            if size:
                ids.append(known[unfinished[:size]])
            unfinished = unfinished[max(size, 1) :]
        return ids


def _start(tokenizer: Tokenizer) -> str:
    """The names of the special tokens that a tokenizer puts before every text."""
    around = [id for id in tokenizer.encode("") if id not in tokenizer.eos_tokens]
    return b"".join(spelled(tokenizer, id) for id in around).decode()


def _spaces_first(tokenizer: Tokenizer) -> bool:
    """True for a tokenizer that puts a space of its own before a text."""
    ids = tokenizer.encode("a", around=False)
    return bool(ids) and spelled(tokenizer, ids[0]).startswith(b" ")


def _replaced(text: str, names: Mapping[str, str]) -> str:
    """Every key of `names` by its value, the first key that fits where several do."""
    pattern = "|".join(re.escape(name) for name in names if name)
    return re.sub(pattern, lambda found: names[found[0]], text) if pattern else text
