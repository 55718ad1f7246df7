"""Tokenizers: text to ids and back, token by token, chats, and the comparison of vocabularies."""

from draftwise.tokenizer.load import load_tokenizer
from draftwise.tokenizer.tokenizer import TextDecoder, Tokenizer

__all__ = ["TextDecoder", "Tokenizer", "load_tokenizer"]
