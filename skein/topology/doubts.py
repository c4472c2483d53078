"""Links that look broken: a hundred times slower than their like is more often a fault than a distance.

A doubted link keeps its measured cost. Planners avoid it because it is slow, never trust it to be faster than it was
measured, and say that somebody should measure it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

DOUBTED_FROM = 30.0
"""Times the median of its like. In the reference's instances one pair of cities is at 62, all others are within 2."""
_LEAST_LIKE = 3
"""Other links that a median needs to say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDoubt:
    """A link (positions of workers; `sender` sends) and how far it is off: `seconds` against `usual_s` of `like`."""

    sender: int
    receiver: int
    seconds: float
    usual_s: float
    like: str

    @property
    def factor(self) -> float:
        return self.seconds / self.usual_s


def questioned_links(seconds: F64, places: Sequence[str] | None = None) -> tuple[LinkDoubt, ...]:
    """Links slower than `DOUBTED_FROM` times the median of their like, the worst first.

    A link's like are the other links, in either direction, between the same two places; and all links inside places, or
    between places. The second finds a pair of places whose links are all wrong. With no places known, all links are
    one kind.

    Args:
        seconds: (num_workers, num_workers), for one boundary tensor; row sends to column. The diagonal is not read.
        places: (num_workers,), site or city of each worker.

    Source: the reference's link table for SkipPipe (arXiv 2502.19913) has one pair of cities a hundred times too slow,
    which ruins whatever plan believes in it without saying so.

    >>> seconds = np.ones((4, 4))
    >>> seconds[0, 3] = 50
    >>> [(x.sender, x.receiver, x.factor, x.like) for x in questioned_links(seconds)]
    [(0, 3, 50.0, 'all links')]
    """
    num_workers = len(seconds)
    if places is None:
        kind = np.zeros((num_workers, num_workers), dtype=np.int64)
        return _worst_first(_doubts(seconds, kind, ("all links",)))
    names = sorted(set(places))
    place = np.array([names.index(name) for name in places], dtype=np.int64)
    low, high = np.minimum.outer(place, place), np.maximum.outer(place, place)
    pair_names = tuple(_between(names[a], names[b]) for a in range(len(names)) for b in range(len(names)))
    crosses = (low != high).astype(np.int64)
    return _worst_first(
        [
            *_doubts(seconds, low * len(names) + high, pair_names),
            *_doubts(seconds, crosses, ("links inside a place", "links between places")),
        ]
    )


def _between(one: str, other: str) -> str:
    return f"links inside {one}" if one == other else f"links between {one} and {other}"


def _doubts(seconds: F64, kind: npt.NDArray[np.int64], names: Sequence[str]) -> list[LinkDoubt]:
    """Doubts within each kind, (num_workers, num_workers) numbers into `names`."""
    is_link = ~np.eye(len(seconds), dtype=np.bool_)
    found = []
    for number in np.unique(kind[is_link]) if len(seconds) > 1 else ():
        senders, receivers = np.nonzero((kind == number) & is_link)
        if len(senders) <= _LEAST_LIKE:
            continue
        own = seconds[senders, receivers]
        usual_s = float(np.median(own))
        # Among links that take no time at all, one that takes some has no factor.
        for i in np.flatnonzero((own > DOUBTED_FROM * usual_s) & (usual_s > 0)):
            found.append(
                LinkDoubt(
                    sender=int(senders[i]),
                    receiver=int(receivers[i]),
                    seconds=float(own[i]),
                    usual_s=usual_s,
                    like=names[number],
                )
            )
    return found


def _worst_first(doubts: Sequence[LinkDoubt]) -> tuple[LinkDoubt, ...]:
    """Doubts, the largest factor first; of several about one link, the one with the larger factor."""
    by_link: dict[tuple[int, int], LinkDoubt] = {}
    for doubt in sorted(doubts, key=lambda x: -x.factor):
        by_link.setdefault((doubt.sender, doubt.receiver), doubt)
    return tuple(sorted(by_link.values(), key=lambda x: (-x.factor, x.sender, x.receiver)))
