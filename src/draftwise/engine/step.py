"""What one pass makes of one request: the target's rows, the verdict, and the commit. Pure but for the sequence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from draftwise.sampling import token_logprobs
from draftwise.sequence import Sequence
from draftwise.types import Draft, Verdict
from draftwise.verify import follow, verify


def target_rows(logits_NV: Tensor, seq: Sequence, draft: Draft) -> Callable[[int], Tensor]:
    """row(node): the target's warped distribution after `node`, made when asked for.

    logits_NV: float32 [1 + len(draft), vocab]; row 0 follows the last committed token, row i + 1 node i.
    """
    return lambda node: seq.distribution(*_at(node, logits_NV, draft))


def decide(logits_NV: Tensor, seq: Sequence, draft: Draft) -> Verdict:
    """Accept or reject the draft by the request's rule. Nothing of the sequence changes."""
    if seq.request.verify == "match":
        return follow(draft, lambda node: seq.target_token(*_at(node, logits_NV, draft)))
    return verify(draft, target_rows(logits_NV, seq, draft), seq.request.verify, seq.noise())


def _at(node: int, logits_NV: Tensor, draft: Draft) -> tuple[Tensor, list[int]]:
    """The row of logits after a node, and the drafted tokens before it."""
    return logits_NV[node + 1], [draft.tokens[above] for above in draft.path(node)]


def report_logprobs(logits_NV: Tensor, seq: Sequence, draft: Draft, verdict: Verdict, taken: int) -> None:
    """Keep log-probabilities of the tokens taken, each from the target's raw row before it."""
    top = seq.params.logprobs
    if top is None:
        return
    rows = [-1, *verdict.path]
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.token]
    seq.logprobs += [token_logprobs(logits_NV[node + 1], token, top) for node, token in zip(rows[:taken], tokens, strict=False)]
