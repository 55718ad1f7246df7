"""Finds which parts of a target to leave out when it drafts for itself: what promises the most tokens a second.

Knows passes, their cost and what the target wrote; has no loop that generates. A set is judged by one pass over texts that
the target wrote, instead of by generating with it: as in SWIFT (Xia et al. 2024, arXiv 2410.06916, sec. 4), but from the
target's own keys and values, as when drafting, and by time instead of by a given share of layers (Zhang et al. 2024,
"Draft & Verify", arXiv 2309.08168, sec. 3.3).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence as Seq
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.drafters.skipset import NOTHING, SkipSet, parts
from draftwise.engine.cost import measure
from draftwise.engine.llm import LLM, Prompt
from draftwise.models.base import Model
from draftwise.types import Feed

DEPTH = 8
"""Tokens of the longest draft that is considered."""
CHECK_EVERY = 4
"""Of so many texts one is kept from the search, for the figures that are reported."""
PATIENCE = 4
CONTEXT = 256
"""Tokens before the passes whose time is measured."""


class Text(NamedTuple):
    """What the target wrote greedily: all tokens, and how many of them are the prompt."""

    tokens: list[int]
    prompt_length: int


class Costs(NamedTuple):
    """Seconds: of one layer's parts and of all else in a pass of one row; and of target passes of 1, 2, … rows."""

    attention: float
    feed_forward: float
    rest: float
    target: tuple[float, ...]


class Trial(NamedTuple):
    """What a set promises: `survival[k]`, the chance that k + 1 drafted tokens in a row are right; the draft length of the
    most tokens a second, at least 1; with it the tokens a target pass gives, and the speed over plain decoding."""

    skip: SkipSet
    survival: tuple[float, ...]
    length: int
    tokens_per_step: float
    speedup: float


class Found(NamedTuple):
    """The best set, as it came out on texts that the search did not see, and how many sets were tried."""

    trial: Trial
    trials: int


