"""What drafters keep from run to run: arrays in one file, with the vocabulary that their tokens belong to."""

from __future__ import annotations

import os
import time
import weakref
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, "np.ndarray[Any, Any]"]

EVERY = 60.0
"""Seconds between two writes of a drafter at work."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of one kind of drafter. `vocabulary`: the tokenizer's fingerprint; `notice` is told when writing fails."""

    path: Path
    drafter: str
    vocabulary: str
    notice: Callable[[str], None]

    def read(self) -> Arrays | None:
        """What was written; None where there is no file yet. Raises ValueError on any other file, or vocabulary."""
        if not self.path.exists():
            if not self.path.absolute().parent.is_dir():
                raise ValueError(f"{self.path} cannot be kept: its folder does not exist; make it, or name another file")
            return None
        try:
            with self.path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            drafter, vocabulary = str(arrays.pop("drafter")), str(arrays.pop("vocabulary"))
        except (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile):
            raise ValueError(f"{self.path} is not a file that a drafter kept; name another file") from None
        if drafter != self.drafter:
            raise ValueError(f"{self.path} was kept by the drafter {drafter}, not by {self.drafter}; name another file")
        if vocabulary != self.vocabulary:
            raise ValueError(f"{self.path} was kept for a model of another vocabulary; name another file for this one")
        return arrays

    def write(self, arrays: Arrays) -> None:
        """Replace what was written, whole or not at all."""
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                named: dict[str, Any] = {"drafter": self.drafter, "vocabulary": self.vocabulary, **arrays}
                np.savez(file, **named)
            part.replace(self.path)
        except OSError as error:
            self.notice(f"{self.path} could not be written: {error.strerror or error}")


class Keeper:
    """Writes what `arrays` gives to a file: now and then, and once more when `owner` goes or the process ends.

    `arrays` must not hold on to `owner`.
    """

    def __init__(self, owner: object, file: KeptFile, arrays: Callable[[], Arrays]) -> None:
        self._file, self._arrays, self._written = file, arrays, time.monotonic()
        weakref.finalize(owner, self.write)

    def write(self) -> None:
        self._file.write(self._arrays())
        self._written = time.monotonic()

    def write_if_due(self) -> None:
        if time.monotonic() - self._written >= EVERY:
            self.write()
