"""The Coordinator machine: jobs, who is there to do them, and time."""

from dataclasses import replace
from math import inf, nan

import pytest

from skein.protocol.coordinator import coordinator
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    Log,
    MakePlan,
    ReportRefused,
    Send,
    StreamBroken,
)
from skein.protocol.coordinator.runs.gathering import GATHER_S, RETURN_S
from skein.protocol.coordinator.runs.watching.detection import WARMING_S
from skein.protocol.coordinator.runs.watching.vigil import STALL_S
from skein.protocol.log.records import (
    GenerationOpened,
    Incident,
    IncidentKind,
    JobSubmitted,
)
from skein.protocol.messages.directives import Dismiss, NewGeneration, Probe, Refused, Welcome
from skein.protocol.messages.reports import Beat, Leaving, LinksMeasured, Suspected
from skein.topology.fleet import Link
from skein.types import JobId, JobState, WorkerId
from tests.support.desk import Desk
from tests.support.reports import hello
from tests.support.runs import PAIRS_SPEC, PLAN, SPEC, beats, began, ended, stepping

# --- jobs ---


def test_a_key_submits_one_job_however_often_it_is_used() -> None:
    desk = Desk()
    first = desk.submit(SPEC, key="a")
    assert desk.recorded(JobSubmitted)
    assert desk.submit(SPEC, key="a") == first
    assert desk.commands == []
    assert desk.submit(SPEC, key="b") != first


def test_jobs_wait_for_each_other_in_the_order_of_submission() -> None:
    desk = Desk()
    first, second, third = (desk.submit(SPEC, key=key) for key in "abc")
    assert (first, second, third) == ("small-1", "small-2", "small-3")
    assert desk.machine.view.state_of(first) is JobState.PAUSED
    assert desk.machine.view.state_of(third) is JobState.PENDING
    assert desk.machine.view.reason_of(first) == "waiting for workers: it wants 1 at least, and 0 are here"
    assert desk.machine.view.reason_of(third) == "waiting for workers: it wants 1 at least, and 0 are here"
    desk.give(CancelAsked(job=first))
    assert desk.machine.view.state_of(first) is JobState.CANCELLED
    assert desk.machine.view.state_of(second) is JobState.PAUSED


def test_a_job_that_has_not_begun_can_be_cancelled_once() -> None:
    desk = stepping()
    waiting = desk.submit(SPEC, key="later")
    desk.give(CancelAsked(job=waiting))
    assert ended(desk) == (JobState.CANCELLED, "cancelled before it began")
    assert desk.machine.view.reason_of(waiting) == "cancelled before it began"
    assert desk.give(CancelAsked(job=waiting)) == []
    assert desk.give(CancelAsked(job=JobId("unknown"))) == []


def test_cancelling_the_active_job_frees_its_workers_and_begins_the_next() -> None:
    desk = stepping()
    desk.submit(SPEC, key="next")
    desk.give(CancelAsked(job=JobId("small-1")))
    assert set(desk.told(Dismiss)) == set(PLAN.workers)
    assert {fence.job for fence in desk.told(NewGeneration).values()} == {"small-2"}


def test_the_state_of_a_job_follows_its_run() -> None:
    desk = Desk()
    job = desk.submit(SPEC)
    desk.join(*PLAN.workers)
    assert desk.machine.view.state_of(job) is JobState.PLANNING
    desk.settle(PLAN)
    assert desk.machine.view.state_of(job) is JobState.RUNNING
    assert desk.machine.view.reason_of(job) == "workers gathered"


# --- gathering ---


def test_a_run_begins_at_once_when_all_wanted_workers_are_here() -> None:
    desk = Desk()
    desk.submit(SPEC)
    desk.join("w0a")
    assert not desk.told(NewGeneration)
    desk.join("w1a")
    assert set(desk.told(NewGeneration)) == {"w0a", "w1a"}


def test_a_run_begins_with_fewer_after_a_while() -> None:
    desk = Desk()
    desk.submit(PAIRS_SPEC)
    desk.join("w0a")
    desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
    assert desk.machine.deadline() == desk.now + GATHER_S
    desk.wait(GATHER_S - 0.1)
    assert not desk.told(NewGeneration)
    desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
    desk.wait(0.1)
    assert desk.told(NewGeneration)


