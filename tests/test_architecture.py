"""Imports point down: the table of docs/architecture.md, held by reading every file's imports without running it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "draftwise"

LAYERS = [
    {"types"},
    {"sampling", "cache", "checkpoint", "tokenizer", "kernels"},
    {"verify", "models", "sequence"},
    {"drafters"},
    {"engine"},
    {"train"},
]
SIDEWAYS = {
    ("tokenizer", "checkpoint"),  # a tokenizer lies in the checkpoint's files
    ("kernels", "checkpoint"),  # compiled kernels lie in the cache folder
    ("kernels", "cache"),  # the fused decoder writes and reads the pool
    ("sampling", "kernels"),  # a draw goes through the whole vocabulary
}
PUBLIC_ONLY = {"bench", "server"}  # these see what any user sees
EDGE = {"__init__", "__main__", "cli"}  # the public names and the command line reach everything, but lazily


class Import(NamedTuple):
    """An import in `part` of the package; `target` is a part, or "" for the public names; lazy: not run on import."""

    part: str
    target: str
    lazy: bool
    where: str


def imports() -> Iterator[Import]:
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node, lazy in _imports_of(tree, lazy=False):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert isinstance(node, ast.Import) or node.level == 0, f"{path}:{node.lineno} is a relative import"
            for name in names:
                package, _, rest = name.partition(".")
                where = f"{path.relative_to(SOURCE)}:{node.lineno} imports {name}"
                if package == "draftwise":
                    yield Import(part, rest.partition(".")[0], lazy, where)
                elif package in ("torch", "transformers", "numpy", "gguf"):
                    yield Import(part, package, lazy, where)


def _imports_of(node: ast.AST, *, lazy: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        checking = isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING"
        yield from _imports_of(child, lazy=lazy or inside or checking)


FOUND = list(imports())
PARTS = sorted({path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")})


def layer(part: str) -> int | None:
    return next((depth for depth, parts in enumerate(LAYERS) if part in parts), None)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_its_place(part):
    assert layer(part) is not None or part in PUBLIC_ONLY | EDGE, f"{part} is not in the table; give it a layer"


def test_layers_import_only_from_below():
    wrong = [
        found.where
        for found in FOUND
        if (own := layer(found.part)) is not None
        and found.target not in ("torch", "transformers", "numpy", "gguf", found.part)
        and (found.part, found.target) not in SIDEWAYS
        and ((other := layer(found.target)) is None or other >= own)
    ]
    assert not wrong


def test_benchmarks_and_server_see_only_the_public_names():
    wrong = [
        found.where
        for found in FOUND
        if found.part in PUBLIC_ONLY and found.target not in ("", "torch", "transformers", "numpy", found.part)
    ]
    assert not wrong


def test_nothing_but_the_edge_imports_the_command_line():
    assert not [found.where for found in FOUND if found.target == "cli" and found.part not in EDGE]


def test_the_edge_imports_lazily():
    wrong = [
        found.where for found in FOUND if found.part in EDGE and not found.lazy and found.target not in ("cli", "")
    ]
    assert not wrong


def test_a_drafter_never_sees_the_engine_and_a_model_never_a_drafter():
    assert not [found.where for found in FOUND if found.part == "drafters" and found.target == "engine"]
    assert not [found.where for found in FOUND if found.part == "models" and found.target in ("drafters", "engine")]
