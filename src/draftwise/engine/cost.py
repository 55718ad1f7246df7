"""What a target pass of n rows takes on this machine: measured once, kept on disk, read by the governor."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

import torch

from draftwise.engine.passes import CostTable
from draftwise.kernels import version
from draftwise.models.base import Model
from draftwise.types import Feed

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@torch.inference_mode()
def measure(
    model: Model,
    rows: Seq[int],
    *,
    context: int,
    repeats: int,
    pick: Callable[[Seq[float]], float] = statistics.median,
) -> list[float]:
    """Seconds of a pass of n rows, head included, after `context` committed rows; sizes take turns, `pick` chooses.

    The committed rows hold zeros: time does not depend on values.
    """
    cache = model.new_cache(context + max(rows) + 16)
    slot = cache.alloc()
    while cache.length(slot) < context:
        count = min(512, context - cache.length(slot))
        cache.pack([Feed.chain(slot, [0] * count)])
        cache.commit(slot, range(count))
    times: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(repeats + 1):  # the first round warms up
        for count in rows:
            started = time.perf_counter()
            batch = cache.pack([Feed.chain(slot, list(range(1, count + 1)))])
            logits = model.logits(model.forward(batch, cache).final)
            logits[-1, 0].item()  # waits for the device
            times[count].append(time.perf_counter() - started)
            cache.discard(slot)
    return [pick(times[count][1:]) for count in rows]


def cost_table(model: Model, folder: Path, *, fingerprint: str, context: int = 256) -> CostTable:
    """t(n) of this model on this machine, measured on the first call and read from `folder` afterwards."""
    machine = [str(model.device), torch.__version__, torch.get_num_threads(), os.cpu_count(), _processor()]
    kernels = [version(), *sorted({kernel for kernel, *_ in model.row_report})]
    what = [fingerprint, model.weights, kernels, context, *machine]
    path = folder / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]}.json"
    try:
        kept = json.loads(path.read_text())
        return CostTable(kept["rows"], kept["seconds"])
    except (OSError, ValueError, KeyError):
        pass
    # the least of several: what is kept must not be what a busy moment made of it
    seconds = measure(model, ROWS, context=context, repeats=7, pick=min)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"rows": ROWS, "seconds": seconds}))
        part.replace(path)
    except OSError:
        pass  # a read-only cache folder: measured again next time
    return CostTable(ROWS, seconds)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
