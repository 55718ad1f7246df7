"""Prompt files: JSON lines read, checked and thinned out. Knows nothing of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Prompt(NamedTuple):
    """What to ask, and the kind of task it stands for."""

    text: str
    category: str = "all"


class Workload(NamedTuple):
    """Prompts with the file they came from and the SHA-256 of that whole file."""

    path: str
    sha256: str
    prompts: tuple[Prompt, ...]


def read(path: str | None = None, *, limit: int | None = None) -> Workload:
    """The prompts of a JSON lines file, or the set that comes with draftwise; `limit` of them, spread evenly.

    A line has `prompt` (text) or `turns` (a list of texts, of which the first is asked), and perhaps `category`.
    Raises ValueError, with the line's number, on a line that is not so, and on a file without prompts.
    """
    source = files("draftwise.bench") / "prompts.jsonl" if path is None else Path(path)
    content = source.read_bytes()
    name = path or "draftwise/bench/prompts.jsonl"
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text; give a file of JSON lines") from error
    prompts = [_prompt(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f'{name}: no prompts; give one a line, such as {{"prompt": "Hello"}}')
    return Workload(name, hashlib.sha256(content).hexdigest(), tuple(spread(prompts, limit)))


def spread(rows: Sequence[T], limit: int | None) -> list[T]:
    """`limit` rows spread evenly over all: rows i * len // limit."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // limit] for i in range(limit)]


def _prompt(line: str, where: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict) or not ("prompt" in row or "turns" in row):
        raise ValueError(f"{where}: has neither `prompt` nor `turns`")
    text = row["prompt"] if "prompt" in row else row["turns"][0] if isinstance(row["turns"], list) and row["turns"] else None
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: `prompt` must be a text, `turns` a list of texts, and neither empty")
    return Prompt(text, str(row.get("category", "all")))
