"""draftwise: any causal language model faster by speculative decoding, with its output unchanged.

import draftwise as dw
llm = dw.load("smollm2", drafter="ngram")
print(llm.generate("Why is the sky blue?", max_tokens=64).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwise.checkpoint import cache_dir, pull
    from draftwise.drafters import drafter_names, drafter_options
    from draftwise.drafters.base import Drafter
    from draftwise.engine.llm import LLM, load
    from draftwise.sequence import Sequence
    from draftwise.types import (
        Draft,
        Drawn,
        Event,
        Limit,
        Outcome,
        Piece,
        Request,
        Result,
        SamplingParams,
        Stats,
        TokenLogprob,
    )

__version__ = "0.1.0"

_HOMES = {
    "draftwise.checkpoint": ("cache_dir", "pull"),
    "draftwise.drafters": ("drafter_names", "drafter_options"),
    "draftwise.drafters.base": ("Drafter",),
    "draftwise.engine.llm": ("LLM", "load"),
    "draftwise.sequence": ("Sequence",),
    "draftwise.types": (
        "Draft",
        "Drawn",
        "Event",
        "Limit",
        "Outcome",
        "Piece",
        "Request",
        "Result",
        "SamplingParams",
        "Stats",
        "TokenLogprob",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "Draft",
    "Drafter",
    "Drawn",
    "Event",
    "Limit",
    "Outcome",
    "Piece",
    "Request",
    "Result",
    "SamplingParams",
    "Sequence",
    "Stats",
    "TokenLogprob",
    "cache_dir",
    "drafter_names",
    "drafter_options",
    "load",
    "pull",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the package itself imports in no time."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
