"""Several drafts of one request as one trie, verified in one pass (SpecInfer, Miao et al. 2023, arXiv 2305.09781).

Knows drafts and how their tokens were drawn; knows nothing of who made them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.types import NO_DRAFT, Draft, Drawn

SAMPLED = (Drawn.CHAIN, Drawn.WITH_REPLACEMENT, Drawn.WITHOUT_REPLACEMENT)


class Offer(NamedTuple):
    """A drafter's draft, its survivals given; `whole` where it may be taken or left, but not trimmed."""

    draft: Draft
    whole: bool


class Merged(NamedTuple):
    """A trie of drafts. Its first `settled` nodes may not be left out; of the others any that have no child."""

    draft: Draft
    settled: int


def weighed(draft: Draft, rule: str) -> bool:
    """True where `rule` weighs nodes by the q they were drawn from, so that none may be left out for its value."""
    return rule != "match" and any(drawn in SAMPLED for drawn in draft.drawn)


def merge(offers: Seq[Offer], rule: str) -> Merged:
    """One draft with all paths of the offers, equal paths joined where the rule allows it.

    Drafts drawn from q come first and are joined with nothing before them: each node has its own coin and row. A chosen
    token that equals one of theirs is left out, and its children hang below that one; this is exact since it would stand
    after it. Where drafts agree, survival is the chance that one of them is right, as if they erred independently.
    """
    offers = [offer for offer in offers if len(offer.draft)]
    offers.sort(key=lambda offer: (not weighed(offer.draft, rule), not offer.whole))
    if len(offers) < 2:
        draft = offers[0].draft if offers else NO_DRAFT
        return Merged(draft, len(draft) if offers and (offers[0].whole or weighed(draft, rule)) else 0)
    tokens: list[int] = []
    parents: list[int] = []
    drawn: list[Drawn] = []
    rows: list[int] = []
    survival: list[float] = []
    q: list[Tensor] = []
    at: dict[tuple[int, int], int] = {}  # the first node of a parent and token
    settled = 0
    for draft, whole in offers:
        alone = weighed(draft, rule)
        place = {-1: -1}
        assert draft.survival is not None
        for node, (token, chance) in enumerate(zip(draft.tokens, draft.survival, strict=True)):
            key = place[draft.parents[node]], token
            if key in at and not alone:
                place[node] = at[key]
                survival[at[key]] = 1 - (1 - survival[at[key]]) * (1 - chance)
                continue
            place[node] = len(tokens)
            at.setdefault(key, len(tokens))
            tokens.append(token)
            parents.append(key[0])
            drawn.append(draft.drawn[node])
            rows.append(len(q) + draft.q_row[node] if alone and draft.q_row[node] >= 0 else -1)
            survival.append(chance)
        if alone and draft.q is not None:
            q += draft.q.unbind()
        if alone or whole:
            settled = len(tokens)
    for node, parent in enumerate(parents):
        if parent >= 0:
            survival[node] = min(survival[node], survival[parent])
    stacked, q_row = (torch.stack(q), tuple(rows)) if q else (None, ())
    return Merged(Draft(tuple(tokens), tuple(parents), tuple(drawn), stacked, q_row, tuple(survival)), settled)