def test_a_restarted_coordinator_waits_for_the_members_it_had() -> None:
    desk = Desk(stepping().log)
    desk.join("w0a")
    for _ in range(int(RETURN_S) - 1):
        desk.wait(1.0)
        desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
    assert desk.machine.history.generation == 1
    desk.wait(1.0)
    assert set(desk.told(NewGeneration)) == {"w0a"}


def test_a_restarted_coordinator_goes_on_as_soon_as_all_are_back() -> None:
    desk = Desk(stepping().log)
    desk.join("w0a")
    desk.join("w1a")
    [opened] = desk.recorded(GenerationOpened)
    assert (opened.generation, desk.machine.history.epoch) == (2, 2)


def test_nobody_is_waited_for_twice() -> None:
    """After the first generation of a restarted coordinator, who stayed away is no reason to hurry or to wait."""
    desk = Desk(stepping().log)
    desk.join("w0a")
    for _ in range(int(RETURN_S)):
        desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
        desk.wait(1.0)
    assert desk.generation == 2
    desk.break_stream("w0a")
    desk.wait(100.0)
    desk.join("w5a")
    assert not desk.told(NewGeneration)
    assert desk.machine.deadline() == desk.now + GATHER_S


# --- workers ---


def test_a_newcomer_is_welcomed_and_measures_its_links() -> None:
    desk = Desk()
    desk.join("a")
    assert desk.told(Welcome)["a"].epoch == 1
    assert not desk.told(Probe)
    desk.join("b")
    assert [member.worker for member in desk.told(Probe)["b"].peers] == ["a"]


def test_a_worker_of_another_release_is_refused() -> None:
    desk = Desk()
    desk.report("a", hello("a", version=99))
    assert "install the same release" in desk.told(Refused)["a"].reason
    assert desk.live == []


def test_a_worker_that_followed_a_newer_coordinator_is_refused() -> None:
    desk = Desk()
    desk.report("a", hello("a", epoch=7))
    assert "start the worker again" in desk.told(Refused)["a"].reason
    assert desk.live == []


def test_who_loses_its_name_to_another_process_is_told_so() -> None:
    desk = Desk()
    desk.join("a")
    desk.join("a", incarnation=2)
    [refused] = [command for command in desk.found(Send) if isinstance(command.directive, Refused)]
    assert refused.incarnation == "a-1"
    assert desk.live == ["a"]


def test_measured_links_reach_the_planner() -> None:
    desk = began()
    link = Link(sender=WorkerId("w0a"), receiver=WorkerId("w1a"), latency_s=0.5, bytes_per_s=1e6)
    desk.report("w0a", LinksMeasured(links=(link,)))
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    assert [(x.sender, x.receiver) for x in asked.fleet.links] == [("w0a", "w1a")]


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s"), [(0.1, 0.0), (0.1, nan), (-1.0, 1e6), (inf, 1e6), (nan, 1e6)]
)
def test_a_link_that_cannot_be_is_none(latency_s: float, bytes_per_s: float) -> None:
    desk = Desk()
    desk.join("a", "b")
    link = Link(sender=WorkerId("a"), receiver=WorkerId("b"), latency_s=latency_s, bytes_per_s=bytes_per_s)
    desk.report("a", LinksMeasured(links=(link,)))
    assert not desk.machine.links


def test_links_of_workers_that_are_gone_are_forgotten_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "MAX_LINKS", 2)
    desk = Desk()
    desk.join("a", "b")
    ends = [("a", "b"), ("a", "gone"), ("gone", "b")]
    for s, r in ends:
        link = Link(sender=WorkerId(s), receiver=WorkerId(r), latency_s=0.1, bytes_per_s=1e6)
        desk.report("a" if "a" in (s, r) else "b", LinksMeasured(links=(link,)))
    assert list(desk.machine.links) == [("a", "b")]


def test_what_an_unknown_worker_says_is_nothing() -> None:
    desk = stepping()
    desk.incarnations[WorkerId("stranger")] = desk.incarnations[WorkerId("w0a")]
    assert desk.report("stranger", Leaving(reason="bye")) == []


