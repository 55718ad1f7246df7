"""What a step hands to the rules: rows with their own history, all of them warped, and drafts that drop no drawn token."""

from collections import Counter
from collections.abc import Iterable, Sequence as Seq

import pytest
import torch
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.drafters.model import ModelDrafter
from draftwise.drafters.trees import Trees
from draftwise.engine.step import decide, target_rows
from draftwise.sampling import History, distribution
from draftwise.sequence import Sequence
from draftwise.types import Batch, Draft, Drawn, Hidden, Limit, Request, SamplingParams, Tap
from laws import deviation

TARGET = torch.tensor([[0.2, 1.0, 0.1], [0.9, 0.3, 0.4], [0.5, 0.8, 1.1]])
OTHER = torch.tensor([[1.0, 0.2, 0.6], [0.1, 1.2, 0.4], [0.9, 0.1, 0.7]])


class Silent:
    """A decoder that shows nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TableModel:
    """A model whose logits depend on the last token alone: the row of a table."""

    def __init__(self, table_VV: Tensor) -> None:
        self.table_VV = table_VV

    def forward(self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = ()) -> Hidden:
        return Hidden(batch.tokens_N[:, None], {})

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table_VV[hidden[:, 0]]

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(layers=1, kv_heads=1, head_dim=1, capacity=capacity, dtype=torch.float32, device=torch.device("cpu"))


def sequence(
    params: SamplingParams, *, prompt: tuple[int, ...] = (0,), output: Seq[int] = (), verify: str = "match"
) -> Sequence:
    seq = Sequence(0, Request(prompt=prompt, params=params, verify=verify), end_tokens=(), context=64, decoder=Silent())
    seq.extend(output)
    return seq


def test_every_row_sees_its_own_path_and_is_warped_down_to_the_bonus_row() -> None:
    """A tree in which a node's path differs from the nodes before it; every warper on."""
    draft = Draft((1, 2, 0, 0, 1), (-1, -1, 0, 1, 3), (Drawn.CHOSEN,) * 5)
    paths = {-1: (), 0: (1,), 1: (2,), 2: (1, 0), 3: (2, 0), 4: (2, 0, 1)}
    params = SamplingParams(temperature=0.7, top_k=2, repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.3)
    seq = sequence(params, output=(2,))
    logits_NV = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    row = target_rows(logits_NV, seq, draft)
    for node, path in paths.items():
        expected = distribution(logits_NV[node + 1], params, History((0,), (2, *path)))
        assert torch.equal(row(node), expected)
        assert int((row(node) > 0).sum()) == 2


def law(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Of the first tokens after the prompt (0,), by the target alone."""
    found = {(): 1.0}
    for _ in range(length):
        found = {
            (*text, token): probability * p
            for text, probability in found.items()
            for token, p in enumerate(distribution(TARGET[(0, *text)[-1]], params, History((0,), text)).tolist())
            if p > 0
        }
    return found


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
def test_a_draft_model_and_the_rules_together_have_the_law_of_the_target(verify: str) -> None:
    """Three tokens under a history-dependent warper; a chain ends after, never before, a token of little confidence."""
    found: Counter[tuple[int, ...]] = Counter()
    drafted = 0
    for seed in range(1200):
        params = SamplingParams(
            temperature=0.8, top_p=0.9, repetition_penalty=1.4, frequency_penalty=0.5, seed=seed, max_tokens=9
        )
        seq = sequence(params, verify=verify)
        trees = Trees(max_tokens=2, min_confidence=0.4)
        drafter = ModelDrafter(TableModel(OTHER), vocab=3, context=64, max_batch=1, trees=trees)
        while len(seq.output) < 3:
            (draft,) = drafter.propose([seq], [Limit(2, 2)])
            drafted += len(draft)
            tokens = [seq.tokens[-1], *draft.tokens]
            path, token = decide(TARGET[tokens], seq, draft)
            seq.extend([*(draft.tokens[node] for node in path), token])
        found[tuple(seq.output[:3])] += 1
    assert drafted > 1500
    assert deviation(found, law(params, 3)) < 5


def test_a_token_of_little_confidence_ends_the_draft_and_stays_in_it() -> None:
    for verify in ("match", "rejection", "block"):
        drafter = ModelDrafter(TableModel(OTHER), vocab=3, context=64, max_batch=1, trees=Trees(min_confidence=1.0))
        seq = sequence(SamplingParams(temperature=1, seed=3), verify=verify)
        assert [len(draft) for draft in drafter.propose([seq], [Limit(4, 4)])] == [1]
