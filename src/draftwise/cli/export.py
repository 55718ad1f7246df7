"""draftwise export: a trained draft in small numbers, or in the layout of another engine."""

from __future__ import annotations

from pathlib import Path

import click

from draftwise.cli import options


@click.command(
    epilog=options.examples(
        "draftwise export eagle3:my-draft --model smollm2 --out small --quantize int8",
        "draftwise export eagle3:my-draft --model smollm2 --out for-vllm --layout speculators",
    )
)
@click.argument("draft", metavar="KIND:DIR")
@click.option("--model", default="smollm2", show_default=True, metavar="MODEL", help="The target that it was trained for.")
@click.option("--out", required=True, metavar="DIR", help="Where to write it.")
@click.option("--layout", default="draftwise", show_default=True, metavar="NAME",
              help="draftwise, or another engine's: eagle (SafeAILab), speculators (vLLM), medusa (FasterDecoding).")
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="Matrices in groups of integers.")
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@options.json_option
def command(
    draft: str, model: str, out: str, layout: str, quantize: str | None, revision: str | None, as_json: bool
) -> None:
    """Write a draft anew. KIND is the drafter that runs it, such as eagle3."""
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
    import draftwise

    llm = draftwise.load(model, revision=revision, context=64)
    module.export(Path(folder), Path(out), llm.target, layout=layout, quantize=quantize, name=model)
    options.note(f"the draft is in {out}")
    if as_json:
        print_json({"kind": kind, "draft": out, "layout": layout, "quantize": quantize})
