"""Asks the drafters, the free ones first, and makes one draft a request of what they offer.

Knows no drafter's kind but `free`; how much to ask and to keep is the governor's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

from draftwise.drafters.base import Drafter
from draftwise.engine.governor import Choice, Governor, Load
from draftwise.sequence import Sequence
from draftwise.types import Draft, Limit, Outcome, Tap


class Proposals:
    """An engine's drafters, and what they proposed in this step."""

    def __init__(self, drafters: Seq[Drafter], governor: Governor, clock: Callable[[], float]) -> None:
        self.drafters, self.governor, self._clock = tuple(drafters), governor, clock
        self._order = sorted(range(len(self.drafters)), key=lambda place: not self.drafters[place].free)
        for place, drafter in enumerate(self.drafters):
            drafter.place = place
            governor.meet(drafter)
        self.max_depth = max((drafter.max_depth for drafter in self.drafters), default=0)
        self.seconds = 0.0
        """What the drafts of this step should have taken, but for catching up."""
        self.foreseen = 0.0
        """The same with catching up: what is taken beyond it, in drafting or around it, is what asking costs."""
        self._rounds: dict[int, Choice] = {}

    def taps(self, seqs: Seq[Sequence]) -> tuple[Tap, ...]:
        """The hidden states that drafters want of a pass over these requests."""
        wanted = (
            drafter.taps
            for place, drafter in enumerate(self.drafters)
            if drafter.taps and any(self.governor.hears(place, drafter, seq) for seq in seqs)
        )
        return tuple(dict.fromkeys(tap for taps in wanted for tap in taps))

    def propose(self, asking: Seq[tuple[Sequence, Limit]], load: Load) -> dict[int, Draft]:
        """A draft for each request by its id, within its limit; `load` is what the pass holds without them."""
        choices = [Choice(seq, limit) for seq, limit in asking]
        self._rounds, self.seconds, self.foreseen = {choice.seq.id: choice for choice in choices}, 0.0, 0.0
        if not choices:
            return {}
        for place in self._order:
            drafter = self.drafters[place]
            heard = [choice for choice in choices if self.governor.hears(place, drafter, choice.seq)]
            wanted = self.governor.plan(place, drafter, heard, load) if heard else []
            asked = [(choice, limit) for choice, limit in zip(heard, wanted, strict=True) if limit.depth > 0]
            if not asked:
                continue
            late = sum(drafter.seconds_to_catch_up(choice.seq) for choice, _ in asked)
            started = self._clock()
            drafts = drafter.propose([choice.seq for choice, _ in asked], [limit for _, limit in asked])
            took = self._clock() - started
            if drafter.free:
                self.governor.took(place, took / len(asked))
            elif seconds := drafter.seconds_per_depth(len(asked)):
                depth = max(max(draft.depths(), default=0) for draft in drafts)
                expected = drafter.seconds_to_begin(len(asked)) + seconds * depth
                self.seconds += expected
                self.foreseen += max(expected + late, took - expected)  # a surprise counts for no more than the draft
            else:
                self.foreseen += took  # nothing is known of it yet
            for (choice, limit), draft in zip(asked, drafts, strict=True):
                if drafter.free and not draft.tokens:
                    self.governor.came_empty(place, choice)
                    continue
                choice.drafts[place] = draft.within(limit)
                if not drafter.free:
                    choice.asked[place] = limit
                self.governor.weigh(place, choice)
        if not any(choice.drafts for choice in choices):
            return {}
        chosen = self.governor.choose(choices, load)
        return {choice.seq.id: draft for choice, draft in zip(choices, chosen, strict=True)}

    def observe(self, seq: Sequence, outcome: Outcome) -> None:
        """Tell all of them that take part what a pass made of a request."""
        for place, drafter in enumerate(self.drafters):
            if self.governor.hears(place, drafter, seq):
                drafter.observe(seq, outcome)
        if seq.id in self._rounds:
            self.governor.learn(self._rounds[seq.id], outcome.draft, outcome.emitted)

    def forget(self, seq: Sequence) -> None:
        """The request ended."""
        for drafter in self.drafters:
            drafter.forget(seq)
        self.governor.forget(seq)
        self._rounds.pop(seq.id, None)
