"""Shapes of trees, fixed before a token is drawn. Knows how often each rank of sibling is right; knows no tokens.

A shape maps a place to the number of children there; a place is the path of ranks that leads to it: () is the root, (0, 1)
the second child of the first child.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence as Seq

from draftwise.types import Limit

Place = tuple[int, ...]
Shape = dict[Place, int]


def levels(widths: Seq[int]) -> Callable[[Place], int]:
    """The tree with widths[d] children at each node of depth d, as the most children at each place."""
    return lambda place: widths[len(place)] if len(place) < len(widths) else 0


def parse_widths(text: str) -> tuple[int, ...]:
    """Widths by depth from text such as "4,2,1". Raises ValueError."""
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise ValueError(f"{text!r} is not a list of widths by depth such as 4,2,1")
    return widths


def parse_places(text: str) -> Shape:
    """The shape of exactly these places, ranks by depth with dots between and spaces between places: "0 0.0 0.1 1".

    Medusa's sparse trees are such lists. Raises ValueError naming a place whose parent or elder sibling is not there.
    """
    try:
        places = {tuple(int(rank) for rank in part.split(".")) for part in text.split()}
    except ValueError:
        places = set()
    if not places or min(min(place) for place in places) < 0:
        raise ValueError(f"{text!r} is not a list of places such as '0 0.0 0.1 1'")
    shape: Shape = {}
    for place in sorted(places):
        above, rank = place[:-1], place[-1]
        if (above and above not in places) or (rank and (*above, rank - 1) not in places):
            missing = above if above and above not in places else (*above, rank - 1)
            raise ValueError(f"{text!r} has {_dotted(place)} without {_dotted(missing)}")
        shape[above] = rank + 1
    return shape


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def best_shape(rates: Seq[float], limit: Limit, most: Callable[[Place], int]) -> Shape:
    """The shape within `limit` and within `most` children at each place that is expected to bring the most, less its prices.

    rates[r]: the chance that the child of rank r is right once its parent was, whatever the depth; so a node survives with
    the product along its path, and the nodes of the greatest products are the best tree of any size. That is the optimum
    of Sequoia's dynamic programme (Chen et al. 2024, arXiv 2402.12374, sec. 4.1), found by taking the best node next.
    """
    grown = _best([1.0], rates, limit, lambda place: most(place[1:]))
    return {place[1:]: count for place, count in grown.items()}


def best_counts(reaches: Seq[float], rates: Seq[float], limit: Limit) -> list[int]:
    """How many children each of some nodes gets in the best trees below them; reaches: the chances of these nodes."""
    grown = _best(reaches, rates, limit, lambda place: len(rates))
    return [grown.get((root,), 0) for root in range(len(reaches))]


def _best(reaches: Seq[float], rates: Seq[float], limit: Limit, most: Callable[[Place], int]) -> Shape:
    """The best trees below several nodes, within one limit; places begin with the number of the node."""
    falling = [min(rates[: rank + 1]) for rank in range(len(rates))]
    best: Shape = {}
    most_worth = 0.0
    for depth in range(1, limit.depth + 1) if limit.level_price else (limit.depth,):
        shape, worth = _likeliest(reaches, falling, limit._replace(depth=depth), most)
        worth -= depth * limit.level_price
        if worth > most_worth:
            best, most_worth = shape, worth
    return best


def _likeliest(
    reaches: Seq[float], rates: Seq[float], limit: Limit, most: Callable[[Place], int]
) -> tuple[Shape, float]:
    """The nodes worth their price, likeliest first, and what they are expected to bring above it."""
    shape: Shape = {}
    worth, nodes = 0.0, 0
    waiting: list[tuple[float, Place, float]] = []

    def consider(above: Place, rank: int, reach: float) -> None:
        if len(above) <= limit.depth and rank < min(most(above), len(rates)):
            heapq.heappush(waiting, (-reach * rates[rank], (*above, rank), reach))

    for root, reach in enumerate(reaches):
        consider((root,), 0, reach)
    while waiting and nodes < limit.nodes and -waiting[0][0] >= limit.node_price:
        negative, place, reach = heapq.heappop(waiting)
        nodes += 1
        worth += -negative - limit.node_price
        above, rank = place[:-1], place[-1]
        shape[above] = rank + 1
        consider(place, 0, -negative)
        consider(above, rank + 1, reach)
    return shape, worth
