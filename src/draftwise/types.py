"""The nouns: what a caller asks for, what a drafter offers, what a pass carries and what comes of it.

Knows lengths, limits and bookkeeping; knows nothing of logits, models or files. Every other module imports this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import lt
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

Tap = int | Literal["final_norm"]
"""Where a hidden state is read: the residual stream after k layers (0 is the embedding), or after the final norm."""

VERIFY_RULES = ("match", "rejection", "block")

MaskHook = Callable[[tuple[int, ...]], Tensor | None]
"""From the output tokens of a path to a bool tensor [vocab] of the tokens allowed next (None: all). Must be pure."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy decoding. Raises ValueError on values that mean nothing.

    `repetition_penalty` sees prompt and output, `presence_penalty` and `frequency_penalty` the output only.
    `logprobs=k` reports each token's log-probability under the target's raw logits and the k most likely tokens.
    `bad_words` are token sequences never completed; `allowed_tokens` the only ids that may be sampled.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    mask: MaskHook | None = None
    min_tokens: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(
                isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
                f"{name} is {value!r}; it must be a finite number",
            )
        for name in ("top_k", "min_tokens", "max_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, int) and not isinstance(value, bool), f"{name} is {value!r}; it must be a whole number")
        _require(self.temperature >= 0, f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        _require(self.top_k >= 0, f"top_k is {self.top_k}; it must be 0 (off) or more")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}; it must lie between 0 (off) and 1")
        _require(self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1 is off)")
        _require(self.max_tokens >= 1, f"max_tokens is {self.max_tokens}; it must be at least 1")
        _require(self.min_tokens >= 0, f"min_tokens is {self.min_tokens}; it must be 0 (off) or more")
        _require(self.min_tokens <= self.max_tokens, f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= 1000, f"logprobs is {self.logprobs}; it must lie between 0 and 1000"
        )
        _require(self.seed is None or isinstance(self.seed, int), f"seed is {self.seed!r}; it must be a whole number")
        _require(
            self.allowed_tokens is None or len(self.allowed_tokens) > 0, "allowed_tokens is empty; leave it out to allow all"
        )
        _require(all(self.bad_words), "bad_words holds an empty sequence")
        _require(all(self.stop), "stop holds an empty string")
        _require(all(not math.isnan(bias) for bias in self.logit_bias.values()), "logit_bias holds a NaN")

    @property
    def looks_back(self) -> bool:
        """True when a row's distribution depends on the tokens before it, beyond the logits themselves."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.mask is not None
            or self.min_tokens
        )

    @property
    def edits(self) -> bool:
        """True when logits are changed before anything is drawn by them."""
        return self.looks_back or bool(self.logit_bias) or self.allowed_tokens is not None

    @property
    def truncates(self) -> bool:
        """True when tokens are left out for being unlikely."""
        return self.temperature > 0 and bool(self.top_k or self.top_p < 1 or self.min_p)

    def token_ids(self) -> Iterator[tuple[str, int]]:
        """Every token id named here with the parameter that names it, for a check against a vocabulary."""
        yield from (("logit_bias", token) for token in self.logit_bias)
        yield from (("bad_words", token) for word in self.bad_words for token in word)
        yield from (("allowed_tokens", token) for token in self.allowed_tokens or ())
        yield from (("stop_tokens", token) for token in self.stop_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what is wanted of it.

    draft_tokens: the most nodes to draft a step; None lets the governor choose. continues: the output goes on with the
    prompt's own text, so a space that begins it is kept.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    verify: str = "match"
    draft_tokens: int | None = None
    continues: bool = False

    def __post_init__(self) -> None:
        _require(len(self.prompt) > 0, "the prompt is empty; give at least one token")
        _require(self.verify in VERIFY_RULES, f"verify is {self.verify!r}; it must be one of: {', '.join(VERIFY_RULES)}")
        _require(
            self.draft_tokens is None or self.draft_tokens >= 0,
            f"draft_tokens is {self.draft_tokens}; it must be 0 (off) or more, or auto",
        )


class Drawn(Enum):
    """How a drafted node's token came about, which decides the rule that verifies it."""

    CHOSEN = "chosen"  # a function of the prefix alone: q is one-hot
    SHARED_NOISE = "shared noise"  # picked with the noise that `match` will use
    CHAIN = "chain"  # the only child, drawn from q
    WITH_REPLACEMENT = "with replacement"  # one of several draws from the same q
    WITHOUT_REPLACEMENT = "without replacement"  # one of several distinct draws from q, in draw order


class Limit(NamedTuple):
    """The most a draft may hold: `nodes` by cost and room, `depth` by the tokens the request may still emit, less one.

    The prices are in expected tokens: what a node's row costs, and what drafting one level more does. Whoever can estimate
    what a node or a level brings leaves out what brings less; they are 0 where as much as possible is wanted.
    """

    nodes: int
    depth: int
    node_price: float = 0.0
    level_price: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guessed tokens as a tree below the last committed token. Siblings stand in draw order.

    q: float32 [m, vocab], the distributions drawn from; q_row[i] is node i's row of q, -1 for none.
    survival[i] estimates the chance that node i is accepted; it may not look at a sampled token's own value.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    drawn: tuple[Drawn, ...] = ()
    q: Tensor | None = None
    q_row: tuple[int, ...] = ()
    survival: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        size = len(self.tokens)
        assert len(self.parents) == size and len(self.drawn) == size
        assert all(map(lt, self.parents, range(size))) and min(self.parents, default=-1) >= -1
        assert len(self.q_row) in (0, size) and (self.survival is None or len(self.survival) == size)

    @staticmethod
    def chain(
        tokens: Seq[int], drawn: Drawn = Drawn.CHOSEN, *, q: Tensor | None = None, survival: Seq[float] | None = None
    ) -> Draft:
        """A draft without branches; q, when given, has one row for each token."""
        size = len(tokens)
        return Draft(
            tokens=tuple(tokens),
            parents=tuple(range(-1, size - 1)),
            drawn=(drawn,) * size,
            q=q,
            q_row=tuple(range(size)) if q is not None else (),
            survival=tuple(survival) if survival is not None else None,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> list[int]:
        """Nodes below `node` (-1: below the last committed token), in draw order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def depths(self) -> list[int]:
        """Per node its depth; a node below the last committed token has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to `node`, itself included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def follow(self, text: Seq[int]) -> list[int]:
        """The nodes of the longest path that spells the beginning of `text`, root first."""
        spelt = {-1: 0}  # tokens of `text` that the path down to a node spells
        deepest = -1
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            depth = spelt.get(parent)
            if depth is not None and depth < len(text) and token == text[depth]:
                spelt[node] = depth + 1
                if spelt[node] > spelt[deepest]:
                    deepest = node
        return self.path(deepest)

    def surviving(self, chances: Seq[float]) -> Draft:
        """The same draft with other estimates of survival."""
        return Draft(self.tokens, self.parents, self.drawn, self.q, self.q_row, tuple(chances))

    def within(self, limit: Limit) -> Draft:
        """The same draft without the nodes past `limit`; looks at positions only, never at a token's value."""
        if len(self) <= min(limit.nodes, limit.depth):
            return self
        depths = self.depths()
        return self.only([node for node in range(len(self)) if depths[node] <= limit.depth][: max(limit.nodes, 0)])

    def only(self, nodes: Seq[int]) -> Draft:
        """The draft of `nodes` alone, which ascend and hold the parents of each."""
        if len(nodes) == len(self):
            return self
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return Draft(
            tuple([self.tokens[n] for n in nodes]),
            tuple([place[self.parents[n]] for n in nodes]),
            tuple([self.drawn[n] for n in nodes]),
            self.q,
            tuple([self.q_row[n] for n in nodes]) if self.q_row else (),
            tuple([self.survival[n] for n in nodes]) if self.survival is not None else None,
        )


NO_DRAFT = Draft()


class Verdict(NamedTuple):
    """What survived of a draft: the accepted nodes, root first, and the target's own token after them."""

    path: list[int]
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a target pass made of one request, told to its drafter after every pass, prompt chunks included.

    consumed: tokens whose target K/V became committed in this pass (prompt chunk, or pending token and accepted nodes).
    emitted: tokens appended to the request by this pass, after the cut at its end.
    features: per tap, the hidden rows of `consumed`, [len(consumed), width].
    draft, path: the draft as it was verified and the accepted nodes; draft is empty on prompt chunks and plain passes.
    logits: makes the target's raw logits, float32 [1 + len(draft), vocab]: after the last committed token, then per node.
    """

    consumed: tuple[int, ...]
    emitted: tuple[int, ...]
    draft: Draft = NO_DRAFT
    path: tuple[int, ...] = ()
    features: Mapping[Tap, Tensor] = field(default_factory=dict)
    logits: Callable[[], Tensor] | None = None


class Feed(NamedTuple):
    """Rows one slot brings to a pass: tokens, and per token the staged row it follows (-1: the last committed token).

    Staged rows of a slot are numbered as fed since the last commit, so a parent may lie in an earlier pass.
    """

    slot: int
    tokens: Seq[int]
    parents: Seq[int]

    @staticmethod
    def chain(slot: int, tokens: Seq[int], after: int = -1) -> Feed:
        """Tokens that follow each other; the first follows staged row `after`. Their rows continue from after + 1."""
        return Feed(slot, tokens, range(after, after + len(tokens)))


class Span(NamedTuple):
    """One slot's share of a packed pass: its rows [start, stop), and its committed and staged lengths in the cache."""

    slot: int
    start: int
    stop: int
    committed: int  # rows of the slot that every new row sees
    staged: int  # staged rows of the slot, this pass's included


class Tree(NamedTuple):
    """How the new rows of a span hang together: what each may see, and the paths that lead to them.

    visible: bool [rows of the span, staged rows of the slot]; positions: int64 [staged rows of the slot].
    branches: the staged rows of each path from the last committed row to a leaf; every new row is on one of them at least.
    """

    visible: Tensor
    positions: Tensor
    branches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A packed pass: rows of all slots one after another, no padding. Made by KVCache.pack.

    tokens_N, positions_N, rows_N: int64; a position is committed length plus depth, a row the place in the cache's pool.
    trees: per span its tree; None where the slot's staged rows are a chain, so that a row sees all before it and itself.
    """

    tokens_N: Tensor
    positions_N: Tensor
    rows_N: Tensor
    spans: tuple[Span, ...]
    trees: tuple[Tree | None, ...]

    def __len__(self) -> int:
        return int(self.tokens_N.shape[0])


class Hidden(NamedTuple):
    """What a pass leaves: final-norm rows [N, width], and the tapped hidden states, each [N, width]."""

    final: Tensor
    taps: Mapping[Tap, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. `windows[i]` is layer i's sliding window in tokens, None for full attention.

    vocab_size counts the head's rows, padding included. `rope` is the Hugging Face `rope_parameters`/`rope_scaling`
    mapping with `rope_theta` in it. `raw` is the checkpoint's own configuration, for architectures read elsewhere.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...] = ()
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    activation: str = "silu"
    eos_tokens: tuple[int, ...] = ()
    bos_token: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Stats:
    """What generating took, pooled as ratios of sums; `a + b` pools two. Seconds are wall time.

    steps: target passes after the one that ended the prefill. drafted: nodes fed. reached_at[k]: steps whose first k
    drafted depths were accepted and that drafted depth k + 1; accepted_at[k]: those where depth k + 1 was accepted too.
    """

    emitted: int = 0
    requests: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    time_to_first_token: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return (self.emitted - self.requests) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: the first token of each request and the time before it are left out."""
        return (self.emitted - self.requests) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        return [a / r if r else 0.0 for a, r in zip(self.accepted_at, self.reached_at, strict=True)]

    def record(self, draft: Draft, path: Seq[int]) -> None:
        """Count one target pass that verified `draft` and accepted `path`."""
        self.steps += 1
        self.drafted += len(draft)
        self.accepted += len(path)
        deepest = max(draft.depths(), default=0)
        for tally, upto in ((self.reached_at, min(len(path) + 1, deepest)), (self.accepted_at, len(path))):
            tally.extend([0] * (deepest - len(tally)))
            for k in range(upto):
                tally[k] += 1

    def __add__(self, other: Stats) -> Stats:
        total = Stats()
        for item in fields(Stats):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                size = max(len(mine), len(theirs))
                padded = (mine + [0] * (size - len(mine)), theirs + [0] * (size - len(theirs)))
                setattr(total, item.name, [a + b for a, b in zip(*padded, strict=True)])
            else:
                setattr(total, item.name, mine + theirs)
        return total

    def as_dict(self) -> dict[str, Any]:
        """The figures under the names of the JSON output."""
        requests = max(self.requests, 1)
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_at": list(self.accepted_at),
            "reached_at": list(self.reached_at),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "time_to_first_token": round(self.time_to_first_token / requests, 6),
            "seconds": {
                "prefill": round(self.prefill_seconds, 6),
                "draft": round(self.draft_seconds, 6),
                "target": round(self.target_seconds, 6),
                "decode": round(self.decode_seconds, 6),
                "total": round(self.total_seconds, 6),
            },
        }


class TokenLogprob(NamedTuple):
    """A token's log-probability under the target's raw logits, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Piece(NamedTuple):
    """Text that one token completed, and whether that token was drafted and accepted."""

    text: str
    drafted: bool


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. finish_reason: "stop", "length", "cancelled" or "error". `stop_reason` says what stopped it."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: str | int | None = None
    drafter: str = "none"
    verify: str = "match"
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "stats": {"drafter": self.drafter, "verify": self.verify, **self.stats.as_dict()},
        }
        if self.error is not None:
            out["error"] = self.error
        if self.logprobs is not None:
            out["logprobs"] = [
                {"token": lp.token, "logprob": lp.logprob, "top": [{"token": t, "logprob": v} for t, v in lp.top]}
                for lp in self.logprobs
            ]
        return out


@dataclass(frozen=True, slots=True)
class Event:
    """News of one request: what a step added to it. The last one carries the result."""

    request_id: int
    tokens: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Decoder(Protocol):
    """Incremental decoding of one request's output."""

    def push(self, token: int) -> str:
        """Text that became certain with this token, perhaps none."""

    def flush(self) -> str:
        """What was held back, at the end."""
