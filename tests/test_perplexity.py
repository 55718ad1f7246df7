"""What the kernels round is too little to change how well the model reads a page of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwise.checkpoint import open_checkpoint
from draftwise.models import load_model
from draftwise.models.linear import WeightKind
from draftwise.tokenizer import load_tokenizer
from passes import logits

PAGE = Path(__file__).parents[1] / "docs" / "lossless.md"
CPU = torch.device("cpu")


def perplexity(path: Path, kind: WeightKind, tokens: list[int]) -> float:
    rows = logits(load_model(open_checkpoint(path), kind, CPU), tokens)
    return float(torch.nn.functional.cross_entropy(rows[:-1].double(), torch.tensor(tokens[1:])).exp())


@pytest.mark.parametrize(
    "name",
    ["smollm2", *(pytest.param(name, marks=pytest.mark.lab) for name in ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"))],
)
def test_perplexity_is_that_of_the_dequantised_model(name, request):
    path = request.getfixturevalue("smollm2_path") if name == "smollm2" else request.getfixturevalue("lab_model")(name)
    tokens = load_tokenizer(open_checkpoint(path)).encode(PAGE.read_text())[:600]
    dequantised = perplexity(path, WeightKind(torch.bfloat16, keep_blocks=False, compiled=False), tokens)
    of_blocks = perplexity(path, WeightKind(torch.bfloat16), tokens)
    unrounded = perplexity(path, WeightKind(torch.bfloat16, round_activations=False), tokens)
    print(f"{name}: {of_blocks:.4f} of blocks, {unrounded:.4f} with float activations, {dequantised:.4f} dequantised")
    assert len(tokens) > 400 and 1 < dequantised < 1000
    assert of_blocks == pytest.approx(dequantised, rel=0.005)
    assert unrounded == pytest.approx(dequantised, rel=0.005)
