"""The cursor: every position belongs to one microbatch of one step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.config.job import BatchSpec
from skein.data.cursor import Cursor, positions_of

BATCHES = st.builds(
    lambda size, count: BatchSpec(samples=size * count, microbatch_samples=size),
    st.integers(1, 64),
    st.integers(1, 64),
)


@given(batch=BATCHES, first_step=st.integers(0, 10**6))
def test_microbatches_of_successive_steps_tile_the_positions(batch: BatchSpec, first_step: int) -> None:
    positions = [
        position
        for step in (first_step, first_step + 1)
        for microbatch in range(batch.num_microbatches)
        for position in positions_of(step, microbatch, batch)
    ]
    start = first_step * batch.samples
    assert positions == list(range(start, start + 2 * batch.samples))


@given(batch=BATCHES, step=st.integers(0, 10**6))
def test_a_committed_step_moves_the_cursor_to_the_next(batch: BatchSpec, step: int) -> None:
    assert Cursor.at_step(step, batch).after(batch) == Cursor.at_step(step + 1, batch)


@pytest.mark.parametrize("microbatch", [-1, 2])
def test_a_microbatch_that_the_batch_has_not_is_refused(microbatch: int) -> None:
    with pytest.raises(ValueError, match="not one of 2"):
        positions_of(0, microbatch, BatchSpec(samples=8, microbatch_samples=4))
