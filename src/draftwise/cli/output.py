"""What the commands print: streamed text with the drafted tokens in colour, and the line of figures after it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from draftwise import Event, Result

DRAFTED = "green"


def in_colour() -> bool:
    """True when the text goes to a terminal that may be coloured."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def stream(events: Iterator[Event]) -> Result:
    """Print a stream as it comes and return its result; leaving early cancels the request."""
    coloured = in_colour()
    result = None
    with closing(events) as source:  # type: ignore[type-var]  # a generator, which has close()
        for event in source:
            for piece in event.pieces:
                text = click.style(piece.text, fg=DRAFTED) if coloured and piece.drafted else piece.text
                click.echo(text, nl=False, color=coloured)
            result = event.result or result
    click.echo()
    assert result is not None
    return result


def figures(results: Sequence[Result], *, seed: int | None = None) -> None:
    """One line on standard error: how fast, how many tokens a pass, how much was accepted, who drafted, and by what seed."""
    from draftwise import LLM

    stats = LLM.pool(results)
    parts = [f"{stats.tokens_per_second:.1f} tokens/s", f"{stats.tokens_per_step:.2f} tokens a pass"]
    if stats.drafted:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens accepted")
    parts.append(f"drafter {results[0].drafter}")
    if seed is not None:
        parts.append(f"seed {seed}")
    if in_colour() and stats.accepted:
        parts.append(click.style("drafted and accepted tokens in this colour", fg=DRAFTED))
    click.echo(" · ".join(parts), err=True, color=in_colour() or None)


class Terminal(Console):
    """A console for which a reader that left is what it is for click."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))
