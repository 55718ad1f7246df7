"""Run the benchmarks of docs/benchmarks.json and write their tables into README.md and docs/benchmarks.md.

python scripts/benchmarks.py [--tables]      --tables: only write the tables, from the results that are stored
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORE = ROOT / "docs" / "benchmarks.json"
START, END = "<!-- table: written by scripts/benchmarks.py -->", "<!-- end of table -->"


def measure(command: str) -> dict[str, Any]:
    """The JSON that a `draftwise …` command prints. Exit code 1, outputs that differ, stops everything."""
    done = subprocess.run([sys.executable, "-m", *shlex.split(command), "--json"], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(entries: list[dict[str, Any]]) -> str:
    """One row for each drafter of each benchmark, and what was run on what."""
    heads = ["model", "prompts", "temperature", "drafter", "plain tokens/s", "tokens/s", "speed-up", "tokens a pass"]
    rows = []
    for entry in entries:
        plain, *runs = entry["result"].get("runs", [None])
        rows += [
            [
                entry["model"], entry["prompts"], f"{run['temperature']:g}", run["drafter"].partition(":")[0],
                f"{plain['tokens_per_second']:.1f}", f"{run['tokens_per_second']:.1f}", f"**{run['speedup']:.2f}×**",
                f"{run['tokens_per_step']:.2f}",
            ]
            for run in runs
        ]  # fmt: skip
    machines = {
        f"{machine['processor']}, {machine['threads']} threads"
        for machine in (entry["result"].get("machine") for entry in entries)
        if machine
    }
    return f"{table(heads, rows)}\n\n{'; '.join(sorted(machines))}. Every output equals plain decoding's, token for token."


def details(entries: list[dict[str, Any]]) -> str:
    """For each benchmark its command, and its figures by category or by rows."""
    parts = []
    for entry in entries:
        result = entry["result"]
        parts.append(f"### {entry['model']}, {entry['prompts']}\n\n`{entry['command']}`")
        if "runs" in result:
            plain, *runs = result["runs"]
            heads = ["category", "plain tokens/s", *(run["drafter"].partition(":")[0] for run in runs)]
            parts.append(
                table(
                    heads,
                    [
                        [name, f"{figures['tokens_per_second']:.1f}"]
                        + [f"{run['by_category'][name]['speedup']:.2f}×" for run in runs]
                        for name, figures in plain["by_category"].items()
                    ],
                )
            )
            for run in runs:
                rates = ", ".join(f"{rate:.0%}" for rate in run["conditional_acceptance"][:8])
                parts.append(f"{run['drafter'].partition(':')[0]}: {run['acceptance_rate']:.0%} accepted; by depth {rates}.")
            parts.append(f"Prompts: {result['prompts']['count']}, file SHA-256 `{result['prompts']['sha256'][:16]}…`")
        else:
            heads = ["rows of a pass", *map(str, result["rows"])]
            parts.append(table(heads, [["ms", *(f"{value:.1f}" for value in result["milliseconds"])]]))
            parts.append(
                f"{result['weights']}, after {result['context']} tokens; merely reading weights and cache takes "
                f"{result['floor_milliseconds']:.1f} ms ({result['read_gb_per_s']} GB/s)."
            )
    return "\n\n".join(parts)


def replaced(text: str, block: str) -> str:
    """The document with the block between its marks exchanged."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert rest and after, "the document has lost its marks"
    return f"{before}{START}\n{block}\n{END}{after}"


def documents(entries: list[dict[str, Any]]) -> dict[Path, str]:
    """What README.md and docs/benchmarks.md should say about what has been measured."""
    measured = [entry for entry in entries if entry["result"]]
    block = summary(measured) if measured else "Nothing has been measured yet."
    blocks = {ROOT / "README.md": block, ROOT / "docs" / "benchmarks.md": details(measured)}
    return {path: replaced(path.read_text(encoding="utf-8"), block) for path, block in blocks.items()}


def main(arguments: list[str]) -> None:
    entries = json.loads(STORE.read_text(encoding="utf-8"))
    if "--tables" not in arguments:
        for entry in entries:
            print(entry["command"], flush=True)
            entry["result"] = measure(entry["command"])
            STORE.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for path, text in documents(entries).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
