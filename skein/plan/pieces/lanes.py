"""Pieces in which tokens go to experts on other devices and back: how many make a layer end earliest.

Two lanes work side by side: exchanges between devices, and experts. A piece is exchanged, computed, and exchanged back.
Exchanges go in order: all there, then sums of gradients that fit in before the first piece is back, then all back.

Source: Pan et al., FSMoE, 2025, Section 4, without the lane of gathers and scatters within a group of devices: each
expert is whole on one device here. Its cases are closed forms of what is walked through.
"""

from dataclasses import dataclass

from skein.plan.pieces.line import TimeLine

MOST_PIECES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Numbers of pieces on the way of tokens to experts and back, and on that of their gradients.

    `num_summed`: elements of the gradients of later layers that devices may sum beside a layer's way back.
    """

    forward: int = 1
    backward: int = 1
    num_summed: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Work of one layer of experts, one way.

    Attributes:
        exchange: of rows between devices, once; the way back takes as long.
        experts: their computing.
        after_s: seconds of computing once the last piece is done, as its rows travel.
    """

    exchange: Work
    experts: Work
    after_s: float = 0.0


def end_s(layer: LayerWork, num_pieces: int) -> float:
    """Seconds until all rows of a layer are back, in so many pieces.

    >>> layer = LayerWork(exchange=Work(all_s=1.0), experts=Work(all_s=4.0))
    >>> [end_s(layer, num) for num in (1, 2, 4)]
    [6.0, 5.0, 4.5]
    """
    exchange_s, experts_s = layer.exchange.piece_s(num_pieces), layer.experts.piece_s(num_pieces)
    between_s, computed_s = num_pieces * exchange_s, 0.0
    for piece in range(num_pieces):
        computed_s = max(computed_s, (piece + 1) * exchange_s) + experts_s
        between_s = max(between_s, computed_s) + exchange_s
    return max(between_s, computed_s + layer.after_s)


def idle_s(layer: LayerWork, num_pieces: int) -> float:
    """Seconds for which exchanges leave their lane idle, in so many pieces: what takes no longer, once all rows are on
    their way there, may delay some on their way back, but not the end.

    >>> layer = LayerWork(exchange=Work(all_s=1.0), experts=Work(all_s=4.0))
    >>> [idle_s(layer, num) for num in (1, 2, 4)]
    [4.0, 3.0, 2.5]
    """
    return max(0.0, end_s(layer, num_pieces) - 2 * num_pieces * layer.exchange.piece_s(num_pieces))


def best_pieces(layer: LayerWork, most: int = MOST_PIECES) -> int:
    """Number of pieces with which a layer ends earliest; of equal ones the smallest."""
    return min(range(1, most + 1), key=lambda num: (end_s(layer, num), num))
