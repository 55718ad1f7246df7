"""draftwise generate: one prompt streamed, or a file of prompts as one batch."""

from __future__ import annotations

import secrets
import sys
from typing import Any

import click

from draftwise.cli import options


@click.command(
    epilog=options.examples(
        "draftwise generate 'Why is the sky blue?'",
        "draftwise generate 'Write a haiku.' --temperature 0.8 --seed 1 --drafter none",
        "draftwise generate --model big.gguf --drafter model:small.gguf --draft-tokens 4 - < prompt.txt",
        "draftwise generate --prompts questions.jsonl --limit 8 --batch 4 --json",
    )
)
@click.argument("prompt", required=False)
@options.prompts_options
@options.drafter_option
@options.model_options
@options.sampling_options
@options.json_option
@click.option("--help-drafter", metavar="NAME", help="Show the options of a drafter, and leave.")
def command(
    prompt: str | None,
    prompts_file: str | None,
    limit: int | None,
    batch: int,
    drafter: str,
    as_json: bool,
    help_drafter: str | None,
    **flags: Any,
) -> None:
    """Generate text for a prompt or a file of them.

    PROMPT may be - for standard input. A single prompt is streamed; those of a file are printed in their order.
    """
    if help_drafter is not None:
        return show_options(help_drafter)
    texts = _texts(prompt, prompts_file, limit)
    params = options.sampling_params(flags)
    if params["seed"] is None:
        params["seed"] = secrets.randbits(32)
    told = params["seed"] if params["temperature"] else None
    chosen = options.drafter_options(drafter, flags["options"])

    from draftwise.cli import output

    llm = options.load(flags, drafter=drafter, options=chosen, batch=batch)
    params |= options.bad_words(flags, llm)
    if prompts_file is None and not as_json:
        return output.figures([output.stream(llm.stream(texts[0], raw=flags["raw"], **params))], seed=told)
    results = []
    for start in range(0, len(texts), len(texts) if batch > 1 else 1):
        for result in llm.generate(texts[start:] if batch > 1 else texts[start : start + 1], raw=flags["raw"], **params):
            results.append(result)
            if as_json:
                output.print_json(result.as_dict() | {"seed": params["seed"]})
            else:
                click.echo(click.style(f"— {len(results)} of {len(texts)}", dim=True))
                click.echo(result.text)
    if not as_json:
        output.figures(results, seed=told)


def _texts(prompt: str | None, prompts_file: str | None, limit: int | None) -> list[str]:
    if (prompt is None) == (prompts_file is None):
        raise ValueError("give either a prompt (- for standard input) or --prompts FILE.jsonl")
    if prompts_file is not None:
        from draftwise.bench.workloads import read

        return [row.text for row in read(prompts_file, limit=limit).prompts]
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty; give some text")
    return [text]


def show_options(drafter: str) -> None:
    from draftwise.drafters import AUTO, drafter_options

    if drafter == AUTO:
        return show_auto()
    rows = drafter_options(drafter)
    click.echo(f"{drafter}: " + ("options for -o key=value" if rows else "no options"))
    for name, kind, default, text in rows:
        click.echo(f"  {name:<20} {kind:<8} default {default!s:<10} {text}")


def show_auto() -> None:
    from draftwise.drafters.shipped import ALWAYS, auto_drafts

    drafts = auto_drafts()
    click.echo(f"auto: {ALWAYS}, and with it the trained draft that comes with draftwise for exactly this model, if one does")
    click.echo(f"drafts for: {', '.join(f'{draft.target} ({draft.algorithm})' for draft in drafts) or 'no model yet'}")
    for drafter in dict.fromkeys([ALWAYS, *(draft.algorithm for draft in drafts)]):
        show_options(drafter)
