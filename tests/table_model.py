"""A model without arithmetic: its logits are a pure function of all tokens a row may see, read back from the cache.

Any mistake in staging, masks, positions or commits changes the tokens, and a run takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from draftwise.cache import KVCache
from draftwise.drafters import find_drafter, parse_options
from draftwise.drafters.base import Drafter, Target
from draftwise.engine.engine import Engine
from draftwise.engine.governor import Governor
from draftwise.engine.passes import FLAT, CostTable
from draftwise.types import Batch, Hidden, ModelConfig, Tap


class TableModel:
    """Each distribution is drawn from a generator seeded with the tokens seen; `memory` of them, the last ones, count.

    A short memory makes texts repeat, so that prompt lookup has something to find. `skew` above 0 gives a model that
    often agrees with the one of skew 0: a draft for it.
    """

    def __init__(
        self, vocab: int = 24, *, memory: int = 2, skew: float = 0.0, peak: float = 3.0, positions: int = 4096
    ) -> None:
        self.config = ModelConfig(
            architecture="table",
            vocab_size=vocab,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            norm_eps=1e-6,
            max_positions=positions,
            rope={},
        )
        self.memory, self.skew, self.peak = memory, skew, peak
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.weights, self.weight_bytes = "table", 0
        self.passes = 0
        self.rows: dict[int, Tensor] = {}

    def forward(self, batch: Batch, cache: KVCache, taps: Iterable[Tap] = ()) -> Hidden:
        self.passes += 1
        cache.stage(0, batch, batch.tokens_N[:, None, None].float(), batch.positions_N[:, None, None].float())
        seen = []
        for span, tree in zip(batch.spans, batch.trees, strict=True):
            tokens, positions = (part[0, : span.committed + span.staged, 0].tolist() for part in cache.view(0, span))
            for row in range(span.stop - span.start):
                own = span.staged - (span.stop - span.start) + row
                staged = range(own + 1) if tree is None else tree.visible[row].nonzero().flatten().tolist()
                visible = [*range(span.committed), *(span.committed + column for column in staged)]
                pairs = sorted((int(positions[column]), int(tokens[column])) for column in visible)
                assert [position for position, _ in pairs] == list(range(len(pairs))), "a row sees a path, each place once"
                seen.append(self._code([token for _, token in pairs]))
        hidden = torch.tensor(seen, dtype=torch.float64)[:, None]
        return Hidden(hidden, dict.fromkeys(taps, hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        codes = [int(code) for code in hidden[:, 0].tolist()]
        for code in codes:
            if code not in self.rows:
                self.rows[code] = self.row(code)
        return torch.stack([self.rows[code] for code in codes])

    def row(self, code: int) -> Tensor:
        generator = torch.Generator().manual_seed(code)
        row = torch.randn(self.config.vocab_size, generator=generator) * self.peak
        if self.skew:
            row = row + torch.randn(self.config.vocab_size, generator=torch.Generator().manual_seed(code + 1)) * self.skew
        return row

    def _code(self, tokens: Sequence[int]) -> int:
        code = 7
        for token in tokens[-self.memory :] if self.memory else tokens:
            code = (code * 1_000_003 + token + 1) % (2**50)
        return code

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(layers=1, kv_heads=1, head_dim=1, capacity=capacity)

    def subset(self, attention: Collection[int], feed_forward: Collection[int] | None = None) -> TableModel:
        return self


class Letters:
    """A decoder for tests: token 0 is "a", 1 is "b", and so on; past "z" it starts again."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token % 26)

    def flush(self) -> str:
        return ""


def engine(
    model: TableModel,
    drafters: Drafter | Sequence[Drafter],
    *,
    context: int = 512,
    capacity: int = 4096,
    max_batch: int = 8,
    end_tokens: Sequence[int] = (),
    cost: CostTable = FLAT,
    vocab: int | None = None,
    cache: KVCache | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Engine:
    """An engine over a table model. Its clock stands still unless given, so that nothing depends on the machine.

    cache: for a drafter that shares the target's.
    """
    return Engine(
        model,
        cache or model.new_cache(capacity),
        [drafters] if isinstance(drafters, Drafter) else drafters,
        name="test",
        vocab=vocab or model.config.vocab_size,
        context=context,
        end_tokens=end_tokens,
        decoder=lambda continues: Letters(),
        governor=Governor(cost),
        max_batch=max_batch,
        clock=clock,
    )


def built(name: str, model: TableModel, cache: KVCache, **options: object) -> Drafter:
    """A drafter that needs no checkpoint, by its name."""
    target = Target(model, cache, None, model.config.vocab_size, 512, 8, lambda line: None)
    return find_drafter(name).build(parse_options(name, options), target, None)
