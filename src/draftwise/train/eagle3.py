"""EAGLE-3: three hidden states of the target at once, and outputs that need not look like any of them.

Source: Li et al. 2025, arXiv 2503.01840. Here the last of the three is the target's final hidden state unless told else, and
the head consists of the target's own rows, which learns faster on little data and makes a small file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwise.drafters.base import Target
from draftwise.train import eagle
from draftwise.train.data import Corpus
from draftwise.train.eagle import EagleLesson, build_lesson
from draftwise.types import Tap


@dataclass(frozen=True, slots=True)
class Options(eagle.Options):
    """Options of EAGLE-3 drafts."""

    taps: str = field(
        default="auto",
        metadata={"help": "layers whose inputs are read, such as 2,15,27, or final_norm; auto: middle, late and final"},
    )
    own_head: bool = field(default=False, metadata={"help": "learn a head instead of borrowing the target's rows"})


def build(options: Options, target: Target, corpus: Corpus) -> EagleLesson:
    """An untrained EAGLE-3 draft. Raises ValueError where taps are not of the target."""
    taps = parse_taps(options.taps, target.model.config.num_layers)
    return build_lesson("eagle3", taps, options, target, corpus, own_head=options.own_head)


def parse_taps(text: str, layers: int) -> tuple[Tap, ...]:
    """The taps that a user named: numbers of layers, each read at its input, or final_norm."""
    if text == "auto":
        return (layers // 2, max(layers - 1 - layers // 8, layers // 2), "final_norm")
    taps: list[Tap] = []
    for name in text.split(","):
        name = name.strip()
        if name != "final_norm" and not (name.isdecimal() and int(name) <= layers):
            raise ValueError(f"taps is {text!r}; each must be a number from 0 to {layers}, or final_norm")
        taps.append("final_norm" if name == "final_norm" else int(name))
    return tuple(taps)
