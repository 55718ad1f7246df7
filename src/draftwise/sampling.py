"""From logits to a distribution and from a distribution to a token, with noise that is a pure function of its key.

Knows probabilities, a request's sampling parameters and the tokens before a row; knows nothing of models or drafts.
Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence as Seq
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

import draftwise.kernels as kernels
from draftwise.types import SamplingParams, TokenLogprob

CANDIDATES = 256
"""Tokens among which drafts that share the noise look for the one that top-k, top-p and min-p leave."""


class History(NamedTuple):
    """The tokens before a row: the request's prompt, and its output with the path of drafted tokens down to the row."""

    prompt: tuple[int, ...] = ()
    output: Seq[int] = ()

    def ends_with(self, tokens: tuple[int, ...]) -> bool:
        missing = len(tokens) - len(self.output)
        tail = (*self.prompt[-missing:], *self.output) if missing > 0 else tuple(self.output[-missing:])
        return not tokens or tail == tokens


def distribution(logits_V: Tensor, params: SamplingParams, history: History, *, end_tokens: Collection[int] = ()) -> Tensor:
    """The distribution the next token is drawn from, float32 [V]; plain and drafted rows are warped alike.

    Order: repetition penalty (prompt and output), presence and frequency penalty (output), logit bias, bad words (which
    a prompt may begin), allowed tokens, mask hook, min_tokens (forbids `end_tokens` and stop tokens while the output is
    shorter); then temperature, top-k, top-p, min-p. Greedy is one-hot. Ties go to the lowest ids everywhere.
    Raises ValueError if no token is left, or if the logits hold NaN.
    """
    values, tokens = _warped(_processed(logits_V, params, history, end_tokens), params)
    values = (values / values.sum(dtype=torch.float64)).float()
    return values if tokens is None else torch.zeros_like(logits_V, dtype=torch.float32).scatter_(0, tokens, values)


def target_token(
    logits_V: Tensor,
    params: SamplingParams,
    history: History,
    noise: Noise,
    depth: int,
    *,
    end_tokens: Collection[int] = (),
) -> int:
    """What `noise.target` draws from the distribution, but for how it is rounded; by the logits alone where they suffice.

    Raises ValueError as `distribution` does.
    """
    logits_V, key = _processed(logits_V, params, history, end_tokens), noise.target_key(depth)
    found = None if params.truncates else kernels.draw(logits_V, params.temperature, key)
    return _earliest(*_warped(logits_V, params), key, 1)[0][1] if found is None else found[0][1]


def shared_arrivals(
    logits_V: Tensor,
    params: SamplingParams,
    history: History,
    noise: Noise,
    depth: int,
    count: int,
    *,
    end_tokens: Collection[int] = (),
) -> list[tuple[float, int]]:
    """Times and tokens of the likeliest to be `target_token` at that depth, as a draft's logits see it, the earliest first.

    A guess, so what truncates looks at the `CANDIDATES` likeliest alone. Raises ValueError as `distribution` does.
    """
    logits_V, key = _processed(logits_V, params, history, end_tokens), noise.target_key(depth)
    if not params.truncates:
        found = kernels.draw(logits_V, params.temperature, key, count)
        return _earliest(*_warped(logits_V, params), key, count) if found is None else found
    (values,), (ids,) = kernels.largest(logits_V[None], CANDIDATES)
    weights = _warped(values, params)
    return _earliest(weights.values, ids if weights.tokens is None else ids[weights.tokens], key, count)


def likeliest(
    logits_V: Tensor, params: SamplingParams, history: History, count: int, *, end_tokens: Collection[int] = ()
) -> tuple[list[int], list[float]]:
    """The `count` likeliest tokens and their probabilities after all that edits single tokens, at temperature 1.

    What a greedy request takes the largest of, for drafters that want a second choice too. Raises ValueError as
    `distribution` does.
    """
    logits_V = _processed(logits_V, params, history, end_tokens)
    found = kernels.likeliest(logits_V, count)
    if found is None:
        top = logits_V[_argmax(logits_V)].item()
        if not top > -math.inf:
            raise ValueError(_nothing_left(top, params))
        if top == math.inf:
            return [_argmax(logits_V)], [1.0]
        chances, ids = logits_V.double().softmax(0).topk(min(count, len(logits_V)))
        found = [(token, chance) for token, chance in zip(ids.tolist(), chances.tolist(), strict=True) if chance > 0]
    return [token for token, _ in found], [chance for _, chance in found]


