"""Snapshots, backups and copies that follow commits: what a worker does about them, and what it says it has."""

from dataclasses import replace
from typing import TypeVar

import pytest

from skein.protocol.messages.directives import (
    ChunkVersion,
    Decision,
    Dismiss,
    Follow,
    Member,
    Prefetch,
    Prepare,
    Snapshot,
    StepRecord,
)
from skein.protocol.messages.reports import Prefetched, Report
from skein.protocol.worker.copies import Copies
from skein.protocol.worker.ops import ApplyOp, LossOp, SnapshotOp
from skein.protocol.worker.standing import Standing
from skein.protocol.worker.worker_io import (
    CopyKind,
    DirectiveArrived,
    DropCopies,
    FollowCommit,
    ForgetJob,
    PrefetchEnded,
    PrefetchFailed,
    RunOp,
    SendReport,
    SnapshotsHeld,
    StartPrefetch,
    WorkerCommand,
)
from skein.types import Epoch, Generation, Incarnation, JobId, StageIndex, StageSpec, Step, WorkerId
from tests.support.hands import JOB, Hand, alone, identity, record
from tests.support.plans import chunk, path, plan_of, stage_spec
from tests.support.reports import attempt, ledger

STAGE, OTHER_STAGE = stage_spec(1), stage_spec(2)
C = TypeVar("C", bound=WorkerCommand)


def donor(name: str) -> Member:
    return Member(worker=WorkerId(name), incarnation=Incarnation(f"{name}-1"), address=f"{name}:1")


def prefetch(
    version: int = 3,
    *,
    stage: StageSpec = STAGE,
    is_backup: bool = False,
    drops_before: int = 0,
    epoch: int = 1,
    job: JobId = JOB,
) -> Prefetch:
    return Prefetch(
        epoch=Epoch(epoch),
        job=job,
        job_spec="{}",
        stage=stage,
        version=Step(version),
        donors=(donor("w1a"), donor("w1b")),
        is_backup=is_backup,
        drops_before=Step(drops_before),
    )


def follow(step: int, *, job: JobId = JOB, epoch: int = 1) -> Follow:
    return Follow(epoch=Epoch(epoch), job=job, record=record(step))


def ended(version: int, kind: CopyKind = CopyKind.FOLLOWED, *, stage: StageSpec = STAGE) -> PrefetchEnded:
    return PrefetchEnded(job=JOB, stage=stage, version=Step(version), kind=kind)


class Spare:
    """The copies of a worker that has no chunk yet."""

    def __init__(self, *, epoch: int = 1) -> None:
        self.standing = Standing(identity("w9"))
        self.standing.is_connected = True
        self.standing.epoch = Epoch(epoch)
        self.copies = Copies(self.standing)

    def take(self, directive: Prefetch | Follow) -> list[WorkerCommand]:
        self.copies.take(directive)
        return self.standing.drain()

    def hear(self, event: PrefetchEnded | PrefetchFailed | SnapshotsHeld) -> list[Report]:
        self.copies.ended(event)
        return [command.report for command in self.standing.drain() if isinstance(command, SendReport)]

    def built(self, *stages: StageSpec, version: int) -> list[WorkerCommand]:
        self.copies.built(stages, Step(version))
        return self.standing.drain()


def only(commands: list[WorkerCommand], kind: type[C]) -> C:
    [command] = commands
    assert isinstance(command, kind)
    return command


def prefetched(version: int, *, stage: StageSpec = STAGE) -> Prefetched:
    return Prefetched(job=JOB, stage=stage, version=Step(version), error="")


# --- a copy that follows the commits ---


def test_a_copy_is_fetched_and_reported_with_every_version_that_it_reaches() -> None:
    spare = Spare()
    assert only(spare.take(prefetch(3)), StartPrefetch).prefetch == prefetch(3)
    assert spare.hear(ended(3)) == [prefetched(3)]
    assert only(spare.take(follow(3)), FollowCommit).record == record(3)
    assert spare.hear(ended(4)) == [prefetched(4)]


def test_commits_are_passed_on_once_and_in_order_even_while_the_state_is_on_its_way() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    told = [spare.take(follow(step)) for step in (2, 3, 3, 4, 3)]
    assert [[x.record.step for x in commands if isinstance(x, FollowCommit)] for commands in told] == [
        [], [3], [], [4], [],
    ]  # fmt: skip


def test_a_copy_that_missed_a_commit_is_dropped_and_told() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    commands = spare.take(follow(4))
    assert only([x for x in commands if isinstance(x, DropCopies)], DropCopies).followed == (STAGE,)
    [report] = [x.report for x in commands if isinstance(x, SendReport)]
    assert isinstance(report, Prefetched)
    assert (report.stage, report.version, bool(report.error)) == (STAGE, 3, True)
    assert only(spare.take(prefetch(5)), StartPrefetch).prefetch.version == 5


