"""Trees that a draft grows, in the ids of a target with another vocabulary: of shared tokens, or by way of the text.

Knows trees, ids and text; knows no model.
Source: token-level intersection and string-level exact match of Timor et al. 2025 (arXiv 2502.05202), here for trees.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from draftwise.drafters.growth import Tree
from draftwise.drafters.transcripts import Reader
from draftwise.drafters.vocabularies import SharedTokens, spelled
from draftwise.sequence import Sequence
from draftwise.types import Draft, Drawn


class Crossing(Protocol):
    """What is drafted for one sequence in a step: a tree in the target's ids or in the draft's own."""

    tree: Tree

    def logits(self, logits_V: Tensor) -> Tensor:
        """The draft's logits in the vocabulary of the tree."""

    def id(self, node: int) -> int:
        """The draft's id of a node."""

    def draft(self) -> Draft:
        """The tree in the target's ids."""

    def learn(self, emitted: Seq[int]) -> None:
        """Take in the target tokens that were emitted."""


class Shared:
    """Shared tokens, guessed by the draft's distribution over them after the request's own warpers.

    What is drawn is drawn from a q that is 0 elsewhere, so every rule verifies it as it does any other.
    """

    def __init__(self, tree: Tree, shared: SharedTokens) -> None:
        self.tree, self.shared = tree, shared

    def logits(self, logits_V: Tensor) -> Tensor:
        return self.shared.row(logits_V)

    def id(self, node: int) -> int:
        return self.shared.to_draft[self.tree.tokens[node]]

    def draft(self) -> Draft:
        return self.tree.draft()

    def learn(self, emitted: Seq[int]) -> None:
        self.tree.learn(emitted)


class Written:
    """What the draft finds likeliest, in its own tokens, whose text becomes tokens of the target.

    They are a function of what stands before them, so every rule verifies them as chosen. A special token ends a branch.
    """

    def __init__(self, tree: Tree, seq: Sequence, reader: Reader, vocab: int) -> None:
        self.tree, self.seq, self.reader, self.vocab = tree, seq, reader, vocab

    def logits(self, logits_V: Tensor) -> Tensor:
        return logits_V[: self.vocab]

    def id(self, node: int) -> int:
        return self.tree.tokens[node]

    def draft(self) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        at: dict[tuple[int, int], int] = {}
        grown = self.tree.whole()
        for leaf in sorted(set(range(len(grown))) - set(grown.parents)):
            parent = -1
            for token, chance in self._rewritten(grown.path(leaf)):
                node = at.setdefault((parent, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    survival.append(chance)
                survival[node] = max(survival[node], chance)
                parent = node
        order = sorted(range(len(tokens)), key=lambda node: (-survival[node], node))
        draft = Draft(tuple(tokens), tuple(parents), (Drawn.CHOSEN,) * len(tokens), survival=tuple(survival))
        return draft.only(sorted(order[: self.tree.limit.nodes])).within(self.tree.limit)

    def learn(self, emitted: Seq[int]) -> None:
        """Follow the emitted text down the tree; where it ends inside a token, nothing is learnt of that."""
        text = b"".join(self.reader.write(token) for token in emitted)
        told: list[int] = []
        node, grown = -1, self.tree.whole()
        while text:
            below = {child: spelled(self.reader.draft, self.id(child)) for child in grown.children(node)}
            right = next((child for child, written in below.items() if written and text.startswith(written)), None)
            if right is None:
                if not any(written.startswith(text) for written in below.values()):
                    told.append(-1)
                break
            told.append(self.id(right))
            text = text[len(below[right]) :]
            node = right
        self.tree.learn(told)

    def _rewritten(self, path: Seq[int]) -> list[tuple[int, float]]:
        """The target's tokens along a path, each with the chance of the node that completes it."""
        text = b""
        ends: list[tuple[int, float]] = []
        last: list[tuple[int, float]] = []
        for node in path:
            id, chance = self.id(node), self.tree.survival[node]
            written = self.reader.draft.token_bytes(id)
            if written is None:
                to_target = self.reader.shared.to_target
                last = [(to_target[id], chance)] if id in to_target else []
                break
            text += written
            ends.append((len(text), chance))
        found: list[tuple[int, float]] = []
        place = 0
        for token in self.reader.rewrite(self.seq.tokens, text):
            if token >= self.reader.shared.target_vocab:
                return found
            place += len(spelled(self.reader.target, token))
            found.append((token, next((chance for end, chance in ends if end >= place), ends[-1][1])))
        return found + last
