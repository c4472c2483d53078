"""Quotas of namespaces: what is refused, who waits, and that no job suffers for what is stored."""

from collections.abc import Sequence

import pytest

from skein.config.job import JobSpec
from skein.config.quota import QuotaSpec, QuotasSpec, QuotaUse
from skein.config.resources import ResourcesSpec
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.errors import UserError
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    DeleteAsked,
    ManifestWritten,
    PauseAsked,
    PruneCheckpoints,
    ResumeAsked,
    SubmitAsked,
    WriteManifest,
)
from skein.protocol.coordinator.lifecycle import deletable
from skein.protocol.coordinator.quotas import OverQuotaError
from skein.protocol.coordinator.runs.checkpoints.savings import LATER_S
from skein.protocol.log.records import CheckpointCommitted, CheckpointDeleted, JobEnded, JobSubmitted, Record
from skein.protocol.messages.directives import Beginning, CheckpointFile, Save
from skein.protocol.messages.reports import CheckpointWritten
from skein.types import Generation, JobId, JobState, StageIndex, Step
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.runs import PAIRS, PAIRS_SPEC, PLAN, SPEC, later

FIRST, SECOND = JobId("small-1"), JobId("small-2")
FREE = QuotaSpec(workers=None, running_jobs=None, queued_jobs=None, stored_bytes=None)
SAVING = small_job(stages=2, replicas=1, microbatches=2, steps=9, save_every=1, keep=1)


def bounded(quota: QuotaSpec, *, log: Sequence[Record] = ()) -> Desk:
    return Desk(log, quotas=QuotasSpec(default=quota, namespaces={"lab": FREE}))


def stepping(quota: QuotaSpec, spec: JobSpec = SPEC) -> Desk:
    desk = bounded(quota)
    desk.join(*PLAN.workers)
    desk.submit(spec)
    desk.settle(PLAN)
    return desk


def uses(desk: Desk) -> dict[str, tuple[int, int]]:
    return {use.quota: (use.used, use.most) for use in desk.machine.view.quotas.of("default")}


