"""Drafters that try to break the engine: wrong, right, overlong, branching, at random. None may change one token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence as Seq

import torch

from draftwise.drafters.base import Drafter
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Drawn, Limit, Outcome


class RandomTree(Drafter):
    """Random trees over a small vocabulary, duplicate siblings included, some depths empty, longer than asked."""

    free = True
    max_depth = 6

    def __init__(self, vocab: int, seed: int = 0, oracle: Callable[[Seq[int]], int] | None = None) -> None:
        self.vocab, self.random, self.oracle = vocab, random.Random(seed), oracle
        self.seen: list[Outcome] = []

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._tree(seq) for seq in seqs]

    def _tree(self, seq: Sequence) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(self.random.choice([0, 1, 3, 6, 12])):
            parent = self.random.randrange(-1, node)
            path = []
            above = parent
            while above >= 0:
                path.append(tokens[above])
                above = parents[above]
            right = self.oracle([*seq.tokens, *path[::-1]]) if self.oracle else 0
            tokens.append(right if self.oracle and self.random.random() < 0.6 else self.random.randrange(self.vocab))
            parents.append(parent)
        return Draft(tuple(tokens), tuple(parents), (Drawn.CHOSEN,) * len(tokens)) if tokens else NO_DRAFT

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        self.seen.append(outcome)


class Oracle(Drafter):
    """Always right, from a plain run's tokens."""

    free = True
    max_depth = 16

    def __init__(self, answer: Seq[int], length: int) -> None:
        self.answer, self.length = list(answer), length

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            done = len(seq.tokens) - seq.prompt_length
            drafts.append(Draft.chain(self.answer[done : done + min(self.length, limit.depth, limit.nodes)]))
        return drafts


class Sampled(Drafter):
    """Chains and trees drawn from a q of its own that has little to do with the target, with holes in it."""

    free = True
    max_depth = 4

    def __init__(self, vocab: int, shape: str) -> None:
        self.vocab, self.shape = vocab, shape

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        return [self._draft(seq).within(limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _draft(self, seq: Sequence) -> Draft:
        generator = torch.Generator().manual_seed(len(seq.tokens))
        q = torch.rand(4, self.vocab, generator=generator) * (torch.rand(4, self.vocab, generator=generator) > 0.5)
        q = q / q.sum(-1, keepdim=True)
        noise = seq.noise()
        if self.shape == "chain":
            return Draft.chain([noise.draft(q[depth], depth) for depth in range(4)], Drawn.CHAIN, q=q)
        first = noise.draft_distinct(q[0], 0, 3)
        second = noise.draft_distinct(q[1], 1, 2, parent=0)
        tokens = (*first, *second)
        parents = (*(-1 for _ in first), *(0 for _ in second))
        rows = (*(0 for _ in first), *(1 for _ in second))
        return Draft(tokens, parents, (Drawn.WITHOUT_REPLACEMENT,) * len(tokens), q, rows)
