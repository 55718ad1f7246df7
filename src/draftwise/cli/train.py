"""draftwise train: from a model, and prompts if there are any, to a draft that --drafter loads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from draftwise.cli import options

DEFAULT_MINUTES = 20.0


@click.command(
    epilog=options.examples(
        "draftwise train eagle3 --model smollm2 --out my-draft --minutes 20",
        "draftwise train eagle3 --model my-model --prompts chats.jsonl --tokens 2000000 --minutes 120 --out my-draft",
        "draftwise train eagle3 --out my-draft --resume --minutes 120",
        "draftwise generate 'Why is the sky blue?' --drafter eagle3:my-draft",
    )
)
@click.argument("kind")
@click.option("--model", default="smollm2", show_default=True, metavar="MODEL",
              help="The target: a folder, a hub id, a .gguf file or an alias.")
@click.option("--out", required=True, metavar="DIR", help="Where the draft, its answers and its checkpoint go.")
@click.option("--prompts", "prompt_files", metavar="FILE.jsonl", multiple=True,
              help="Prompts to answer: a line each with `prompt` or `turns`; repeatable. Without any the model makes them up.")
@click.option("--answers", metavar="FILE.jsonl", help="Answers to learn from and add to; default: DIR/answers.jsonl.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), metavar="N",
              help=f"Time in all, answers included; default: {DEFAULT_MINUTES:g} where no other budget is given.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Answered tokens to learn from at most.")
@click.option("--updates", type=click.IntRange(min=1), metavar="N", help="Updates, whatever time they take.")
@click.option("--resume", is_flag=True, help="Go on from DIR's checkpoint.")
@click.option("-o", "pairs", type=options.pair, metavar="KEY=VALUE", multiple=True, help="An option of the kind; repeatable.")
@click.option("--rows", type=click.IntRange(min=1), default=1280, show_default=True, help="Answered tokens of an update.")
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), default=2e-3, show_default=True)
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--invented", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Prompts that the model makes up; default: a quarter, or all without --prompts.")
@click.option("--longer", type=click.FloatRange(0, 1), default=0.25, show_default=True, metavar="SHARE",
              help="Prompts made of earlier answers, to be summarised, translated, drawn on.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=384, show_default=True, help="Longest answer, in tokens.")
@click.option("--keep-features", type=click.FloatRange(min=0), default=0.0, show_default=True, metavar="GB",
              help="Memory for what the target computed, which the next epochs then need not compute again.")
@click.option("--every", type=click.FloatRange(min=0, min_open=True), default=4.0, show_default=True, metavar="MINUTES",
              help="How often the draft is served and measured.")
@click.option("--patience", type=click.IntRange(min=0), default=8, show_default=True, metavar="N",
              help="End after N measurements without progress; 0: never.")
@click.option("--batch", type=click.IntRange(min=1), default=32, show_default=True, help="Answers made at once.")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Convert the target's weights when loading.")
@click.option("--draft-quantize", type=click.Choice(["int8", "int4"]),
              help="What the draft's weights will be served in: it learns with weights rounded so.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="The target's number format.")
@click.option("--device", default="cpu", show_default=True, help="Where to train: cpu, cuda, cuda:1 …")
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--context", type=click.IntRange(min=1), default=2048, show_default=True, help="Longest prompt and answer.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads; default: torch's choice.")
@options.json_option
def command(kind: str, model: str, out: str, prompt_files: tuple[str, ...], as_json: bool, **flags: Any) -> None:
    """Train a draft of a KIND, such as eagle3, for a model.

    The model answers prompts with the engine; the draft learns to foresee it. The same command with --resume goes on after
    a stop. Start it with torchrun to train on several devices.
    """
    from draftwise.bench.workloads import read
    from draftwise.cli.output import print_json
    from draftwise.train import find_kind, parse_kind_options
    from draftwise.train.loop import Plan, train

    module, chosen = find_kind(kind), parse_kind_options(kind, dict(flags["pairs"]))
    minutes = flags["minutes"]
    if minutes is None and flags["updates"] is None:
        minutes = DEFAULT_MINUTES
    plan = Plan(
        minutes=minutes,
        tokens=flags["tokens"],
        updates=flags["updates"],
        rows=flags["rows"],
        learning_rate=flags["learning_rate"],
        precision=flags["precision"],
        seed=flags["seed"],
        max_answer=flags["max_tokens"],
        memory=int(flags["keep_features"] * 1e9),
        patience=flags["patience"],
        every=flags["every"],
        invented=flags["invented"],
        longer=flags["longer"],
        quantize=flags["draft_quantize"],
    )
    workloads = [read(path) for path in prompt_files]
    start = _earlier(kind, getattr(chosen, "start", ""))
    if flags["threads"] is not None:
        import torch

        torch.set_num_threads(flags["threads"])
    import draftwise

    llm = draftwise.load(
        model,
        dtype=flags["dtype"],
        quantize=flags["quantize"],
        device=_device(flags["device"]),
        revision=flags["revision"],
        max_batch=flags["batch"],
        context=min(flags["context"], _limit(model, flags["revision"])),
        notice=options.note,
    )
    card = {
        "command": f"draftwise {' '.join(sys.argv[1:])}",
        "kind": kind,
        "model": model,
        "prompts": [{"file": Path(w.path).name, "sha256": w.sha256, "count": len(w.prompts)} for w in workloads],
        "version": draftwise.__version__,
        "start": start,
    }
    with _Progress() as show:
        train(
            llm,
            lambda corpus: module.build(chosen, llm.target, corpus),
            Path(out),
            plan,
            prompts=[prompt.text for workload in workloads for prompt in workload.prompts],
            answers=Path(flags["answers"]) if flags["answers"] else None,
            resume=flags["resume"],
            card=card,
            report=show,
        )
    options.note(f"the draft is in {out}; use it with --drafter {kind}:{out}")
    if as_json:
        print_json({"kind": kind, "model": model, "draft": out, "served": show.served})


def _earlier(kind: str, folder: str) -> Mapping[str, Any] | None:
    """The card of the draft that training begins with, if it has one."""
    from draftwise.drafters.trained import check_algorithm, read_config

    if not folder:
        return None
    config = read_config(Path(folder))
    check_algorithm(Path(folder), config, kind)
    return (config.get("draftwise") or {}).get("card")


def _limit(model: str, revision: str | None) -> int:
    from draftwise.checkpoint import open_checkpoint

    return open_checkpoint(model, revision=revision).config.max_positions


def _device(name: str) -> str:
    """This process's own device under torchrun."""
    import os

    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and "LOCAL_RANK" in os.environ else name


