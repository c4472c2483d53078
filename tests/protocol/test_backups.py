"""Copies of stages elsewhere: how often they are made, and what is told where that is less often than asked."""

from collections.abc import Iterable

from skein.config.job import BackupSpec
from skein.protocol.coordinator.coordinator_io import Log, Outbox
from skein.protocol.coordinator.runs.improving.backups import Backups
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import JobSubmitted
from skein.protocol.membership.membership import Entry, Membership
from skein.protocol.messages.reports import Prefetched
from skein.topology.fleet import Link
from skein.types import JobId, Step, WorkerId
from tests.support.jobs import small_job
from tests.support.plans import grid_plan, stage_spec
from tests.support.reports import hello

PLAN = grid_plan(stages=2, replicas=1, num_microbatches=2)
JOB = JobId("j")


class Copying:
    """A job whose stages are copied, with its steps and copies made by hand."""

    def __init__(self, every: int = 10, *, workers: Iterable[str] = PLAN.workers, slow: bool = False) -> None:
        self.outbox = Outbox(History())
        spec = small_job(stages=2, replicas=1, microbatches=2, steps=1000)
        spec = spec.model_copy(update={"backup": BackupSpec(every_steps=every)})
        self.outbox.record(JobSubmitted(job=JOB, key="k", spec=spec.canonical_json(), wall_s=0.0))
        self.job: JobHistory = self.outbox.history.jobs[JOB]
        membership = Membership()
        for worker in workers:
            membership.handle(hello(worker), now=0.0)
        members = Members(self.job, membership.live, self.outbox)
        members.open_generation("test", now=0.0)
        self.entries: list[Entry] = [membership.live[w] for w in sorted(membership.live)]
        pairs = [(a, b) for a in PLAN.workers for b in PLAN.workers if a != b]
        rate = 1e4 if slow else 1e12
        links = {(a, b): Link(sender=a, receiver=b, latency_s=0.0, bytes_per_s=rate) for a, b in pairs}
        self.backups = Backups(members, links)
        self.outbox.drain()

    def steps(self, until: int, *, arrive: bool = True) -> list[int]:
        """Steps begin until this version is made; gives the versions that are copied."""
        asked = []
        while self.job.version < until:
            if self.backups.is_due():
                self.backups.step_begins(PLAN, self.entries, step_s=1.0)
                asked.append(self.job.version + 1)
                for stage in PLAN.stages if arrive else ():
                    here = Prefetched(job=JOB, stage=stage, version=Step(asked[-1]), error="")
                    self.backups.prefetched(here)
            self.job.version = Step(self.job.version + 1)
        return asked

    def lines(self) -> list[str]:
        return [command.line for command in self.outbox.drain() if isinstance(command, Log)]


def test_stages_are_copied_as_often_as_asked_and_nothing_is_told() -> None:
    copying = Copying()
    assert copying.steps(40) == [10, 20, 30, 40]
    assert copying.lines() == []


def test_copies_that_take_longer_than_asked_are_told_of_once_and_made_later() -> None:
    copying = Copying()
    assert copying.steps(49, arrive=False) == [10]
    [line] = copying.lines()
    assert "not copied every 10 steps (newest copies: none): those before are still on their way" in line


def test_copies_that_a_link_cannot_bear_are_told_of_with_how_often_they_come() -> None:
    copying = Copying(slow=True)
    first, second = copying.steps(20_000)[:2]
    [line] = copying.lines()
    assert f"every {second - first} steps, for the slowest copy takes" in line


def test_copies_that_fail_or_that_a_generation_cuts_short_are_told_of() -> None:
    copying = Copying()
    copying.steps(10, arrive=False)
    error = Prefetched(job=JOB, stage=stage_spec(0), version=Step(10), error="no memory")
    copying.backups.prefetched(error)
    assert "stage 0 at version 10 was not copied: no memory" in copying.lines()[0]
    copying.steps(20, arrive=False)
    copying.backups.fenced(now=0.0)
    assert "a new generation began while version 20 was copied" in copying.lines()[0]
    assert copying.steps(30) == [30]


def test_where_there_is_no_elsewhere_that_is_told() -> None:
    copying = Copying(workers=PLAN.workers[:1])
    assert copying.steps(35) == [10, 20, 30]
    [line] = copying.lines()
    assert "every worker that could keep the copy of a stage holds that stage itself" in line
    assert WorkerId(PLAN.workers[0]) not in line
