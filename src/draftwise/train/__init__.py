"""Training of drafts for one's own model: its answers, what it computes on them, a loop, and a file for each kind of draft."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def draft_kinds() -> list[str]:
    """The kinds of draft that can be trained: the files here that define `build`."""
    files = (Path(folder) / f"{info.name}.py" for folder in __path__ for info in pkgutil.iter_modules([folder]))
    return sorted(file.stem for file in files if "\ndef build(" in file.read_text(encoding="utf-8"))


def find_kind(name: str) -> ModuleType:
    """The module of a kind of draft. Raises ValueError naming the choices."""
    if name not in draft_kinds():
        raise ValueError(f"unknown kind of draft {name!r}; choices: {', '.join(draft_kinds())}")
    return import_module(f"{__name__}.{name}")


def parse_kind_options(name: str, given: dict[str, str]) -> Any:
    """The Options of a kind from values as typed by a user. Raises ValueError naming what is wrong and the choices."""
    from draftwise.drafters import convert_options

    return convert_options(name, find_kind(name).Options, given)
