"""Fixtures shared by the tests: the real models, where they are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

LAB_MODELS = {  # repository on the hub, file
    "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
    "qwen2.5-coder-0.5b": ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
}


def pytest_configure(config: pytest.Config) -> None:
    import torch

    # tiny models gain nothing from a second thread, and on a busy machine threads that wait for each other crawl
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "lab: needs the large lab models or much time; run by `make test-lab`")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file in the project's cache; fetched on first use."""
    from draftwise.checkpoint import pull

    return pull("smollm2")


@pytest.fixture(scope="session")
def lab_model() -> Callable[[str], Path]:
    """lab_model(name): the path of a large model. A missing one fails the test: a lab run that skips proves nothing."""

    def find(name: str) -> Path:
        folder = Path(os.environ.get("DRAFTWISE_LAB") or Path.home() / ".cache" / "lab-models")
        repository, file = LAB_MODELS[name]
        path = folder / file
        if not path.is_file():
            fetch = f"hf download {repository} {file} --local-dir {folder}"
            pytest.fail(f"{path} is missing; run `{fetch}`, or set DRAFTWISE_LAB to its folder", pytrace=False)
        return path

    return find
