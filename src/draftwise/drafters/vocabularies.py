"""Two vocabularies side by side: which ids mean the same, and what a text becomes in each.

Knows tokenizers, bytes and ids; knows nothing of models or drafts. Shapes: V vocabulary, S shared tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.tokenizer import Tokenizer

INSIDE = frozenset(range(0x80, 0xC0))
"""The bytes inside characters, never at their start."""


class SharedTokens:
    """The tokens that a target's and a draft's vocabulary have in common, one to one.

    Text tokens correspond by the bytes they add; where several ids of a vocabulary add the same, the last one counts, since
    byte tokens and merges come before what their tokenizer prefers to them. Special tokens correspond by name, and end
    tokens that are left over by role: the end of a turn first. Ids from the two sizes on are padding of a head.
    Source: the intersection of Timor et al. 2025 (arXiv 2502.05202), section 4, by bytes instead of normalised strings.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, *, target_vocab: int, draft_vocab: int, device: torch.device | None = None
    ) -> None:
        self.target_vocab = target_vocab
        self.target_bytes, self.draft_bytes = _by_bytes(target, target_vocab), _by_bytes(draft, draft_vocab)
        pairs = {self.target_bytes[text]: id for text, id in self.draft_bytes.items() if text in self.target_bytes}
        pairs |= _specials(target, draft, target_vocab, draft_vocab)
        self.to_draft = dict(sorted(pairs.items()))
        self.to_target = {theirs: mine for mine, theirs in self.to_draft.items()}
        assert len(self.to_target) == len(self.to_draft), "one to one"
        self._target_S = torch.tensor(list(self.to_draft.keys()), dtype=torch.int64, device=device)
        self._draft_S = torch.tensor(list(self.to_draft.values()), dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.to_draft)

    def row(self, logits_V: Tensor) -> Tensor:
        """The draft's logits in the target's vocabulary, float32 [target's V]: minus infinity where a token is not shared."""
        row_V = logits_V.new_full((self.target_vocab,), -torch.inf, dtype=torch.float32)
        row_V[self._target_S] = logits_V[self._draft_S].float()
        return row_V


def _by_bytes(tokenizer: Tokenizer, vocab: int) -> dict[bytes, int]:
    return {text: id for id in range(min(tokenizer.size, vocab)) if (text := tokenizer.token_bytes(id))}


def _specials(target: Tokenizer, draft: Tokenizer, target_vocab: int, draft_vocab: int) -> dict[int, int]:
    """The special tokens of the same name, then the end tokens without one, in the order of `_ends`."""

    def names(tokenizer: Tokenizer, vocab: int) -> dict[str, int]:
        ids = (id for id in range(min(tokenizer.size, vocab)) if tokenizer.token_bytes(id) is None)
        return {name: id for id in ids if (name := tokenizer.token_text(id)) is not None}

    theirs = names(draft, draft_vocab)
    pairs = {id: theirs[name] for name, id in names(target, target_vocab).items() if name in theirs}
    ends = [id for id in _ends(target) if id < target_vocab and id not in pairs]
    draft_ends = [id for id in _ends(draft) if id < draft_vocab and id not in pairs.values()]
    return pairs | {
        mine: other
        for mine, other in zip(ends, draft_ends, strict=False)
        if target.token_bytes(mine) is None and draft.token_bytes(other) is None
    }


def _ends(tokenizer: Tokenizer) -> list[int]:
    """The end tokens: the one that ends a turn of a chat, then the others."""
    phrases = chat_phrases(tokenizer)
    after_answer = phrases.get("assistant, user", "")
    places = {id: after_answer.find(tokenizer.token_text(id) or "\0") for id in tokenizer.eos_tokens}
    return sorted(places, key=lambda id: (places[id] < 0, places[id], id))


def chat_phrases(tokenizer: Tokenizer) -> dict[str, str]:
    """What a chat template puts before, between and after messages, by their roles; empty where there is no template."""
    if not tokenizer.has_chat_template:
        return {}
    said = {role: f"(here {role} speaks)" for role in ("system", "user", "assistant")}
    found: dict[str, str] = {}
    for roles in (("user", "assistant", "user"), ("system", "user")):
        try:
            text = tokenizer.chat_text([{"role": role, "content": said[role]} for role in roles])
        except ValueError:  # a template without a system role, or without answers
            continue
        before = "start"
        for role in roles:
            phrase, met, text = text.partition(said[role])
            if not met:
                break
            found[f"{before}, {role}"] = phrase
            before = role
        else:
            found[f"{before}, answer"] = text
    return {roles: phrase for roles, phrase in found.items() if phrase.strip()}


def continuation(tokenizer: Tokenizer, before: bytes, text: bytes) -> list[int]:
    """The ids of `text` where it follows `before`, a look-behind of what is already read; special tokens by their names.

    Where tokens would grow across the border, `text` is encoded alone. Bytes of a character that `text` leaves unfinished
    get no id, nor does a text that begins inside a character which no token of `before` ends.
    """
    whole = _complete(before + text)
    ids = tokenizer.encode(whole.decode("utf-8", "replace"), around=False)
    if not before:
        return ids
    place = border(tokenizer, ids, len(whole) - len(before))
    if place is not None:
        return ids[place:]
    text = _complete(text)
    if not text or text[0] in INSIDE:
        return []
    ids = tokenizer.encode(text.decode("utf-8", "replace"), around=False)
    # a space that the tokenizer puts before every text
    added = bool(ids) and not text.startswith(b" ") and tokenizer.token_bytes(ids[0]) == b" "
    return ids[1:] if added else ids


def border(tokenizer: Tokenizer, ids: Sequence[int], size: int) -> int | None:
    """How many ids come before those that write the last `size` bytes; None where no two tokens meet there."""
    place = len(ids)
    while size > 0 and place > 0:
        place -= 1
        size -= len(spelled(tokenizer, ids[place]))
    return place if size == 0 else None


def spelled(tokenizer: Tokenizer, id: int) -> bytes:
    """What a token writes; for a special one its name."""
    text = tokenizer.token_bytes(id)
    return (tokenizer.token_text(id) or "").encode() if text is None else text


def _complete(text: bytes) -> bytes:
    """Without the bytes of an unfinished character at the end."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            return text[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else text
        if byte < 0x80:
            break
    return text
