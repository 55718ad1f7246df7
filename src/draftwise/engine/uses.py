"""A request's use of a drafter: when it was asked, when it is let be, and what it brought of late. Knows counts only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Rest:
    """Steps in which something is not thought of: the more, the oftener it was thought of in vain."""

    left: int = 0
    length: int = 0

    def lengthen(self, least: int, most: int) -> None:
        """Begin another one, twice as long as the last within these bounds."""
        self.left = self.length = min(max(2 * self.length, least), most)


@dataclass(slots=True)
class Use:
    """A request's use of a drafter: the steps since it was asked, and whether its last draft began right.

    rests: steps in which one that costs is not thought of, since it was not worth it, where nothing else is offered and where
    something is.
    profit: what a free one brought of late, in tokens a draft, less its time and its rows. vain: drafts since that was well.
    """

    idle: int = 0
    curious: bool = False
    rests: tuple[Rest, Rest] = field(default_factory=lambda: (Rest(), Rest()))
    profit: float = 0.1
    vain: int = 0
