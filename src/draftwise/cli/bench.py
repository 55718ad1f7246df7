"""draftwise bench: drafters side by side with plain decoding, or the cost of a pass by its rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from draftwise.cli import options


@click.command(
    epilog=options.examples(
        "draftwise bench --drafters ngram --limit 6 --max-tokens 64",
        "draftwise bench --model big.gguf --drafters ngram,model:small.gguf,ngram+model:small.gguf --temperature 1",
        "draftwise bench --prompts questions.jsonl --batch 4 --json > bench.json",
        "draftwise bench --cost --cost-context 2048",
    )
)
@click.option("--drafters", default="ngram", show_default=True, metavar="A,B,…",
              help="Drafters to compare, NAME[:PATH] each; + joins those that draft together.")
@options.prompts_options
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="How often to go over the prompts.")
@click.option("--journal", metavar="FILE", help="Keep every answer there, and go on from it after a cut.")
@click.option("--cost", is_flag=True, help="Measure passes of 1, 2, 4, 8, 16 and 32 rows instead.")
@click.option("--cost-context", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens before those rows.")
@options.model_options
@options.sampling_options
@options.json_option
def command(
    drafters: str,
    prompts_file: str | None,
    limit: int | None,
    batch: int,
    repeat: int,
    journal: str | None,
    cost: bool,
    cost_context: int,
    as_json: bool,
    **flags: Any,
) -> int | None:
    """Measure drafters against plain decoding.

    They are interleaved prompt by prompt, and their outputs compared.
    Without --prompts, twelve prompts that come with draftwise are used. -o KEY=VALUE goes to each drafter that has KEY.
    Speed is that of a request while decoding, its first token left out.
    """
    if cost:
        _cost(flags, cost_context, as_json)
        return None

    from draftwise.bench.workloads import read

    workload = read(prompts_file, limit=limit)
    params = options.sampling_params(flags) | {"seed": flags["seed"] or 0}
    chosen = _settings(drafters, flags["options"])

    from rich.console import Console
    from rich.progress import Progress

    from draftwise.bench import report
    from draftwise.bench.run import Journal, Setting, first_difference, side_by_side
    from draftwise.cli.output import Terminal, print_json

    drafting = {name: flags[name] for name in ("draft_tokens", "draft_dtype", "draft_quantize")}
    kept = None
    if journal:
        what = {"prompts": workload.sha256, "count": len(workload.prompts), "batch": batch, "drafters": chosen, **drafting}
        what |= {name: flags[name] for name in ("model", "verify", "quantize", "dtype", "activations", "raw")}
        kept = Journal(Path(journal), what | {"params": repr(sorted(params.items()))})

    llm = options.load(flags, drafter="none", options={}, batch=batch)
    params |= options.bad_words(flags, llm)
    groups = -(-len(workload.prompts) // batch)
    with Progress(console=Console(stderr=True), transient=True, disable=as_json or not sys.stderr.isatty()) as bar:
        task = bar.add_task("decoding", total=groups * repeat * (1 + len(chosen)))
        runs = side_by_side(
            llm,
            [Setting(*setting) for setting in chosen],
            workload.prompts,
            batch=batch,
            repeat=repeat,
            drafting=drafting,
            journal=kept,
            progress=lambda: bar.advance(task),
            raw=flags["raw"],
            **params,
        )
    outcome = report.as_json(
        runs,
        workload,
        model=flags["model"],
        device=flags["device"],
        verify=flags["verify"],
        temperature=flags["temperature"],
        batch=batch,
    )
    if as_json:
        print_json(outcome)
    else:
        console = Terminal()
        size = f"{len(workload.prompts)} prompts, {flags['max_tokens']} tokens each at most"
        console.print(f"{flags['model']} ({llm.weights}), {size}\n")
        for table in report.tables(outcome):
            console.print(table, "")
    if flags["verify"] != "match":
        options.note(f"{flags['verify']} promises the same distribution, not the same tokens; outputs were not compared")
        return None
    different = first_difference(runs)
    if different is None:
        count = len(runs[0].answers)
        options.note(f"every output is the same as with plain decoding, token for token ({count} outputs a drafter)")
        return None
    options.note(
        f"{different.drafter} differs from plain decoding: prompt {different.prompt + 1}, "
        f"token {different.position + 1}: {_said(llm, different.drafted)} instead of {_said(llm, different.plain)}"
    )
    return 1


def _cost(flags: dict[str, Any], context: int, as_json: bool) -> None:
    from draftwise.bench import report
    from draftwise.bench.cost import cost_table
    from draftwise.cli.output import Terminal, print_json

    llm = options.load(flags, drafter="none", options={})
    most = llm.engine.context - 32
    if context > most:
        raise ValueError(f"--cost-context is {context}; at most {most} tokens and 32 rows fit in the context of {most + 32}")
    cost = cost_table(llm, flags["model"], device=flags["device"], context=context)
    if as_json:
        return print_json(cost)
    console = Terminal()
    console.print(f"{cost['model']} ({cost['weights']}), passes after {context} tokens\n", report.cost_table(cost), "")
    console.print(
        f"merely reading the bytes of weights and cache takes {cost['floor_milliseconds']:.2f} ms "
        f"({cost['read_gb_per_s']} GB/s), {cost['read_share']:.0%} of a pass of one row"
    )


def _settings(drafters: str, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, dict[str, str]]]:
    """The drafters, each with those of the options that it has; an option that none has is an error."""
    from draftwise.drafters import drafter_labels, drafter_options
    from draftwise.drafters.shipped import forms

    names = [name.replace("+", ",") for name in drafters.split(",") if name]
    if not names:
        raise ValueError("no drafter given; name one or more, as in --drafters ngram,suffix")
    chosen, known, used = [], set(), set()
    for name in names:
        labels = {label: drafter for form in forms(name) for label, drafter in drafter_labels(form).items()}
        has = {(label, option) for label, drafter in labels.items() for option, *_ in drafter_options(drafter)}
        has |= {("", option) for _, option in has}
        mine = [(key, value) for key, value in pairs if _label_and_option(key) in has]
        chosen.append((name, options.drafter_options(name, mine)))
        known |= {option for _, option in has}
        used |= {key for key, _ in mine}
    for key, _ in pairs:
        if key not in used:
            raise ValueError(f"unknown option {key!r} for {drafters}; they have: {', '.join(sorted(known)) or 'none'}")
    return chosen


def _label_and_option(key: str) -> tuple[str, str]:
    label, _, option = key.rpartition(".")
    return label, option.replace("-", "_")


def _said(llm: Any, token: int | None) -> str:
    return "the end" if token is None else f"token {token} {llm.tokenizer.decode([token])!r}"
