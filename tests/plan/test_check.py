"""A valid plan with one thing broken: each is found and named."""

from dataclasses import replace

import pytest

from skein.plan.check import violations
from skein.plan.plan import ChunkPlan, Path, Plan
from skein.types import ChunkRef, GroupId, Layout, StageIndex, WorkerId
from tests.plan.builders import fleet, job, planned, without

SPEC = job(stages=2, replicas=2, layout=Layout.LOOP)
FLEET = fleet([1e10] * 4)
PLAN = planned(SPEC, FLEET)
FIRST, *REST = PLAN.paths
STAGES = PLAN.stages


def bent(path: Path, hop: int, worker: str) -> Path:
    hops = list(path.hops)
    hops[hop] = ChunkRef(stage=hops[hop].stage, worker=WorkerId(worker))
    return Path(hops=tuple(hops))


def other_origin() -> str:
    """A holder of the first stage that is not the first path's."""
    return next(worker for worker in PLAN.holders(StageIndex(0)) if worker != FIRST.hops[0].worker)


def with_slots(placed: ChunkPlan, slots: int) -> Plan:
    return replace(PLAN, chunks=(replace(placed, slots=slots), *(x for x in PLAN.chunks if x != placed)))


def test_a_good_plan_has_no_violations() -> None:
    assert violations(PLAN, SPEC, FLEET) == ()


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (replace(PLAN, layout=Layout.LINE), "the layout is line"),
        (replace(PLAN, stages=STAGES[:-1]), "2 stages, the job asks for 3"),
        (replace(PLAN, stages=(replace(STAGES[0], stop=2), *STAGES[1:])), "expected layers from 2 on"),
        (replace(PLAN, chunks=PLAN.chunks[2:]), "nobody holds stage 0"),
        (replace(PLAN, chunks=(*PLAN.chunks, PLAN.chunks[0])), "listed 2 times for stage 0"),
        (replace(PLAN, chunks=PLAN.chunks[:-1]), "the head is not held where the first stage is"),
        (with_slots(PLAN.chunks[0], 0), "0 slots for stage 0"),
        (with_slots(PLAN.chunks[0], 10**9), "and has"),
        (replace(PLAN, paths=PLAN.paths[1:]), "7 paths for 8 microbatches"),
        (replace(PLAN, paths=(Path(hops=FIRST.hops[::-1]), *REST)), "path of microbatch 0: does not visit every stage"),
        (replace(PLAN, paths=(bent(FIRST, 1, "w9"), *REST)), "w9 does not hold stage 1"),
        (replace(PLAN, paths=(bent(FIRST, 2, other_origin()), *REST)), "not where it began"),
        (replace(PLAN, groups=PLAN.groups[:-1]), "groups ['s0', 's1', 's2'], expected"),
        (replace(PLAN, groups=(replace(PLAN.groups[0], group=GroupId("x")), *PLAN.groups[1:])), "groups ['x'"),
        (
            replace(PLAN, groups=(replace(PLAN.groups[0], members=PLAN.groups[0].members[:1]), *PLAN.groups[1:])),
            "group s0 has other members",
        ),
        (replace(PLAN, groups=(replace(PLAN.groups[0], num_shards=3), *PLAN.groups[1:])), "3 shards for 2 workers"),
        (replace(PLAN, lower_bound_s=2 * PLAN.predicted_step_s), "below its own lower bound"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(plan: Plan, found: str) -> None:
    assert found in "; ".join(violations(plan, SPEC, FLEET))


def test_a_plan_with_a_worker_that_left_is_refused() -> None:
    left = PLAN.workers[0]
    assert any(f"{left} holds stage" in sentence for sentence in violations(PLAN, SPEC, without(FLEET, left)))
