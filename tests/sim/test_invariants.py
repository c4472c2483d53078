"""The simulator can fail: each invariant is shown to catch what it is for."""

import pytest

from skein.protocol.messages import (
    Commit,
    Direction,
    Dismiss,
    HopTensor,
    NewGeneration,
    Phase,
    StepRecord,
)
from skein.protocol.records import (
    EpochOpened,
    GenerationOpened,
    JobSubmitted,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.protocol.worker import Worker
from skein.sim.invariants import INITIAL, Invariants, Violated, lineage_after
from skein.types import Epoch, Generation, JobId, MicrobatchId, StageIndex, Step
from tests.support.hands import Hand, record
from tests.support.jobs import small_job
from tests.support.plans import grid_plan

JOB = JobId("small-1")
FIRST, SECOND = record(0), record(1)
AFTER_FIRST = lineage_after(INITIAL, FIRST)


def epoch(number: int) -> EpochOpened:
    return EpochOpened(epoch=Epoch(number), wall_s=0.0)


def generation(number: int) -> GenerationOpened:
    return GenerationOpened(job=JOB, generation=Generation(number), members=(), reason="", wall_s=0.0)


def committed(decided: StepRecord) -> StepCommitted:
    return StepCommitted(job=JOB, record=decided, wall_s=0.0)


def rolled_back(from_version: int, to_version: int) -> RolledBack:
    return RolledBack(
        job=JOB, from_version=Step(from_version), to_version=Step(to_version), reason="", wall_s=0.0
    )


def followed(*records: Record) -> Invariants:
    invariants = Invariants()
    submitted = JobSubmitted(job=JOB, key="k", spec=small_job().canonical_json(), wall_s=0.0)
    for entry in (epoch(1), submitted, generation(1), *records):
        invariants.recorded(entry)
    return invariants


def worker(*, version: int = 0, generation: int = 1, epoch: int = 1) -> Worker:
    """A worker of one stage that says of itself to be there."""
    hand = Hand("w0a")
    hand.connect(epoch=epoch)
    hand.settle(grid_plan(stages=1, replicas=1), generation=generation, epoch=epoch, version=version)
    return hand.machine


def announcement(decided: StepRecord) -> Commit:
    return Commit(epoch=Epoch(1), generation=Generation(1), record=decided, goes_on=True)


@pytest.mark.parametrize("repeated", [epoch(1), generation(1), committed(SECOND)])
def test_numbers_that_do_not_grow_by_the_rules_are_caught(repeated: Record) -> None:
    with pytest.raises(Violated):
        followed().recorded(repeated)


def test_a_step_that_is_committed_twice_is_caught() -> None:
    invariants = followed(committed(FIRST))
    with pytest.raises(Violated, match="step 0 is committed at version 1"):
        invariants.recorded(committed(FIRST))


def test_a_roll_back_allows_its_steps_again() -> None:
    followed(committed(FIRST), committed(SECOND), rolled_back(2, 1), committed(record(1)))


def test_an_announcement_before_its_record_is_caught() -> None:
    invariants = followed()
    with pytest.raises(Violated, match="announced before"):
        invariants.announced(announcement(FIRST))
    invariants.recorded(committed(FIRST))
    invariants.announced(announcement(FIRST))
    invariants.announced(Dismiss(epoch=Epoch(1), job=JOB, may_exit=False))


def test_a_fence_that_names_no_recorded_commit_is_caught() -> None:
    fence = NewGeneration(epoch=Epoch(1), generation=Generation(1), job=JOB, members=(), last_commit=FIRST)
    with pytest.raises(Violated):
        followed().announced(fence)


def test_an_update_of_other_parameters_is_caught() -> None:
    invariants = followed(committed(FIRST), committed(SECOND))
    invariants.applies(worker(version=1), SECOND, [AFTER_FIRST])
    with pytest.raises(Violated, match="applies step 1 to other parameters"):
        invariants.applies(worker(version=1), SECOND, [AFTER_FIRST, INITIAL])


def test_an_update_that_was_rolled_back_meanwhile_is_nobodys_business() -> None:
    invariants = followed(committed(FIRST), rolled_back(1, 0))
    invariants.applies(worker(), FIRST, ["whatever"])


def test_a_chunk_of_another_history_is_caught() -> None:
    invariants = followed(committed(FIRST))
    invariants.holds(worker(version=1), Generation(1), Step(1), {StageIndex(0): AFTER_FIRST})
    with pytest.raises(Violated, match="holds another stage 0 at version 1"):
        invariants.holds(worker(version=1), Generation(1), Step(1), {StageIndex(0): INITIAL})
    # What an older generation builds is of no consequence.
    invariants.holds(worker(version=1), Generation(0), Step(1), {StageIndex(0): INITIAL})


def test_a_worker_that_goes_back_is_caught() -> None:
    invariants = followed(generation(2))
    invariants.handled(worker(generation=2))
    with pytest.raises(Violated, match="went back"):
        invariants.handled(worker(generation=1))


def test_a_slot_too_many_is_caught() -> None:
    machine = worker()
    assert machine.pipeline is not None
    releases = HopTensor(
        direction=Direction.BACKWARD,
        phase=Phase.EVALUATE,
        step=Step(0),
        microbatch=MicrobatchId(0),
        hop=0,
        path=grid_plan(stages=1, replicas=1).paths[0],
    )
    machine.pipeline.arrive(releases)
    with pytest.raises(Violated, match="taken slots"):
        followed().handled(machine)


@pytest.mark.parametrize("ahead", [worker(epoch=2), worker(generation=2), worker(version=1)])
def test_a_worker_that_is_ahead_of_the_log_is_caught(ahead: Worker) -> None:
    with pytest.raises(Violated):
        followed().handled(ahead)
