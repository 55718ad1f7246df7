"""Several drafts of one request as one trie, verified in one pass (SpecInfer, Miao et al. 2023, arXiv 2305.09781).

Knows drafts and how their tokens were drawn; knows nothing of who made them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.types import NO_DRAFT, Draft, Drawn

SAMPLED = (Drawn.CHAIN, Drawn.WITH_REPLACEMENT, Drawn.WITHOUT_REPLACEMENT)


class Offer(NamedTuple):
    """A drafter's draft, its survivals given; `whole` where it may be taken or left, but not trimmed.

    place: the drafter's among the engine's.
    """

    draft: Draft
    whole: bool
    place: int = 0


class Merged(NamedTuple):
    """A trie of drafts. Its first `settled` nodes may not be left out; of the others any that have no child.

    sources: per node the places of the drafters that offer it; empty where there is one draft alone.
    """

    draft: Draft
    settled: int
    sources: list[tuple[int, ...]]


def weighed(draft: Draft, rule: str) -> bool:
    """True where `rule` weighs nodes by the q they were drawn from, so that none may be left out for its value."""
    return rule != "match" and any(drawn in SAMPLED for drawn in draft.drawn)


def merge(offers: Seq[Offer], rule: str) -> Merged:
    """One draft with all paths of the offers, equal paths joined where the rule allows it.

    Drafts drawn from q come first and are joined with nothing before them: each node has its own coin and row. A chosen
    token that equals one of theirs is left out, and its children hang below that one; this is exact since it would stand
    after it. Survival takes what drafts say of one place together, see `_agreed`.
    """
    offers = [offer for offer in offers if len(offer.draft)]
    offers.sort(key=lambda offer: (not weighed(offer.draft, rule), not offer.whole))
    if len(offers) < 2:
        draft = offers[0].draft if offers else NO_DRAFT
        return Merged(draft, len(draft) if offers and (offers[0].whole or weighed(draft, rule)) else 0, [])
    tokens: list[int] = []
    parents: list[int] = []
    drawn: list[Drawn] = []
    rows: list[int] = []
    sources: list[tuple[int, ...]] = []
    said: dict[int, list[_Saying]] = {}  # of each parent's children, draft by draft
    q: list[Tensor] = []
    at: dict[tuple[int, int], int] = {}  # the first node of a parent and token
    settled = 0
    for draft, whole, who in offers:
        alone = weighed(draft, rule)
        place = {-1: -1}
        assert draft.survival is not None
        sayings: dict[int, _Saying] = {}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            key = place[parent], token
            if key in at and not alone:
                place[node] = at[key]
                sources[at[key]] += (who,)
            else:
                place[node] = len(tokens)
                at.setdefault(key, len(tokens))
                tokens.append(token)
                parents.append(key[0])
                drawn.append(draft.drawn[node])
                sources.append((who,))
                rows.append(len(q) + draft.q_row[node] if alone and draft.q_row[node] >= 0 else -1)
            above = draft.survival[parent] if parent >= 0 else 1.0
            sayings.setdefault(key[0], {})[place[node]] = draft.survival[node] / above if above > 0 else 0.0
        for above_all, saying in sayings.items():
            said.setdefault(above_all, []).append(saying)
        if alone and draft.q is not None:
            q += draft.q.unbind()
        if alone or whole:
            settled = len(tokens)
    survival = [0.0] * len(tokens)
    for parent, sayings_of_all in said.items():  # parents stand before their children
        for node, chance in functools.reduce(_agreed, sayings_of_all).items():
            survival[node] = min(chance, 1.0) * (survival[parent] if parent >= 0 else 1.0)
    stacked, q_row = (torch.stack(q), tuple(rows)) if q else (None, ())
    return Merged(Draft(tuple(tokens), tuple(parents), tuple(drawn), stacked, q_row, tuple(survival)), settled, sources)


_Saying = dict[int, float]
"""Nodes with one parent, and how likely each is right once that one is."""


def _agreed(one: _Saying, other: _Saying) -> _Saying:
    """What two drafts say of one place together.

    Drafts that agree often err together, so a token that both offer is as likely as the surer of them says. One that a single
    draft offers is right where the other's are wrong. Only one token is right, so all these and none share what is left of 1.
    """
    neither_one, neither_other = (max(1 - sum(saying.values()), 0.0) for saying in (one, other))
    both = {node: max(one[node], other[node]) for node in one if node in other}
    apart = {node: chance * neither_other for node, chance in one.items() if node not in other}
    apart |= {node: chance * neither_one for node, chance in other.items() if node not in one}
    left, total = max(1 - sum(both.values()), 0.0), sum(apart.values()) + neither_one * neither_other
    return both | {node: left * weight / total if total > 0 else 0.0 for node, weight in apart.items()}
