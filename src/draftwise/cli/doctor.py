"""draftwise doctor: what draftwise finds on this machine."""

from __future__ import annotations

import click

from draftwise.cli import options


@click.command(epilog=options.examples("draftwise doctor", "draftwise doctor --json"))
@options.json_option
def command(as_json: bool) -> None:
    """Say what there is to run on.

    Versions, processor, memory speed, threads, compiled kernels, cache folder, drafters, and the drafts that come along.
    """
    from draftwise.bench.cost import read_bandwidth
    from draftwise.bench.machine import describe, versions
    from draftwise.checkpoint import cache_dir
    from draftwise.cli.output import print_json
    from draftwise.drafters import drafter_names
    from draftwise.drafters.shipped import shipped_drafts

    machine = describe()
    facts = {
        "versions": versions(),
        "machine": machine | {"read_gb_per_s": round(read_bandwidth() / 1e9, 1)},
        "kernels": _kernels(),
        "cache": str(cache_dir()),
        "drafters": drafter_names(),
        "drafts": [f"{draft.target}/{draft.algorithm}" for draft in shipped_drafts()],
    }
    if as_json:
        return print_json(facts)
    for title, value in facts.items():
        if isinstance(value, dict):
            for name, item in value.items():
                click.echo(f"{name:<16}{' '.join(item) if isinstance(item, list) else item}")
        else:
            click.echo(f"{title:<16}{', '.join(value) or 'none' if isinstance(value, list) else value}")


def _kernels() -> str:
    """The instruction set whose compiled kernels are used, or why there are none. Compiles them where that is still to do."""
    from draftwise.kernels.loader import BuildError, instruction_sets, load

    best = instruction_sets()[0]
    try:
        load(best)
    except BuildError as error:
        return f"none, torch's are used instead: {error}"
    return best
