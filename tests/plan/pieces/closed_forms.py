"""Closed forms for the end of a layer of experts in pieces: a second opinion on `skein.plan.pieces.lanes`.

Source: Pan et al., FSMoE, 2025, Section 4.2, cases 1 to 4, of which the one that takes longest rules.
"""

from skein.plan.pieces.lanes import MOST_PIECES, LayerWork


def closed_end_s(layer: LayerWork, num_pieces: int) -> float:
    """Seconds until all rows of a layer are back: by the lane of exchanges with gradients, by experts, by exchanges
    alone, or by gathers and scatters, whichever is the bottleneck."""
    exchange_s, experts_s = layer.exchange.piece_s(num_pieces), layer.experts.piece_s(num_pieces)
    within_s = layer.gather.piece_s(num_pieces) + layer.scatter.piece_s(num_pieces)
    return max(
        2 * num_pieces * exchange_s + layer.gradients_s,
        2 * exchange_s + within_s + num_pieces * experts_s,
        2 * num_pieces * exchange_s + within_s,
        2 * exchange_s + num_pieces * within_s,
    )


def closed_pieces(layer: LayerWork, most: int = MOST_PIECES) -> int:
    """Number of pieces that the closed forms would choose."""
    return min(range(1, most + 1), key=lambda num: (closed_end_s(layer, num), num))
