"""Every drafter in the folder, with what it takes to build it for a tiny model: a new one is covered by existing."""

from __future__ import annotations

import functools
from pathlib import Path

import draftwise as dw
from tiny import tiny_draft

DRAFTERS = [name for name in dw.drafter_names() if name != "none"]


@functools.cache
def named(drafter: str, target: Path, *, checkpoint: Path, corpus: str) -> str:
    """The drafter as `load` takes it: with `checkpoint`, a file of `corpus` or a draft trained for `target` if it needs one."""
    try:
        dw.load(str(target), drafter=drafter, context=64)
        return drafter
    except ValueError as error:
        (need,) = [need for need in ("needs a checkpoint", "needs a text", "needs a draft") if need in str(error)]
    if need == "needs a checkpoint":
        return f"{drafter}:{checkpoint}"
    path = target.with_name(f"{target.name}-{drafter}")
    if need == "needs a text":
        path.write_text(corpus, encoding="utf-8")
    else:
        tiny_draft(path, target, drafter)
    return f"{drafter}:{path}"
