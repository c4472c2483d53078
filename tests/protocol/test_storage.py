"""What a run does where checkpoints cannot be written or read: it waits, falls back, and ends for none of it."""

from dataclasses import replace
from math import nan

import pytest

from skein.plan.plan import Infeasible
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    CheckpointVerified,
    MakePlan,
    VerifyCheckpoint,
)
from skein.protocol.coordinator.runs.checkpoints.savings import AGAIN_S, LATER_S
from skein.protocol.coordinator.runs.checkpoints.storage import LOOK_AGAIN_S
from skein.protocol.coordinator.runs.gathering import PARDON_S
from skein.protocol.coordinator.runs.phase import BuildPhase, GatherPhase, SavePhase, StepPhase
from skein.protocol.coordinator.runs.placing.giving_up import LEAST_S
from skein.protocol.coordinator.runs.watching.vigil import STALL_S
from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import (
    CheckpointChecked,
    GenerationOpened,
    Incident,
    IncidentKind,
    JobEnded,
    JobSubmitted,
    Record,
    RolledBack,
)
from skein.protocol.messages.directives import Assign, Beginning, NewGeneration, Save, SourceKind, Start
from skein.protocol.messages.reports import (
    Beat,
    CheckpointUnread,
    CheckpointUnwritten,
    CheckpointWritten,
    Trouble,
)
from skein.types import Condition, JobId, JobState, StageIndex, Step
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.plans import grid_plan, stage_spec
from tests.support.reports import hello
from tests.support.runs import PLAN, beats, ended, later, phase, stepping
from tests.support.worlds import of_kind

JOB, OTHER = JobId("small-1"), JobId("small-2")
BEGINNING = Beginning(job=JOB, version=Step(2))
SAVING = small_job(stages=2, replicas=1, microbatches=2, steps=20, save_every=2)
FULL = "needs 251 MiB at /checkpoints, 3 MiB are free"


def unwritten(desk: Desk, version: int, stage: int) -> CheckpointUnwritten:
    return CheckpointUnwritten(
        generation=desk.generation, version=Step(version), stage=StageIndex(stage), reason=FULL
    )


def unread(desk: Desk, version: int, reason: str = "other bytes") -> CheckpointUnread:
    return CheckpointUnread(generation=desk.generation, version=Step(version), reason=reason)


def saved(*versions: int) -> Desk:
    """Steps have been made, one more than there are checkpoints of, and then everything died."""
    desk = stepping(SAVING)
    while desk.machine.history.jobs[JOB].version <= versions[-1]:
        desk.step(PLAN)
        if desk.told(Save):
            desk.save()
    assert [c.version for c in desk.machine.history.jobs[JOB].checkpoints] == list(versions)
    return desk


def reading(desk: Desk) -> Desk:
    """The next coordinator has its workers read a checkpoint."""
    desk = Desk(desk.log)
    desk.join(*PLAN.workers, incarnation=2)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    look(desk, Condition.WHOLE)
    return desk


