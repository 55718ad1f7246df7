"""draftwise predict: what speculation would gain, before anything is deployed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from draftwise.cli import options

if TYPE_CHECKING:
    from draftwise.bench.predict import Forecast, Roofline

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def rates(text: str) -> tuple[float, ...]:
    """Acceptance: one rate, or one for each depth between commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= rate <= 1 for rate in found):
        raise click.BadParameter(f"{text!r} is not one or more numbers between 0 and 1")
    return found


def size(text: str) -> float:
    """A number that may end in K, M, B or T, such as 1.5B."""
    scale = SUFFIXES.get(text[-1:].upper())
    try:
        found = float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise click.BadParameter(f"{text!r} is not a size such as 135M or 8B")
    return found


@click.command(
    epilog=options.examples(
        "draftwise predict --acceptance 0.7 --cost 0.1",
        "draftwise predict --acceptance 0.9,0.8,0.7 --cost 0.05 --length 4 --plot forecast.png",
        "draftwise predict --parameters 8B --bits 16 --bandwidth 4800 --arithmetic 990000     # an H200",
        "draftwise predict --parameters 1.5B --bits 4.5 --bandwidth 40 --arithmetic 870      # two CPU cores",
    )
)
@click.option("--acceptance", type=rates, metavar="RATE[,RATE…]", default="0.7", show_default=True,
              help="Chance that a drafted token is accepted; by depth if several, the last going on.")
@click.option("--cost", type=click.FloatRange(min=0), default=0.1, show_default=True,
              help="Time of one drafted token over that of a plain target pass; 0 for n-gram drafts.")
@click.option("--length", type=click.IntRange(0, 1000), help="The draft length you have in mind; default: the best one.")
@click.option("--parameters", type=size, metavar="SIZE", help="Weights of the target, such as 8B; adds the roofline of a pass.")
@click.option("--bits", type=click.FloatRange(min=0, min_open=True), default=16, show_default=True, help="Of a weight.")
@click.option("--bandwidth", type=click.FloatRange(min=0, min_open=True), default=40, show_default=True, help="Memory, GB/s.")
@click.option("--arithmetic", type=click.FloatRange(min=0, min_open=True), default=870, show_default=True, help="GFLOP/s.")
@click.option("--plot", metavar="FILE.png", help="Draw it too (needs the extra `plot`).")
@options.json_option
def command(
    acceptance: tuple[float, ...],
    cost: float,
    length: int | None,
    parameters: float | None,
    bits: float,
    bandwidth: float,
    arithmetic: float,
    plot: str | None,
    as_json: bool,
) -> None:
    """Forecast speed-ups by draft length.

    With --parameters, a pass costs what the machine's roofline says; without, a pass of many rows costs that of one.
    Speed-up is E / (γ c + t(γ + 1)), with E the expected tokens a pass and t the cost of a pass.
    """
    import math

    from draftwise.bench.predict import Roofline, best_length, flat, forecasts

    for name, value in (("cost", cost), ("bits", bits), ("bandwidth", bandwidth), ("arithmetic", arithmetic)):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be a finite number")
    roofline = None if parameters is None else Roofline(bandwidth * 1e9, arithmetic * 1e9, parameters, bits)
    pass_cost: Callable[[int], float] = flat if roofline is None else roofline.pass_cost
    best = best_length(acceptance, cost, pass_cost=pass_cost)
    chosen = best.length if length is None else length
    rows = list(forecasts(acceptance, cost, longest=max(best.length + 3, chosen, 8), pass_cost=pass_cost))
    if plot is not None:
        _draw(plot, rows, roofline)
    if as_json:
        from draftwise.cli.output import print_json

        return print_json(
            {
                "acceptance": list(acceptance),
                "cost": cost,
                "best_length": best.length,
                "best_speedup": best.speedup,
                "lengths": [row._asdict() for row in rows],
                "roofline": roofline
                and {
                    "break_even_rows": roofline.break_even,
                    "rows": list(ROWS),
                    "milliseconds": [roofline.seconds(n) * 1e3 for n in ROWS],
                },
            }
        )
    _show(rows, best.length, chosen, roofline)


def _show(rows: list[Forecast], best: int, chosen: int, roofline: Roofline | None) -> None:
    from draftwise.bench.report import plain_table
    from draftwise.cli.output import Terminal

    console = Terminal()
    table = plain_table("length", "tokens a pass", "all accepted", "speed-up", "")
    table.add_column("")
    highest = max(row.speedup for row in rows)
    for row in rows:
        mark = "best" if row.length == best else "yours" if row.length == chosen else ""
        table.add_row(
            str(row.length),
            f"{row.tokens_per_step:.3f}",
            f"{row.all_accepted:.1%}",
            f"{row.speedup:.2f}×",
            mark,
            "█" * round(24 * row.speedup / highest),
        )
    console.print(table)
    if best == 0:
        console.print("\nno draft length gains anything: a drafted token must be accepted more often than it costs")
    if roofline is None:
        return
    passes = plain_table("rows of a pass", "ms at least")
    passes.add_column("")
    slowest = roofline.seconds(ROWS[-1])
    for count in ROWS:
        seconds = roofline.seconds(count)
        passes.add_row(str(count), f"{seconds * 1e3:.3f}", "█" * max(round(24 * seconds / slowest), 1))
    console.print("", passes)
    console.print(f"\nrows cost nothing extra up to {roofline.break_even:.0f} a pass, all requests of a batch together")


def _draw(path: str, rows: list[Forecast], roofline: Roofline | None) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib; install it with: pip install 'draftwise[plot]'") from error

    figure = Figure(figsize=(5 if roofline is None else 10, 4), layout="constrained")
    panels = figure.subplots(1, 1 if roofline is None else 2, squeeze=False)[0]
    panels[0].plot([row.length for row in rows], [row.speedup for row in rows], marker="o", label="speed-up")
    panels[0].plot([row.length for row in rows], [row.tokens_per_step for row in rows], ls="--", label="tokens a pass")
    panels[0].axhline(1, color="grey", lw=0.8)
    panels[0].set(xlabel="draft length", ylim=(0, None))
    panels[0].legend()
    if roofline is not None:
        panels[1].loglog(ROWS, [roofline.seconds(n) * 1e3 for n in ROWS], marker="o")
        panels[1].axvline(roofline.break_even, color="grey", lw=0.8)
        panels[1].set(xlabel="rows of a pass", ylabel="milliseconds at least")
    figure.savefig(path, dpi=150)
    options.note(f"drawn to {path}")
