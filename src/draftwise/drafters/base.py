"""What a way of drafting must offer. Knows sequences and limits; knows nothing of the engine that calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwise.cache import KVCache
from draftwise.models.base import Model
from draftwise.models.linear import DTYPES, WeightKind
from draftwise.sequence import Sequence
from draftwise.types import Draft, Limit, Outcome, Tap

if TYPE_CHECKING:
    from draftwise.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """What a drafter is told of the model it drafts for. `vocab` is the number of ids that are ever emitted.

    `cache` is the target's own: a drafter may read committed rows, and stage rows of its own between passes. `own` is the
    folder that the target came from, for drafts that it brings itself; None where it came from no folder.
    """

    model: Model
    cache: KVCache
    tokenizer: Tokenizer
    vocab: int
    context: int
    max_batch: int
    notice: Callable[[str], None]
    own: DraftSource | None = None


@dataclass(frozen=True, slots=True)
class DraftSource:
    """The checkpoint named after the drafter, NAME:PATH, and how its weights are wanted."""

    path: str
    dtype: str | None = None
    quantize: str | None = None
    revision: str | None = None
    compiled: bool = True

    def kind(self, target: Target, stored: str | None = None) -> WeightKind:
        """The kind of weight that is wanted: unless told else `stored`, the file's integers, and the target's numbers."""
        dtype = DTYPES[self.dtype] if self.dtype else target.model.dtype
        return WeightKind(dtype, self.quantize or stored, compiled=self.compiled)


class Drafter:
    """Offers drafts and learns from what came of them. One object serves all requests of an engine.

    A file in this folder holds a frozen dataclass `Options` (fields with `metadata={"help": …}`), a Drafter and
    `build(options, target, source) -> Drafter`; the file's name is the drafter's.
    """

    taps: tuple[Tap, ...] = ()
    """Hidden states wanted in Outcome.features."""
    free = False
    """True when proposing costs no model pass; the governor then sees the draft before it decides on its size."""
    max_depth = 16
    """Deeper drafts are never asked for."""
    acceptance = 0.6
    """A guess at how often its first token is right, before anything came of it."""
    place = 0
    """Among the engine's drafters, which sets it. Keys what is drawn from q: `Noise.draft(..., drafter=self.place)`."""

    def propose(self, seqs: Seq[Sequence], limits: Seq[Limit]) -> list[Draft]:
        """One draft a sequence, within its limit; nodes 0 is legal and gives an empty draft.

        Feeds what it has not consumed of `seq.tokens`. `seq.request.verify` says which draws can be verified. A draft with
        `survival` may lose its least likely nodes, except those drawn from q; one without is verified whole or not at all.
        """
        raise NotImplementedError

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        """Told after every target pass of the sequence, prompt chunks and plain passes too; seq already holds the tokens.

        `outcome.draft` is what was verified: trimmed, and merged with other drafters' drafts. `outcome.emitted` tells what
        became of your own, verified or not: see Draft.follow.
        """

    def forget(self, seq: Sequence) -> None:
        """The sequence ended: drop what is kept of it."""

    def seconds_to_begin(self, batch: int) -> float:
        """Estimated time that the first level of drafts for `batch` sequences takes beyond what another one takes."""
        return 0.0

    def seconds_per_depth(self, batch: int) -> float:
        """Estimated time to draft one level deeper for `batch` sequences; 0 where drafting is free."""
        return 0.0

    def seconds_to_catch_up(self, seq: Sequence) -> float:
        """Estimated time to read what the drafter has not read of the sequence, beyond the tokens of the last step."""
        return 0.0
