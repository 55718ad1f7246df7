"""One request under way: its tokens, its text, and where it ends.

Only `Sequence.extend` grows tokens, and it alone decides the end: end and stop tokens, stop strings, max_tokens, context.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq

from torch import Tensor

from draftwise.sampling import History, Noise, choice_seed, distribution, likeliest, shared_arrivals, target_token
from draftwise.types import Decoder, Piece, Request, Stats, TokenLogprob


class Sequence:
    """A request's state, shared by the engine and its drafter; a drafter only reads it.

    `tokens` holds the prompt and then the output. `context` is the most tokens both may have together. `slot` is the place
    in the target's cache, which the scheduler gives; None while the request waits.
    """

    def __init__(
        self, identity: int, request: Request, *, end_tokens: Collection[int], context: int, decoder: Decoder, choice: int = 0
    ) -> None:
        self.id = identity
        self.slot: int | None = None
        self.request = request
        self.params = request.params
        self.tokens = list(request.prompt)
        self.prompt_length = len(request.prompt)
        self.seed = choice_seed(request.params.seed, choice)
        self.context = context
        self.end_tokens = frozenset(end_tokens)
        self._ending = frozenset() if request.params.ignore_eos else self.end_tokens
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.stats = Stats(requests=1)
        self.logprobs: list[TokenLogprob] = []
        self._decoder = decoder
        self._held: list[Piece] = []  # text that a stop string may still cut
        self._text: list[str] = []

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def text(self) -> str:
        """What may be shown so far."""
        return "".join(self._text)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def room(self) -> int:
        """Tokens the request may still emit."""
        emitted = len(self.tokens) - self.prompt_length
        return min(self.params.max_tokens - emitted, self.context - len(self.tokens))

    def noise(self) -> Noise:
        """The randomness of the step that decides the token after the last one."""
        return Noise(self.seed, len(self.tokens))

    def distribution(self, logits_V: Tensor, path: Seq[int] = ()) -> Tensor:
        """The warped distribution after the tokens so far and `path`, from a model's logits there: target's or draft's."""
        return distribution(logits_V, self.params, self._history(path), end_tokens=self._ending)

    def target_token(self, logits_V: Tensor, path: Seq[int] = ()) -> int:
        """What `noise().target` draws from that distribution: the token after `path` that plain sampling gives."""
        return target_token(
            logits_V, self.params, self._history(path), self.noise(), len(path), end_tokens=self._ending
        )

    def shared_arrivals(self, logits_V: Tensor, path: Seq[int], count: int) -> list[tuple[float, int]]:
        """Times and tokens of the likeliest to be `target_token` after `path`, by a draft's logits, the earliest first."""
        return shared_arrivals(
            logits_V, self.params, self._history(path), self.noise(), len(path), count, end_tokens=self._ending
        )

    def likeliest(self, logits_V: Tensor, path: Seq[int], count: int) -> tuple[list[int], list[float]]:
        """The tokens that a greedy request would take first, and their probabilities, by a draft's logits."""
        return likeliest(logits_V, self.params, self._history(path), count, end_tokens=self._ending)

    def _history(self, path: Seq[int]) -> History:
        return History(self.request.prompt, [*self.output, *path]) if self.params.looks_back else History()

    def extend(self, tokens: Seq[int], *, drafted: int = 0) -> tuple[int, tuple[Piece, ...]]:
        """Append tokens up to the request's end; the first `drafted` of them were drafted and accepted.

        Returns how many were taken and the text that became certain.
        """
        shown: list[Piece] = []
        taken = 0
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            if self._ends(token):
                self.finish_reason, self.stop_reason = "stop", token
            else:
                self._held.append(Piece(self._decoder.push(token), taken <= drafted))
                shown += self._release()
                if not self.finished and self.room == 0:
                    self.finish_reason = "length"
            if self.finished:
                shown += self._drain()
                break
        self.stats.emitted += taken
        return taken, tuple(piece for piece in shown if piece.text)

    def end(self, reason: str, error: str | None = None) -> tuple[Piece, ...]:
        """Finish from outside: cancelled, or an error."""
        self.finish_reason, self.error = reason, error
        return tuple(piece for piece in self._drain() if piece.text)

    def _ends(self, token: int) -> bool:
        return token in self._ending or token in self.params.stop_tokens

    def _release(self) -> list[Piece]:
        """Show held text up to a stop string, or up to what may be the start of one."""
        if not self.params.stop:
            return self._show(len("".join(piece.text for piece in self._held)))
        held = "".join(piece.text for piece in self._held)
        found = [(place, stop) for stop in self.params.stop if (place := held.find(stop)) >= 0]
        if found:
            place, self.stop_reason = min(found, key=lambda item: item[0])
            self.finish_reason = "stop"
            shown = self._show(place)
            self._held.clear()
            return shown
        waiting = max(_overlap(held, stop) for stop in self.params.stop)
        return self._show(len(held) - waiting)

    def _drain(self) -> list[Piece]:
        if self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            return []
        self._held.append(Piece(self._decoder.flush(), False))
        return self._show(len("".join(piece.text for piece in self._held)))

    def _show(self, length: int) -> list[Piece]:
        """Move the first `length` characters from held to shown."""
        shown: list[Piece] = []
        while self._held and length >= len(self._held[0].text):
            piece = self._held.pop(0)
            length -= len(piece.text)
            shown.append(piece)
        if length and self._held:
            text, drafted = self._held[0]
            shown.append(Piece(text[:length], drafted))
            self._held[0] = Piece(text[length:], drafted)
        self._text += [piece.text for piece in shown]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