def test_a_commit_is_for_every_stage_that_follows() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.take(prefetch(2, stage=OTHER_STAGE))
    assert [x.stage for x in spare.take(follow(2)) if isinstance(x, FollowCommit)] == [OTHER_STAGE]
    assert [x.stage for x in spare.take(follow(3)) if isinstance(x, FollowCommit)] == [STAGE, OTHER_STAGE]


def test_what_is_asked_for_again_is_answered_if_it_is_here_and_goes_on_if_not() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    others = replace(prefetch(3), donors=(donor("w1c"),))
    assert only(spare.take(others), StartPrefetch).prefetch == others
    spare.hear(ended(3))
    assert spare.take(prefetch(3)) == [
        SendReport(report=prefetched(3)),
        StartPrefetch(prefetch=prefetch(3)),
    ]


@pytest.mark.parametrize("version", [3, 4])
def test_a_copy_that_is_here_learns_what_donors_want_to_be_shown_by_now(version: int) -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.hear(ended(3))
    spare.take(follow(3))
    anew = replace(prefetch(version), donors=(replace(donor("w1a"), door="new"),))
    _, started = spare.take(anew)
    assert isinstance(started, StartPrefetch)
    # The driver knows a copy by the version that it began with.
    assert started.prefetch.version == 3
    assert [member.door for member in started.prefetch.donors] == ["new"]


def test_a_copy_that_missed_commits_begins_anew_at_the_version_asked_for() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.hear(ended(3))
    spare.take(follow(3))
    dropped, started = spare.take(prefetch(7))
    assert isinstance(dropped, DropCopies)
    assert dropped.followed == (STAGE,)
    assert isinstance(started, StartPrefetch)
    assert spare.hear(ended(4)) == []  # of the one that was dropped
    assert only(spare.take(follow(7)), FollowCommit).record.step == 7


def test_a_copy_that_follows_is_asked_for_at_a_version_that_it_will_reach_by_itself() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.hear(ended(3))
    spare.take(follow(3))
    told, _ = spare.take(prefetch(4))
    assert told == SendReport(report=prefetched(3))


def test_a_fetch_that_is_asked_for_at_a_newer_version_keeps_the_commits_that_were_heard() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    for step in (3, 4, 5):
        spare.take(follow(step))
    dropped, started, *followed = spare.take(prefetch(4))
    assert isinstance(dropped, DropCopies)
    assert isinstance(started, StartPrefetch)
    assert [x.record.step for x in followed if isinstance(x, FollowCommit)] == [4, 5]
    assert spare.hear(ended(4)) == [prefetched(4)]
    assert only(spare.take(follow(6)), FollowCommit).record.step == 6


@pytest.mark.parametrize("version", [2, 4])
def test_a_job_that_has_gone_back_is_followed_from_its_new_version(version: int) -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.take(follow(3))
    spare.take(follow(4))
    spare.hear(ended(5))
    dropped, started, *followed = spare.take(prefetch(version))
    assert isinstance(dropped, DropCopies)
    assert isinstance(started, StartPrefetch)
    assert followed == []


@pytest.mark.parametrize(
    "decided", [record(4, decision=Decision.SKIP), record(1)], ids=["otherwise", "long before"]
)
def test_a_copy_of_steps_that_were_decided_otherwise_is_dropped(decided: StepRecord) -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.take(follow(3))
    spare.take(follow(4))
    spare.hear(ended(5))
    other = Follow(epoch=Epoch(1), job=JOB, record=decided)
    told: list[WorkerCommand] = [x for x in spare.take(other) if not isinstance(x, SendReport)]
    assert only(told, DropCopies).followed == (STAGE,)


def test_what_a_new_generation_says_is_committed_is_followed() -> None:
    hand = Hand("w9")
    hand.connect()
    hand.hear(prefetch(3))
    hand.fence(PLAN, last_commit=record(3))
    assert [x.record.step for x in hand.found(FollowCommit)] == [3]


def test_a_copy_that_cannot_be_had_may_be_asked_for_again() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    failed = PrefetchFailed(
        job=JOB, stage=STAGE, version=Step(3), kind=CopyKind.FOLLOWED, reason="nobody has it"
    )
    assert spare.hear(failed) == [Prefetched(job=JOB, stage=STAGE, version=Step(3), error="nobody has it")]
    assert spare.take(follow(3)) == []
    assert only(spare.take(prefetch(5)), StartPrefetch).prefetch.version == 5


