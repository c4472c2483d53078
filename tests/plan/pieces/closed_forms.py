"""Closed forms for a layer of experts in pieces: a second opinion on `skein.plan.pieces.lanes`.

Source: Pan et al., FSMoE, 2025, Section 4.2 and 4.3, cases 1 to 4, without gathers and scatters. The case that takes
longest rules.
"""

from skein.plan.pieces.lanes import LayerWork


def closed_end_s(layer: LayerWork, num_pieces: int, sums_s: float = 0.0) -> float:
    """Seconds until all rows of a layer are back: by exchanges with sums of gradients, or by experts."""
    exchange_s, experts_s = layer.exchange.piece_s(num_pieces), layer.experts.piece_s(num_pieces)
    return max(
        2 * num_pieces * exchange_s + sums_s,
        2 * exchange_s + num_pieces * experts_s,
    )


def closed_idle_s(layer: LayerWork, num_pieces: int) -> float:
    """Seconds left between exchanges there and back: none where these are the bottleneck."""
    exchange_s, experts_s = layer.exchange.piece_s(num_pieces), layer.experts.piece_s(num_pieces)
    return max(0.0, num_pieces * experts_s - 2 * (num_pieces - 1) * exchange_s)
