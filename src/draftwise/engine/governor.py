"""How much to draft, and by whom: what brings the most tokens a second, by measured cost and learned acceptance.

Knows times and chances; knows nothing of how drafts are made. It settles what to ask of a drafter before that one drafts,
and leaves out afterwards only nodes whose presence may depend on their values, so every verify rule stays exact.

A second is worth the tokens that decoding made of one of late, and plain decoding's at least. So a node is worth its row
while its chance of being accepted exceeds what the row takes, and a level of a draft while its nodes exceed what its pass
and their rows take: that maximizes tokens over seconds, whatever a single step looks like (Dinkelbach 1967).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from draftwise.drafters.averages import Rates, level
from draftwise.drafters.base import Drafter
from draftwise.engine.merge import Merged, Offer, merge, weighed
from draftwise.engine.passes import FLAT, CostTable, PassTimes
from draftwise.sequence import Sequence
from draftwise.types import Draft, Limit

GUESS = 0.6  # acceptance of a drafter of which nothing is known
DEPTHS = 4  # acceptance is learnt for each depth up to this one, and together for all below
IDLE = 0.98  # share of what is known of a request's drafter that outlasts a step in which it is not asked
AHEAD = 8  # rows over which the price of one is taken, since t(n) climbs in steps


class Load(NamedTuple):
    """What a pass holds anyway: its rows, and the requests that each get a token from it."""

    rows: int
    requests: int


@dataclass(slots=True, eq=False)
class Choice:
    """One request in one step: what it may draft at most, what was asked of each drafter that costs, and what came."""

    seq: Sequence
    limit: Limit
    asked: dict[int, Limit] = field(default_factory=dict)
    drafts: dict[int, Draft] = field(default_factory=dict)
    chances: dict[int, list[float]] = field(default_factory=dict)  # per draft and node, as learnt

    @property
    def auto(self) -> bool:
        return self.seq.request.draft_tokens is None

    def left(self, drafter: Drafter) -> Limit:
        """The most that this drafter may draft: nodes drawn from q before it take their room for good."""
        rule = self.seq.request.verify
        taken = sum(len(draft) for draft in self.drafts.values() if weighed(draft, rule))
        nodes = max(self.limit.nodes - taken, 0)
        return Limit(nodes, min(self.limit.depth, drafter.max_depth, nodes))

    def by_depth(self) -> list[list[float]]:
        """The chances of the drafts that came, by depth. Nodes of one depth exclude each other, so their chances add up."""
        found: list[list[float]] = []
        for place, draft in self.drafts.items():
            for depth, chance in zip(draft.depths(), self.chances[place], strict=True):
                while len(found) < depth:
                    found.append([])
                found[depth - 1].append(chance)
        return found


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of one request."""

    rates: Rates
    said: Rates
    idle: dict[int, int] = field(default_factory=dict)  # per drafter: steps since it was asked
    curious: set[int] = field(default_factory=set)  # drafters whose last draft began right


