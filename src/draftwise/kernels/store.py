"""Packed weights on disk: laid out for the kernels once, read back as they are afterwards.

One file holds a model's matrices one after another, and ends with an index. Knows bytes; knows nothing of models.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.kernels.loader import library
from draftwise.kernels.packed import Packed, WeightsStruct, memory

MAGIC = b"draftwise packed weights 2\n"
ALIGNMENT = 64  # a cache line
POINTERS = ("data", "row_scale", "row_minimum", "bias")


class PackedStore:
    """Matrices by name. Reads the file if it is whole; otherwise collects what is put and writes it in `save`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new: dict[str, Packed] = {}
        self._file: BufferedReader | None = None
        self._bytes: Tensor | None = None
        self._index: Mapping[str, Any] = {}
        try:
            self._file = open(path, "rb")
            self._index = _read_index(self._file)
        except (OSError, ValueError):
            self._index = {}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def get(self, name: str) -> Packed | None:
        """The matrix kept under `name`; all matrices share one piece of memory."""
        entry, lib = self._index.get(name), library()
        if entry is None or self._file is None or lib is None:
            return None
        if self._bytes is None:  # all of it at once: one piece of memory can have huge pages, many small ones cannot
            self._bytes = memory(self._file.seek(0, os.SEEK_END))
            self._file.seek(0)
            if self._file.readinto(self._bytes.numpy().data) != self._bytes.nbytes:
                raise ValueError(f"{self.path} cannot be read; delete it and it will be made again")
        struct = WeightsStruct.from_buffer_copy(bytes.fromhex(entry["struct"]))
        tensors = []
        for role, kind, size, offset in entry["tensors"]:
            dtype: torch.dtype = getattr(torch, kind)
            tensors.append(self._bytes[offset : offset + size * dtype.itemsize].view(dtype))
            setattr(struct, role, tensors[-1].data_ptr())
        return Packed(lib, struct, tuple(tensors))

    def put(self, name: str, packed: Packed) -> None:
        """Keep a matrix for `save`."""
        self._new[name] = packed

    def save(self) -> None:
        """Write what was put, if anything, in one go; a cache folder that cannot be written to is left alone."""
        if self._file is not None:
            self._file.close()
        if not self._new:
            return
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as file:
                file.write(MAGIC)
                index = {name: _write(file, packed) for name, packed in self._new.items()}
                start = file.tell()
                file.write(json.dumps(index).encode())
                file.write(start.to_bytes(8, "little"))
            part.replace(self.path)
        except OSError:
            part.unlink(missing_ok=True)
        finally:
            self._new.clear()


def _write(file: BufferedWriter, packed: Packed) -> dict[str, Any]:
    struct = WeightsStruct.from_buffer_copy(packed.struct)
    roles = {getattr(struct, role): role for role in POINTERS if getattr(struct, role)}
    tensors = []
    for tensor in packed.tensors:
        file.write(bytes(-file.tell() % ALIGNMENT))
        tensors.append((roles[tensor.data_ptr()], _kind(tensor), tensor.numel(), file.tell()))
        file.write(tensor.contiguous().view(torch.uint8).numpy().data)
    for role in POINTERS:
        setattr(struct, role, None)
    return {"struct": ctypes.string_at(ctypes.byref(struct), ctypes.sizeof(struct)).hex(), "tensors": tensors}


def _read_index(file: BufferedReader) -> Mapping[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("not a file of packed weights")
    end = file.seek(-8, os.SEEK_END)
    start = int.from_bytes(file.read(8), "little")
    file.seek(start)
    index: Mapping[str, Any] = json.loads(file.read(end - start))
    return index


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