@pytest.mark.parametrize("kind", list(CopyKind))
def test_what_came_of_a_copy_that_could_not_be_had_goes_when_the_job_goes_back(kind: CopyKind) -> None:
    spare = Spare()
    spare.take(prefetch(3, is_backup=kind is CopyKind.BACKUP))
    spare.hear(PrefetchFailed(job=JOB, stage=STAGE, version=Step(3), kind=kind, reason="nobody has it"))
    assert spare.take(follow(2)) == []
    dropped = only(spare.take(follow(1)), DropCopies)
    assert (dropped.followed, dropped.above) == ((STAGE,), 2)
    assert spare.take(follow(2)) == []


def test_once_its_chunk_is_built_a_copy_is_dropped() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.hear(ended(3))
    assert only(spare.built(STAGE, version=3), DropCopies).followed == (STAGE,)
    assert spare.take(follow(3)) == []


def test_a_copy_outlives_a_generation_that_does_not_need_it_yet() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    spare.take(follow(3))
    assert spare.built(OTHER_STAGE, version=4) == []


def test_a_copy_that_nobody_tells_of_commits_is_dropped() -> None:
    spare = Spare()
    spare.take(prefetch(3))
    assert only(spare.built(OTHER_STAGE, version=5), DropCopies).followed == (STAGE,)


# --- backups ---


def test_backups_are_kept_and_listed_as_they_are() -> None:
    spare = Spare()
    spare.take(prefetch(2, is_backup=True))
    assert not spare.copies.held
    assert spare.hear(ended(2, CopyKind.BACKUP)) == [prefetched(2)]
    assert spare.take(follow(2)) == []
    assert spare.copies.held == (ChunkVersion(stage=STAGE, version=Step(2)),)
    spare.take(prefetch(4, is_backup=True))
    spare.take(follow(3))
    spare.hear(ended(4, CopyKind.BACKUP))
    assert [copy.version for copy in spare.copies.held] == [2, 4]


def test_backups_that_are_of_no_more_use_go_even_while_they_are_fetched() -> None:
    spare = Spare()
    spare.take(prefetch(2, is_backup=True))
    spare.hear(ended(2, CopyKind.BACKUP))
    spare.take(prefetch(3, is_backup=True))
    dropped, started = spare.take(prefetch(6, is_backup=True, drops_before=4))
    assert isinstance(dropped, DropCopies)
    assert (dropped.backups_before, dropped.followed, dropped.above) == (4, (), None)
    assert isinstance(started, StartPrefetch)
    assert spare.hear(ended(3, CopyKind.BACKUP)) == []
    assert not spare.copies.held


def test_a_backup_asked_for_twice_is_fetched_once() -> None:
    spare = Spare()
    spare.take(prefetch(2, is_backup=True))
    spare.hear(ended(2, CopyKind.BACKUP))
    assert only(spare.take(prefetch(2, is_backup=True)), SendReport).report == prefetched(2)


def test_going_back_takes_every_copy_above() -> None:
    spare = Spare()
    spare.take(prefetch(2, is_backup=True))
    spare.take(prefetch(4, is_backup=True))
    spare.take(prefetch(5, stage=OTHER_STAGE))
    for event in (ended(2, CopyKind.BACKUP), ended(4, CopyKind.BACKUP), ended(5, stage=OTHER_STAGE)):
        spare.hear(event)
    followed, above = spare.built(STAGE, version=3)
    assert isinstance(followed, DropCopies)
    assert followed.followed == (OTHER_STAGE,)
    assert isinstance(above, DropCopies)
    assert above.above == 3
    assert [copy.version for copy in spare.copies.held] == [2]


def test_going_back_takes_what_has_come_of_a_copy_too() -> None:
    spare = Spare()
    spare.take(prefetch(4, is_backup=True))
    assert only(spare.built(STAGE, version=3), DropCopies).above == 3
    assert spare.hear(ended(4, CopyKind.BACKUP)) == []
    assert only(spare.take(prefetch(4, is_backup=True)), StartPrefetch).prefetch.version == 4


def test_a_commit_below_a_copy_tells_that_the_job_went_back() -> None:
    spare = Spare()
    for version in (2, 4):
        spare.take(prefetch(version, is_backup=True))
        spare.hear(ended(version, CopyKind.BACKUP))
    assert spare.take(follow(3)) == []
    assert only(spare.take(follow(2)), DropCopies).above == 3
    assert [copy.version for copy in spare.copies.held] == [2]


# --- whom a worker listens to ---


def test_directives_of_an_older_coordinator_are_ignored() -> None:
    spare = Spare(epoch=2)
    assert spare.take(prefetch(3, epoch=1)) == []
    spare.take(prefetch(3, epoch=2))
    assert spare.take(follow(3, epoch=1)) == []