class Governor:
    """Chooses drafters and sizes request by request, and learns from what came of them.

    A drafter that does not pay is tried now and then, since only that tells when it would: for `PROBE_SHARE` of the time
    at most. Free drafts are judged by the emitted tokens, verified or not. A new request starts from what earlier ones
    taught.
    """

    PROBE_SHARE, PROBE_EVERY = 0.01, 16  # of the time; steps
    MARGIN = 0.01  # that a drafter must promise beyond its cost to be taken up, and fall short by to be dropped

    def __init__(self, cost: CostTable = FLAT, *, most_rows: int = 64) -> None:
        self.times, self.most_rows = PassTimes(cost), most_rows
        self._rates = Rates(weight=4.0, forget=0.98)
        self._said = Rates(weight=8.0, forget=0.995)
        self._known: dict[int, _Known] = {}
        self._speed = Rates(weight=8.0, forget=0.99)
        self._output = Rates(weight=2.0, forget=0.9)
        self._allowance = 0.0  # seconds that trying may take

    # before drafting

    def plan(self, place: int, drafter: Drafter, choices: Seq[Choice], load: Load) -> list[Limit]:
        """What to ask of a drafter that costs; depth 0 where nothing. Reads drafts that were made, never one to be made."""
        worth, price = self._worth(load), self._price(load)
        seconds = drafter.seconds_per_depth(len(choices))
        limits = [choice.left(drafter) for choice in choices]
        pairs = list(zip(choices, limits, strict=True))
        depths = [0 if choice.auto else self._share(place, choice, limit) for choice, limit in pairs]
        paid = max(depths, default=0)
        cost = self._row_cost(load, worth) if len(choices) == 1 else lambda rows: price * rows
        bids = [
            self._bid(place, choice, limit.depth, cost, self._extra(place, drafter, choice, worth)) if choice.auto else _NO_BID
            for choice, limit in pairs
        ]
        depth, most, passes = 0, 0.0, 0.0
        for deeper in range(1, max(len(bid.gains) for bid in bids)):
            if deeper > paid:
                passes += worth * seconds * max(bid.runs[deeper - 1] for bid in bids if len(bid.gains) > deeper)
            gain = sum(max(bid.gains[: deeper + 1]) for bid in bids) - passes
            if gain > most:
                depth, most = deeper, gain
        depths = [given or _best(bid.gains[: depth + 1]) for given, bid in zip(depths, bids, strict=True)]
        if not any(depths):
            self._try(place, drafter, choices, limits, depths)
        for choice, depth in zip(choices, depths, strict=True):
            known = self._of(choice.seq)
            known.idle[place] = 0 if depth else known.idle.get(place, 0) + 1
            if not depth:
                known.rates.fade(("right", place, 0), IDLE)
        shared = worth * seconds / max(sum(map(bool, depths)), 1)
        return [
            limit._replace(depth=depth, node_price=price, level_price=shared) if choice.auto else limit._replace(depth=depth)
            for choice, limit, depth in zip(choices, limits, depths, strict=True)
        ]

    def _bid(self, place: int, choice: Choice, depth: int, cost: Callable[[float], float], extra: float) -> _Bid:
        """What a request gains by each depth of a drafter over the drafts that it has, in tokens; cost(rows) likewise."""
        offered = choice.by_depth()
        nodes = sorted((chance for chances in offered for chance in chances), reverse=True)
        sums = [0.0, *accumulate(nodes)]
        taken = max(range(len(sums)), key=lambda count: sums[count] - cost(count))
        least = nodes[taken - 1] if taken else 2.0
        has = [min(sum(chance for chance in chances if chance >= least), 1.0) for chances in offered] + [0.0] * depth
        without = sums[taken] - cost(taken)
        beside, alone, read = sums[taken], 0.0, 0.0
        gains, runs = [0.0], []
        for k, (chance, rows) in enumerate(self._outlook(place, choice, depth)):
            beside += chance * (1 - has[k])
            alone += chance
            read += rows
            promised = max(beside - cost(taken + read), alone - cost(read))
            gains.append(promised - without - extra * (1 + max(beside, alone)))
            runs.append(min(rows, 1.0))
        return _Bid(gains, runs)

    def _outlook(self, place: int, choice: Choice, depth: int) -> list[tuple[float, float]]:
        """Per depth the chance that a drafter is right down to it, and the nodes that it has there."""
        rates = self._of(choice.seq).rates
        outlook, chance, right, rows = [], 1.0, GUESS, 1.0
        for k in range(depth):
            right = rates.rate(("right", place, min(k, DEPTHS)), right)
            rows = rates.rate(("rows", place, min(k, DEPTHS)), rows)
            chance *= right
            outlook.append((chance, rows))
        return outlook

    def _extra(self, place: int, drafter: Drafter, choice: Choice, worth: float) -> float:
        """What a drafter costs for each token beyond its passes: catching up is spread over what may still be said."""
        said = len(choice.seq.tokens) - choice.seq.prompt_length
        left = min(max(self._output.rate("tokens", 256.0) - said, 64.0), choice.seq.room)
        margin = self.MARGIN if self._of(choice.seq).idle.get(place, 0) else -self.MARGIN
        return worth * drafter.seconds_to_catch_up(choice.seq) / max(left, 1.0) + margin

    def _share(self, place: int, choice: Choice, limit: Limit) -> int:
        """Depth to ask where the number of nodes is given: down to the last level that is among the likeliest nodes."""
        nodes = [(chance, 0) for chances in choice.by_depth() for chance in chances]
        if not nodes or not limit.depth:
            return limit.depth
        has = [min(sum(chances), 1.0) for chances in choice.by_depth()] + [0.0] * limit.depth
        for k, (chance, rows) in enumerate(self._outlook(place, choice, limit.depth)):
            count = max(int(rows + 0.5), 1)
            nodes += [(chance * (1 - has[k]) / count, k + 1)] * count
        return max(depth for _, depth in sorted(nodes, reverse=True)[: choice.limit.nodes])

    def _try(self, place: int, drafter: Drafter, choices: Seq[Choice], limits: Seq[Limit], depths: list[int]) -> None:
        """Ask for one level where nothing was asked for long, if it is due and affordable."""
        due = [
            (self._of(choice.seq).idle.get(place, 0), i)
            for i, (choice, limit) in enumerate(zip(choices, limits, strict=True))
            if choice.auto and limit.depth > 0 and self._due(place, choice)
        ]
        if not due:
            return
        _, i = max(due)
        cost = drafter.seconds_per_depth(1) + drafter.seconds_to_catch_up(choices[i].seq) + self.times(2) - self.times(1)
        self._allowance = min(self._allowance, 2 * cost)
        if self._allowance >= cost:
            self._allowance -= cost
            depths[i] = 1

    def _due(self, place: int, choice: Choice) -> bool:
        known = self._of(choice.seq)
        return place in known.curious or known.idle.get(place, 0) >= self.PROBE_EVERY

    # after drafting

    def weigh(self, place: int, choice: Choice) -> None:
        """Estimate the chances of a draft that came: what it says of itself, corrected by what came of such sayings."""
        draft = choice.drafts[place]
        chances: list[float] = []
        if draft.survival is None:
            depths = draft.depths()
            outlook = self._outlook(place, choice, max(depths, default=0))
            chances = [outlook[depth - 1][0] / depths.count(depth) for depth in depths]
        else:
            rates = self._of(choice.seq).said
            for said, parent in zip(draft.survival, draft.parents, strict=True):
                above, before = (chances[parent], draft.survival[parent]) if parent >= 0 else (1.0, 1.0)
                alone = min(said / before, 1.0) if before > 0 else 0.0
                chances.append(above * rates.rate((place, level(alone)), alone))
        choice.chances[place] = chances

    def choose(self, choices: Seq[Choice], load: Load) -> list[Draft]:
        """What to verify of the drafts that came."""
        worth, price = self._worth(load), self._price(load)
        merged = [self._merged(choice, price) for choice in choices]
        kept = [list(range(draft.settled)) for draft in merged]
        likeliest: list[tuple[float, int, int]] = []
        for i, (choice, (draft, settled)) in enumerate(zip(choices, merged, strict=True)):
            assert draft.survival is not None or settled == len(draft)
            nodes = sorted((-draft.survival[node], i, node) for node in range(settled, len(draft))) if draft.survival else []
            nodes = nodes[: max(choice.limit.nodes - settled, 0)]
            if choice.auto:
                likeliest += nodes
            else:
                kept[i] += [node for _, _, node in nodes]
        rows = load.rows + sum(map(len, kept))
        cost = self._row_cost(load._replace(rows=rows), worth)
        size, most, gain = 0, 0.0, 0.0
        likeliest.sort()
        for count, (chance, _, _) in enumerate(likeliest[: self.most_rows], 1):
            gain -= chance
            if gain - cost(count) > most:
                size, most = count, gain - cost(count)
        for _, i, node in likeliest[:size]:
            kept[i].append(node)
        return [
            draft.only(sorted(nodes)).within(choice.limit)
            for choice, (draft, _), nodes in zip(choices, merged, kept, strict=True)
        ]

    def _merged(self, choice: Choice, price: float) -> Merged:
        offers = []
        for place, draft in choice.drafts.items():
            chances, whole = choice.chances[place], draft.survival is None
            if not whole or place in choice.asked or not choice.auto or sum(chances) > price * len(draft):
                offers.append(Offer(replace(draft, survival=tuple(chances)), whole))
        return merge(offers, choice.seq.request.verify)

    # afterwards

    def learn(self, choice: Choice, emitted: Seq[int]) -> None:
        """Take in what came of a request's drafts, and of those that were not verified what would have come."""
        known = self._of(choice.seq)
        for place, draft in choice.drafts.items():
            path = draft.follow(emitted)
            if draft.survival is not None:
                self._learn_said(known.said, place, draft, path, len(emitted))
            if draft.survival is None or place in choice.asked:
                self._learn_depths(known.rates, place, draft, choice.asked.get(place), len(path), len(emitted))
            known.curious.discard(place)
            if path:
                known.curious.add(place)

    def _learn_depths(self, rates: Rates, place: int, draft: Draft, asked: Limit | None, right: int, reached: int) -> None:
        """A draft that ended early for want of confidence counts as wrong there, and as having cost no row below."""
        depths = draft.depths()
        deepest = max(depths, default=0) if asked is None else asked.depth
        for k in range(deepest):
            rates.learn(("rows", place, min(k, DEPTHS)), depths.count(k + 1))
            if k <= right and k < reached:
                rates.learn(("right", place, min(k, DEPTHS)), k < right)
        for k in range(deepest, DEPTHS + 1):  # what was not tried for long is taken to be like the depth above
            rates.fade(("right", place, k))
            self._rates.fade(("right", place, k))

    def _learn_said(self, rates: Rates, place: int, draft: Draft, path: Seq[int], reached: int) -> None:
        assert draft.survival is not None
        depth_of = {-1: 0} | {node: depth for depth, node in enumerate(path, 1)}
        right = set(path)
        for node, parent in enumerate(draft.parents):
            if depth_of.get(parent, reached) < reached:
                before = draft.survival[parent] if parent >= 0 else 1.0
                alone = min(draft.survival[node] / before, 1.0) if before > 0 else 0.0
                rates.learn((place, level(alone)), node in right)

    def passed(self, load: Load, rows: int, seconds: float, emitted: int, drafting: float) -> None:
        """Take in a pass of decoding requests alone; `drafting`: the seconds that its drafts should have taken."""
        self.times.learn(rows, seconds)
        plain = self.times(load.requests)
        self._speed.learn("tokens", emitted / load.requests)
        self._speed.learn("time", (self.times(rows) + drafting) / plain)
        self._allowance += self.PROBE_SHARE * plain

    def forget(self, seq: Sequence) -> None:
        """The request ended."""
        if self._known.pop(seq.id, None) is not None:
            self._output.learn("tokens", len(seq.tokens) - seq.prompt_length)

    def _of(self, seq: Sequence) -> _Known:
        if seq.id not in self._known:
            rates, said = Rates(self._rates, weight=3.0, forget=0.95), Rates(self._said, weight=8.0, forget=0.98)
            self._known[seq.id] = _Known(rates, said)
        return self._known[seq.id]

    def _worth(self, load: Load) -> float:
        """Tokens that a second is worth."""
        gain = self._speed.rate("tokens", 1.0) / self._speed.rate("time", 1.0)
        return max(gain, 1.0) * load.requests / self.times(load.requests)

    def _price(self, load: Load) -> float:
        """Tokens that a row is worth."""
        return self._row_cost(load, self._worth(load))(AHEAD) / AHEAD

    def _row_cost(self, load: Load, worth: float) -> Callable[[float], float]:
        """Tokens that so many further rows are worth."""
        without = self.times(load.rows)
        return lambda rows: worth * (self.times(load.rows + rows) - without)


class _Bid(NamedTuple):
    """What a drafter promises a request: `gains` by depth from 0, `runs` the share of steps in which a level is drafted."""

    gains: list[float]
    runs: list[float]


_NO_BID = _Bid([0.0], [])


def _best(gains: Seq[float]) -> int:
    return max(range(len(gains)), key=lambda depth: gains[depth])
