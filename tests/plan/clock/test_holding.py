"""What a plan uses of each worker, planned and told."""

from dataclasses import replace
from typing import Literal

import pytest

from skein.config.job import PlanSpec
from skein.plan.balanced import pool_of
from skein.plan.clock.holding import planned_uses
from skein.plan.clock.timing import op_times
from skein.plan.clock.walked import Walk, pace_of
from skein.plan.load import stage_loads, together_bytes
from skein.plan.plan import Plan
from skein.plan.searched import make_searched_plan
from skein.types import StageIndex
from tests.plan.builders import fleet, job


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_peaks_and_bubbles_are_those_of_the_planned_order(
    backward: Literal["whole", "split"], chunks: int
) -> None:
    spec = job(stages=3, replicas=1, num_layers=12, is_tied=False)
    parallel = spec.parallel.model_copy(update={"chunks": chunks})
    spec = spec.model_copy(update={"parallel": parallel, "plan": PlanSpec(backward=backward, budget_s=0.05)})
    on = fleet([1e10] * 3)
    plan = make_searched_plan(spec, on, None, 0)
    assert isinstance(plan, Plan)
    pool, loads = pool_of(spec, on), stage_loads(spec, plan.stages)
    walk = Walk(plan.paths, plan.schedules, pace_of(pool, loads, *op_times(on, loads, pool)))
    walk.ends_s()
    uses = planned_uses(plan, spec)
    assert [use.worker for use in uses] == list(plan.workers)
    for use in uses:
        assert len(use.stages) == chunks
        bars = [bar for bar in walk.bars if bar.worker == use.worker]
        busy_s = sum(bar.end_s - bar.begin_s for bar in bars)
        assert use.planned_bubble == pytest.approx(1 - busy_s / plan.predicted_step_s)
        for slots, peak in zip(use.slots, use.planned_peaks, strict=True):
            assert 0 <= peak <= max(slots, 1)
        held = [loads[stage] for stage in use.stages]
        assert use.most_bytes == together_bytes(held, use.slots)
        assert use.planned_bytes <= use.most_bytes - use.fixed_bytes
    assert max(peak for use in uses for peak in use.planned_peaks) > 1


def test_what_was_told_stands_beside_what_was_planned() -> None:
    spec = job(stages=2, replicas=1)
    plan = make_searched_plan(
        spec.model_copy(update={"plan": PlanSpec(budget_s=0.05)}), fleet([1e10] * 2), None, 0
    )
    assert isinstance(plan, Plan)
    use = planned_uses(plan, spec)[0]
    assert (use.held_peaks, use.held_bytes, use.bubble) == ((), 0, None)
    told = use.told({use.stages[0]: 3, StageIndex(7): 5}, 0.25)
    assert (told.held_peaks, told.bubble) == ((3,), 0.25)
    assert told.held_bytes == 3 * use.slot_bytes[0]
    assert replace(told, held_peaks=(), bubble=None) == use
