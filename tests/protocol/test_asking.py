"""Before steps are given up: who is asked, who is waited for, how long, and what is said of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.plan.plan import Infeasible
from skein.protocol.coordinator.coordinator_io import CancelAsked, MakePlan, PauseAsked, PlanMade
from skein.protocol.coordinator.runs.gathering import GATHER_S, RETURN_S
from skein.protocol.coordinator.runs.placing.giving_up import (
    LEAST_S,
    MOST_S,
    TIMES_REACHED,
    patience_s,
    waits_until,
)
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import GenerationOpened, RolledBack
from skein.protocol.messages.directives import Assign, Look, NewGeneration, SourceKind
from skein.protocol.messages.reports import PeersSeen, Prefetched
from skein.types import Incarnation, JobState, Step
from tests.support.desk import LEASE_S, Desk
from tests.support.plans import chunk, path, plan_of, stage_spec
from tests.support.runs import BOTH_STAGES, HELD, PAIRS, PAIRS_SPEC, ended, stepping

FIRST, SECOND = ("w0a", "w0b"), ("w1a", "w1b")
"""Holders of each stage."""
SILENT_S = LEASE_S + 1.0
ALONE = plan_of(
    [chunk(0, "w0a"), chunk(1, "w0a")], [path(chunk(0, "w0a"), chunk(1, "w0a"))] * 4, num_shards=1
)
THREE = plan_of(
    [chunk(0, "w0a"), chunk(0, "w0b"), chunk(1, "w1a")],
    [path(chunk(0, worker), chunk(1, "w1a")) for worker in FIRST] * 2,
)


def reason(desk: Desk) -> str:
    assert desk.machine.run is not None
    return desk.machine.run.reason


def acknowledged(desk: Desk) -> None:
    """Everybody who is here tells what it holds."""
    desk.acknowledge(desk.live, {worker: HELD[worker] for worker in desk.live})


def silenced() -> Desk:
    """A step is committed; nothing is heard of the holders of the second stage any more, and a plan without them is
    there.
    """
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.beat(*FIRST, seconds=SILENT_S)
    assert desk.live == list(FIRST)
    acknowledged(desk)
    desk.adopt(BOTH_STAGES)
    return desk


def test_nothing_is_given_up_while_silent_holders_may_live_and_everybody_is_told_so() -> None:
    desk = silenced()
    assert not desk.recorded(RolledBack)
    assert not desk.told(Assign)
    assert reason(desk).startswith("waiting for w1a, w1b until 00:")
    assert reason(desk).endswith(" UTC: going back would cost 1 step")
    assert any(line.endswith(reason(desk)) for line in desk.lines())
    assert desk.machine.view.state_of(desk.job) is JobState.PLANNING


def test_what_silent_holders_have_is_not_lost_when_they_are_heard_again() -> None:
    desk = silenced()
    desk.beat(*FIRST, seconds=LEAST_S - 2.0)
    desk.beat(*FIRST, "w1a")
    [opened] = desk.recorded(GenerationOpened)
    assert opened.reason == "asking w1a before steps are given up"
    acknowledged(desk)
    desk.adopt(THREE)
    assert not desk.machine.history.jobs[desk.job].rollbacks
    sources = {c.source.kind for assign in desk.told(Assign).values() for c in assign.chunks}
    assert sources == {SourceKind.KEEP}


@pytest.mark.parametrize("seconds", [MOST_S + 10.0, 2 * MOST_S + 10.0])
def test_who_comes_while_somebody_is_waited_for_is_asked_however_late_that_is(seconds: float) -> None:
    desk = silenced()
    desk.machine.absence.came_back_after(MOST_S)
    reached = PeersSeen(reached=(Incarnation("w1b-1"),), gone=())
    until = desk.now + seconds
    while desk.now < until:
        desk.report("w0b", reached)
        desk.beat(*FIRST, seconds=10.0)
    assert reason(desk).startswith("waiting for w1b until")
    desk.beat(*FIRST, "w1a")
    assert reason(desk) == "asking w1a before steps are given up"
    assert not desk.machine.history.jobs[desk.job].rollbacks


def test_who_comes_when_a_plan_exists_again_is_asked_however_long_none_did() -> None:
    desk = silenced()
    desk.beat("w0a", seconds=SILENT_S)
    acknowledged(desk)
    desk.plan(Infeasible(reason="too few workers"))
    desk.beat("w0a", seconds=2 * MOST_S)
    desk.join("w9")
    desk.beat("w0a", "w9", seconds=GATHER_S)
    desk.acknowledge(["w0a", "w9"], HELD | {"w9": []})
    [asked] = desk.found(MakePlan)
    desk.beat("w0a", "w9", "w1a")
    desk.give(PlanMade(request=asked.request, result=ALONE))
    assert reason(desk) == "asking w1a before steps are given up"
    assert not desk.machine.history.jobs[desk.job].rollbacks


def test_when_the_time_is_over_the_job_goes_back_and_says_whom_it_waited_for() -> None:
    desk = silenced()
    desk.beat(*FIRST, seconds=LEAST_S + 1.0)
    [back] = desk.recorded(RolledBack)
    assert (back.from_version, back.to_version) == (1, 0)
    assert back.reason == "no worker holds stage 1 at version 1; w1a, w1b did not come back within 15 s"


def asked_to_end(job_of: type[PauseAsked] | type[CancelAsked]) -> Desk:
    """A coordinator that has just started again and knows of a step that no checkpoint has; the job is to end."""
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    again = Desk(desk.log)
    again.give(TimePassed())
    again.give(job_of(job=again.job))
    return again


@pytest.mark.parametrize(("wish", "state"), [(PauseAsked, JobState.HELD), (CancelAsked, JobState.CANCELLED)])
def test_a_job_that_is_to_end_waits_for_holders_whose_death_nobody_has_seen(
    wish: type[PauseAsked] | type[CancelAsked], state: JobState
) -> None:
    desk = asked_to_end(wish)
    desk.wait(RETURN_S + 2.0)
    assert reason(desk).startswith("waiting for w0a, w0b, w1a, w1b until 00:")
    assert reason(desk).endswith(" UTC: they may have 1 step that no checkpoint has")
    desk.join(*PAIRS.workers)
    # The first who comes is asked at once; nothing is done without the others, who are here by now.
    desk.acknowledge(["w0a"], HELD)
    desk.plan(ALONE)
    assert reason(desk).startswith("asking ")
    desk.acknowledge(PAIRS.workers, HELD)
    desk.adopt(PAIRS)
    desk.ready(PAIRS.workers)
    desk.save()
    assert desk.machine.view.state_of(desk.job) is state
    assert desk.machine.history.jobs[desk.job].checkpoints[-1].version == 1


def test_a_job_that_is_to_end_waits_for_nobody_without_whom_nothing_is_whole() -> None:
    desk = asked_to_end(CancelAsked)
    for worker in SECOND:
        desk.machine.absence.lost(Incarnation(f"{worker}-1"), silent_s=0.0, is_dead=True, now=desk.now)
    desk.wait(RETURN_S)
    assert ended(desk) == (
        JobState.CANCELLED,
        "cancelled by a client; the steps after 0 are with no worker that is here",
    )


def test_a_job_that_is_to_end_ends_when_nobody_comes_back_and_says_so() -> None:
    desk = asked_to_end(CancelAsked)
    desk.wait(RETURN_S + LEAST_S)
    state, said = ended(desk)
    assert state is JobState.CANCELLED
    assert said.endswith("is here; w0a, w0b, w1a, w1b did not come back within 15 s")


def test_who_comes_back_after_that_is_told_of() -> None:
    desk = silenced()
    desk.beat(*FIRST, seconds=LEAST_S + 1.0)
    desk.beat(*FIRST, "w1a")
    told = [line for line in desk.lines() if "is back, too late" in line]
    assert told == [
        f"job={desk.job} worker=w1a is back, too late: what it may hold of version 1 was given up, and the job is at "
        "version 0; it begins anew"
    ]
    desk.beat(*FIRST, "w1a", seconds=1.0)
    assert not [line for line in desk.lines() if "is back, too late" in line]


def test_members_look_at_those_who_are_silent_until_it_is_over() -> None:
    desk = silenced()
    looks = desk.beat(*FIRST, seconds=3.0)
    assert looks
    assert set(desk.told(Look)) == set(FIRST)
    assert [(peer.worker, peer.address) for peer in desk.told(Look)["w0a"].peers] == [
        ("w1a", "w1a:1"),
        ("w1b", "w1b:1"),
    ]


def test_deaths_that_peers_have_seen_end_the_wait() -> None:
    desk = silenced()
    gone = tuple(Incarnation(f"{worker}-1") for worker in SECOND)
    desk.report("w0a", PeersSeen(reached=(), gone=gone[:1]))
    assert not desk.recorded(RolledBack)
    assert reason(desk).startswith("waiting for w1b until")
    desk.report("w0b", PeersSeen(reached=(), gone=gone[1:]))
    [back] = desk.recorded(RolledBack)
    assert back.reason == "no worker holds stage 1 at version 1"


def test_deaths_that_were_seen_before_the_plan_was_made_cost_no_time() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    for worker in SECOND:
        desk.break_stream(worker)
    acknowledged(desk)
    began = desk.now
    desk.adopt(BOTH_STAGES)
    assert desk.recorded(RolledBack)
    assert desk.now == began


def test_a_worker_that_peers_reach_is_not_dead() -> None:
    desk = silenced()
    reached = PeersSeen(reached=(Incarnation("w1a-1"),), gone=())
    desk.report("w0a", PeersSeen(reached=(), gone=(Incarnation("w1a-1"),)))
    desk.report("w0b", reached)
    desk.beat(*FIRST, seconds=LEAST_S - 1.0)
    desk.report("w0b", reached)
    desk.beat(*FIRST, seconds=LEAST_S - 1.0)
    assert reason(desk).startswith("waiting for w1a until")
    desk.beat(*FIRST, seconds=2.0)
    assert desk.recorded(RolledBack)


def test_who_has_come_back_late_before_is_waited_for_longer() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.beat("w0a", *SECOND, seconds=30.0)
    desk.beat("w0a", "w0b", *SECOND)
    assert max(desk.machine.absence.silences_s) == pytest.approx(30.0)
    desk.beat("w0a", "w0b", seconds=SILENT_S)
    acknowledged(desk)
    desk.adopt(BOTH_STAGES)
    desk.beat("w0a", "w0b", seconds=40.0)
    assert reason(desk).startswith("waiting for w1a, w1b until")
    desk.beat("w0a", "w0b", seconds=6.0)
    assert desk.recorded(RolledBack)


def test_who_came_while_a_plan_was_made_is_asked_before_steps_are_given_up() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.beat(*FIRST, seconds=SILENT_S)
    acknowledged(desk)
    planning = desk.commands
    desk.beat(*FIRST, "w1b")
    desk.commands = planning
    desk.plan(BOTH_STAGES)
    [opened] = desk.recorded(GenerationOpened)
    assert opened.reason == "asking w1b before steps are given up"
    assert set(desk.told(NewGeneration)) == {*FIRST, "w1b"}


def test_a_restarted_coordinator_waits_for_holders_that_come_late() -> None:
    before = stepping(PAIRS_SPEC, PAIRS)
    before.step(PAIRS)
    desk = Desk(before.log)
    desk.join(*FIRST)
    desk.beat(*FIRST, seconds=RETURN_S)
    acknowledged(desk)
    desk.adopt(BOTH_STAGES)
    assert not desk.recorded(RolledBack)
    desk.beat(*FIRST, seconds=2.0)
    assert {peer.worker for look in desk.told(Look).values() for peer in look.peers} == set(SECOND)
    desk.join("w1a")
    acknowledged(desk)
    desk.adopt(THREE)
    assert not desk.machine.history.jobs[desk.job].rollbacks
    sources = {c.source.kind for assign in desk.told(Assign).values() for c in assign.chunks}
    assert sources == {SourceKind.KEEP}
    assert max(desk.machine.absence.silences_s) == pytest.approx(RETURN_S + 2.0)


def test_another_process_of_a_holders_name_says_that_it_is_dead() -> None:
    desk = silenced()
    desk.join("w1a", "w1b", incarnation=2)
    acknowledged_now = {worker: HELD[worker] for worker in FIRST}
    desk.acknowledge(desk.live, acknowledged_now)
    desk.adopt(PAIRS)
    assert desk.machine.history.jobs[desk.job].rollbacks


def test_copies_in_the_memory_of_silent_workers_are_waited_for_too() -> None:
    """Both holders of a stage are known dead; the newest copy of it is with one who is silent."""
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    copy = Prefetched(job=desk.job, stage=stage_spec(1), version=Step(1), error="")
    desk.report("w0b", copy)
    desk.beat("w0a", *SECOND, seconds=SILENT_S)
    for worker in SECOND:
        desk.break_stream(worker)
    desk.acknowledge(["w0a"], HELD)
    desk.adopt(ALONE)
    assert reason(desk).startswith("waiting for w0b until")


def test_silence_of_those_who_hold_nothing_that_is_lacking_delays_nothing() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.beat("w0a", *SECOND, seconds=SILENT_S)
    for worker in SECOND:
        desk.break_stream(worker)
    desk.acknowledge(["w0a"], HELD)
    desk.adopt(ALONE)
    assert desk.recorded(RolledBack)


@given(
    cost_s=st.floats(0.0, 1e6),
    silences_s=st.lists(st.floats(0.0, 1e6), max_size=16),
    more_s=st.floats(0.0, 1e6),
)
def test_more_at_stake_and_longer_silences_never_make_the_wait_shorter(
    cost_s: float, silences_s: list[float], more_s: float
) -> None:
    wait_s = patience_s(cost_s=cost_s, silences_s=silences_s)
    assert LEAST_S <= wait_s <= MOST_S
    assert patience_s(cost_s=cost_s + more_s, silences_s=silences_s) >= wait_s
    assert patience_s(cost_s=cost_s, silences_s=[*silences_s, more_s]) >= wait_s


@given(since=st.floats(0.0, 1e9), seen=st.none() | st.floats(0.0, 2e9), wait_s=st.floats(LEAST_S, MOST_S))
def test_a_wait_lasts_one_silence_at_least_and_a_few_at_most(
    since: float, seen: float | None, wait_s: float
) -> None:
    ends_at = waits_until(since, wait_s, seen)
    assert since + wait_s <= ends_at <= since + TIMES_REACHED * wait_s


def test_a_worker_that_comes_and_goes_does_not_keep_a_job_from_its_end() -> None:
    desk = asked_to_end(CancelAsked)
    began = desk.now
    for incarnation in range(1, 10):
        if desk.machine.history.jobs[desk.job].end is not None:
            break
        desk.join("x", incarnation=incarnation)
        desk.wait(RETURN_S)
        desk.acknowledge(desk.live)
        if desk.found(MakePlan):
            desk.plan(Infeasible(reason="too few workers"))
        desk.wait(RETURN_S)
    assert ended(desk)[0] is JobState.CANCELLED
    assert desk.now - began < 2 * LEAST_S
