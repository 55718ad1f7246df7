"""What a way of drafting must offer. Knows sequences and limits; knows nothing of the engine that calls it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draftwise.types import Draft, Limit, Outcome, Tap


class Drafter:
    """Offers drafts and learns from what came of them. One object serves all requests of an engine."""

    taps: tuple[Tap, ...] = ()
    """Hidden states wanted in Outcome.features."""
    free = False
    """True when proposing costs no model pass."""
