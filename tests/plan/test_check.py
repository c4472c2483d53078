"""A valid plan with one thing broken: each is found and named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest

from skein.config.aggregation import AllReduce, Gossip
from skein.config.job import JobSpec, SkipSpec
from skein.config.optimizer import SgdSpec
from skein.config.robust import TrimmedMean
from skein.plan.agreeing.exchange import Broadcast, Pattern, Ring, Tree
from skein.plan.balanced import make_balanced_plan
from skein.plan.check import violations
from skein.plan.order import ascending_schedules
from skein.plan.plan import Alternates, ChunkPlan, Infeasible, Path, Plan, PlannedOp
from skein.types import ChunkRef, Layout, StageIndex, WorkerId, parse_group
from tests.plan.builders import fleet, job, planned, without
from tests.support.plans import schedule

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


def with_ops(change: Callable[[tuple[PlannedOp, ...]], tuple[PlannedOp, ...]]) -> Plan:
    first, *others = PLAN.schedules
    return replace(PLAN, schedules=(replace(first, ops=change(first.ops)), *others))


def with_pattern(pattern: Pattern) -> Plan:
    first, *others = PLAN.groups
    return replace(PLAN, groups=(replace(first, pattern=pattern), *others))


def with_others(change: Callable[[Alternates], tuple[ChunkRef, ...]]) -> Plan:
    first, *others = PLAN.alternates
    return replace(PLAN, alternates=(replace(first, others=change(first)), *others))


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
        (
            replace(PLAN, paths=(replace(FIRST, split=(1,)), *REST)),
            "path of microbatch 0: has split backwards at hops [1], the job wants them at stages []",
        ),
        (replace(PLAN, paths=(Path(hops=FIRST.hops[::-1]), *REST)), "path of microbatch 0: does not begin at stage 0"),
        (replace(PLAN, paths=(bent(FIRST, 1, "w9"), *REST)), "w9 does not hold stage 1"),
        (replace(PLAN, paths=(bent(FIRST, 2, other_origin()), *REST)), "not where it began"),
        (replace(PLAN, paths=(Path(hops=()), *REST)), "path of microbatch 0: does not begin at stage 0"),
        (replace(PLAN, paths=(Path(hops=FIRST.hops[:-1]), *REST)), "does not end at stage 2, where the loss is"),
        (replace(PLAN, paths=(Path(hops=FIRST.hops[::2]), *REST)), "visits 1 stages, the job asks for 2"),
        (replace(PLAN, evaluation_paths=()), "no path to evaluate on"),
        (
            replace(PLAN, evaluation_paths=(Path(hops=FIRST.hops[::2]),)),
            "evaluation path 0: does not visit every stage once, in order",
        ),
        (replace(PLAN, evaluation_paths=(bent(FIRST, 1, "w9"),)), "evaluation path 0: w9 does not hold stage 1"),
        (replace(PLAN, schedules=PLAN.schedules[1:]), "schedules of"),
        (with_ops(lambda ops: ops[:-1]), "lacks the backward of microbatch"),
        (with_ops(lambda ops: (*ops, ops[0])), "has without need the forward of microbatch"),
        (with_ops(lambda ops: ops[::-1]), "before forward: microbatch"),
        (replace(PLAN, alternates=PLAN.alternates[1:]), "alternates are not listed once for each chunk"),
        (with_others(lambda x: (x.chunk,)), "is no alternate of"),
        (with_others(lambda x: x.others * 2), "has an alternate twice"),
        (replace(PLAN, groups=PLAN.groups[:-1]), "groups ['s0', 's1', 's2'], expected"),
        (replace(PLAN, groups=(replace(PLAN.groups[0], group=parse_group("s9")), *PLAN.groups[1:])), "groups ['s9'"),
        (
            replace(PLAN, groups=(replace(PLAN.groups[0], members=PLAN.groups[0].members[:1]), *PLAN.groups[1:])),
            "group s0 has other members",
        ),
        (replace(PLAN, groups=(replace(PLAN.groups[0], num_shards=3), *PLAN.groups[1:])), "3 shards for 2 workers"),
        (with_pattern(Broadcast(leader=0, parents=(0, 0))), "does not sum the gradients of all for all"),
        (with_pattern(Tree(parents=(1, 0))), "has no tree over its 2 workers"),
        (replace(PLAN, lower_bound_s=2 * PLAN.predicted_step_s), "below its own lower bound"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(plan: Plan, found: str) -> None:
    assert found in "; ".join(violations(plan, SPEC, FLEET))


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("pattern", [Ring(), Tree()])
def test_what_is_rounded_on_the_wire_is_not_added_on_the_way(
    wire: Literal["bf16", "int8"], pattern: Pattern
) -> None:
    plan = with_pattern(pattern)
    assert violations(plan, SPEC, FLEET) == ()
    rounding = SPEC.model_copy(update={"aggregation": AllReduce(wire=wire)})
    assert "adds on the way" in "; ".join(violations(plan, rounding, FLEET))


def test_a_plan_with_a_worker_that_left_is_refused() -> None:
    left = PLAN.workers[0]
    assert any(f"{left} holds stage" in sentence for sentence in violations(PLAN, SPEC, without(FLEET, left)))


# --- skips, swaps and jumps ---

SKIPPING = job(stages=6, replicas=1, num_layers=6, num_microbatches=8, layout=Layout.LOOP, skip_ratio=1 / 3)
SIX = fleet([1e10] * 6)
SIX_PLAN = planned(SKIPPING, SIX)


def through(*ways: tuple[int, ...]) -> Plan:
    """The plan with such stages on its first paths, ascending schedules as they follow from them."""
    holder = {x.chunk.stage: x.chunk for x in SIX_PLAN.chunks}
    paths = [Path(hops=tuple(holder[StageIndex(s)] for s in (*way, 6))) for way in ways]
    paths += SIX_PLAN.paths[len(ways) :]
    slots = {x.chunk: x.slots for x in SIX_PLAN.chunks}
    schedules = ascending_schedules(paths, slots, SIX_PLAN.workers)
    return replace(SIX_PLAN, paths=tuple(paths), schedules=schedules)


def allowing(max_swaps: int, max_jump: int | None) -> JobSpec:
    return SKIPPING.model_copy(update={"skip": SkipSpec(ratio=1 / 3, max_swaps=max_swaps, max_jump=max_jump)})


# The plain rotation begins 0 2 3 5, 0 1 3 4, 0 2 4 5, 0 1 3 5: what takes a path's place visits the same stages.
@pytest.mark.parametrize(
    ("plan", "spec", "found"),
    [
        (SIX_PLAN, SKIPPING, ""),
        (through((0, 2, 3, 5)), allowing(0, 2), ""),
        (through((0, 3, 2, 5)), allowing(1, None), ""),
        (through((0, 3, 2, 5)), allowing(1, 3), ""),
        (through((0, 3, 2, 5)), allowing(0, None), "path of microbatch 0: swaps stages 1 times, the job allows 0"),
        (through((0, 3, 2, 5)), allowing(1, 2), "goes on from stage 0 to stage 3, the job allows 2 at once"),
        (through((0, 5, 3, 2)), allowing(4, None), "goes back from stage 5 to stage 3, which is not the one before"),
        # After a swap the highest stage so far still counts.
        (through((0, 3, 2, 1)), allowing(4, None), "goes back from stage 3 to stage 1, which is not the one before"),
        (through((0, 2, 3, 3)), SKIPPING, "path of microbatch 0: visits a stage twice"),
        (through((0, 2, 3)), SKIPPING, "path of microbatch 0: visits 3 stages, the job asks for 4"),
        (through((0, 1, 3, 5), (0, 1, 3, 4)), SKIPPING, "in a step, stage 2 "),
    ],
)  # fmt: skip
def test_paths_stray_as_far_as_the_job_allows(plan: Plan, spec: JobSpec, found: str) -> None:
    sentences = violations(plan, spec, SIX)
    assert found in "; ".join(sentences)
    assert bool(sentences) == bool(found)


def test_a_line_that_skips_still_ends_at_the_last_stage() -> None:
    spec = job(stages=4, replicas=1, num_layers=4, num_microbatches=4, skip_ratio=0.25)
    on = fleet([1e10] * 4)
    plan = planned(spec, on)
    assert violations(plan, spec, on) == ()
    early = replace(plan, paths=(Path(hops=plan.evaluation_paths[0].hops[:3]), *plan.paths[1:]))
    assert "does not end at stage 3, where the loss is" in "; ".join(violations(early, spec, on))


def test_orders_that_run_in_a_circle_are_found() -> None:
    """Each stage begins with the microbatch that the other has not let through."""
    spec = job(stages=2, replicas=1, num_microbatches=2)
    on = fleet([1e10] * 2)
    plan = planned(spec, on)
    first, last = (plan.holders(StageIndex(stage))[0] for stage in (0, 1))
    crossed = (schedule(first, "F0.0 B0.0 F0.1 B0.1"), schedule(last, "L1.1 L1.0"))
    slots = tuple(replace(x, slots=1) for x in plan.chunks)
    stuck = replace(plan, chunks=slots, schedules=tuple(sorted(crossed, key=lambda x: x.worker)))
    [sentence] = violations(stuck, spec, on)
    assert sentence == (
        "the schedules make 2 microbatches wait for each other, the first for the loss of microbatch 0 at stage 1"
    )
    # With a second slot the other microbatch gets through, and then the first.
    free = replace(stuck, chunks=tuple(replace(x, slots=2) for x in plan.chunks))
    assert violations(free, spec, on) == ()


# --- many walkers ---

MANY = job(stages=2, replicas=3, is_tied=False).model_copy(
    update={
        "aggregation": Gossip(rule="gossip", method="dmsgd", graph="ring"),
        "optimizer": SgdSpec(name="sgd"),
    }
)
WALKED = planned(MANY, fleet([1e10] * 6))


def crossed() -> Plan:
    """Two walkers' microbatches change places halfway."""
    first, second, *others = WALKED.paths
    ways = (Path(hops=(first.hops[0], second.hops[1])), Path(hops=(second.hops[0], first.hops[1])), *others)
    slots = {x.chunk: x.slots for x in WALKED.chunks}
    schedules = ascending_schedules(ways, slots, (x.chunk.worker for x in WALKED.chunks))
    return replace(WALKED, paths=ways, schedules=schedules)


