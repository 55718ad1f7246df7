"""The kernels for this machine's other instruction sets than the best: by default as written, in the lab as users get them."""

from __future__ import annotations

import ctypes
import functools
from unittest import mock

import pytest

from draftwise.kernels import loader


def compiled(instruction_set: str, *, optimised: bool) -> ctypes.CDLL:
    """Without optimisation the sources say the same and take seconds to compile instead of a minute."""
    flags = [flag for flag in loader._FLAGS if optimised or flag != "-O3"]
    with mock.patch.object(loader, "_FLAGS", flags):
        return loader.load(instruction_set)


OTHERS = [
    pytest.param(functools.partial(compiled, name, optimised=optimised), id=f"{name}, {what}", marks=marks)
    for name in loader.instruction_sets()[1:]
    for optimised, what, marks in ((False, "as written", ()), (True, "optimised", pytest.mark.lab))
]
"""Functions that give a library each, compiled on the first call."""