class _Weights(NamedTuple):
    """A distribution without its zeros: float32 weights, the likeliest 1, and the tokens they are of; None: all, in order."""

    values: Tensor
    tokens: Tensor | None


def _warped(logits_V: Tensor, params: SamplingParams) -> _Weights:
    """Temperature, top-k, top-p and min-p of processed logits."""
    best = _argmax(logits_V)
    top = logits_V[best].item()
    if not top > -math.inf:
        raise ValueError(_nothing_left(top, params))
    if params.temperature == 0:
        return _Weights(logits_V.new_ones(1), torch.tensor([best], device=logits_V.device))
    if top == math.inf:  # a bias of infinity: nothing else can be drawn
        logits_V, top = torch.where(logits_V == math.inf, 0.0, -math.inf), 0.0

    values = (logits_V - top).div_(params.temperature).exp_()  # the most likely token weighs exactly 1
    tokens = None
    if 0 < params.top_k < len(logits_V):
        tokens = _largest(logits_V, params.top_k)
        values = values[tokens]
    if params.top_p < 1:
        nucleus = _nucleus(values, params.top_p)
        tokens = nucleus if tokens is None else tokens[nucleus]
        values = values[nucleus]
    if params.min_p > 0:
        values = torch.where(values >= params.min_p, values, 0.0)
    return _Weights(values, tokens)


def _processed(logits_V: Tensor, params: SamplingParams, history: History, end_tokens: Collection[int]) -> Tensor:
    """Logits in float32 after everything that edits single tokens; the argument itself when nothing does."""
    if logits_V.dtype != torch.float32:
        logits_V = logits_V.float()
    if not params.edits:
        return logits_V
    logits_V = logits_V.clone()

    def ids(tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=logits_V.device)

    def values(numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.float32, device=logits_V.device)

    if params.repetition_penalty != 1:
        seen = ids({*history.prompt, *history.output})
        logits = logits_V[seen]
        logits_V[seen] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and history.output:
        counts = Counter(history.output)
        logits_V[ids(counts)] -= values(params.presence_penalty + params.frequency_penalty * n for n in counts.values())
    if params.logit_bias:
        logits_V[ids(params.logit_bias)] += values(params.logit_bias.values())

    forbidden = {word[-1] for word in params.bad_words if history.ends_with(word[:-1])}
    if len(history.output) < params.min_tokens:
        forbidden |= {*end_tokens, *params.stop_tokens}
    if forbidden:
        logits_V[ids(forbidden)] = -math.inf
    if params.allowed_tokens is not None:
        allowed = ids(params.allowed_tokens)
        logits_V = torch.full_like(logits_V, -math.inf).scatter_(0, allowed, logits_V[allowed])
    if params.mask is not None and (mask := params.mask(tuple(history.output))) is not None:
        if mask.shape != logits_V.shape:
            raise ValueError(f"the mask hook returned shape {tuple(mask.shape)}; it must be ({len(logits_V)},), one per token")
        logits_V = logits_V.masked_fill(~mask.to(logits_V.device), -math.inf)
    return logits_V


def _nothing_left(top: float, params: SamplingParams) -> str:
    if math.isnan(top):
        return "the logits hold NaN; the weights or the input of the model are broken"
    names = ("allowed_tokens", "bad_words", "logit_bias", "mask", "min_tokens")
    active = [name for name in names if getattr(params, name) not in (None, 0, (), {})]
    return f"no token can follow: {', '.join(active) or 'the logits'} forbid all of them; loosen what forbids too much"


