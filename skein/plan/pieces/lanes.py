"""Pieces in which tokens go to experts on other devices and back: how many make a layer end earliest.

Three lanes work side by side: exchanges between devices, gathers and scatters within a group of them, and experts. A
piece is exchanged, gathered, computed, scattered, and exchanged back. Exchanges go in order: all there, then gradients
that wait for the lane, then all back.

Source: Pan et al., FSMoE, 2025, Section 4, whose four cases are approximations of what is walked through here.
"""

from dataclasses import dataclass, field
from math import inf

from skein.plan.pieces.line import TimeLine

MOST_PIECES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Numbers of pieces on the way of tokens to experts and back, and on that of their gradients."""

    forward: int = 1
    backward: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of a kind of work: `each_s` of every piece, and `all_s` shared by all pieces of a layer."""

    each_s: float = 0.0
    all_s: float = 0.0

    @classmethod
    def of(cls, line: TimeLine, size: float) -> "Work":
        """Work of a layer of this size, by a line."""
        return cls(each_s=line.alpha_s, all_s=line.beta_s * size)

    def piece_s(self, num_pieces: int) -> float:
        """Seconds of one of so many pieces."""
        return self.each_s + self.all_s / num_pieces

    def times(self, factor: float) -> "Work":
        """So many times as much."""
        return Work(each_s=self.each_s * factor, all_s=self.all_s * factor)


NOTHING = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Work of one layer of experts, one way.

    Attributes:
        exchange: of rows between devices, once; the way back takes as long.
        experts: their computing.
        gather: of rows within a group of devices, before experts.
        scatter: of results within the group, after them.
        gradients_s: seconds of sums that others wait for, on the lane of exchanges, after the last piece has left.
        after_s: seconds of computing once the last piece is done, as its rows travel.
    """

    exchange: Work
    experts: Work
    gather: Work = field(default=NOTHING)
    scatter: Work = field(default=NOTHING)
    gradients_s: float = 0.0
    after_s: float = 0.0


def end_s(layer: LayerWork, num_pieces: int) -> float:
    """Seconds until all rows of a layer are back, in so many pieces.

    Of a gather and a scatter the one that can begin first does, a scatter where both can.

    >>> layer = LayerWork(exchange=Work(all_s=1.0), experts=Work(all_s=4.0))
    >>> [end_s(layer, num) for num in (1, 2, 4)]
    [6.0, 5.0, 4.5]
    """
    exchange_s, experts_s = layer.exchange.piece_s(num_pieces), layer.experts.piece_s(num_pieces)
    gather_s, scatter_s = layer.gather.piece_s(num_pieces), layer.scatter.piece_s(num_pieces)
    computed: list[float] = []
    scattered: list[float] = []
    within_s = experts_free_s = 0.0
    while len(scattered) < num_pieces:
        num_here, num_left = len(computed), len(scattered)
        gather_at_s = max(within_s, (num_here + 1) * exchange_s) if num_here < num_pieces else inf
        scatter_at_s = max(within_s, computed[num_left]) if num_left < num_here else inf
        if scatter_at_s <= gather_at_s:
            within_s = scatter_at_s + scatter_s
            scattered.append(within_s)
        else:
            within_s = gather_at_s + gather_s
            experts_free_s = max(experts_free_s, within_s) + experts_s
            computed.append(experts_free_s)
    between_s = num_pieces * exchange_s + layer.gradients_s
    for ready_s in scattered:
        between_s = max(between_s, ready_s) + exchange_s
    return max(between_s, experts_free_s + layer.after_s)


def best_pieces(layer: LayerWork, most: int = MOST_PIECES) -> int:
    """Number of pieces with which a layer ends earliest; of equal ones the smallest."""
    return min(range(1, most + 1), key=lambda num: (end_s(layer, num), num))
