"""What a target pass costs by its number of rows, beside the time the machine needs to read the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwise import LLM

ROWS = (1, 2, 4, 8, 16, 32)


def cost_table(
    llm: LLM, model: str, *, device: str = "cpu", context: int = 512, rows: Sequence[int] = ROWS, repeats: int = 15
) -> dict[str, Any]:
    """Median milliseconds of passes of 1 … 32 rows after `context` tokens, the head included, as a JSON object.

    read_gb_per_s is measured on this machine; floor_milliseconds is what reading weights and cache once takes at that rate.
    """
    milliseconds = llm.cost(rows, context=context, repeats=repeats)
    bandwidth = read_bandwidth(device)
    read = llm.weight_bytes + context * llm.row_bytes
    return {
        "model": model,
        "weights": llm.weights,
        "context": context,
        "rows": list(rows),
        "milliseconds": [round(value, 3) for value in milliseconds],
        "read_gb_per_s": round(bandwidth / 1e9, 1),
        "floor_milliseconds": round(read / bandwidth * 1e3, 3),
    }


def read_bandwidth(device: str = "cpu", *, megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes a second that summing a large tensor reads, the best of some tries; measured beyond every cache."""
    import torch

    data = torch.ones(megabytes * 1_000_000 // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum().item()
        best = min(best, time.perf_counter() - start)
    return data.numel() * data.element_size() / best
