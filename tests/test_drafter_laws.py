"""Every drafter under the rules that draw: all its draws and the rule's, enumerated, have the law of the target.

Through the whole engine, on real arithmetic. Found by scanning the folder of drafters, so that a new one is covered by
existing.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from torch import Tensor

import draftwise as dw
from draftwise.sequence import Sequence
from laws import Chance, ExactNoise, law
from scanned import DRAFTERS, named
from tiny import tiny_checkpoint

TEXT = "ABCABCABACBAABC"
LETTERS = "ABC"


class Scripted(ExactNoise):
    """The noise of one step, the drafter's included, by enumeration of what floats say."""

    def target(self, row_V: Tensor, depth: int) -> int:
        return super().target(row_V.tolist(), depth)

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


@pytest.fixture(scope="module")
def asked(plain) -> dict:
    """Four of three letters, under a warper that looks back."""
    allowed = tuple(plain.encode(LETTERS, raw=True))
    return {"raw": True, "max_tokens": 4, "allowed_tokens": allowed, "temperature": 2.0, "frequency_penalty": 0.5}


@pytest.fixture(scope="module")
def expected(plain, asked) -> dict[tuple[int, ...], Fraction]:
    def experiment(chance: Chance) -> tuple[int, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sequence, "noise", lambda seq: Scripted(chance))
            return plain.generate(TEXT, **asked).tokens

    return law(experiment)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_keeps_the_law_of_the_target(plain, target, other, asked, expected, drafter, rule, monkeypatch):
    drafter = named(drafter, target, checkpoint=other, corpus=TEXT * 3)
    drafted = 0

    def experiment(chance: Chance) -> tuple[int, ...]:
        nonlocal drafted
        monkeypatch.setattr(Sequence, "noise", lambda seq: Scripted(chance))
        # built anew for every outcome, so that none remembers another
        result = plain.using(drafter).generate(TEXT, verify=rule, draft_tokens=2, **asked)
        drafted += result.stats.drafted
        return result.tokens

    found = law(experiment)
    assert found.keys() == expected.keys() and len(expected) == 3**4
    assert all(abs(found[tokens] - expected[tokens]) < 1e-6 for tokens in expected)
    assert drafted > 3**4