def shuffled() -> Plan:
    """A group whose members are not in the order of the walkers."""
    first, *others = WALKED.groups
    return replace(WALKED, groups=(replace(first, members=first.members[::-1]), *others))


def test_a_plan_of_walkers_has_no_violations() -> None:
    assert violations(WALKED, MANY, fleet([1e10] * 6)) == ()


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (crossed(), "path of microbatch 0 leaves its walker"),
        (shuffled(), "group s0 does not have its members in the order of the walkers"),
        (
            replace(WALKED, evaluation_paths=WALKED.evaluation_paths[:2]),
            "evaluation paths are not one for each walker, in their order",
        ),
    ],
)
def test_what_is_broken_among_walkers_is_named(plan: Plan, found: str) -> None:
    assert found in violations(plan, MANY, fleet([1e10] * 6))


def test_walkers_that_lack_a_stage_are_refused() -> None:
    on = fleet([1e10] * 5)
    spec = MANY.model_copy(update={"aggregation": AllReduce()})
    plan = planned(spec, on)
    assert violations(plan, spec, on) == ()
    assert any("walkers are not complete" in sentence for sentence in violations(plan, MANY, on))


def test_a_combiner_that_compares_wants_enough_to_compare() -> None:
    spec = job(stages=2, replicas=3, is_tied=False)
    trimming = spec.model_copy(update={"aggregation": AllReduce(robust=TrimmedMean(kind="trimmed_mean"))})
    assert violations(planned(trimming, fleet([1e10] * 6)), trimming, fleet([1e10] * 6)) == ()
    reason = "trimmed_mean needs 3 holders of each stage: stage 0 has 2"
    on = fleet([1e10] * 5)
    assert make_balanced_plan(trimming, on, None, 0) == Infeasible(reason=reason)
    assert reason in violations(planned(spec, on), trimming, on)
