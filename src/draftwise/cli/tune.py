"""draftwise tune: what of a model to skip when it drafts for itself, found by trying."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftwise.cli import options

if TYPE_CHECKING:
    from draftwise.engine.skip_search import Found


@click.command(
    epilog=options.examples(
        "draftwise tune skip --prompts prompts.jsonl --out smollm2-skip.json",
        "draftwise tune skip --model big.gguf --prompts prompts.jsonl --limit 8 --minutes 15 --out skip.json --json",
        "draftwise generate 'Hello' --drafter skip -o file=smollm2-skip.json      # then draft with what was found",
    )
)
@click.argument("drafter", type=click.Choice(["skip"]))
@click.option("--out", required=True, metavar="FILE.json", help="Where to write what was found.")
@click.option("--prompts", "prompts_file", metavar="FILE.jsonl",
              help="Prompts like those you will ask: a line each with `prompt` or `turns`.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", default=12, show_default=True,
              help="N prompts, spread evenly over the file.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", default=64, show_default=True,
              help="Tokens of each answer to judge by.")
@click.option("--minutes", type=click.FloatRange(min=0), metavar="N", default=5.0, show_default=True,
              help="How long to search at most.")
@options.target_options
@options.json_option
def command(
    drafter: str,
    out: str,
    prompts_file: str | None,
    limit: int,
    max_tokens: int,
    minutes: float,
    as_json: bool,
    **flags: Any,
) -> None:
    """Search for the parts of a model to skip.

    The model answers the prompts; then sets of layers, attentions and feed-forwards to leave out are tried, for the most
    tokens a second when the model so reduced drafts for the whole one. Every fourth answer is kept for the figures shown.
    """
    from draftwise.bench.workloads import read

    workload = read(prompts_file, limit=limit)
    folder = Path(out).absolute().parent
    if not folder.is_dir() or Path(out).is_dir():
        why = "it is a folder" if folder.is_dir() else f"there is no folder {folder}"
        raise ValueError(f"{out} cannot be written: {why}")

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from draftwise.cli.output import print_json
    from draftwise.engine.skip_search import find

    llm = options.load(flags, drafter="none", options={}, batch=min(len(workload.prompts), 8))
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    shown = sys.stderr.isatty() and not as_json
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("the model answers", total=minutes * 60)
        found = find(
            llm,
            [prompt.text for prompt in workload.prompts],
            max_tokens=max_tokens,
            raw=flags["raw"],
            seconds=minutes * 60,
            progress=lambda trials, best, seconds: bar.update(
                task, completed=seconds, description=f"{trials} sets tried, best {best.speedup:.2f}×"
            ),
        )
    about = {"model": flags["model"], "prompts": workload.path, **_figures(found)}
    found.trial.skip.save(out, llm.config, **about)
    if as_json:
        return print_json({"file": out, "skip": str(found.trial.skip), **about})
    trial = found.trial
    size = f"{len(trial.skip)} of {2 * llm.config.num_layers} parts"
    gain = f"{trial.tokens_per_step:.2f} tokens a pass, {trial.speedup:.2f}× the speed of plain decoding"
    click.echo(f"skip {trial.skip}: {size}; {found.trials} sets tried")
    click.echo(f"drafts of {trial.length}: {gain}")
    click.echo(f"written to {out}: --drafter skip -o file={out}")
    if trial.speedup <= 1:
        options.note("no set pays on this machine; with --draft-tokens auto such drafts are hardly asked for")


def _figures(found: Found) -> dict[str, Any]:
    trial = found.trial
    return {
        "draft_tokens": trial.length,
        "tokens_per_step": round(trial.tokens_per_step, 3),
        "speedup": round(trial.speedup, 3),
        "survival": [round(chance, 3) for chance in trial.survival],
        "trials": found.trials,
    }