class _Progress:
    """A bar with the time left and the loss, and a line for each measurement; lines alone where nobody watches."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.watched = sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self.watched)
        self.task = self.bar.add_task("starting", total=1.0)
        self.told = 0.0
        self.served: list[dict[str, float]] = []

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, figures: Mapping[str, Any]) -> None:
        import time

        phase = figures["phase"]
        if phase == "data":
            wanted = figures["wanted"]
            share = figures["tokens"] / wanted if wanted else 0.0
            text = f"answers: {figures['answers']}, {figures['tokens']} tokens"
        elif phase == "train":
            share = figures["progress"]
            text = f"update {figures['update']}, loss {figures['loss']:.3f}, {_time(figures['left'])} left"
        else:
            if phase == "served":
                greedy, sampled = figures["served"]
                seconds, rows = figures["seconds"], figures["rows"]
                self.served.append({"seconds": seconds, "rows": rows, "greedy": greedy, "temperature 0.8": sampled})
                options.note(
                    f"{_time(seconds)}, {rows} rows: served tokens a pass {greedy:.3f} greedy, {sampled:.3f} at temperature 0.8"
                )
            return
        self.bar.update(self.task, completed=min(share, 1.0), description=text)
        if not self.watched and time.monotonic() - self.told > 30:
            self.told = time.monotonic()
            options.note(text)


def _time(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
