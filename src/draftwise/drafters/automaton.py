"""A suffix automaton: every stretch of some texts, what followed it and how often. Knows tokens; nothing of drafts.

Source: Blumer et al. 1985. Appending a token adds two states at most and takes constant time on average.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import NamedTuple

NEWEST = 16
"""Hundreds of tokens may have followed a short stretch: the most frequent and this many of the newest are looked at."""


class End(NamedTuple):
    """The end of a text that grows: the state of all of it, and the state of its last tokens, as many as are counted."""

    whole: int = 0
    counted: int = 0


class Match(NamedTuple):
    """A stretch of `length` tokens that stood in the texts, and the state that it belonged to when it was found."""

    state: int = 0
    length: int = 0


START = End()
NOTHING = Match()


class Automaton:
    """All stretches of the texts appended to it; stretches that ended at the same places share a state.

    Occurrences are counted of stretches of up to `longest` tokens with the token after them, so that text that goes round
    in circles costs no more than that. Not thread-safe.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._next: list[dict[int, int]] = [{}]
        self._link = array("i", [-1])  # to the state of the longest suffix that stood in more places
        self._length = array("i", [0])  # of the state's longest stretch
        self._count = array("i", [0])
        self._favourite = array("i", [-1])  # the token that followed most often, among equals the latest to do so

    def __len__(self) -> int:
        """States held."""
        return len(self._next)

    def append(self, end: End, token: int) -> End:
        """Let the text that ends at `end` go on with `token`; a new text begins at START."""
        nexts, links = self._next, self._link
        if token in nexts[end.whole]:  # another text went on so
            whole = self._target(end.whole, token)
        else:
            whole = self._add(self._length[end.whole] + 1, link=0)
            state = end.whole
            while state >= 0 and token not in nexts[state]:
                nexts[state][token] = whole
                state = links[state]
            if state >= 0:
                links[whole] = self._target(state, token)
        before = self._holding(end.counted, self.longest + 1)
        counted = self._holding(nexts[before][token], self.longest + 1)
        self._count_up(before, token, counted)
        return End(whole, counted)

    def repeated(self, end: End) -> Match:
        """The longest stretch up to `end` that stood in the texts once more, of `longest` tokens at most."""
        state = self._holding(end.counted, self.longest)
        while self._count[state] == 1 and state:
            state = self._link[state]
        return Match(state, min(self._length[state], self.longest))

    def follow(self, match: Match, token: int) -> Match:
        """The longest end of the stretch that `token` followed, and that token."""
        state, length = match
        while token not in self._next[state]:
            state = self._link[state]
            if state < 0:
                return NOTHING
            length = min(length, self._length[state])
        length = min(length + 1, self.longest)
        return Match(self._holding(self._next[state][token], length), length)

    def shorter(self, match: Match) -> Match:
        """The longest end of the stretch that stood in more places."""
        state = self._link[self._holding(*match)]
        return Match(state, self._length[state]) if state > 0 else NOTHING

    def followers(self, match: Match, most: int) -> tuple[int, list[tuple[int, int]]]:
        """How often any token followed the stretch; and up to `most` tokens, each with its own count, most frequent first."""
        state = self._holding(*match)
        nexts, count = self._next[state], self._count
        if not nexts:
            return 0, []
        favourite = self._favourite[state]
        total = sum([count[after] for after in nexts.values()]) if len(nexts) <= NEWEST else count[state]
        if most == 1 or len(nexts) == 1:
            return total, [(favourite, count[nexts[favourite]])]
        newest = islice(reversed(nexts), NEWEST)
        looked_at = [favourite, *(token for token in newest if token != favourite)]
        found = sorted(((token, count[nexts[token]]) for token in looked_at), key=lambda pair: -pair[1])
        return total, found[:most]

    def _target(self, state: int, token: int) -> int:
        """The state of `state`'s longest stretch with `token`, split off where it shares one with longer stretches."""
        shared = self._next[state][token]
        length = self._length[state] + 1
        if self._length[shared] == length:
            return shared
        own = self._add(length, link=self._link[shared])
        self._next[own] = dict(self._next[shared])
        self._count[own] = self._count[shared]
        self._favourite[own] = self._favourite[shared]
        self._link[shared] = own
        while state >= 0 and self._next[state].get(token) == shared:
            self._next[state][token] = own
            state = self._link[state]
        return own

    def _add(self, length: int, *, link: int) -> int:
        self._next.append({})
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        self._favourite.append(-1)
        return len(self._next) - 1

    def _holding(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of a stretch of `state`, which may have been split since."""
        links, lengths = self._link, self._length
        while state and lengths[links[state]] >= length:
            state = links[state]
        return state

    def _count_up(self, before: int, token: int, after: int) -> None:
        """`token` followed the stretches of `before` and its suffixes, which makes those of `after` and its suffixes."""
        nexts, links, count, favourite = self._next, self._link, self._count, self._favourite
        while after > 0:
            count[after] += 1
            after = links[after]
        while before >= 0:
            follower = nexts[before]
            best = favourite[before]
            if best != token and (best < 0 or count[follower[token]] >= count[follower[best]]):
                favourite[before] = token
            before = links[before]
