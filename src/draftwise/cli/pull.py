"""draftwise pull: fetch a model into the cache."""

from __future__ import annotations

import click

from draftwise.cli import options


@click.command(epilog=options.examples("draftwise pull smollm2", "draftwise pull HuggingFaceTB/SmolLM2-135M-Instruct"))
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@options.json_option
def command(model: str, revision: str | None, as_json: bool) -> None:
    """Fetch a model into the cache.

    MODEL is a hub id or an alias. Prints where it lies; what is there already is checked and kept.
    """
    from draftwise.checkpoint import pull
    from draftwise.cli.output import print_json

    path = str(pull(model, revision=revision, progress=options.note))
    print_json({"model": model, "path": path}) if as_json else click.echo(path)