# --- time ---


def test_a_step_in_which_nothing_ends_for_long_is_tried_again() -> None:
    desk = stepping()
    beats(desk, int(STALL_S) - 1)
    assert desk.generation == 1
    beats(desk, 2)
    assert desk.generation == 2
    assert f"no op ended for {STALL_S:.0f} s" in desk.recorded(GenerationOpened)[0].reason


def test_the_watchdog_waits_twice_as_long_after_it_was_in_vain() -> None:
    desk = stepping()
    beats(desk, int(STALL_S) + 1)
    desk.settle(PLAN)
    beats(desk, int(2 * STALL_S) - 2)
    assert desk.generation == 2
    beats(desk, 3)
    assert desk.generation == 3


def test_a_worker_whose_op_never_ends_is_turned_away_by_its_beat() -> None:
    desk = stepping()
    desk.report("w1a", Beat(progress=1, running_s=WARMING_S - 1.0, statistics=()))
    assert desk.generation == 1
    desk.report("w1a", Beat(progress=1, running_s=WARMING_S + 1.0, statistics=()))
    assert "an op has run for 31.0 s" in desk.told(Refused)["w1a"].reason
    assert set(desk.told(NewGeneration)) == {"w0a"}


def test_a_suspicion_that_the_coordinators_own_stream_bears_out_is_a_death_at_once() -> None:
    desk = stepping()
    dead = WorkerId("w1a")
    desk.give(StreamBroken(worker=dead, incarnation=desk.incarnations[dead], reason="reset"))
    suspected = Suspected(generation=desk.generation, peer=dead, reason="refused")
    desk.report("w0a", suspected)
    assert "w0a cannot reach it: refused" in desk.recorded(GenerationOpened)[0].reason
    assert desk.generation == 2
    assert [member.worker for member in desk.recorded(GenerationOpened)[0].members] == ["w0a"]


def test_progress_anywhere_puts_off_the_watchdog() -> None:
    desk = stepping()
    for progress in range(1, 4):
        beats(desk, int(STALL_S) - 20, progress=progress)
    assert desk.generation == 1


def test_a_step_that_was_predicted_to_be_slow_may_be_slow() -> None:
    slow = replace(PLAN, predicted_step_s=100.0)
    desk = stepping(SPEC, slow)
    beats(desk, 399)
    assert desk.generation == 1
    beats(desk, 3)
    assert desk.generation == 2


# --- reports that cannot be ---


def refuse(desk: Desk, worker: str) -> None:
    name = WorkerId(worker)
    reason = "Beat.running_s: -1.0: give seconds, from 0 to 1e9"
    desk.give(ReportRefused(worker=name, incarnation=desk.incarnations[name], reason=reason))


def test_a_report_that_cannot_be_is_its_workers_failure_and_the_step_goes_on_without_it() -> None:
    desk = stepping()
    worker = PLAN.workers[0]
    refuse(desk, worker)
    assert desk.recorded(GenerationOpened)
    assert any(
        f"worker={worker} report refused: Beat.running_s: -1.0" in line.line for line in desk.found(Log)
    )
    desk.settle(PLAN)
    [incident] = desk.recorded(Incident)
    assert (incident.kind, incident.workers) == (IncidentKind.WORKER_FAILED, (worker,))
    assert "Beat.running_s" in incident.reason


def test_who_sends_several_is_turned_away_whatever_others_commit_meanwhile() -> None:
    desk = stepping()
    worker = PLAN.workers[0]
    for _ in range(coordinator.MAX_REFUSED - 1):
        refuse(desk, worker)
        desk.settle(PLAN)
    assert worker in desk.machine.membership.live
    refuse(desk, worker)
    assert "reports that cannot be" in desk.told(Refused)[worker].reason
    assert worker not in desk.machine.membership.live


def test_a_report_that_cannot_be_of_a_process_that_is_gone_changes_nothing() -> None:
    desk = stepping()
    worker = PLAN.workers[0]
    before = desk.incarnations[worker]
    desk.join(worker, incarnation=2)
    generation = desk.machine.history.generation
    desk.give(ReportRefused(worker=worker, incarnation=before, reason="made up"))
    assert desk.machine.history.generation == generation
