import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.plan.paths import shares, visited_stages
from skein.types import Layout


@given(st.integers(0, 200), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_shares_add_up_and_leave_nobody_out_while_there_is_enough(total: int, weights: list[float]) -> None:
    counts = shares(total, weights)
    assert sum(counts) == total
    assert min(counts) >= (1 if total >= len(weights) else 0)


# With at least twice as many as there are weights within a factor of two, nobody's share is raised to one.
@given(st.integers(16, 200), st.lists(st.floats(1.0, 2.0), min_size=1, max_size=8))
def test_shares_of_similar_weights_are_proportional_to_one(total: int, weights: list[float]) -> None:
    for count, weight in zip(shares(total, weights), weights, strict=True):
        ideal = total * weight / sum(weights)
        assert math.floor(ideal) <= count <= math.ceil(ideal)


@pytest.mark.parametrize("layout", Layout)
@given(st.integers(3, 12), st.data())
def test_stages_left_out_in_rotation_are_visited_equally_often(
    layout: Layout, num_stages: int, data: st.DataObject
) -> None:
    num_fixed = 1 if layout is Layout.LOOP else 2
    num_visited = data.draw(st.integers(num_fixed, num_stages - 1))
    num_microbatches = data.draw(st.integers(1, 30))
    ways = [visited_stages(m, num_stages, num_visited, layout) for m in range(num_microbatches)]
    assert all(len(way) == num_visited and list(way) == sorted(set(way)) and way[0] == 0 for way in ways)
    counts = Counter(stage for way in ways for stage in way)
    assert counts[0] == num_microbatches
    if layout is Layout.LINE:
        assert counts[num_stages - 1] == num_microbatches
    used = [counts[stage] for stage in range(1, num_stages - (layout is Layout.LINE))]
    assert max(used) - min(used) <= 1
