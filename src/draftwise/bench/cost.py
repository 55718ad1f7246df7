"""What a target pass costs by its number of rows, beside the time the machine needs to read the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from draftwise import LLM

ROWS = (1, 2, 4, 8, 16, 32)
MOST_READ = 1_000_000_000  # bytes


def cost_table(
    llm: LLM, model: str, *, device: str = "cpu", context: int = 512, rows: Sequence[int] = ROWS, repeats: int = 15
) -> dict[str, Any]:
    """Median milliseconds of passes of 1 … 32 rows after `context` tokens, the head included, as a JSON object.

    floor_milliseconds: what merely reading as many bytes as weights and cache have takes, at read_gb_per_s. Memory is faster
    at one moment than at another, so reads and passes of one row take turns; read_share is the median of their ratios.
    """
    milliseconds = llm.cost(rows, context=context, repeats=repeats)
    size = llm.weight_bytes + context * llm.row_bytes
    data = _ones(min(size, MOST_READ), device)
    turns = [(llm.cost((1,), context=context, repeats=1)[0], _read(data) * size / data.nbytes * 1e3) for _ in range(repeats)]
    floor = median(read for _, read in turns)
    return {
        "model": model,
        "weights": llm.weights,
        "context": context,
        "rows": list(rows),
        "milliseconds": [round(value, 3) for value in milliseconds],
        "read_gb_per_s": round(size / floor / 1e6, 1),
        "floor_milliseconds": round(floor, 3),
        "read_share": round(median(read / one for one, read in turns), 3),
    }


def read_bandwidth(device: str = "cpu", *, repeats: int = 7) -> float:
    """Bytes a second that summing a large tensor reads, the best of some tries; measured beyond every cache."""
    data = _ones(MOST_READ // 2, device)
    return data.nbytes / min(_read(data) for _ in range(repeats))


def _ones(size: int, device: str) -> Tensor:
    import torch

    return torch.ones(size // 4, dtype=torch.float32, device=device)


def _read(data: Tensor) -> float:
    """Seconds that reading the tensor takes."""
    start = time.perf_counter()
    data.sum().item()
    return time.perf_counter() - start