def _argmax(values_V: Tensor) -> int:
    """The lowest id of the largest value, or of a NaN."""
    on_cpu = values_V.device.type == "cpu"  # where numpy is ten times as fast as torch
    return int(values_V.detach().numpy().argmax() if on_cpu else values_V.argmax())


def _largest(values_V: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values, ascending; among equal values the lowest ids."""
    edge = values_V.topk(count).values[-1]
    ids = (values_V >= edge).nonzero().flatten()
    if len(ids) > count:
        tied = values_V[ids] == edge
        surplus = len(ids) - count
        ids = torch.cat((ids[~tied], ids[tied][:-surplus])).sort().values
    return ids


def _nucleus(weights: Tensor, mass: float) -> Tensor:
    """Places of the fewest largest weights that hold `mass` of their sum, most likely first, ties to the lowest place.

    Sorts only weights above a cut, which falls until they hold enough: what a full sort would pick, at a fraction of it.
    """
    enough = mass * weights.sum(dtype=torch.float64).item()
    for cut in (2.0**-7, 2.0**-14, 2.0**-21, 0.0):  # the largest weight is 1
        places = (weights >= cut).nonzero().flatten()
        values, order = weights[places].sort(descending=True, stable=True)
        held = values.cumsum(0, dtype=torch.float64)
        if held[-1] >= enough:
            break
    return places[order[: int(torch.searchsorted(held, enough)) + 1]]


class Purpose(IntEnum):
    """What a random number is for; each purpose has its own stream."""

    TARGET = 1
    ACCEPT = 2
    NEXT = 3
    DRAFT = 4
    CHOICE = 5


class Noise:
    """The randomness of one request's step, counter based: every number is a hash of its key, on any device the same.

    `root` is the absolute position of the first token that the step decides. Noise for `match` is keyed by (seed,
    position, token) and so is the same however a text was drafted; all other noise by (seed, root, depth, …, purpose),
    fresh at each step, since those rules look at random numbers beyond the token that they emit.
    """

    def __init__(self, seed: int, root: int) -> None:
        self.seed = seed
        self.root = root

    def target_key(self, depth: int) -> int:
        """Of the noise that the target's token is drawn with; depth 0 follows the last committed token."""
        return _key(self.seed, Purpose.TARGET, self.root + depth)

    def target(self, row_V: Tensor, depth: int) -> int:
        """The target's token from `row_V`: argmax of log p plus Gumbel noise."""
        return _earliest(row_V, None, self.target_key(depth), 1)[0][1]

    def match_top(self, q_V: Tensor, depth: int, count: int) -> list[int]:
        """The `count` likeliest to be `target`'s token at that depth, as q_V sees it: for drafts that share its noise."""
        return _first_arrivals(q_V, self.target_key(depth), count)

    def accept(self, probability: float, depth: int, candidate: int) -> bool:
        """True with `probability` (1 and more: always; 0 or NaN: never), by a number of [0, 1) of this candidate's own."""
        return self._uniform(depth, candidate) < probability

    def draw(self, weights_V: Tensor, depth: int) -> int:
        """A token from unnormalised weights, never one of weight 0: what follows the accepted path in a step."""
        return _first_arrivals(weights_V, _key(self.seed, Purpose.NEXT, self.root, depth), 1)[0]

    def draft(self, q_V: Tensor, depth: int, *, parent: int = -1, candidate: int = 0, drafter: int = 0) -> int:
        """A drafted token from q_V. No two draws of a step may agree in (depth, parent, candidate, drafter)."""
        return _first_arrivals(q_V, _key(self.seed, Purpose.DRAFT, self.root, depth, parent, candidate, drafter), 1)[0]

    def draft_distinct(self, q_V: Tensor, depth: int, count: int, *, parent: int = -1, drafter: int = 0) -> list[int]:
        """Up to `count` drafted tokens from q_V without replacement, in draw order; fewer where q_V has fewer."""
        return _first_arrivals(q_V, _key(self.seed, Purpose.DRAFT, self.root, depth, parent, 0, drafter), count)

    def _uniform(self, depth: int, candidate: int) -> float:
        return (_key(self.seed, Purpose.ACCEPT, self.root, depth, candidate) >> 11) * 2.0**-53


def choice_seed(seed: int | None, index: int) -> int:
    """The seed of a request's choice `index`; fresh when the request has none."""
    return secrets.randbits(63) if seed is None else _key(seed, Purpose.CHOICE, index) >> 1


def token_logprobs(logits_V: Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probability of `token` under the raw logits, with the `top` most likely tokens, best first."""
    logprobs_V = logits_V.double().log_softmax(0)
    best: list[tuple[int, float]] = []
    if top > 0:
        ids = _largest(logprobs_V, min(top, len(logprobs_V)))
        values, order = logprobs_V[ids].sort(descending=True, stable=True)
        best = list(zip(ids[order].tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, logprobs_V[token].item(), tuple(best))


def _first_arrivals(weights_V: Tensor, key: int, count: int) -> list[int]:
    """The `count` tokens of positive weight that arrive first, in order, when token v arrives at rate weights_V[v]."""
    return [token for _, token in _earliest(weights_V, None, key, count)]


def _earliest(weights: Tensor, tokens: Tensor | None, key: int, count: int) -> list[tuple[float, int]]:
    """What `_arrivals` gives, compiled where it can be."""
    if tokens is not None and len(tokens) == 1:
        return [(0.0, int(tokens))]
    found = kernels.arrivals(weights, tokens, key, count)
    return _arrivals(weights, key, count, tokens) if found is None else found


def _arrivals(weights_V: Tensor, key: int, count: int, tokens: Tensor | None = None) -> list[tuple[float, int]]:
    """Times and tokens of the first `count` arrivals, in order; `tokens`: what the weights are of, unless of all ids.

    The first is a draw from the weights, and all together are draws without replacement: arrival E / p with E = -log(u)
    orders tokens as log p + Gumbel noise does. Logarithms cost most, so only what may be among the first gets one:
    with u = 1 - w, E is at least w, and w / p of the others already comes too late.
    """
    places = weights_V.nonzero().flatten()
    ids = places if tokens is None else tokens[places]
    count = min(count, len(ids))
    assert count > 0, "a draw from weights that are all zero"
    if len(ids) == 1:
        return [(0.0, int(ids))]
    weights = weights_V[places].double()
    w = _shifted(_hashes(key, ids), 12).double().add_(0.5).mul_(2.0**-52)
    bounds = w / weights

    def arrivals(places: Tensor) -> list[tuple[float, int]]:
        rows = zip(w[places].tolist(), weights[places].tolist(), ids[places].tolist(), strict=True)
        return sorted((-math.log1p(-w) / weight, token) for w, weight, token in rows)

    early = bounds.topk(count, largest=False).indices if count > 1 else bounds.argmin().reshape(1)
    latest = arrivals(early)[-1][0]
    return arrivals((bounds <= latest * (1 + 1e-12)).nonzero().flatten())[:count]


_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64 (Steele, Lea and Flood 2014): a counter in steps of this, then two mixing rounds
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _key(*words: int) -> int:
    """One 64-bit key from whole numbers; each one changes all bits."""
    key = 0
    for word in words:
        key = ((key ^ word) + _GOLDEN) & _WORD
        key = ((key ^ key >> 30) * _MIX_1) & _WORD
        key = ((key ^ key >> 27) * _MIX_2) & _WORD
        key ^= key >> 31
    return key


def _hashes(key: int, ids: Tensor) -> Tensor:
    """SplitMix64's output number `id` when seeded with `key`, as int64 bit patterns; wraps alike on every device."""
    z = (ids * _signed(_GOLDEN)).add_(_signed((key + _GOLDEN) & _WORD))
    z ^= _shifted(z, 30)
    z *= _signed(_MIX_1)
    z ^= _shifted(z, 27)
    z *= _signed(_MIX_2)
    z ^= _shifted(z, 31)
    return z


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A logical shift to the right, which torch lacks."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
