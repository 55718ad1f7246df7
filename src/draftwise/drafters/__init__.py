"""Drafters: one file a method, found by its file name; a dotted path "package.module" works for code outside."""

from __future__ import annotations

import pkgutil
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

AUTO = "auto"
"""The name that stands for drafters which suit the target; see shipped.py."""


class OptionInfo(NamedTuple):
    """An option of a drafter, as its file declares it."""

    name: str
    type: str
    default: Any
    help: str


def drafter_names() -> list[str]:
    """The drafters that ship with the package: the files here that define `build`; others hold what drafters share."""
    files = (Path(folder) / f"{info.name}.py" for folder in __path__ for info in pkgutil.iter_modules([folder]))
    return sorted(file.stem for file in files if "\ndef build(" in file.read_text(encoding="utf-8"))


def find_drafter(name: str) -> ModuleType:
    """The module of a drafter. Raises ValueError naming the choices."""
    if "." in name:
        try:
            module = import_module(name)
        except ImportError as error:
            raise ValueError(f"drafter {name!r} cannot be imported: {error}") from None
        if not hasattr(module, "build") or not hasattr(module, "Options"):
            raise ValueError(f"drafter {name!r} has no `Options` and `build`")
        return module
    if name == AUTO:
        raise ValueError("auto chooses drafters itself: it stands alone and takes no path; or name them, as in ngram,suffix")
    if name not in drafter_names():
        choices = ", ".join(drafter_names())
        raise ValueError(f"unknown drafter {name!r}; choices: {choices}, a dotted module path, or auto alone")
    return import_module(f"{__name__}.{name}")


def drafter_options(name: str) -> list[OptionInfo]:
    """The options of a drafter, in the order declared."""
    module = find_drafter(name)
    hints = typing.get_type_hints(module.Options)
    return [
        OptionInfo(
            item.name,
            _type_name(hints[item.name]),
            None if item.default is MISSING else item.default,
            item.metadata.get("help", ""),
        )
        for item in fields(module.Options)
    ]


def parse_options(name: str, given: Mapping[str, Any]) -> Any:
    """The drafter's Options from values as typed by a user. Raises ValueError naming what is wrong and the choices."""
    return convert_options(name, find_drafter(name).Options, given)


def convert_options(name: str, options: Any, given: Mapping[str, Any]) -> Any:
    """A dataclass of options from values as typed by a user. Raises ValueError naming what is wrong and the choices."""
    hints = typing.get_type_hints(options)
    values = {}
    for key, value in given.items():
        key = key.replace("-", "_")
        if key not in hints:
            raise ValueError(f"unknown option {key!r} for {name}; it has: {', '.join(hints) or 'none'}")
        values[key] = _convert(name, key, hints[key], value)
    return options(**values)


def drafter_labels(text: str) -> dict[str, str]:
    """The drafters of NAME[:PATH],… in order: their names by label, which is the name, numbered from 1 where it comes twice."""
    names = [part.strip().partition(":")[0] for part in text.split(",")]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return {f"{name}{count}" if names.count(name) > 1 else name: name for name, count in zip(names, counts, strict=True)}


class Chosen(NamedTuple):
    """One of the drafters that a user named, ready to be built."""

    name: str
    path: str | None
    options: Any


def parse_drafters(text: str, given: Mapping[str, Any]) -> list[Chosen]:
    """The drafters of NAME[:PATH],… with their options as typed by a user.

    KEY goes to the one drafter that has it, LABEL.KEY to the one of that label. Raises ValueError naming the choices.
    """
    labels = drafter_labels(text)
    if len(labels) > 1 and "none" in labels.values():
        raise ValueError(f"--drafter {text}: 'none' drafts nothing, so it cannot stand beside others; leave it out")
    own: dict[str, dict[str, Any]] = {label: {} for label in labels}
    has = {label: [option.name for option in drafter_options(name)] for label, name in labels.items()}
    for key, value in given.items():
        label, _, option = key.rpartition(".")
        option = option.replace("-", "_")
        if label and label not in own:
            raise ValueError(f"option {key!r} names no drafter here; there are: {', '.join(labels)}")
        owners = [label] if label else [label for label in labels if option in has[label]]
        if len(owners) > 1:
            choices = ", ".join(f"{label}.{option}" for label in owners)
            raise ValueError(f"option {option!r} is one of several drafters; say which: {choices}")
        if not owners and len(labels) > 1:
            choices = ", ".join(f"{label}.{option}" for label in labels for option in has[label])
            raise ValueError(f"unknown option {option!r} for {', '.join(labels)}; they have: {choices or 'none'}")
        own[owners[0] if owners else next(iter(labels))][option] = value
    paths = [part.strip().partition(":")[2] or None for part in text.split(",")]
    return [
        Chosen(name, path, parse_options(name, own[label]))
        for (label, name), path in zip(labels.items(), paths, strict=True)
    ]


def _convert(drafter: str, key: str, hint: Any, value: Any) -> Any:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not isinstance(value, str):
        return value
    if type(None) in members and value.lower() == "none":
        return None
    kind = next(member for member in members if member is not type(None))
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}[value.lower()]
        return kind(value)
    except (ValueError, KeyError):
        raise ValueError(f"option {key} of {drafter} is {value!r}; it must be {_type_name(hint)}") from None


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
