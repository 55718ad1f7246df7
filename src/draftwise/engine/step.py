"""What one pass makes of one request: the target's rows, the verdict, and the commit. Pure but for the sequence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from draftwise.sampling import Weights, token_logprobs
from draftwise.sequence import Sequence
from draftwise.types import Draft, Verdict
from draftwise.verify import verify


def target_rows(logits_NV: Tensor, seq: Sequence, draft: Draft) -> Callable[[int], Tensor | Weights]:
    """row(node): what the target draws from after `node`, warped when asked for; a distribution in full where a rule needs it.

    logits_NV: float32 [1 + len(draft), vocab]; row 0 follows the last committed token, row i + 1 node i.
    """
    warped = seq.weights if seq.request.verify == "match" else seq.distribution
    return lambda node: warped(logits_NV[node + 1], [draft.tokens[above] for above in draft.path(node)])


def decide(logits_NV: Tensor, seq: Sequence, draft: Draft) -> Verdict:
    """Accept or reject the draft by the request's rule. Nothing of the sequence changes."""
    return verify(draft, target_rows(logits_NV, seq, draft), seq.request.verify, seq.noise())


def report_logprobs(logits_NV: Tensor, seq: Sequence, draft: Draft, verdict: Verdict, taken: int) -> None:
    """Keep log-probabilities of the tokens taken, each from the target's raw row before it."""
    top = seq.params.logprobs
    if top is None:
        return
    rows = [-1, *verdict.path]
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.token]
    seq.logprobs += [token_logprobs(logits_NV[node + 1], token, top) for node, token in zip(rows[:taken], tokens, strict=False)]