def find(
    llm: LLM,
    prompts: Seq[Prompt],
    *,
    max_tokens: int = 64,
    raw: bool = False,
    seconds: float = 300.0,
    progress: Callable[[int, Trial, float], None] = lambda trials, best, seconds: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Search for `seconds`, the writing of the texts included, or until nothing better turns up; one set at least is tried.

    progress: told after each set how many were tried, the best that leaves out something, and the seconds since the start.
    Raises ValueError where no prompt gets an answer longer than a draft.
    """
    started = clock()
    texts = write(llm, prompts, max_tokens=max_tokens, raw=raw)
    model, vocab = llm.engine.model, llm.engine.vocab
    costs = measure_costs(model)
    checked = texts[CHECK_EVERY - 1 :: CHECK_EVERY] or texts
    judge = Judge(model, [text for text in texts if text not in checked] or texts, costs, vocab=vocab)

    def judged(skip: SkipSet) -> Trial:
        trial = judge(skip)
        best = max(judge.trials.values(), key=lambda tried: (len(tried.skip) > 0, tried.speedup))
        progress(len(judge.trials), best, clock() - started)
        return trial

    best = search(judged, judge.parts, go_on=lambda: clock() - started < seconds)
    return Found(Judge(model, checked, costs, vocab=vocab)(best.skip), len(judge.trials))


def write(llm: LLM, prompts: Seq[Prompt], *, max_tokens: int, raw: bool) -> list[Text]:
    """What the target answers greedily, where that is long enough to be judged by."""
    requests = [llm.request(prompt, raw=raw, max_tokens=max_tokens) for prompt in prompts]
    results = llm.engine.generate(requests)
    texts = [
        Text([*request.prompt, *result.tokens], len(request.prompt))
        for request, result in zip(requests, results, strict=True)
        if len(result.tokens) >= DEPTH
    ]
    if not texts:
        raise ValueError(f"no prompt got an answer of {DEPTH} tokens or more; give others, or more --max-tokens")
    return texts


def measure_costs(model: Model) -> Costs:
    """Time the passes, and tell the parts of a layer apart by leaving them out of all layers."""
    every = range(model.config.num_layers)

    def one_row(subset: Model) -> float:
        return measure(subset, [1], context=CONTEXT, repeats=9, pick=min)[0]

    target = measure(model, range(1, DEPTH + 2), context=CONTEXT, repeats=9, pick=min)
    if separable(model):
        attention = (target[0] - one_row(model.subset((), every))) / len(every)
        feed_forward = (target[0] - one_row(model.subset(every, ()))) / len(every)
    else:
        attention = feed_forward = (target[0] - one_row(model.subset((0,)))) / (len(every) - 1) / 2
    attention, feed_forward = max(attention, 0.0), max(feed_forward, 0.0)
    rest = max(target[0] - (attention + feed_forward) * len(every), 0.0)
    return Costs(attention, feed_forward, rest, tuple(max(target[:n]) for n in range(1, len(target) + 1)))


def separable(model: Model) -> bool:
    """True where attention and feed-forward of a layer can be left out one without the other.

    Raises ValueError where there is nothing to leave out.
    """
    every = range(model.config.num_layers)
    try:
        model.subset(every, ()), model.subset((), every)
    except ValueError:
        if len(every) == 1:
            raise
        return False
    return True


class Judge:
    """Says what a set promises on some texts. Remembers what it said.

    The texts are read once by the whole target. A set is then judged at every DEPTH-th place of what was written: from the
    target's own rows up to there it reads the next DEPTH tokens, as it would had it drafted them, and should each time find
    the one that follows.
    """

    @torch.inference_mode()
    def __init__(self, model: Model, texts: Seq[Text], costs: Costs, *, vocab: int) -> None:
        self.model, self.texts, self.costs, self.vocab = model, texts, costs, vocab
        self.trials: dict[SkipSet, Trial] = {}
        layers = range(model.config.num_layers)
        self.parts = (
            parts(len(layers))
            if separable(model)
            else [SkipSet(frozenset({layer}), frozenset({layer})) for layer in layers]
        )
        self.cache = model.new_cache(2 * sum(len(text.tokens) + 3 * DEPTH for text in texts))
        self._rows = []  # of each text, in the pool
        for text in texts:
            slot = self.cache.alloc()
            batch = self.cache.pack([Feed.chain(slot, text.tokens)])
            model.forward(batch, self.cache)
            self.cache.commit(slot, range(len(text.tokens)))
            self._rows.append(batch.rows_N)

    def __call__(self, skip: SkipSet) -> Trial:
        if skip not in self.trials:
            self.trials[skip] = self.weigh(skip, self._survival(skip))
        return self.trials[skip]

    def weigh(self, skip: SkipSet, survival: Seq[float]) -> Trial:
        """What drafts that survive so often are worth."""
        attention, feed_forward = skip.kept(self.model.config.num_layers)
        costs, tokens = self.costs, 1.0
        draft = costs.rest + costs.attention * len(attention) + costs.feed_forward * len(feed_forward)
        best = Trial(skip, tuple(survival), 1, 1.0, 0.0)
        for length, chance in enumerate(survival, 1):
            tokens += chance
            speedup = tokens * costs.target[0] / (length * draft + costs.target[length])
            if speedup > best.speedup:
                best = best._replace(length=length, tokens_per_step=tokens, speedup=speedup)
        return best

    @torch.inference_mode()
    def _survival(self, skip: SkipSet) -> list[float]:
        subset = self.model.subset(*skip.kept(self.model.config.num_layers))
        longest = max(len(text.tokens) - text.prompt_length for text in self.texts)
        right_BD = torch.cat([self._right(subset, after) for after in range(0, longest - DEPTH + 1, DEPTH)])
        # a run of right tokens counts from wherever in its window it begins
        runs = (right_BD.unfold(1, k, 1).all(-1) for k in range(1, DEPTH + 1))
        return [float(run.float().mean()) for run in runs]

    def _right(self, subset: Model, after: int) -> Tensor:
        """Which of the DEPTH tokens `after` so many written ones are found, by texts that have them: bool [texts, DEPTH]."""
        cache, feeds, expected = self.cache, [], []
        for text, rows_N in zip(self.texts, self._rows, strict=True):
            known = text.prompt_length + after  # the last of them is pending
            window = text.tokens[known - 1 : known + DEPTH]
            if len(window) > DEPTH:
                slot = cache.alloc()
                if known > 1:
                    copied = cache.pack([Feed.chain(slot, text.tokens[: known - 1])]).rows_N
                    cache.pool.index_copy_(3, copied, cache.pool.index_select(3, rows_N[: known - 1]))
                    cache.commit(slot, range(known - 1))
                feeds.append(Feed.chain(slot, window[:-1]))
                expected.append(window[1:])
        final = subset.forward(cache.pack(feeds), cache).final
        found_BD = subset.logits(final)[:, : self.vocab].argmax(-1).view(-1, DEPTH)
        for feed in feeds:
            cache.free(feed.slot)
        return found_BD == torch.tensor(expected, device=found_BD.device)


def search(judge: Callable[[SkipSet], Trial], single: Seq[SkipSet], *, go_on: Callable[[], bool], seed: int = 0) -> Trial:
    """The fastest set found that leaves out something: one part after another, then changes of one or two at random.

    The first is lazy greedy (Minoux 1978): a part's gain is estimated by what it was when it was judged last, and judged anew
    only once it is the largest estimate. Ends after PATIENCE random changes a part in vain.
    """
    whole, alone = judge(NOTHING), [judge(single[0])]
    for part in single[1:]:
        if go_on():
            alone.append(judge(part))
    best, every = max(alone, key=lambda trial: trial.speedup), sum(map(len, single))
    # loss, parts left out when it was judged, which part
    waiting = [(whole.speedup - trial.speedup, 0, place) for place, trial in enumerate(alone) if trial is not best]
    heapify(waiting)
    while waiting and go_on():
        loss, judged, place = heappop(waiting)
        if loss >= 0:
            break
        if judged == len(best.skip):
            best = judge(best.skip | single[place])
        elif len(best.skip | single[place]) < every:
            trial = judge(best.skip | single[place])
            heappush(waiting, (best.speedup - trial.speedup, len(best.skip), place))
    noise, vain = random.Random(seed), 0
    while vain < PATIENCE * len(single) and go_on():
        skip = best.skip
        for part in noise.sample(single, min(noise.choice((1, 2)), len(single))):
            skip ^= part
        trial = judge(skip) if 0 < len(skip) < every else best
        best, vain = (trial, 0) if trial.speedup > best.speedup else (best, vain + 1)
    return best
