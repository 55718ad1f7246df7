"""Which parts of a model a draft leaves out: whole layers, their attention or their feed-forward alone; as text and as file.

Knows the numbers of layers; knows nothing of weights, passes or how a set is found.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise.types import ModelConfig

EXAMPLE = "10-20,25,a12,m3"
SHAPE = ("architecture", "num_layers", "hidden_size")
"""Of the model that a set was found for: a file is refused for any other."""


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Layers without attention and layers without feed-forward; a layer in both is left out whole."""

    attention: frozenset[int] = frozenset()
    feed_forward: frozenset[int] = frozenset()

    @staticmethod
    def parse(text: str) -> SkipSet:
        """From text such as "10-20,25,a12,m3": layers from 0, `a` for attention alone, `m` for feed-forward alone.

        Raises ValueError.
        """
        attention: set[int] = set()
        feed_forward: set[int] = set()
        for item in text.split(","):
            item = item.strip()
            kind = item[:1] if item[:1] in ("a", "m") else ""
            first, dash, last = item[len(kind) :].partition("-")
            if not (first.isdecimal() and (last.isdecimal() if dash else True)) or int(last or first) < int(first):
                raise ValueError(f"{item!r} is no layer or range of layers; write what to leave out as in {EXAMPLE}")
            layers = range(int(first), int(last or first) + 1)
            if kind != "m":
                attention.update(layers)
            if kind != "a":
                feed_forward.update(layers)
        return SkipSet(frozenset(attention), frozenset(feed_forward))

    def __str__(self) -> str:
        whole = self.attention & self.feed_forward
        return ",".join([*_ranges("", whole), *_ranges("a", self.attention - whole), *_ranges("m", self.feed_forward - whole)])

    def __len__(self) -> int:
        """Parts that are left out; a layer has two."""
        return len(self.attention) + len(self.feed_forward)

    def __or__(self, other: SkipSet) -> SkipSet:
        return SkipSet(self.attention | other.attention, self.feed_forward | other.feed_forward)

    def __xor__(self, other: SkipSet) -> SkipSet:
        return SkipSet(self.attention ^ other.attention, self.feed_forward ^ other.feed_forward)

    def kept(self, layers: int) -> tuple[frozenset[int], frozenset[int]]:
        """What stays of a model of so many layers, as Model.subset takes it. Raises ValueError where nothing does."""
        beyond = max((*self.attention, *self.feed_forward), default=0)
        if beyond >= layers:
            raise ValueError(f"layer {beyond} cannot be skipped: the model has layers 0 to {layers - 1}")
        if len(self) == 2 * layers:
            raise ValueError(f"skipping {self} leaves nothing of a model of {layers} layers; keep a part of one at least")
        every = frozenset(range(layers))
        return every - self.attention, every - self.feed_forward

    def save(self, path: str | Path, config: ModelConfig, **about: Any) -> None:
        """Write the set as JSON, with the model that it was found for and whatever else is `about` it."""
        shape = {name: getattr(config, name) for name in SHAPE}
        Path(path).write_text(json.dumps({"skip": str(self), **shape, **about}, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path, config: ModelConfig) -> SkipSet:
        """Read a saved set. Raises ValueError where the file is something else or was found for another model."""
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            found, shape = SkipSet.parse(saved["skip"]), {name: saved[name] for name in SHAPE}
        except OSError as error:
            raise ValueError(f"{path}: {(error.strerror or type(error).__name__).lower()}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} holds no set of layers to skip; make one with `draftwise tune skip`") from None
        for name, value in shape.items():
            if value != getattr(config, name):
                raise ValueError(
                    f"{path} was found for another model: its {name} is {value!r} and the target's is "
                    f"{getattr(config, name)!r}; make one for this model with `draftwise tune skip`"
                )
        return found


NOTHING = SkipSet()


def after(layers: int, exit_layer: int) -> SkipSet:
    """All that follows the first `exit_layer` layers."""
    rest = frozenset(range(exit_layer, layers))
    return SkipSet(rest, rest)


def parts(layers: int) -> list[SkipSet]:
    """Each single part of a model of so many layers."""
    single = [frozenset({layer}) for layer in range(layers)]
    return [*(SkipSet(attention=one) for one in single), *(SkipSet(feed_forward=one) for one in single)]


def _ranges(kind: str, layers: Collection[int]) -> Iterable[str]:
    for first in sorted(layers):
        if first - 1 not in layers:
            last = first
            while last + 1 in layers:
                last += 1
            yield f"{kind}{first}" if last == first else f"{kind}{first}-{last}"
