"""Every drafter under the rules that draw: all its draws and the rule's, enumerated, have the law of the target.

Through the whole engine, on real arithmetic. Found by scanning the folder of drafters, so that a new one is covered by
existing.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import draftwise as dw
from draftwise.sequence import Sequence
from laws import Chance, ExactNoise, law
from scanned import DRAFTERS, named
from tiny import tiny_checkpoint

TEXT = "ABCABCABACBAABC"


class Scripted(ExactNoise):
    """The noise of one step, the drafter's included, by enumeration of what floats say."""

    def draw(self, weights_V: Tensor, depth: int) -> int:
        return super().draw(weights_V.tolist(), depth)

    def draft(self, q_V: Tensor, depth: int, *, parent: int = -1, candidate: int = 0, drafter: int = 0) -> int:
        self._once("draft", depth, parent, candidate, drafter)
        return self._chance.choose(q_V.tolist())

    def draft_distinct(self, q_V: Tensor, depth: int, count: int, *, parent: int = -1, drafter: int = 0) -> list[int]:
        self._once("draft", depth, parent, 0, drafter)
        left, found = q_V.tolist(), []
        while len(found) < count and any(left):
            found.append(self._chance.choose(left))
            left[found[-1]] = 0
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("other"), "llama", seed=1)


@pytest.fixture(scope="module")
def plain(target) -> dw.LLM:
    return dw.load(str(target), dtype="fp32", context=128)


@pytest.fixture(scope="module", params=["rejection", "block"])
def asked(plain, request) -> dict[str, Any]:
    """A few of these letters, under a warper that looks back: few enough that all outcomes together take a second."""
    letters, tokens = {"rejection": ("ABC", 3), "block": ("AB", 4)}[request.param]
    allowed = tuple(plain.encode(letters, raw=True))
    warpers = {"allowed_tokens": allowed, "temperature": 2.0, "frequency_penalty": 0.5}
    return {"raw": True, "verify": request.param, "max_tokens": tokens, **warpers}


def enumerated(llm: Callable[[], dw.LLM], asked: dict[str, Any]) -> tuple[dict[tuple[int, ...], Fraction], int]:
    """The law of the tokens that `llm()` says, and how many nodes were drafted in all."""
    drafted = 0

    def experiment(chance: Chance) -> tuple[int, ...]:
        nonlocal drafted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sequence, "noise", lambda seq: Scripted(chance))
            result = llm().generate(TEXT, **asked)
        drafted += result.stats.drafted
        return result.tokens

    return law(experiment), drafted


@pytest.fixture(scope="module")
def expected(plain, asked) -> dict[tuple[int, ...], Fraction]:
    return enumerated(lambda: plain, asked)[0]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_keeps_the_law_of_the_target(plain, target, other, asked, expected, drafter):
    drafter = named(drafter, target, checkpoint=other, corpus=TEXT * 3)
    # built anew for every outcome, so that none remembers another
    found, drafted = enumerated(lambda: plain.using(drafter, draft_tokens=3), asked)
    assert found.keys() == expected.keys()
    assert all(abs(found[tokens] - expected[tokens]) < 1e-6 for tokens in expected)
    assert drafted > 10
