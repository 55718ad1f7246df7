"""The model card of a draft: what it is for, how it came about and what it is worth, as text for people.

Knows what a draft's configuration and `draftwise bench --json` say; what they leave out is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Seq
from typing import Any

from draftwise.train.served import TEMPERATURES

CARD = "README.md"


def model_card(config: Mapping[str, Any], *, license: str | None = None, results: Seq[Mapping[str, Any]] = ()) -> str:
    """Markdown with the metadata that model hubs read. config: of a draft in our own layout; results: benchmarks of it."""
    own: Mapping[str, Any] = config["draftwise"]
    card: Mapping[str, Any] = own.get("card") or {}
    kind, made = own["algorithm"], own["target"]
    model = card.get("model") or "its target"
    plan, trained, data = (card.get(name) or {} for name in ("plan", "trained", "data"))
    shape = f"{made['num_hidden_layers']} layers of {made['hidden_size']}, {made['vocab_size']} tokens"
    facts = {
        "target": f"{model}: {shape}, tokenizer `{made['tokenizer'][:12]}…`, embedding `{made['embedding'][:12]}…`",
        "weights": f"{own.get('quantize') or 'float32'}; the embedding, and a head that is borrowed, are the target's own",
        "command": card.get("command") and f"`{card['command']}`",
        "data": ", ".join(_data(card.get("prompts") or (), data)),
        "seed": plan.get("seed"),
        "training": trained and _trained(card),
        "begun with": "; before it, ".join(map(_begun, _earlier(card))),
        "version": card.get("version") and f"draftwise {card['version']}",
        "licence": license,
    }
    metadata = [f"license: {license}"] if license else []
    lines = [
        *("---", *metadata, "library_name: draftwise", f"tags: [speculative-decoding, {kind}]", "---", ""),
        *(f"# {kind} draft for {model}", ""),
        *("Foresees what the model says, so that it needs fewer passes; every token is still the model's own:", ""),
        *(f"`draftwise generate --model {model} --drafter {kind}:FOLDER`", ""),
        *_table(("", ""), [(name, fact) for name, fact in facts.items() if fact not in (None, "", {})]),
    ]
    if card.get("curve"):
        heads = [f"{what}, temperature {t:g}" for what in ("tokens a pass", "first token accepted") for t in TEMPERATURES]
        lines += ["", "## Curve", "", "Served while training, with drafts of 4 tokens, to prompts that were held out:", ""]
        lines += _table(("minutes", "updates", "rows", *heads), map(_point, card["curve"]))
    if results:
        heads = ["prompts", "temperature", "drafter", "tokens a pass", "accepted", "speed-up"]
        lines += ["", "## Results", "", "`draftwise bench`, against plain decoding; bounds of 95 % of resamples:", ""]
        lines += _table(heads, [row for result in results for row in _measured(result)])
        lines += ["", *dict.fromkeys(map(_machine, results))]
    return "\n".join(lines) + "\n"


def _trained(card: Mapping[str, Any]) -> str:
    """How long a draft was trained."""
    trained = card["trained"]
    return f"{trained['minutes']} minutes, {trained['update']} updates, {trained['rows']} rows"


def _earlier(card: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The cards of the drafts that this one began with, the last first."""
    while (card := card.get("start") or {}).get("trained"):
        yield card


def _begun(card: Mapping[str, Any]) -> str:
    """A draft that another began with, in words."""
    data = ", ".join(_data(card.get("prompts") or (), card.get("data") or {}))
    return f"a draft trained for {_trained(card)} on {data}"


def _point(row: Mapping[str, Any]) -> list[object]:
    """A row of the curve."""
    shares = [f"{value:.2f}" for value in (*row["served"], *row["first"])]
    return [f"{row['seconds'] / 60:.1f}", row["update"], row["rows"], *shares]


def _data(prompts: Iterable[Mapping[str, Any]], data: Mapping[str, Any]) -> Iterable[str]:
    """The answers that were learnt from, and the files of prompts that were answered."""
    if data:
        yield f"{data['answers']} answers of the model, {data['tokens']} tokens"
    for file in prompts:
        yield f"{file['count']} prompts of {file['file']} (SHA-256 `{file['sha256'][:12]}…`)"


def _measured(result: Mapping[str, Any]) -> Iterable[tuple[object, ...]]:
    """A row for each drafter of a benchmark."""
    prompts = result["prompts"]
    for run in result["runs"]:
        if run["drafter"] != "none":
            low, high = run["interval"]
            yield (
                f"{str(prompts['path']).rpartition('/')[2]}, {prompts['count']}",
                f"{run['temperature']:g}",
                ", ".join([part.partition(":")[0] for part in run["drafter"].split(",")] + _options(run)),
                f"{run['tokens_per_step']:.2f}",
                f"{run['acceptance_rate']:.0%}",
                f"{run['speedup']:.2f}× ({low:.2f}–{high:.2f})",
            )


def _options(run: Mapping[str, Any]) -> list[str]:
    """What a drafter of a benchmark was given."""
    return [f"{name}={value}" for name, value in (run.get("options") or {}).items()]


def _machine(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine.get('gpu') or machine['processor']}, threads: {machine['threads']}."


def _table(heads: Seq[object], rows: Iterable[Seq[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows)]
