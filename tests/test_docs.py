"""The documents say what the program does: tables match their stored results, and every command shown can be parsed."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from draftwise.cli import COMMANDS, group

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def benchmarks_script():
    spec = importlib.util.spec_from_file_location("benchmarks_script", ROOT / "scripts" / "benchmarks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_match_the_stored_results():
    script = benchmarks_script()
    for path, text in script.documents(json.loads(script.STORE.read_text(encoding="utf-8"))).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run scripts/benchmarks.py --tables"


def shown_commands() -> list[str]:
    blocks = [block for path in DOCUMENTS for block in re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), re.S)]
    lines = [line.partition(" #")[0].strip() for line in "\n".join(blocks).splitlines() if line.startswith("draftwise ")]
    lines += [entry["command"] for entry in json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))]
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None and command.epilog is not None, f"{name} shows no example"
        shown = [line.partition(" #")[0].strip() for line in command.epilog.splitlines()]
        lines += [line for line in shown if line.startswith("draftwise ")]
    return sorted(set(lines))


@pytest.mark.parametrize("line", shown_commands())
def test_every_command_shown_can_be_parsed(line):
    _, name, *arguments = shlex.split(re.split(r" [<>|] ", line)[0])
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"no command {name}"
    command.make_context(name, arguments)
