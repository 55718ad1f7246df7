"""The GGUF container: metadata and a table of tensors in front, aligned data behind, all of it mapped, none of it copied.

Knows the container; knows nothing of models or tokenizers. The reader of the `gguf` package takes seconds over the
300,000 strings of a large vocabulary; here they are stepped over and decoded when asked for.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.checkpoint.blocks import KINDS, OTHER_KINDS, BlockKind, Quantized, unpack

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8"}
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's entry: its shape with the fastest axis last, its kind, and where its bytes are in its file."""

    name: str
    shape: tuple[int, ...]
    kind: BlockKind
    start: int
    file: _Part

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.size * self.kind.nbytes

    def read(self, rows: Tensor | None = None) -> Tensor | Quantized:
        """The tensor as stored, floats as a view of the file; `rows` puts its rows in another order first."""
        raw = self.file.data[self.start : self.start + self.nbytes].view(*self.shape[:-1], -1)
        if rows is not None:
            raw = raw.view(self.shape[0], -1)[rows].view(raw.shape)
        if self.kind.dtype is not None:
            return raw.view(self.kind.dtype)
        return unpack(self.kind, raw)


@dataclass(frozen=True)
class GGUFFile:
    """A parsed file, all its parts taken together. String arrays in `metadata` are StringArray, others numpy arrays."""

    path: Path
    parts: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class StringArray:
    """An array of strings inside the file, decoded each time it is iterated over."""

    def __init__(self, buffer: mmap.mmap, start: int, count: int) -> None:
        self._buffer, self._start, self._count = buffer, start, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        buffer, at = self._buffer, self._start
        for _ in range(self._count):
            end = at + 8 + _U64(buffer, at)[0]
            yield buffer[at + 8 : end].decode("utf-8", errors="replace")
            at = end


class _Part:
    """One file on disk; its bytes are mapped when first asked for, copy on write, so that nobody can change the file."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size

    @cached_property
    def data(self) -> Tensor:
        return torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8)


def read_gguf(path: Path) -> GGUFFile:
    """Parse the file, or every part of a split one (name-00001-of-00003.gguf; any part may be named).

    Raises ValueError for a file that is no GGUF, is cut short, lacks a part or holds a kind of block that is not read.
    """
    parts = _parts(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for part in parts:
        header, entries = _read_part(part)
        metadata = metadata or header  # the first part describes the whole
        tensors |= entries
    return GGUFFile(parts[0], parts, metadata, tensors)


def _parts(path: Path) -> tuple[Path, ...]:
    match = _SPLIT.search(path.name)
    if match is None:
        return (path,)
    stem, count = path.name[: match.start()], int(match[2])
    parts = tuple(path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{path}: part {missing[0]} of {count} is missing; put all parts in one folder")
    return parts


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    size = path.stat().st_size
    cut_short = ValueError(f"{path}: the file is cut short at {size:,} bytes; fetch it again")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file; give a .gguf file or a folder in Hugging Face format")
        if size < 24:
            raise cut_short
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    version, tensor_count, entry_count = struct.unpack_from("<IQQ", buffer, 4)
    if version not in (2, 3):
        order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise ValueError(f"{path}: a GGUF file of {order}; versions 2 and 3, little-endian, can be read")
    try:
        cursor = _Cursor(buffer, 24)
        metadata = {cursor.string(): cursor.value(cursor.u32()) for _ in range(entry_count)}
        table = [cursor.tensor() for _ in range(tensor_count)]
    except (struct.error, IndexError, OverflowError) as error:
        raise cut_short from error
    except LookupError as error:
        raise ValueError(f"{path}: damaged metadata ({error}); fetch the file again") from error
    alignment = int(metadata.get("general.alignment", 32))
    base = -(-cursor.at // alignment) * alignment
    part = _Part(path, size)
    tensors = {}
    for name, shape, number, offset in table:
        if number not in KINDS:
            kind_name = OTHER_KINDS.get(number, f"number {number}")
            choices = ", ".join(kind.name for kind in KINDS.values())
            raise ValueError(f"{path}: {name} is stored as {kind_name}, which is not read; kinds read: {choices}")
        kind = KINDS[number]
        if shape[-1] % kind.size:
            raise ValueError(f"{path}: {name} has rows of {shape[-1]}, no multiple of the {kind.size} of {kind.name}")
        tensors[name] = GGUFTensor(name, shape, kind, base + offset, part)
        if tensors[name].start + tensors[name].nbytes > size:
            raise cut_short
    return metadata, tensors


class _Cursor:
    """A place in the header that moves on with every value read."""

    def __init__(self, buffer: mmap.mmap, at: int) -> None:
        self.buffer, self.at = buffer, at

    def u32(self) -> int:
        self.at += 4
        return int(_U32(self.buffer, self.at - 4)[0])

    def u64(self) -> int:
        self.at += 8
        return int(_U64(self.buffer, self.at - 8)[0])

    def string(self) -> str:
        length = self.u64()
        text = self.buffer[self.at : self.at + length]
        if len(text) < length:
            raise IndexError
        self.at += length
        return text.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.u32(), self.u64())
        return self.numbers(kind, 1)[0].item()

    def array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            start, buffer, at = self.at, self.buffer, self.at
            for _ in range(count):  # hundreds of thousands, so no method calls
                at += 8 + _U64(buffer, at)[0]
            self.at = at
            return StringArray(buffer, start, count)
        if kind == _ARRAY:
            return [self.value(kind) for _ in range(count)]
        return self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _NUMBERS:
            raise LookupError(f"a value of unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        if self.at + count * dtype.itemsize > len(self.buffer):
            raise IndexError
        values: np.ndarray[Any, Any] = np.frombuffer(self.buffer, dtype, count, self.at).copy()
        self.at += count * dtype.itemsize
        return values

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        shape = tuple(self.u64() for _ in range(self.u32()))[::-1]
        return name, shape, self.u32(), self.u64()
