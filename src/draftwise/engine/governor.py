"""How much to draft, and by whom: what brings the most tokens a second, by measured cost and learned acceptance.

Knows times and chances; knows nothing of how drafts are made. It settles what to ask of a drafter before that one drafts,
and leaves out afterwards only nodes whose presence may depend on their values, so every verify rule stays exact.

A second is worth the tokens that decoding made of one of late, and plain decoding's at least. So a node is worth its row
while its chance of being accepted exceeds what the row takes, and a level of a draft while its nodes exceed what its pass
and their rows take: that maximizes tokens over seconds, whatever a single step looks like (Dinkelbach 1967).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from draftwise.drafters.averages import Pace, Rates
from draftwise.drafters.base import Drafter
from draftwise.engine.balance import Balance
from draftwise.engine.experience import Experience
from draftwise.engine.merge import Merged, Offer, merge, weighed
from draftwise.engine.passes import FLAT, CostTable, PassTimes
from draftwise.engine.uses import Rest, Use
from draftwise.sequence import Sequence
from draftwise.types import NO_DRAFT, Draft, Limit

AHEAD = 8  # rows over which the price of one is taken, since t(n) climbs in steps


class Load(NamedTuple):
    """What a pass holds anyway: its rows, and the requests that each get a token from it."""

    rows: int
    requests: int


ALONE = Load(1, 1)
_PLAIN, _FREE, _ASKED = range(3)  # kinds of steps: without drafts, with drafts that cost nothing, with one that cost


@dataclass(slots=True, eq=False)
class Choice:
    """One request in one step: what it may draft at most, what was asked of each drafter that costs, and what came."""

    seq: Sequence
    limit: Limit
    asked: dict[int, Limit] = field(default_factory=dict)
    drafts: dict[int, Draft] = field(default_factory=dict)
    chances: dict[int, list[float]] = field(default_factory=dict)  # per draft and node, as learnt
    merged: Merged | None = None  # what the drafts became, and before that was corrected for what came of such
    estimated: Draft | None = None
    price: float = 0.0  # of its rows in the pass, in tokens

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


class Governor:
    """Chooses drafters and sizes request by request, and learns from what came of them.

    A drafter that does not pay is tried now and then, since only that tells when it would: for `PROBE_SHARE` of the time
    at most. Free drafts are judged by the emitted tokens, verified or not, and asked for less and less often while they bring
    less than they take. A new request starts from what earlier ones taught.
    """

    PROBE_SHARE, PROBE_EVERY, PROBES = 0.01, 4, 8  # of the time; steps at least; that may be saved up, as they are at first
    REST, LONGEST_REST = 3, 12  # steps in which a drafter is not thought of that was not worth it: thinking takes time too
    VAIN, LONGEST = 4, 5  # so many free drafts in vain lengthen the pause before the next by a step; steps of it at most
    TOLERATED = 0.02  # tokens a draft that a free drafter may lose, since asking is how it finds what to gain
    RECENT = 0.1  # share of a free draft in what its drafter brought of late
    MODEST = 0.8  # share of a row's price: the first rows cost less than the rest, and a drafter may promise too little
    ASKING = 5e-4  # seconds that asking is taken to cost beside the drafter's own, until that was measured
    STRAIGHT, STRAIGHTEST = 8, 64  # passes with asking after which one goes without, to tell what asking costs: at first, later
    MARGIN = 0.03  # that a drafter must promise beyond its cost to be taken up, and fall short by to be dropped

    def __init__(self, cost: CostTable = FLAT, *, most_rows: int = 64) -> None:
        self.times, self.most_rows = PassTimes(cost), most_rows
        self._experience = Experience()
        self._speed = Rates(weight=8.0, forget=0.99)
        self._balance = Balance()
        self._uses = defaultdict[int, defaultdict[int, Use]](lambda: defaultdict(Use))  # by request and drafter
        self._asked = Rates(weight=32.0, forget=0.995)  # share of steps in which drafters that cost are asked, of all requests
        self._free = defaultdict[int, Pace](Pace)  # seconds that free drafters take for a draft
        self._beside = Rates(weight=3.0, forget=0.98)  # what steps take beyond a pass of their size and drafts, in such passes
        self._straight, self._most_straight = 1, 1  # passes since one without asking, and at most; at first such a one is due
        self._owed: _Owed | None = None  # of the step that is under way
        self._allowance: float | None = None  # seconds that trying may take; None: as many as may be saved up

    def meet(self, drafter: Drafter) -> None:
        """Take in what a drafter says of itself, once it has its place."""
        self._experience.guesses[drafter.place] = drafter.acceptance

    def hears(self, place: int, drafter: Drafter, seq: Sequence) -> bool:
        """True where a drafter takes part in a request: settled at its start, and always for one whose size is given."""
        return drafter.free or seq.request.draft_tokens is not None or self._balance.takes_part(place, seq.id)

    # before drafting

    def plan(self, place: int, drafter: Drafter, choices: Seq[Choice], load: Load) -> list[Limit]:
        """What to ask of a drafter; depth 0 where nothing. Reads drafts that were made, never one to be made."""
        if drafter.free:
            return self._invite(place, drafter, choices, load)
        if self._straight >= self._most_straight and all(choice.auto for choice in choices):
            return [choice.limit._replace(depth=0) for choice in choices]
        if all(self._rests(place, choice) for choice in choices):
            for choice in choices:
                use = self._use(place, choice.seq)
                rest = use.rests[bool(choice.drafts)]
                rest.left, use.idle = rest.left - 1, use.idle + 1
                self._asked.learn(place, 0.0)
                self._experience.passed_over(place, choice.seq)
            return [choice.limit._replace(depth=0) for choice in choices]
        worth, price = self._worth(load), self._price(load)
        begin, seconds = drafter.seconds_to_begin(len(choices)), drafter.seconds_per_depth(len(choices))
        limits = [choice.left(drafter) for choice in choices]
        pairs = list(zip(choices, limits, strict=True))
        depths = [0 if choice.auto else self._share(place, choice, limit) for choice, limit in pairs]
        paid = max(depths, default=0)
        cost = self._row_cost(load, worth) if len(choices) == 1 else lambda rows: price * rows
        bids = [
            self._bid(place, choice, limit.depth, cost, self._extra(place, drafter, choice, worth)) if choice.auto else _NO_BID
            for choice, limit in pairs
        ]
        asking = self._asking(_FREE if any(choice.drafts for choice in choices) else _PLAIN)
        depth, most, passes = 0, 0.0, 0.0
        for deeper in range(1, max(len(bid.gains) for bid in bids)):
            if deeper > paid:
                passes += worth * seconds * max(bid.runs[deeper - 1] for bid in bids if len(bid.gains) > deeper)
                passes += worth * (begin + asking) if deeper == 1 else 0.0
            gain = sum(max(bid.gains[: deeper + 1]) for bid in bids) - passes
            if gain > most:
                depth, most = deeper, gain
        depths = [given or _best(bid.gains[: depth + 1]) for given, bid in zip(depths, bids, strict=True)]
        pays = any(depths)
        if not pays:
            self._try(place, drafter, choices, limits, depths)
        for choice, depth in zip(choices, depths, strict=True):
            use = self._use(place, choice.seq)
            use.idle = 0 if depth else use.idle + 1
            if depth and pays:
                use.rests = Rest(), Rest()
            self._asked.learn(place, float(depth > 0))
            if not depth:
                use.rests[bool(choice.drafts)].lengthen(self.REST, self.LONGEST_REST)
                self._experience.passed_over(place, choice.seq)
        shared = worth * seconds / max(sum(map(bool, depths)), 1)
        return [
            limit._replace(depth=depth, node_price=price, level_price=shared) if choice.auto else limit._replace(depth=depth)
            for choice, limit, depth in zip(choices, limits, depths, strict=True)
        ]

    def _rests(self, place: int, choice: Choice) -> bool:
        """True where a drafter that costs need not be thought of in this step."""
        use = self._use(place, choice.seq)
        return choice.auto and not use.curious and use.rests[bool(choice.drafts)].left > 0

    def _invite(self, place: int, drafter: Drafter, choices: Seq[Choice], load: Load) -> list[Limit]:
        """What a free drafter may offer: all that may turn out to be worth its row."""
        least = self.MODEST * self._price(load)
        limits = []
        for choice in choices:
            limit = choice.left(drafter)
            if choice.auto:
                use = self._use(place, choice.seq)
                use.idle += 1
                pausing = use.idle <= min(use.vain // self.VAIN, self.LONGEST)
                limit = limit._replace(depth=0) if pausing else limit._replace(node_price=least)
            limits.append(limit)
        return limits

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
        apart = self._experience.where_others_err(place) if offered else 1.0
        gains, runs, row = [0.0], [], cost(1)
        for k, (chance, rows) in enumerate(self._experience.outlook(place, choice.seq, depth)):
            if k and chance < row:
                break  # nor are deeper ones worth their rows
            beside += chance * (1 - has[k]) * apart
            alone += chance
            read += rows
            promised = max(beside - cost(taken + read), alone - cost(read))
            gains.append(promised - without - extra * (1 + max(beside, alone)))
            runs.append(min(rows, 1.0))
        return _Bid(gains, runs)

    def _extra(self, place: int, drafter: Drafter, choice: Choice, worth: float) -> float:
        """What a drafter costs for each token beyond its passes: catching up is spread over what may still be said with it."""
        said = max(self._experience.tokens_left(choice.seq) * self._asked.rate(place, 1.0), 1.0)
        late = drafter.seconds_to_catch_up(choice.seq) / said
        return worth * late + (self.MARGIN if self._use(place, choice.seq).idle else -self.MARGIN)

    def _share(self, place: int, choice: Choice, limit: Limit) -> int:
        """Depth to ask where the number of nodes is given: down to the last level that is among the likeliest nodes."""
        nodes = [(chance, 0) for chances in choice.by_depth() for chance in chances]
        if not nodes or not limit.depth:
            return limit.depth
        has = [min(sum(chances), 1.0) for chances in choice.by_depth()] + [0.0] * limit.depth
        for k, (chance, rows) in enumerate(self._experience.outlook(place, choice.seq, limit.depth)):
            count = max(int(rows + 0.5), 1)
            nodes += [(chance * (1 - has[k]) / count, k + 1)] * count
        return max(depth for _, depth in sorted(nodes, reverse=True)[: choice.limit.nodes])

    def _try(self, place: int, drafter: Drafter, choices: Seq[Choice], limits: Seq[Limit], depths: list[int]) -> None:
        """Ask for one level where nothing was asked for long, if it is due and affordable."""
        due = []
        for i, (choice, limit) in enumerate(zip(choices, limits, strict=True)):
            use = self._use(place, choice.seq)
            if choice.auto and limit.depth > 0 and (use.curious or use.idle >= self.PROBE_EVERY):
                due.append((use.idle, i))
        if not due:
            return
        _, i = max(due)
        level = drafter.seconds_to_begin(1) + drafter.seconds_per_depth(1) + self.times(2) - self.times(1)
        cost = level + drafter.seconds_to_catch_up(choices[i].seq)
        saved = self.PROBES * level
        self._allowance = saved if self._allowance is None else min(self._allowance, max(saved, cost))
        if self._allowance >= cost:
            self._allowance -= cost
            depths[i] = 1

    # after drafting

    def weigh(self, place: int, choice: Choice) -> None:
        """Estimate what the draft that came from a drafter is worth."""
        choice.chances[place] = self._experience.chances(place, choice.seq, choice.drafts[place])

    def choose(self, choices: Seq[Choice], load: Load) -> list[Draft]:
        """What to verify of the drafts that came."""
        worth = self._worth(load)
        merged = [self._merged(choice, load) for choice in choices]
        kept = [list(range(draft.settled)) for draft in merged]
        likeliest: list[tuple[float, int, int]] = []
        for i, (choice, (draft, settled, _)) in enumerate(zip(choices, merged, strict=True)):
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
            if (worth_it := gain - cost(count)) > most:
                size, most = count, worth_it
            elif count >= size + AHEAD:
                break  # the rest are less likely still
        for _, i, node in likeliest[:size]:
            kept[i].append(node)
        price = self._row_cost(load, worth)
        for choice, verified in zip(choices, kept, strict=True):
            choice.price = price(len(verified))
        return [
            draft.only(sorted(nodes)).within(choice.limit)
            for choice, (draft, *_), nodes in zip(choices, merged, kept, strict=True)
        ]

    def _merged(self, choice: Choice, load: Load) -> Merged:
        offers, rule = [], choice.seq.request.verify
        for place, draft in choice.drafts.items():
            chances, whole = choice.chances[place], draft.survival is None
            optional = whole and choice.auto and place not in choice.asked and not weighed(draft, rule)
            if not optional or sum(chances) > self._row_cost(load, self._worth(load))(len(draft)):
                offers.append(Offer(draft.surviving(chances), whole, place))
        merged = merge(offers, rule)
        if merged.sources:
            choice.merged = merged
            merged = merged._replace(draft=merged.draft.surviving(self._experience.together(choice.seq, merged)))
        if merged.draft.survival is None:
            return merged
        choice.estimated = merged.draft
        return merged._replace(draft=merged.draft.surviving(self._experience.sober(merged.draft)))

    # afterwards

    def took(self, place: int, seconds: float) -> None:
        """Take in what a free drafter took for one draft."""
        self._free[place].learn(seconds)

    def learn(self, choice: Choice, verified: Draft, emitted: Seq[int]) -> None:
        """Take in what came of a request's drafts, and of those that were not verified what would have come."""
        accepted = len(verified.follow(emitted))
        if choice.merged is not None:
            self._experience.learn_together(choice.seq, choice.merged, verified, emitted)
        if choice.estimated is not None:
            self._experience.learn_estimates(choice.estimated, verified, emitted)
        if choice.auto and len(choice.asked) == 1:
            (place,) = choice.asked
            free = [draft for other, draft in choice.drafts.items() if other != place]
            if emitted and free and not any(draft.follow(emitted[:1]) for draft in free):
                drafted = choice.drafts.get(place, NO_DRAFT)
                self._experience.learn_apart(place, choice.seq, bool(drafted.follow(emitted[:1])))
            more = len(emitted) - min(1 + max((len(draft.follow(emitted)) for draft in free), default=0), len(emitted))
            self._owed = _Owed(place, choice.seq.id, more, max(map(len, free), default=0))
        for place, draft in choice.drafts.items():
            asked = choice.asked[place].depth if place in choice.asked else None
            use = self._use(place, choice.seq)
            use.curious = self._experience.learn(place, choice.seq, draft, verified, asked, emitted)
            if asked is None:
                brought = min(len(draft.follow(emitted)), accepted) - choice.price * min(len(draft) / max(len(verified), 1), 1)
                self._earned(place, use, brought)

    def came_empty(self, place: int, choice: Choice) -> None:
        """A free drafter that was asked had nothing to offer."""
        self._earned(place, self._use(place, choice.seq), 0.0)

    def _earned(self, place: int, use: Use, brought: float) -> None:
        net = brought - self._free[place].seconds * self._worth(ALONE)
        use.profit += self.RECENT * (net - use.profit)
        use.idle, use.vain = 0, 0 if use.profit > -self.TOLERATED else use.vain + 1

    def passed(
        self, load: Load, rows: int, seconds: float, emitted: int, drafting: float, rest: float, took: float = 0.0
    ) -> None:
        """Take in a pass of decoding requests alone.

        drafting: the seconds that its drafts should have taken, 0 where none was asked for that costs. rest: those of the step
        beyond its pass and what its drafts should have taken. took: those of the whole step.
        """
        owed, self._owed = self._owed, None
        if load.requests == 1:
            if owed is not None and took and self.times.known:
                self._settle(owed, load, took)
            self._balance.step()
        asked, expected = drafting > 0, self.times(rows)
        kind = _ASKED if asked else _FREE if rows > load.rows else _PLAIN
        if asked:
            self._straight += 1
        elif self._straight >= self._most_straight:
            self._straight, self._most_straight = 0, min(max(2 * self._most_straight, self.STRAIGHT), self.STRAIGHTEST)
        else:
            self._straight = 0
        if self.times.known:
            for what, value in (("pass", seconds - expected), ("rest", rest)):
                self._beside.learn((what, kind), max(-1.0, min(value / expected, 1.0)))
        self.times.learn(rows, seconds - expected * self._more("pass", _PLAIN) if asked else seconds)
        plain = self.times(load.requests)
        self._speed.learn("tokens", emitted / load.requests)
        self._speed.learn("time", (self.times(rows) + drafting + (self._asking(_PLAIN) if asked else 0.0)) / plain)
        if self._allowance is not None:
            self._allowance += self.PROBE_SHARE * plain

    def _settle(self, owed: _Owed, load: Load, took: float) -> None:
        """Take in what asking brought, against a step of the same request without it."""
        kind = _FREE if owed.nodes else _PLAIN
        beside = sum(self._beside.rate((what, kind), self._beside.rate((what, _PLAIN), 0.0)) for what in ("pass", "rest"))
        without = self.times(load.rows + owed.nodes) + self.times(1) * beside
        self._balance.learn(owed.place, owed.request, owed.tokens, self._worth(load) * (took - without))

    def forget(self, seq: Sequence) -> None:
        """The request ended."""
        self._balance.forget(seq.id)
        self._experience.forget(seq)
        self._uses.pop(seq.id, None)

    def _asking(self, instead: int) -> float:
        """Seconds that asking takes beside the drafter's own, against a step of the kind `instead`: what is not compiled of
        it, and a pass that begins late since the draft's weights pushed the target's out of the processor's caches."""
        one = self.times(1)
        return one * max(self._more("pass", instead) + self._more("rest", instead, self.ASKING / one), 0.0)

    def _more(self, what: str, instead: int, guess: float = 0.0) -> float:
        """What steps take more in which a drafter was asked that costs, for their pass or for the rest, in passes."""
        plain = self._beside.rate((what, _PLAIN), 0.0)
        without = self._beside.rate((what, instead), plain)
        return self._beside.rate((what, _ASKED), plain + guess) - without

    def _use(self, place: int, seq: Sequence) -> Use:
        return self._uses[seq.id][place]

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


class _Owed(NamedTuple):
    """What a request alone got of a step in which a drafter was asked: `tokens` beyond those that free drafts, of `nodes` at
    most, would have brought it."""

    place: int
    request: int
    tokens: int
    nodes: int


class _Bid(NamedTuple):
    """What a drafter promises a request: `gains` by depth from 0, `runs` the share of steps in which a level is drafted."""

    gains: list[float]
    runs: list[float]


_NO_BID = _Bid([0.0], [])


def _best(gains: Seq[float]) -> int:
    return max(range(len(gains)), key=lambda depth: gains[depth])