def write(desk: Desk, version: int, *, num_bytes: int) -> None:
    """Both stages are written, each of half the size."""
    for stage in (0, 1):
        name = f"{version}-{stage}"
        file = CheckpointFile(name=name, num_bytes=num_bytes // 2, sha256="", tensors=())
        report = CheckpointWritten(
            generation=Generation(1), version=Step(version), stage=StageIndex(stage), files=(file,)
        )
        desk.report(f"w{stage}a", report)


def complete(desk: Desk) -> None:
    [manifest] = desk.found(WriteManifest)
    desk.give(ManifestWritten(checkpoint=manifest.checkpoint, error=None))


# --- jobs and workers ---


def test_a_job_waits_for_the_quota_of_jobs_that_work_and_says_so() -> None:
    desk = stepping(QuotaSpec(running_jobs=1))
    desk.join("x", "y")
    desk.submit(SPEC, key="b")
    later(desk, 2.0)
    view = desk.machine.view
    assert (view.state_of(FIRST), view.state_of(SECOND)) == (JobState.RUNNING, JobState.PENDING)
    assert view.reason_of(SECOND) == (
        "waiting for its namespace's quota: default has 1 jobs with workers, 1 at most"
    )
    assert uses(desk) == {"running_jobs": (1, 1)}
    desk.give(CancelAsked(job=FIRST, discards=True))
    assert desk.machine.view.runs[SECOND].crew


def test_others_start_beside_a_namespace_that_is_at_its_quota() -> None:
    desk = stepping(QuotaSpec(workers=2))
    desk.join("x", "y")
    desk.submit(SPEC, key="b")
    desk.give(SubmitAsked(key="c", spec=SPEC, namespace="lab"))
    later(desk, 2.0)
    assert {job: run.crew for job, run in desk.machine.view.runs.items()} == {
        FIRST: ("w0a", "w1a"),
        JobId("small-3"): ("x", "y"),
    }
    waits = desk.machine.view.reason_of(SECOND)
    assert waits == "waiting for its namespace's quota: default has 2 workers, 2 at most"


def test_a_job_alone_has_no_more_workers_than_its_namespaces_quota() -> None:
    desk = bounded(QuotaSpec(workers=2))
    desk.join(*PAIRS.workers)
    desk.submit(PAIRS_SPEC)
    assert len(desk.machine.view.runs[FIRST].crew) == 2
    assert uses(desk) == {"workers": (2, 2)}


def test_a_quota_that_came_down_while_the_coordinator_was_away_calls_workers_off() -> None:
    desk = bounded(QuotaSpec())
    desk.join(*PAIRS.workers)
    desk.submit(PAIRS_SPEC)
    desk.settle(PAIRS)
    again = bounded(QuotaSpec(workers=2), log=desk.log)
    again.join(*PAIRS.workers)
    later(again, 10.0)
    assert sum("is to go to nobody" in line for line in again.lines()) == 2


def test_who_has_a_full_queue_submits_and_resumes_nothing() -> None:
    desk = stepping(QuotaSpec(queued_jobs=1, running_jobs=1))
    desk.submit(SPEC, key="b")
    quotas = desk.machine.view.quotas
    with pytest.raises(
        OverQuotaError, match=r"quota\.queued_jobs: 1 of 1: .*default wait already: cancel or pause"
    ):
        quotas.check_submit("default", SPEC)
    quotas.check_submit("lab", SPEC)
    desk.give(SubmitAsked(key="c", spec=SPEC))
    assert not desk.recorded(JobSubmitted)
    desk.give(PauseAsked(job=SECOND))
    desk.submit(SPEC, key="c")
    desk.give(ResumeAsked(job=SECOND))
    assert desk.machine.view.state_of(SECOND) is JobState.HELD


def test_a_job_that_its_quota_can_never_hold_is_refused() -> None:
    desk = bounded(QuotaSpec(workers=2))
    wanting = SPEC.model_copy(update={"resources": ResourcesSpec(min_workers=3)})
    with pytest.raises(
        OverQuotaError, match=r"resources\.min_workers: 3: namespace default may have 2 workers"
    ):
        desk.machine.view.quotas.check_submit("default", wanting)


def test_the_size_of_a_job_file_is_bounded() -> None:
    quotas = bounded(QuotaSpec(job_bytes=100)).machine.view.quotas
    quotas.check_size("default", 100)
    with pytest.raises(OverQuotaError, match=r"quota\.job_bytes: 101 of 100 bytes: .*make it smaller"):
        quotas.check_size("default", 101)


def test_a_use_is_shown_in_units() -> None:
    assert QuotaUse(quota="workers", used=1, most=4).shown == "workers 1 of 4"


# --- what is stored ---


def test_a_checkpoint_above_the_quota_is_deleted_and_steps_go_on() -> None:
    desk = stepping(QuotaSpec(stored_bytes=1000), SAVING)
    desk.step(PLAN)
    write(desk, 1, num_bytes=1002)
    assert not desk.found(WriteManifest)
    assert [command.drop for command in desk.found(PruneCheckpoints)] == [(1,)]
    assert desk.lines() == [
        f"job={FIRST} no checkpoint is stored, steps go on: default would have 1002 B stored, 1000 B at most"
    ]
    for version in (2, 3):
        desk.step(PLAN)
        assert desk.machine.history.jobs[FIRST].version == version
    later(desk, LATER_S)
    desk.step(PLAN)
    # The last one tells how large another would be: nobody writes it, and it is said once.
    assert not desk.told(Save)
    assert desk.lines() == []
    assert desk.machine.view.state_of(FIRST) is JobState.RUNNING
    assert uses(desk) == {"stored_bytes": (0, 1000)}


def test_a_checkpoint_takes_the_room_of_those_that_it_replaces() -> None:
    desk = stepping(QuotaSpec(stored_bytes=2000), SAVING)
    for version in (1, 2, 3, 4):
        desk.step(PLAN)
        assert desk.told(Save)
        write(desk, version, num_bytes=900)
        complete(desk)
        assert desk.recorded(CheckpointCommitted)
    assert uses(desk)["stored_bytes"] == (1800, 2000)


def test_what_a_run_waits_for_is_stored_above_the_quota_and_then_nothing_is_submitted() -> None:
    desk = stepping(QuotaSpec(stored_bytes=1000), SAVING)
    desk.step(PLAN)
    desk.give(PauseAsked(job=FIRST))
    desk.step(PLAN)
    assert desk.told(Save)
    write(desk, 2, num_bytes=3000)
    complete(desk)
    assert desk.machine.view.state_of(FIRST) is JobState.HELD
    quotas = desk.machine.view.quotas
    quotas.check_submit("lab", SPEC)
    with pytest.raises(
        OverQuotaError, match=r"quota\.stored_bytes: 2\.9 KiB of 1000 B: .*skein checkpoints delete, or ask"
    ):
        quotas.check_submit("default", SPEC)


# --- room again ---


def test_a_checkpoint_of_a_job_that_has_ended_can_be_deleted_and_makes_room() -> None:
    desk = stepping(QuotaSpec(stored_bytes=1000), SAVING)
    desk.step(PLAN)
    write(desk, 1, num_bytes=1000)
    complete(desk)
    desk.give(DeleteAsked(job=FIRST, version=Step(1)))
    assert not desk.recorded(CheckpointDeleted)
    desk.give(CancelAsked(job=FIRST, discards=True))
    assert uses(desk) == {"stored_bytes": (1000, 1000)}
    desk.give(DeleteAsked(job=FIRST, version=Step(1)))
    assert [x.version for x in desk.recorded(CheckpointDeleted)] == [1]
    assert [(x.keep, x.drop) for x in desk.found(PruneCheckpoints)] == [((), (1,))]
    assert uses(desk) == {"stored_bytes": (0, 1000)}
    desk.machine.view.quotas.check_submit("default", SPEC)
    assert bounded(QuotaSpec(), log=desk.log).machine.history.jobs[FIRST].checkpoints == []


def test_what_somebody_needs_is_not_deleted() -> None:
    desk = stepping(QuotaSpec(), SAVING)
    desk.step(PLAN)
    write(desk, 1, num_bytes=10)
    complete(desk)
    history = desk.machine.history
    job = history.jobs[FIRST]
    with pytest.raises(UserError, match=r"job: 'small-1': has not ended.* cancel it first"):
        deletable(job, Step(1), history)
    desk.give(CancelAsked(job=FIRST, discards=True))
    with pytest.raises(UserError, match=r"version: 7: there is no such checkpoint, small-1 has 1"):
        deletable(job, Step(7), history)
    desk.give(SubmitAsked(key="b", spec=SPEC, begins=Beginning(job=FIRST, version=Step(1))))
    with pytest.raises(UserError, match=r"version: 1: another job begins with it"):
        deletable(job, Step(1), history)


def test_arrays_of_a_sweep_that_wait_take_of_its_quota_and_are_not_parted_again_and_again() -> None:
    desk = bounded(QuotaSpec(workers=1))
    desk.join("w0", "w1", "w2", "w3", "w4")
    rates = {"optimizer.learning_rate": ValuesSpec(log_uniform=(0.001, 0.1))}
    asked = SweepSpec(search="random", space=rates, num_trials=4)
    alone = small_job(stages=1, replicas=1, microbatches=2, steps=400)
    desk.submit(alone.model_copy(update={"sweep": asked}))
    for _ in range(3):
        desk.wait(1.0)
    [array] = desk.machine.history.jobs[FIRST].arrays
    assert desk.machine.history.jobs[array].trials == (0, 1, 2, 3)
    assert not any(isinstance(record, JobEnded) for record in desk.log)
