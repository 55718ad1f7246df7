"""Checkpoints: a folder, hub id, GGUF file or alias in; a config and weights by their Hugging Face names out."""

from draftwise.checkpoint.blocks import Quantized
from draftwise.checkpoint.hub import ALIASES, cache_dir, pull
from draftwise.checkpoint.memory import available_memory, check_memory, memory_needed
from draftwise.checkpoint.open import Checkpoint, open_checkpoint

__all__ = [
    "ALIASES",
    "Checkpoint",
    "Quantized",
    "available_memory",
    "cache_dir",
    "check_memory",
    "memory_needed",
    "open_checkpoint",
    "pull",
]
