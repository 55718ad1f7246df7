"""Mistral: the Llama decoder with a sliding window."""

from draftwise.models.llama import build

__all__ = ["build"]
