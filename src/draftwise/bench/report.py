"""Benchmark figures as JSON and as tables. Knows what the figures are called; computes their ratios, and how sure these are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from draftwise.bench.machine import describe, versions
from draftwise.bench.run import pooled
from draftwise.bench.workloads import Workload

if TYPE_CHECKING:
    from draftwise import Stats
    from draftwise.bench.run import Run

DEPTHS = 4  # of conditional acceptance that a table has room for
RESAMPLES = 2000


def as_json(
    runs: Sequence[Run], workload: Workload, *, model: str, device: str, verify: str, temperature: float, batch: int
) -> dict[str, Any]:
    """The whole benchmark as one object; speed-ups are against runs[0], the interleaved plain control."""
    plain = runs[0]
    return {
        "model": model,
        "machine": describe(device),
        "versions": versions(),
        "prompts": {"path": workload.path, "sha256": workload.sha256, "count": len(workload.prompts)},
        "runs": [
            {
                "drafter": run.setting.drafter,
                "options": dict(run.setting.options),
                "verify": verify,
                "temperature": temperature,
                "batch": batch,
                **_figures(run, plain),
                "acceptance_rate": round(run.stats.acceptance_rate, 4),
                "conditional_acceptance": [round(rate, 4) for rate in run.stats.conditional_acceptance],
                "seconds": run.stats.as_dict()["seconds"],
                "by_category": {name: _figures(run, plain, name) for name in plain.categories},
            }
            for run in runs
        ],
    }


def _figures(run: Run, plain: Run, category: str | None = None) -> dict[str, Any]:
    """Of one category, or of all. interval: where 95 % of speed-ups lie over prompts drawn again (bootstrap)."""
    drafted, plainly = (list(one.by_prompt(category).values()) for one in (run, plain))
    stats, control = pooled(drafted), pooled(plainly)
    low, high = _interval(drafted, plainly)
    return {
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "speedup": round(_ratio(stats.tokens_per_second, control.tokens_per_second), 4),
        "interval": [round(low, 4), round(high, 4)],
        "tokens_per_step": round(stats.tokens_per_step, 4),
    }


def _interval(drafted: Sequence[Stats], plain: Sequence[Stats]) -> tuple[float, float]:
    """Of the ratio of speeds, as prompts vary: each resample takes as many prompts as there are, with both their runs."""
    places = np.random.default_rng(0).integers(len(plain), size=(RESAMPLES, len(plain)))

    def speeds(all_stats: Sequence[Stats]) -> Any:
        tokens = np.array([stats.emitted - stats.requests for stats in all_stats], float)
        seconds = np.array([stats.decode_seconds for stats in all_stats])
        return tokens[places].sum(1) / np.maximum(seconds[places].sum(1), 1e-12)

    control = speeds(plain)
    ratios = speeds(drafted)[control > 0] / control[control > 0]
    return tuple(np.percentile(ratios, (2.5, 97.5)).tolist()) if len(ratios) else (0.0, 0.0)


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


def tables(report: Mapping[str, Any]) -> list[Table]:
    """The object of `as_json` as two tables: the drafters, with tokens per pass, and their speed-ups by category.

    Where prompts can tell, the bounds of 95 % of the speed-ups of prompts drawn again stand behind them.
    """
    runs = report["runs"]
    deepest = max(len(run["conditional_acceptance"][:DEPTHS]) for run in runs)
    depths = [f"at {depth + 1}" for depth in range(deepest)]
    drafters = plain_table("drafter", "tokens/s", "speed-up", "per pass", "accepted", *depths)
    for run in runs:
        by_depth = [f"{rate:.0%}" for rate in run["conditional_acceptance"][:deepest]]
        drafters.add_row(
            run["drafter"],
            f"{run['tokens_per_second']:.1f}",
            f"{run['speedup']:.2f}×",
            f"{run['tokens_per_step']:.2f}",
            f"{run['acceptance_rate']:.0%}" if by_depth else "",
            *by_depth,
            *[""] * (deepest - len(by_depth)),
        )
    names = [run["drafter"] for run in runs[1:]]
    kinds = plain_table("category", "plain tokens/s", *names)
    for name, plain in runs[0]["by_category"].items():
        gains = [_gain(run["by_category"][name]) for run in runs[1:]]
        kinds.add_row(name, f"{plain['tokens_per_second']:.1f}", *gains)
    return [drafters, kinds]


def _gain(figures: Mapping[str, Any]) -> str:
    low, high = figures["interval"]
    return f"{figures['speedup']:.2f}×" + (f" ({low:.2f}–{high:.2f})" if high - low >= 0.005 else "")


def cost_table(cost: Mapping[str, Any]) -> Table:
    """The object of `cost.cost_table` as a table."""
    table = plain_table("rows", "ms a pass", "against 1 row", "ms a row")
    for rows, value in zip(cost["rows"], cost["milliseconds"], strict=True):
        table.add_row(str(rows), f"{value:.2f}", f"{value / cost['milliseconds'][0]:.2f}×", f"{value / rows:.2f}")
    return table


def plain_table(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", min_width=len(name), no_wrap=True)
    return table
