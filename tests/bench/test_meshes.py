"""Figures of a block on a mesh, against the formulas of the papers."""

import pytest

from bench.meshes import NUM_SAMPLES, Line, lines, table
from skein.types import Precision

HIDDEN = 4608
WORD = 4


@pytest.fixture(scope="module")
def found() -> list[Line]:
    return list(lines(HIDDEN, Precision.FP32))


def test_sums_carry_eight_activations_of_a_block_but_for_the_own_share(found: list[Line]) -> None:
    for line in found:
        activations = NUM_SAMPLES * line.num_tokens * HIDDEN * WORD
        assert line.loads[0].received_bytes == 8 * activations * (line.size - 1) // line.size


def test_blocks_carry_their_matrices_too_so_that_they_gain_with_length_and_devices(found: list[Line]) -> None:
    least = {(line.num_tokens, line.size): line.least_traffic for line in found}
    assert {key for key, form in least.items() if form == "2d"} == {
        (1024, 16),
        (8192, 4),
        (8192, 9),
        (8192, 16),
    }


def test_parts_keep_less_than_sums_and_blocks_least(found: list[Line]) -> None:
    for line in found:
        whole, parts, blocks = (load.slot_bytes for load in line.loads)
        assert whole > parts > blocks
    assert table(found).count("\n") == len(found) + 1
