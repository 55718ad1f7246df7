"""Hot code in C++, each piece beside its plain torch version in reference.py and held to it by a test."""

from draftwise.kernels.chain import Chained, ChainHead, ChainRule, Chances
from draftwise.kernels.decoder import Decoder, PackedAttention, PackedFeedForward, PackedLayer, unsupported
from draftwise.kernels.draw import arrivals, draw, largest, likeliest
from draftwise.kernels.loader import layout_key, library, version
from draftwise.kernels.packed import Packed, matmul, pack_dense, pack_int, pack_int4, pack_int8
from draftwise.kernels.store import PackedStore

__all__ = [
    "ChainHead",
    "ChainRule",
    "Chained",
    "Chances",
    "Decoder",
    "Packed",
    "PackedAttention",
    "PackedFeedForward",
    "PackedLayer",
    "PackedStore",
    "arrivals",
    "available",
    "draw",
    "largest",
    "layout_key",
    "likeliest",
    "matmul",
    "pack_dense",
    "pack_int",
    "pack_int4",
    "pack_int8",
    "unsupported",
    "version",
]


def available() -> bool:
    """True where the kernels are, or can be, compiled; the first call may take half a minute. Warns once where not."""
    return library() is not None
