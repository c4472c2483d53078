import math

from hypothesis import given
from hypothesis import strategies as st

from skein.plan.paths import shares


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
