"""Chains that compiled code grows whole: they are those that grow level by level, and only where these could be."""

from __future__ import annotations

import pytest
import torch

import draftwise as dw
from draftwise.drafters import straight
from draftwise.drafters.eagle import EagleRunner
from draftwise.drafters.features import FEW, FeatureDrafter
from draftwise.drafters.trees import Trees
from draftwise.models.linear import WeightKind
from draftwise.sequence import Sequence
from draftwise.types import Limit, Outcome, Request, SamplingParams
from test_eagle_layouts import random_draft
from test_step_law import Silent
from tiny import tiny_checkpoint

PROMPT = tuple(range(5, 25))
KINDS = {
    "float32": WeightKind(torch.float32),
    "bfloat16": WeightKind(torch.bfloat16),
    "int8": WeightKind(torch.bfloat16, "int8"),
    "int4, rows as they are": WeightKind(torch.bfloat16, "int4", round_activations=False),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    target = tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)
    return dw.load(str(target), dtype="fp32", context=256)


class Run:
    """A drafter of made-up features, told of made-up tokens that follow its drafts for a while."""

    def __init__(self, llm, kind: WeightKind, *, whole: bool, trees: Trees, draft_vocab: int = 120, **changes) -> None:
        network = random_draft("eagle3", draft_vocab=draft_vocab, **changes)
        self.runner = EagleRunner(network, llm.target.model, vocab=300, kind=kind)
        self.calls = 0
        if self.runner.chain is not None and whole:
            chain = self.runner.chain

            def counted(*given):
                self.calls += 1
                return chain(*given)

            self.runner.chain = counted
        else:
            self.runner.chain = None
        self.drafter = FeatureDrafter(self.runner, context=256, max_batch=2, trees=trees)
        self.seqs: list[Sequence] = []

    def add(self, verify: str = "match", **params) -> Sequence:
        request = Request(prompt=PROMPT, params=SamplingParams(max_tokens=200, seed=7, **params), verify=verify)
        seq = Sequence(len(self.seqs), request, end_tokens=(), context=256, decoder=Silent())
        self.seqs.append(seq)
        seq.extend([3])
        self.observe(seq, PROMPT, (3,))
        return seq

    def observe(self, seq: Sequence, consumed, emitted) -> None:
        made = torch.Generator().manual_seed(len(seq.tokens))
        features = {tap: torch.randn(len(consumed), 64, generator=made) for tap in self.runner.taps}
        self.drafter.observe(seq, Outcome(consumed=tuple(consumed), emitted=tuple(emitted), features=features))

    def steps(self, limit: Limit, count: int) -> list:
        """What it drafts, step by step and sequence by sequence."""
        found = []
        for step in range(count):
            for seq, draft in zip(self.seqs, self.drafter.propose(self.seqs, [limit] * len(self.seqs)), strict=True):
                found.append((draft.tokens, draft.parents, draft.drawn, draft.survival or ()))
                accepted = list(draft.tokens[: step % 4])
                fed = [seq.tokens[-1], *accepted]
                seq.extend([*accepted, 30 + step])
                self.observe(seq, fed, [*accepted, 30 + step])
        return found


def same(found: list, wanted: list) -> bool:
    """But for how chances are rounded."""
    return found == [(*settled, pytest.approx(survival, rel=1e-4)) for *settled, survival in wanted]


@pytest.mark.parametrize(
    "limit", [Limit(6, 6), Limit(4, 6), Limit(1, 1), Limit(6, 6, 0.02, 0.05), Limit(6, 6, 0.3, 0.0)], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_chain_is_the_one_that_grows_level_by_level(llm, kind, temperature, limit, monkeypatch):
    monkeypatch.setattr(straight, "RENEWED", 0)  # as trees do it, which look up their chances each time
    runs = [Run(llm, KINDS[kind], whole=whole, trees=Trees(max_tokens=6)) for whole in (True, False)]
    for run in runs:
        run.add(temperature=temperature)
    whole, by_level = (run.steps(limit, 40) for run in runs)
    assert same(whole, by_level)
    assert runs[0].calls > 35 and any(tokens for tokens, *_ in whole)  # the first reads a prompt, which is more than FEW rows
    assert len(PROMPT) > FEW


@pytest.mark.parametrize("changes", [{"own_head": True}, {"draft_vocab": 300}], ids=str)
def test_heads_of_every_kind(llm, changes):
    trees = Trees(max_tokens=5, min_confidence=0.25)  # which ends some
    runs = [Run(llm, KINDS["bfloat16"], whole=whole, trees=trees, **changes) for whole in (True, False)]
    for run in runs:
        run.add(temperature=0)
    whole, by_level = (run.steps(Limit(5, 5), 30) for run in runs)
    assert same(whole, by_level) and runs[0].calls > 25
    assert len({len(tokens) for tokens, *_ in whole}) > 1, "confidence never ended a chain"


def test_a_tree_of_one_branch_is_a_chain(llm):
    trees = Trees(tree="dynamic", beam=1, max_nodes=3, max_tokens=6)
    runs = [Run(llm, KINDS["bfloat16"], whole=whole, trees=trees) for whole in (True, False)]
    for run in runs:
        run.add(temperature=0)
    whole, by_level = (run.steps(Limit(8, 8), 30) for run in runs)
    assert same(whole, by_level) and runs[0].calls > 25


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "logit_bias": {9: 5.0}},
        {"temperature": 0, "allowed_tokens": (5, 6, 7, 40)},
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 0.8, "verify": "rejection"},
    ],
    ids=str,
)
def test_requests_that_compiled_code_does_not_know_grow_level_by_level(llm, params):
    run = Run(llm, KINDS["bfloat16"], whole=True, trees=Trees(max_tokens=5))
    run.add(**params)
    assert any(tokens for tokens, *_ in run.steps(Limit(5, 5), 10))
    assert run.calls == 0


def test_several_requests_and_trees_grow_level_by_level(llm):
    runs = [Run(llm, KINDS["bfloat16"], whole=True, trees=Trees(tree=tree)) for tree in ("chain", "dynamic", "2,1")]
    for run in runs:
        run.add(temperature=0)
    runs[0].add(temperature=0)
    for run in runs:
        assert any(tokens for tokens, *_ in run.steps(Limit(5, 5), 10))
        assert run.calls == 0


def test_logits_without_meaning_end_a_chain(llm):
    run = Run(llm, KINDS["float32"], whole=True, trees=Trees(max_tokens=5))
    seq = run.add(temperature=0)
    run.steps(Limit(5, 5), 3)
    run.observe = lambda *_: None
    last = seq.tokens[-1]
    seq.extend([8])
    features = {tap: torch.full((1, 64), torch.nan) for tap in run.runner.taps}
    run.drafter.observe(seq, Outcome(consumed=(last,), emitted=(8,), features=features))
    calls = run.calls
    assert run.drafter.propose([seq], [Limit(5, 5)])[0].tokens == () and run.calls == calls + 1
