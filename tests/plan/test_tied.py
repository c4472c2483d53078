"""Memory of tied models: what both ends have counts once where one worker holds them, and as much more fits there."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skein.config.job import JobSpec
from skein.model.rows import VocabularySplit
from skein.plan.balanced import make_balanced_plan, pool_of
from skein.plan.check import violations
from skein.plan.load import StageLoad, slots_within, spared_bytes, stage_loads, together_bytes
from skein.plan.place import Demand, Seating
from skein.plan.plan import Infeasible, Plan
from skein.plan.route.job_problem import pose
from skein.plan.route.problem import SharedMemory
from skein.types import Layout, WorkerId
from tests.plan.builders import AMPLE_BYTES, fleet, job, planned
from tests.plan.test_shards import sharded
from tests.support.extent import examples

ROWS = 4096
MATRIX_BYTES = ROWS * 64 * 4


def ends(*, layout: Layout = Layout.LINE, is_tied: bool = True) -> JobSpec:
    """Two stages whose ends are most of the model."""
    return job(stages=2, replicas=1, layout=layout, num_layers=2, vocab_size=ROWS, is_tied=is_tied)


def needed_by_worker(spec: JobSpec, plan: Plan) -> dict[WorkerId, int]:
    """Bytes with one slot a chunk."""
    loads, held = stage_loads(spec, plan.stages), defaultdict[WorkerId, list[StageLoad]](list)
    for x in plan.chunks:
        held[x.chunk.worker].append(loads[x.chunk.stage])
    return {worker: together_bytes(own, [1] * len(own)) for worker, own in held.items()}


@pytest.mark.parametrize("layout", Layout)
def test_of_what_is_tied_only_sums_of_gradients_count_twice(layout: Layout) -> None:
    plan = planned(ends(layout=layout), fleet([1e9]))
    spec = ends(layout=layout)
    loads = stage_loads(spec, plan.stages)
    apart = sum(load.memory_bytes(1) for load in loads)
    assert needed_by_worker(spec, plan) == {"w0": apart - 4 * MATRIX_BYTES}
    untied = stage_loads(ends(layout=layout, is_tied=False), plan.stages)
    assert together_bytes(untied, [1] * len(untied)) == sum(load.memory_bytes(1) for load in untied)


@pytest.mark.parametrize("layout", Layout)
def test_both_ends_fit_where_they_just_fit_and_not_in_a_byte_less(layout: Layout) -> None:
    spec = ends(layout=layout)
    [needed] = needed_by_worker(spec, planned(spec, fleet([1e9]))).values()
    plan = planned(spec, fleet([1e9], memory_bytes=needed))
    assert list(violations(plan, spec, fleet([1e9], memory_bytes=needed))) == []
    short = fleet([1e9], memory_bytes=needed - 1)
    assert isinstance(make_balanced_plan(spec, short, None, 0), Infeasible)
    [told] = violations(plan, spec, short)
    assert told.startswith(f"w0 needs {needed / 2**20:.1f} MiB ({needed} bytes)")


def test_shards_of_the_same_rows_lie_together_and_leave_room_for_microbatches() -> None:
    spec, on = sharded(VocabularySplit.BOTH, rows=60_000, is_tied=True), fleet([1e9] * 4)
    plan = planned(spec, on)
    loads = stage_loads(spec, plan.stages)
    needed = needed_by_worker(spec, plan)
    pairs = spared_bytes(loads)
    assert len(pairs) == 4
    assert sum(pairs.values()) == 4 * 60_000 * 64 * 4
    apart = {
        w: sum(loads[x.chunk.stage].memory_bytes(1) for x in plan.chunks if x.chunk.worker == w)
        for w in needed
    }
    assert sum(apart.values()) - sum(needed.values()) == sum(pairs.values())
    # What a plan needs is enough for it, and the search knows it.
    tight = fleet([1e9] * 4, memory_bytes=max(needed.values()))
    assert isinstance(make_balanced_plan(spec, tight, None, 0), Plan)
    posed = pose(spec, tight, plan, pool_of(spec, tight))
    assert posed.problem.memory is not None
    assert posed.problem.memory.spared_bytes == pairs


@settings(max_examples=examples(100))
@given(st.data())
def test_room_is_what_stages_leave_in_whatever_order_they_come_and_go(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(50, 99), min_size=2, max_size=5))
    pairs = [(one, other) for other in range(len(sizes)) for one in range(other)]
    spared = {pair: data.draw(st.integers(1, 10)) for pair in data.draw(st.sets(st.sampled_from(pairs)))}
    demand = Demand(
        flops=np.ones(len(sizes)),
        memory_bytes=np.array(sizes),
        replicas=1,
        num_microbatches=1,
        spared_bytes=spared,
    )
    on = fleet([1e9] * 2, memory_bytes=250)
    seating = Seating(demand, pool_of(job(), on))
    for stage, worker in data.draw(st.lists(st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, 1)))):
        if stage in seating.held[worker]:
            seating.drop(stage, worker)
        elif seating.has_room(stage)[worker]:
            seating.take(stage, worker)
        assert seating.free_bytes.tolist() == [250 - bytes_of(sizes, spared, held) for held in seating.held]
    for start in range(len(sizes)):
        runs = [range(start, max(start, stop)) for stop in range(len(sizes) + 1)]
        assert (
            demand.bytes_from(start)[start:].tolist()
            == [bytes_of(sizes, spared, run) for run in runs][start:]
        )
    memory = SharedMemory(
        memory_bytes=np.full(2, 250),
        fixed_bytes=np.array(sizes),
        slot_bytes=np.array(sizes),
        spared_bytes=spared,
    )
    workers, stages = (np.array([x[at] for x in seats(seating)], np.int64) for at in range(2))
    assert memory.fixed_by_worker(workers, stages).tolist() == [
        bytes_of(sizes, spared, x) for x in seating.held
    ]


@given(st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_groups_of_stages_spare_together_what_their_stages_do(group_of: list[int]) -> None:
    spared = {(0, 2): 3, (1, 3): 5, (0, 3): 7}
    demand = Demand(
        flops=np.ones(4),
        memory_bytes=np.array([10, 20, 30, 40]),
        replicas=1,
        num_microbatches=1,
        spared_bytes=spared,
    )
    together = [[stage for stage in range(4) if group_of[stage] == group] for group in range(3)]
    between = demand.spared_between(together)
    assert all(one < other and num_bytes > 0 for (one, other), num_bytes in between.items())
    apart = sum(demand.bytes_of(stages) for stages in together)
    assert apart - sum(between.values()) == demand.bytes_of(range(4)) == 85


def seats(seating: Seating) -> list[tuple[int, int]]:
    return [(worker, stage) for worker, held in enumerate(seating.held) for stage in held]


def bytes_of(sizes: Sequence[int], spared: dict[tuple[int, int], int], held: Sequence[int]) -> int:
    return sum(sizes[x] for x in held) - sum(spared.get((x, y), 0) for x in held for y in held)


def test_slots_are_as_many_as_fit_beside_what_is_there_once() -> None:
    spec = ends()
    loads = stage_loads(spec, planned(spec, fleet([1e9])).stages)
    room = together_bytes(loads, [3, 3])
    assert slots_within(loads, [8, 8], room) == (3, 3)
    assert slots_within([replace(x, tied_bytes={}) for x in loads], [8, 8], room) < (3, 3)
    assert slots_within(loads, [8, 8], AMPLE_BYTES) == (8, 8)
