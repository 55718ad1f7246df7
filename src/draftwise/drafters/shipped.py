"""Drafts that come with the package, and what `auto` stands for: prompt lookup, and the draft made for the target if any.

Knows folders and what drafts are made for; knows nothing of how they draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftwise.drafters import AUTO, Chosen, parse_drafters
from draftwise.drafters.base import DraftSource, Target
from draftwise.drafters.trained import kind_name, made_for, read_config, stored_kind
from draftwise.models.linear import WeightKind, make_linear

ROOT = Path(__file__).parents[1] / "drafts"
"""ROOT/TARGET/ALGORITHM/ is the folder of a draft, as `draftwise export` writes it."""
ALWAYS = "ngram"
"""What `auto` drafts with whatever the target."""
PREFERRED = ("eagle3",)
"""What `auto` takes where several drafts were made for a target."""
WIDTH = 64
"""Of the product that is tried before a draft is relied on."""


class Shipped(NamedTuple):
    """A draft that comes with the package."""

    folder: Path

    @property
    def target(self) -> str:
        """The name of the model that it was made for, for people."""
        return self.folder.parent.name

    @property
    def algorithm(self) -> str:
        """The drafter that runs it."""
        return self.folder.name

    def fits(self, target: Target) -> bool:
        """True where the draft was made for exactly this target: its sizes, tokenizer and embedding."""
        own = read_config(self.folder).get("draftwise") or {}
        return bool(own.get("target") == made_for(target))

    def kind(self, target: Target, source: DraftSource) -> WeightKind:
        """What its weights would be."""
        return source.kind(target, stored_kind(read_config(self.folder)))


def multiplies(kind: WeightKind, device: torch.device) -> bool:
    """True where the device has products with weights of this kind."""
    try:
        make_linear(torch.zeros(WIDTH, WIDTH), None, kind, device)(torch.zeros(1, WIDTH, dtype=kind.dtype, device=device))
    except RuntimeError:
        return False
    return True


def shipped_drafts() -> list[Shipped]:
    """All of them, by target, and of one target in the order of PREFERRED."""
    drafts = [Shipped(path.parent) for path in sorted(ROOT.glob("*/*/config.json"))]
    return sorted(drafts, key=lambda draft: (draft.target, draft.algorithm not in PREFERRED, draft.algorithm))


def auto_drafts() -> list[Shipped]:
    """Those that `auto` may choose: of each target the first."""
    return list({draft.target: draft for draft in reversed(shipped_drafts())}.values())[::-1]


def forms(text: str) -> list[str]:
    """What NAME[:PATH],… may stand for, which with `auto` depends on the target: the simplest form first."""
    if text.strip() != AUTO:
        return [text]
    return list(dict.fromkeys([ALWAYS, *(f"{ALWAYS},{draft.algorithm}" for draft in auto_drafts())]))


def check_drafters(text: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the choices, where no target can be given these drafters with these options."""
    *others, fullest = forms(text)
    for form in others:
        with suppress(ValueError):
            parse_drafters(form, given)
            return
    parse_drafters(fullest, given)


def choose_drafters(
    text: str, given: Mapping[str, Any], target: Target, source: Callable[[str], DraftSource]
) -> list[Chosen]:
    """The drafters of NAME[:PATH],… for a target, with their options as typed by a user; see parse_drafters.

    For `auto` the first draft that was made for the target comes after prompt lookup, and the user is told what was chosen.
    A trained drafter that is named without a path gets the draft that comes with the package, where there is one for the
    target. source: how the draft of a path is wanted.
    """
    if text.strip() != AUTO:
        return [_with_draft(chosen, target) for chosen in parse_drafters(text, given)]
    draft = next((draft for draft in auto_drafts() if draft.fits(target)), None)
    if draft is None:
        target.notice(f"drafter auto: {ALWAYS}; no draft that comes with draftwise was made for exactly these weights")
        return parse_drafters(ALWAYS, given)
    named = f"the {draft.algorithm} draft for {draft.target} that comes with draftwise"
    kind, device = draft.kind(target, source(str(draft.folder))), target.model.device
    if not multiplies(kind, device):
        target.notice(f"drafter auto: {ALWAYS}; {named} does not run on {device} with weights in {kind_name(kind)}")
        return parse_drafters(ALWAYS, given)
    target.notice(f"drafter auto: {ALWAYS}, and {named}")
    always, trained = parse_drafters(f"{ALWAYS},{draft.algorithm}", given)
    return [always, trained._replace(path=str(draft.folder))]


def _with_draft(chosen: Chosen, target: Target) -> Chosen:
    made = (draft for draft in shipped_drafts() if draft.algorithm == chosen.name and draft.fits(target))
    draft = None if chosen.path else next(made, None)
    return chosen if draft is None else chosen._replace(path=str(draft.folder))
