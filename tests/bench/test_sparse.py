"""Comparison of a sparse layer with a dense one: both multiply a token by equally many numbers."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.sparse import NUM_EXPERTS, NUM_SAMPLES, NUM_TOKENS, WIDTH, layers, rounds


def test_experts_and_feed_forward_have_equal_arithmetic_but_for_the_router() -> None:
    x = torch.zeros(NUM_SAMPLES, NUM_TOKENS, WIDTH)
    counted = []
    for layer in layers():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x)
        counted.append(counter.get_total_flops())
    assert counted[0] - counted[1] == 2 * NUM_SAMPLES * NUM_TOKENS * WIDTH * NUM_EXPERTS


def test_rounds_have_the_seconds_of_both() -> None:
    assert all(sparse_s > 0 and dense_s > 0 for sparse_s, dense_s in rounds(1))
