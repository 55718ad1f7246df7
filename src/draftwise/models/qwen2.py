"""Qwen 2 and 2.5: the Llama decoder with query, key and value biases."""

from draftwise.models.llama import build

__all__ = ["build"]
