"""The public names: this list is a promise, so it changes here and in the library together."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draftwise

ROOT = Path(__file__).parents[1]
NAMES = [
    "LLM", "Draft", "Drafter", "Drawn", "Event", "Limit", "Outcome", "Piece", "Request", "Result", "SamplingParams",
    "Sequence", "Stats", "TokenLogprob", "cache_dir", "drafter_names", "drafter_options", "load", "pull",
]  # fmt: skip


def test_the_list():
    assert sorted(draftwise.__all__) == sorted(NAMES)
    assert dir(draftwise) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_there_and_documented(name):
    assert (getattr(draftwise, name).__doc__ or "").strip()


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        draftwise.Scheduler  # noqa: B018


def test_importing_the_package_imports_no_torch():
    code = "import sys, draftwise; sys.exit('torch' in sys.modules)"
    source = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=source, check=False).returncode == 0


def test_one_version():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"', project, re.M) == [draftwise.__version__]
