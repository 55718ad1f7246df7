"""How much memory a model takes and how much there is, so that a load that cannot end well does not start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwise.checkpoint.open import Checkpoint


def memory_needed(
    checkpoint: Checkpoint, weight_bits: float | None = None, *, cache_rows: int = 0, cache_bytes: int = 4
) -> int:
    """Bytes for the weights and a key/value cache of `cache_rows` rows of numbers of `cache_bytes` bytes.

    weight_bits: what a number of a matrix will take, scales included; None: what it takes in the file. A tied head counts
    once.
    """
    total = 0
    for name in checkpoint.names():
        size = checkpoint.shape(name)
        if weight_bits is None or len(size) < 2:
            total += checkpoint.nbytes(name)
        else:
            count = 1
            for side in size:
                count *= side
            total += int(count * weight_bits / 8)
    config = checkpoint.config
    return total + 2 * config.num_layers * config.num_kv_heads * config.head_dim * cache_rows * cache_bytes


def available_memory() -> int | None:
    """Bytes that can be allocated now: free memory of the machine, or of the container where that is less.

    None where neither can be told.
    """
    found = [amount for amount in (_machine(), _container()) if amount is not None]
    return min(found, default=None)


def check_memory(what: str, needed: int, available: int | None = None) -> None:
    """Raises ValueError with both numbers when `needed` bytes exceed `available` (None: this machine's)."""
    available = available_memory() if available is None else available
    if available is not None and needed > available:
        raise ValueError(
            f"{what} needs {needed / 1e9:.2f} GB of memory and {available / 1e9:.2f} GB are free; "
            "use fewer bits a weight, a shorter context or a smaller model"
        )


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group leaves; its page cache counts as free, as it does for the machine."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        reclaimable = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(reclaimable.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
