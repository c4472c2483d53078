"""Slots of an order's own: each chunk has what it ever holds there, out of what its worker has for all of them."""

from dataclasses import replace

import numpy as np
import pytest

from skein.plan.route.evaluate import timeline
from skein.plan.route.orders import NamedStart, named_orders
from skein.plan.route.problem import Problem, SharedMemory
from skein.plan.route.room import Crowded, may_hold, peak_held, with_room
from tests.plan.route.test_orders import pipeline

FIXED, SLOT = 100, 10
IN_A_V = ", in a V of 4 workers"


def sharing(num_slots: int, *, num_microbatches: int = 12) -> Problem:
    """Four equal workers of two chunks each, with memory for so many slots on both chunks together."""
    problem = pipeline(
        4, num_microbatches, hop_s=0.0, slots=min(num_slots // 2, num_microbatches), chunks=2, is_split=True
    )
    memory = SharedMemory(
        memory_bytes=np.full(4, 2 * FIXED + num_slots * SLOT + SLOT - 1),
        fixed_bytes=np.full(8, FIXED),
        slot_bytes=np.full(8, SLOT),
    )
    return replace(problem, memory=memory)


def starts(problem: Problem) -> dict[str, NamedStart]:
    path = np.array([[*range(8)]] * problem.num_microbatches)
    return {start.name: start for start in named_orders(problem, np.arange(8) % 4, path)}


# Peaks by (p + 2) // 2 and (p + 4) // 3 stages, of which each worker holds halves; ZB-V has p.
@pytest.mark.parametrize(("name", "least"), [("v_half", 6), ("v_min", 5), ("zb_v", 9)])
def test_an_order_begins_a_search_with_just_the_memory_that_it_holds(name: str, least: int) -> None:
    problem = sharing(least)
    start = starts(problem)[name + IN_A_V]
    assert isinstance(start.within, Problem)
    assert start.within is not problem
    held = np.bincount(start.routing.worker_of, peak_held(problem, start.routing))
    assert held.max() == least
    own = start.within.slots[start.routing.worker_of, problem.stage_of]
    assert own.tolist() == peak_held(problem, start.routing).tolist()
    # Elsewhere no chunk of this problem fits beside the others.
    assert start.within.slots.sum() == own.sum()
    assert timeline(start.within, start.routing).step_s > 0
    with pytest.raises(ValueError, match="more microbatches than it has slots"):
        timeline(problem, start.routing)
    short = starts(sharing(least - 1))[name + IN_A_V].within
    assert isinstance(short, Crowded)
    assert (short.needed, short.has) == (least, least - 1)


def test_slots_are_of_a_problem_itself_where_they_suffice() -> None:
    problem = sharing(24)
    assert all(start.within is problem for start in starts(problem).values())


def test_without_shared_memory_slots_say_what_lacks() -> None:
    problem = replace(sharing(6), memory=None)
    start = starts(problem)["v_half" + IN_A_V]
    assert start.within == Crowded(worker=0, needed=6, has=4) == with_room(problem, start.routing)


def test_chunks_of_unequal_size_share_a_memory_that_equal_parts_of_it_would_not_hold() -> None:
    problem, holders = sharing(4), np.arange(8) % 4
    large = SharedMemory(
        memory_bytes=np.full(4, 240), fixed_bytes=np.array([200] + [10] * 7), slot_bytes=np.full(8, SLOT)
    )
    problem = replace(problem, memory=large, slots=np.where(np.arange(8) == 0, 0, problem.slots))
    assert may_hold(problem, holders)
    assert not may_hold(problem, np.zeros(8, np.int64))
    assert not may_hold(replace(problem, memory=None), holders)
