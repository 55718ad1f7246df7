"""Qwen 3: the Llama decoder with query and key norms."""

from draftwise.models.llama import build

__all__ = ["build"]