def test_another_job_than_the_one_worked_on_is_ignored() -> None:
    spare = Spare()
    spare.standing.job = JOB
    assert spare.take(prefetch(3, job=JobId("other-1"))) == []


def test_a_free_worker_changes_to_another_job_and_forgets_the_first() -> None:
    spare = Spare()
    spare.take(prefetch(3, is_backup=True))
    forgot, started = spare.take(prefetch(3, job=JobId("other-1")))
    assert isinstance(forgot, ForgetJob)
    assert isinstance(started, StartPrefetch)
    assert spare.hear(ended(3, CopyKind.BACKUP)) == []


@pytest.mark.parametrize("job", [None, JOB])
def test_a_dismissed_worker_drops_the_copies_of_the_job(job: JobId | None) -> None:
    hand = Hand("w9")
    hand.connect()
    hand.hear(prefetch(3, is_backup=True))
    hand.give(ended(3, CopyKind.BACKUP))
    hand.hear(Dismiss(epoch=Epoch(1), job=job, may_exit=False))
    assert hand.found(ForgetJob)
    assert hand.give(DirectiveArrived(directive=follow(3))) == []


# --- snapshots ---


def snapshot(version: int, *, generation: int = 1, stage: int = 0) -> Snapshot:
    return Snapshot(
        epoch=Epoch(1),
        generation=Generation(generation),
        version=Step(version),
        stages=(StageIndex(stage),),
        keeps_results=True,
    )


PLAN = plan_of([chunk(0, "w0a")], [path(chunk(0, "w0a"))], num_shards=1)
"""`w0a` holds the whole model; one microbatch."""
DECIDED = record(0, attempts={"s0": attempt(0)})


def holding() -> Hand:
    """A worker that holds stage 0 at version 0, and has nothing to do."""
    hand = Hand()
    hand.connect()
    hand.settle(PLAN)
    return hand


def voted() -> Hand:
    """The same when step 0 is done but for the decision."""
    hand = holding()
    hand.start()
    hand.run_all()
    hand.hear(prepare())
    hand.run_all()
    return hand


def prepare() -> Prepare:
    return Prepare(
        epoch=Epoch(1),
        generation=Generation(1),
        step=Step(0),
        group=alone("s0", (ledger(0, "w0a", 0),)),
        attempt=attempt(0),
        parts=(ledger(0, "w0a", 0),),
        exchange=None,
    )


def test_a_snapshot_is_taken_at_its_version_and_not_under_an_older_generation() -> None:
    hand = holding()
    assert hand.hear(snapshot(0, generation=0)) == []
    [run] = hand.hear(snapshot(0))
    assert isinstance(run, RunOp)
    assert run.op == SnapshotOp(
        generation=Generation(1), version=Step(0), stage=StageIndex(0), keeps_results=True
    )


@pytest.mark.parametrize(("version", "stage"), [(3, 0), (0, 1)])
def test_a_snapshot_waits_for_its_version_and_its_chunk(version: int, stage: int) -> None:
    assert holding().hear(snapshot(version, stage=stage)) == []


def test_a_snapshot_of_the_next_version_comes_after_the_update_and_before_the_next_step() -> None:
    hand = voted()
    assert hand.hear(snapshot(1)) == []
    hand.commit(DECIDED)
    applied, copied, *computed = hand.run_all()
    assert isinstance(applied, ApplyOp)
    assert isinstance(copied, SnapshotOp)
    assert copied.version == 1
    assert [op.step for op in computed if isinstance(op, LossOp)] == [1]


def test_a_snapshot_of_this_version_comes_before_the_update() -> None:
    hand = voted()
    hand.hear(snapshot(0))
    hand.hear(snapshot(0))
    hand.commit(DECIDED)
    assert [type(op) for op in hand.run_all()][:3] == [SnapshotOp, SnapshotOp, ApplyOp]


def test_snapshots_and_backups_are_acknowledged() -> None:
    hand = holding()
    hand.hear(prefetch(0, is_backup=True))
    hand.give(ended(0, CopyKind.BACKUP))
    copy = ChunkVersion(stage=stage_spec(0), version=Step(0))
    hand.give(SnapshotsHeld(job=JOB, copies=(copy,)))
    hand.fence(PLAN, generation=2)
    assert hand.acknowledge().backups == (copy, ChunkVersion(stage=STAGE, version=Step(0)))


def test_a_new_generation_forgets_what_snapshots_were_asked_for() -> None:
    hand = holding()
    hand.hear(snapshot(1))
    hand.settle(PLAN, generation=2)
    hand.start(generation=2)
    hand.run_all()
    hand.hear(replace(prepare(), generation=Generation(2)))
    hand.run_all()
    hand.commit(DECIDED, generation=2)
    assert not any(isinstance(op, SnapshotOp) for op in hand.run_all())