def look_in_vain(desk: Desk, reason: str) -> None:
    """Checkpoints that are asked for are damaged whenever the coordinator reads them, until it goes back."""
    for _ in range(int(LEAST_S // LOOK_AGAIN_S) + 1):
        later(desk, LOOK_AGAIN_S)
        for asked in desk.found(VerifyCheckpoint):
            assert not desk.told(Assign)
            damaged = Condition.DAMAGED
            desk.give(CheckpointVerified(checkpoint=asked.checkpoint, condition=damaged, reason=reason))
        if desk.recorded(RolledBack):
            return


def look(desk: Desk, condition: Condition, reason: str = "") -> None:
    """The coordinator reads the checkpoint that is in question among the last commands."""
    [asked] = desk.found(VerifyCheckpoint)
    desk.give(CheckpointVerified(checkpoint=asked.checkpoint, condition=condition, reason=reason))


# --- what a job begins with ---


def begun(*more: Record) -> Desk:
    """A job has ended that has a checkpoint; another begins with that, and its workers are about to build."""
    desk = saved(2)
    desk.give(CancelAsked(job=JOB, discards=True))
    other = JobSubmitted(
        job=OTHER, key="other", spec=SAVING.canonical_json(), wall_s=desk.now, begins=BEGINNING
    )
    return Desk([*desk.log, *more, other])


def checked(*, is_whole: bool) -> CheckpointChecked:
    return CheckpointChecked(job=JOB, version=Step(2), is_whole=is_whole, reason="other bytes", wall_s=1.0)


def building(desk: Desk) -> Desk:
    desk.join(*PLAN.workers, incarnation=2)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    return desk


def test_a_job_waits_for_a_damaged_checkpoint_that_it_begins_with_and_goes_on_when_that_is_back() -> None:
    desk = building(begun(checked(is_whole=False)))
    assert not desk.told(Assign)
    assert desk.machine.run is not None
    assert desk.machine.run.reason == (
        "checkpoint 2 of small-1, with which it begins, is damaged: put it back, or cancel and submit it with "
        "another (other bytes)"
    )
    later(desk, PARDON_S)
    look(desk, Condition.WHOLE)
    later(desk, PARDON_S)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    assert {assign.begins for assign in desk.told(Assign).values()} == {BEGINNING}


def begins_again(*more: Record) -> Desk:
    """Everything died after the first step of a job that begins with another's checkpoint, and has none of its own."""
    desk = building(begun())
    desk.ready(PLAN.workers)
    desk.step(PLAN)
    desk = Desk([*desk.log, *more])
    desk.join(*PLAN.workers, incarnation=3)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    return desk


def test_a_job_that_must_begin_again_with_a_damaged_checkpoint_looks_until_that_is_back() -> None:
    desk = begins_again(checked(is_whole=False))
    assert desk.machine.history.jobs[OTHER].version == 1
    assert "with which it begins, is damaged: put it back" in desk.machine.view.reason_of(OTHER)
    later(desk, PARDON_S)
    look(desk, Condition.DAMAGED, "other bytes")
    later(desk, PARDON_S)
    look(desk, Condition.WHOLE)
    later(desk, PARDON_S)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    assert {assign.begins for assign in desk.told(Assign).values()} == {BEGINNING}


def test_what_was_found_of_another_checkpoint_is_no_news_to_a_job_that_waits_for_its_beginning() -> None:
    desk = building(begun(checked(is_whole=False)))
    later(desk, PARDON_S)
    [asked] = desk.found(VerifyCheckpoint)
    look(desk, Condition.DAMAGED, "other bytes")
    other = replace(asked.checkpoint, version=Step(4))
    desk.give(CheckpointVerified(checkpoint=other, condition=Condition.WHOLE, reason=""))
    later(desk, PARDON_S)
    assert desk.found(VerifyCheckpoint) == [asked]


@pytest.mark.parametrize("is_again", [False, True])
def test_a_checkpoint_to_begin_with_that_nobody_can_read_is_looked_at_and_set_aside(is_again: bool) -> None:
    desk = begins_again() if is_again else building(begun())
    for worker in desk.live:
        trouble = Trouble(generation=desk.generation, is_fatal=False, reason="other bytes", is_unfit=True)
        desk.report(worker, trouble)
        desk.acknowledge(desk.live)
        if desk.found(MakePlan):
            desk.plan(Infeasible(reason="too few workers"))
    later(desk, PARDON_S)
    look(desk, Condition.DAMAGED, "other bytes")
    assert desk.machine.history.jobs[JOB].damaged == {2: "other bytes"}


@pytest.mark.parametrize("is_again", [False, True])
def test_a_job_whose_beginning_is_no_more_ends_and_says_so(is_again: bool) -> None:
    back = RolledBack(job=JOB, from_version=Step(3), to_version=Step(0), reason="diverged", wall_s=1.0)
    desk = begins_again(back) if is_again else begun(back)
    if not is_again:
        desk.give(TimePassed())
    assert not desk.told(Assign)
    assert ended(desk) == (
        JobState.FAILED,
        "checkpoint 2 of small-1, with which it begins, is no more: submit it with another",
    )


# --- what cannot be written ---


def test_a_stage_without_room_is_asked_for_again_and_no_other_and_nobody_is_to_blame() -> None:
    desk = stepping(small_job(stages=2, replicas=1, microbatches=2, steps=1))
    desk.step(PLAN)
    desk.evaluate(PLAN, 2)
    generation = desk.generation
    written = CheckpointWritten(generation=generation, version=Step(1), stage=StageIndex(0), files=())
    desk.report("w0a", written)
    for turn in range(2 * MAX_STRIKES):
        desk.report("w1a", unwritten(desk, 1, 1))
        # The same reason again is no news.
        assert desk.lines() == (
            [] if turn else [f"job=small-1 checkpoint=1 stage 1 was not written by w1a: {FULL}"]
        )
        later(desk, AGAIN_S)
        assert list(desk.told(Save)) == ["w1a"]
    desk.save()
    assert (ended(desk)[0], desk.generation) == (JobState.FINISHED, generation)


def test_what_waits_for_room_is_asked_of_another_holder_of_the_stage() -> None:
    plan = grid_plan(stages=1, replicas=2, num_microbatches=2)
    desk = stepping(small_job(stages=1, replicas=2, microbatches=2, steps=1), plan)
    desk.step(plan)
    desk.evaluate(plan, 2)
    [first] = desk.told(Save)
    desk.report(first, unwritten(desk, 1, 0))
    later(desk, AGAIN_S)
    assert set(desk.told(Save)) == set(plan.workers) - {first}


def test_a_checkpoint_without_room_beside_steps_is_told_and_a_newer_version_saved_later() -> None:
    desk = stepping(small_job(stages=2, replicas=1, microbatches=2, steps=20, save_every=2))
    desk.step(PLAN)
    desk.step(PLAN)
    desk.report("w1a", unwritten(desk, 2, 1))
    assert desk.lines() == [f"job=small-1 checkpoint=2 stage 1 was not written by w1a: {FULL}"]
    desk.step(PLAN)
    assert phase(desk) is StepPhase
    assert not desk.told(Save)
    desk.now += LATER_S
    desk.step(PLAN)
    assert {asked.version for asked in desk.told(Save).values()} == {4}


@pytest.mark.parametrize("is_saving", [True, False])
def test_where_nothing_moves_while_building_or_saving_a_new_generation_is_opened(is_saving: bool) -> None:
    desk = stepping(small_job(stages=2, replicas=1, microbatches=2, steps=1))
    if is_saving:
        desk.step(PLAN)
        desk.evaluate(PLAN, 2)
    else:
        desk.report("w0a", hello("w0a", "w0a-1"))
        desk.acknowledge(desk.live)
        desk.adopt(PLAN)
    before = desk.generation
    assert phase(desk) is (SavePhase if is_saving else BuildPhase)
    beats(desk, int(STALL_S) - 1)
    assert desk.generation == before
    beats(desk, 2)
    assert desk.generation == before + 1


# --- what cannot be read ---


def test_a_damaged_checkpoint_is_waited_for_then_set_aside_and_the_one_before_it_read() -> None:
    desk = reading(saved(2, 4))
    assert desk.recorded(RolledBack)[0].to_version == 4
    desk.report("w1a", unread(desk, 4))
    assert not desk.recorded(GenerationOpened)
    look(desk, Condition.DAMAGED, "stage-001 is not there")
    [checked] = desk.recorded(CheckpointChecked)
    assert (checked.version, checked.is_whole, checked.reason) == (4, False, "stage-001 is not there")
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    look(desk, Condition.WHOLE)  # Of the older one.
    assert "waiting for checkpoint 4, for going back would cost 2 steps" in desk.machine.view.reason_of(JOB)
    look_in_vain(desk, "stage-001 is not there")
    assert desk.recorded(RolledBack)[0].to_version == 2
    sources = [chunk.source for told in desk.told(Assign).values() for chunk in told.chunks]
    assert {(source.kind, source.version) for source in sources} == {(SourceKind.CHECKPOINT, 2)}
    desk.ready(PLAN.workers)
    assert sorted(desk.told(Start)) == list(PLAN.workers)
    [incident] = desk.recorded(Incident)
    assert incident.kind is not IncidentKind.WORKER_FAILED
    assert incident.num_steps_lost == 3


def test_a_worker_that_alone_cannot_read_a_whole_checkpoint_is_set_aside_until_a_step_is_made() -> None:
    plan = grid_plan(stages=1, replicas=2, num_microbatches=2)
    alone = grid_plan(stages=1, replicas=1, num_microbatches=2)
    spec = small_job(stages=1, replicas=2, microbatches=2, steps=20, save_every=2)
    desk = stepping(spec, plan)
    for _ in range(3):
        desk.step(plan)
        if desk.told(Save):
            desk.save()
    desk = Desk(desk.log)
    desk.join(*plan.workers, incarnation=2)
    desk.acknowledge(desk.live)
    desk.adopt(plan)
    look(desk, Condition.WHOLE)
    desk.report("w0b", unread(desk, 2, "no such folder"))
    look(desk, Condition.WHOLE)
    assert not desk.recorded(CheckpointChecked)
    assert "job=small-1 excluded=w0b for now: no such folder" in desk.lines()
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    assert [worker.worker for worker in asked.fleet.workers] == ["w0a"]
    desk.plan(alone)
    desk.ready(alone.workers)
    desk.step(alone)
    assert "job=small-1 pardoned=w0b" in desk.lines()


def test_while_the_place_does_not_answer_the_job_waits_and_looks_again() -> None:
    desk = reading(saved(2, 4))
    for worker in PLAN.workers:
        desk.report(worker, unread(desk, 4, "silent for 30 s"))
    desk.commands = [c for c in desk.commands if not isinstance(c, VerifyCheckpoint)]
    job = desk.machine.history.jobs[JOB]
    silent = CheckpointVerified(checkpoint=job.checkpoints[-1], condition=Condition.UNKNOWN, reason="silent")
    desk.give(silent)
    assert (phase(desk), desk.machine.view.state_of(JOB)) == (GatherPhase, JobState.PAUSED)
    assert desk.machine.view.reason_of(JOB) == "checkpoint 4 cannot be read: silent"
    before = desk.generation
    for _ in range(3):
        later(desk, PARDON_S)
        look(desk, Condition.UNKNOWN, "silent")
    assert (phase(desk), desk.generation) == (GatherPhase, before)
    later(desk, PARDON_S)
    look(desk, Condition.WHOLE)
    assert set(desk.told(NewGeneration)) == set(PLAN.workers)


def test_with_every_checkpoint_damaged_the_job_waits_until_one_is_put_back() -> None:
    desk = reading(saved(2))
    desk.report("w0a", unread(desk, 2))
    look(desk, Condition.DAMAGED, "stage-000 is not there")
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    assert phase(desk) is GatherPhase
    assert "no checkpoint is whole" in desk.machine.view.reason_of(JOB)
    assert "stage-000 is not there" in desk.machine.view.reason_of(JOB)
    later(desk, PARDON_S)
    look(desk, Condition.DAMAGED, "stage-000 is not there")
    assert phase(desk) is GatherPhase
    later(desk, PARDON_S)
    look(desk, Condition.WHOLE)
    assert desk.recorded(CheckpointChecked)[0].is_whole
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    sources = [chunk.source for told in desk.told(Assign).values() for chunk in told.chunks]
    assert {(source.kind, source.version) for source in sources} == {(SourceKind.CHECKPOINT, 2)}


def test_what_diverged_with_all_that_was_good_damaged_goes_back_once_that_is_put_back() -> None:
    desk = stepping(SAVING.model_copy(update={"on_divergence": "rewind"}))
    job = desk.machine.history.jobs[JOB]
    while job.diverged is None:
        is_good = job.version < 2
        desk.ledgers(PLAN)
        desk.votes(PLAN, squared_norm=1.0 if is_good else nan)
        if desk.told(Save) and len(job.checkpoints) < 2:
            desk.save()
        if len(job.checkpoints) == 2 and not job.damaged:
            first = job.checkpoints[0]
            desk.give(CheckpointVerified(checkpoint=first, condition=Condition.DAMAGED, reason="short"))
    assert [c.version for c in job.whole_checkpoints] == [4]
    held = {str(w): [(stage_spec(int(w[1])), int(job.version))] for w in PLAN.workers}
    desk.acknowledge(desk.live, held)
    desk.adopt(PLAN)
    assert "put one back" in desk.machine.view.reason_of(JOB)
    before = desk.generation
    later(desk, PARDON_S)
    look(desk, Condition.DAMAGED, "short")
    assert desk.generation == before
    later(desk, PARDON_S)
    look(desk, Condition.WHOLE)
    desk.acknowledge(desk.live, held)
    desk.adopt(PLAN)
    assert [back.to_version for back in desk.recorded(RolledBack)] == [2]


def test_a_restarted_coordinator_remembers_which_checkpoints_are_damaged() -> None:
    desk = reading(saved(2, 4))
    desk.report("w1a", unread(desk, 4))
    look(desk, Condition.DAMAGED, "short")
    again = Desk(desk.log).machine.history.jobs[JOB]
    assert again.damaged == {4: "short"}
    assert again.newest_checkpoint is not None
    assert again.newest_checkpoint.version == 2


def going_back(desk: Desk) -> Desk:
    """The next coordinator has workers without state, and reads the newest checkpoint first."""
    desk = Desk(desk.log)
    desk.join(*PLAN.workers, incarnation=2)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    return desk


def test_no_step_is_given_up_before_the_checkpoint_was_read() -> None:
    desk = going_back(saved(2, 4))
    assert not desk.recorded(RolledBack)
    assert not desk.told(Assign)
    assert desk.machine.view.reason_of(JOB) == "reading checkpoint 4 before steps are given up"
    look(desk, Condition.WHOLE)
    assert desk.recorded(RolledBack)[0].to_version == 4


def test_a_place_that_shows_no_checkpoint_is_waited_for_and_nothing_is_set_aside() -> None:
    desk = going_back(saved(2, 4))
    for _ in range(3):
        look(desk, Condition.UNKNOWN, "is the place mounted?")
        assert phase(desk) is GatherPhase
        assert "is the place mounted?" in desk.machine.view.reason_of(JOB)
        later(desk, PARDON_S)
    assert not desk.machine.history.jobs[JOB].damaged
    look(desk, Condition.WHOLE)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    assert [x.to_version for x in of_kind(desk.log, RolledBack)] == [4]


def test_a_newer_checkpoint_that_comes_back_while_it_is_waited_for_costs_no_step() -> None:
    desk = going_back(saved(2, 4))
    look(desk, Condition.DAMAGED, "stage-001 is not there")
    look(desk, Condition.WHOLE)  # Of version 2, which would do.
    assert not desk.recorded(RolledBack)
    later(desk, LOOK_AGAIN_S)
    look(desk, Condition.WHOLE)  # Of version 4.
    assert [x.to_version for x in of_kind(desk.log, RolledBack)] == [4]


def test_all_that_were_damaged_are_read_again_before_the_first_that_is_whole_counts() -> None:
    desk = going_back(saved(2, 4))
    look(desk, Condition.DAMAGED, "gone")
    look(desk, Condition.DAMAGED, "gone")
    assert "no checkpoint is whole" in desk.machine.view.reason_of(JOB)
    later(desk, PARDON_S)
    first, second = desk.found(VerifyCheckpoint)
    desk.give(CheckpointVerified(checkpoint=first.checkpoint, condition=Condition.WHOLE, reason=""))
    desk.acknowledge(desk.live)
    desk.plan(PLAN)
    assert not of_kind(desk.log, RolledBack)
    desk.give(CheckpointVerified(checkpoint=second.checkpoint, condition=Condition.WHOLE, reason=""))
    assert [x.to_version for x in of_kind(desk.log, RolledBack)] == [4]


def test_before_the_first_step_who_cannot_reach_the_place_goes_without_and_all_wait_for_it() -> None:
    spec = small_job(stages=2, replicas=1, microbatches=2, steps=3)
    desk = Desk()
    desk.join(*PLAN.workers)
    desk.submit(spec)
    for worker in PLAN.workers:
        desk.acknowledge(desk.live)
        desk.plan(PLAN)
        desk.report(worker, unread(desk, 0, "the place is silent"))
    assert not desk.recorded(JobEnded)
    assert desk.machine.view.state_of(JOB) is JobState.PAUSED
    assert "the place is silent" in desk.machine.view.reason_of(JOB)
    later(desk, PARDON_S)
    assert set(desk.told(NewGeneration)) == set(PLAN.workers)


def test_who_builds_for_ever_while_others_have_is_left_out() -> None:
    desk = stepping()
    desk.report("w0a", hello("w0a", "w0a-1"))
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    desk.ready(["w0a"])
    beats(desk, int(STALL_S) + 1)
    assert "job=small-1 excluded=w1a: nothing moved for 60 s while building" in desk.lines()
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    assert [worker.worker for worker in asked.fleet.workers] == ["w0a"]


def test_a_build_during_which_bytes_move_is_waited_for() -> None:
    desk = stepping()
    desk.report("w0a", hello("w0a", "w0a-1"))
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    before = desk.generation
    for progress in range(3 * int(STALL_S)):
        for worker in desk.live:
            desk.report(worker, Beat(progress=progress, running_s=0.0, statistics=()))
        desk.wait(1.0)
    assert (phase(desk), desk.generation) == (BuildPhase, before)
