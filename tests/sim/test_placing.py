"""Placements that simulated worlds begin with."""

import pytest

from skein.protocol.log.records import PlanAdopted
from skein.sim.scenario import disturbed, judge
from skein.sim.shapes import shape_of
from tests.support.worlds import of_kind


@pytest.mark.parametrize("text", ["line 2x2 chunks 2 split v", "line 3x2 chunks 2 split v on 8"])
def test_a_v_turns_at_a_worker_and_ends_where_it_began(text: str) -> None:
    shape = shape_of(text)
    world = disturbed(shape, seed=0, num_faults=0)
    judge(shape, world)
    plan = of_kind(world.log, PlanAdopted)[0].plan
    for path in plan.paths:
        workers = [hop.worker for hop in path.hops]
        assert workers == workers[::-1]
        assert len(set(workers)) == shape.stages


def test_chunks_beside_each_other_do_not_turn() -> None:
    shape = shape_of("line 2x2 chunks 2 split")
    world = disturbed(shape, seed=0, num_faults=0)
    judge(shape, world)
    for path in of_kind(world.log, PlanAdopted)[0].plan.paths:
        first, second, third, fourth = (hop.worker for hop in path.hops)
        assert first == second != third == fourth
