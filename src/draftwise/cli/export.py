"""draftwise export: a trained draft in small numbers, or in the layout of another engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from draftwise.cli import options

OWN = "draftwise"


@click.command(
    epilog=options.examples(
        "draftwise export eagle3:my-draft --model smollm2 --out small --quantize int8",
        "draftwise export eagle3:my-draft --out small --quantize int8 --license apache-2.0 --results bench.json",
        "draftwise export eagle3:my-draft --model smollm2 --out for-vllm --layout speculators",
    )
)
@click.argument("draft", metavar="KIND:DIR")
@click.option("--model", default="smollm2", show_default=True, metavar="MODEL", help="The target that it was trained for.")
@click.option("--out", required=True, metavar="DIR", help="Where to write it.")
@click.option("--layout", default=OWN, show_default=True, metavar="NAME",
              help="draftwise, or another engine's: eagle (SafeAILab), speculators (vLLM), medusa (FasterDecoding).")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Matrices in groups of integers.")
@click.option("--license", metavar="NAME", help="The licence that the model card names, such as apache-2.0.")
@click.option("--results", metavar="FILE.json", multiple=True,
              help="What `bench --json` printed of this draft, for the model card; repeatable.")
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@options.json_option
def command(
    draft: str,
    model: str,
    out: str,
    layout: str,
    quantize: str | None,
    license: str | None,
    results: tuple[str, ...],
    revision: str | None,
    as_json: bool,
) -> None:
    """Write a draft anew. KIND is the drafter that runs it, such as eagle3.

    In draftwise's own layout a model card, README.md, says how the draft came about.
    """
    from draftwise.cli.output import print_json
    from draftwise.drafters import find_drafter

    kind, colon, folder = draft.partition(":")
    module = find_drafter(kind)
    if not colon or not folder:
        raise ValueError(f"{draft!r} is not of the form KIND:DIR, such as eagle3:my-draft")
    if not hasattr(module, "export"):
        raise ValueError(f"drafts of {kind} cannot be exported")
    if Path(out).exists() and any(Path(out).iterdir()):
        raise ValueError(f"{out}: is not empty; give another folder")
    if layout != OWN and (license or results):
        raise ValueError(f"--license and --results are for the model card, which goes with the {OWN} layout")
    measured = _benchmarks(results)
    import draftwise
    from draftwise.drafters.trained import read_config
    from draftwise.train.card import CARD, model_card

    llm = draftwise.load(model, revision=revision, context=64, notice=options.note)
    module.export(Path(folder), Path(out), llm.target, layout=layout, quantize=quantize, name=model)
    if layout == OWN:
        card = model_card(read_config(Path(out)), license=license, results=measured)
        (Path(out) / CARD).write_text(card, encoding="utf-8")
    options.note(f"the draft is in {out}")
    if as_json:
        print_json({"kind": kind, "draft": out, "layout": layout, "quantize": quantize})


def _benchmarks(paths: Sequence[str]) -> list[dict[str, Any]]:
    """What `draftwise bench --json` printed to each of these files."""
    found = []
    for path in paths:
        try:
            result = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError:
            result = None
        if not isinstance(result, dict) or "runs" not in result:
            raise ValueError(f"{path}: is not what `draftwise bench --json` prints")
        found.append(result)
    return found
