"""One fault at a time: what it costs, and what it must never cost."""

from functools import partial
from itertools import product

import pytest

from skein.protocol.coordinator.coordinator_io import DrainAsked
from skein.protocol.coordinator.runs.placing.giving_up import LEAST_S
from skein.protocol.log.records import GenerationOpened
from skein.protocol.messages.tensors import Envelope, Refusal
from skein.protocol.worker.gate import PeerGate
from skein.sim.faults import GENTLE, Fault, schedule_faults
from skein.sim.scenario import disturbed, judge
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import SiteId
from tests.support.extent import part
from tests.support.jobs import ROOM_FOR_ONE_STAGE, small_job
from tests.support.worlds import of_kind, plan_of, run_until, simulate, undisturbed, version_of, worker

JOB = small_job(steps=4, evaluate_every=2, save_every=2)
"""On four workers: two stages, two holders each."""


def strike(world: World, *, kind: str, at_s: float, seconds: float) -> None:
    fault = Fault(at_s=at_s, kind=kind, worker=worker(1), other=worker(2), seconds=seconds, number=1)
    schedule_faults(world, [fault])


ALONE = (
    "kill",
    "restart",
    "flap",
    "op",
    "forget",
    "neighbours",
    "both",
    *GENTLE,
)
"""Kinds that leave each stage a holder."""


MOMENTS_S = (0.0, 0.05, 0.15, 0.4, 0.9, 1.6, 2.5, 3.3, 4.1)


@pytest.mark.parametrize(("kind", "at_s"), part(list(product(ALONE, MOMENTS_S)), every=8))
def test_one_fault_leaves_the_loss_curve_as_it_was(kind: str, at_s: float) -> None:
    run = simulate(JOB, 4, disturb=partial(strike, kind=kind, at_s=at_s, seconds=4.0))
    assert run.curve == undisturbed(JOB, 4).curve
    assert run.num_rollbacks == 0
    # One that the fault cut short is made up for a step later; a store may be away until the last is due.
    assert run.saved in ([2, 4], [3, 4]) or (kind.startswith("store_") and run.saved == [4])


@pytest.mark.parametrize("seconds", [0.1, 1.0, 1.9])
def test_a_freeze_within_the_lease_opens_no_generation(seconds: float) -> None:
    run = simulate(JOB, 4, disturb=partial(strike, kind="freeze", at_s=1.5, seconds=seconds))
    assert len(of_kind(run.world.log, GenerationOpened)) == 1


def test_a_worker_that_was_frozen_beyond_its_lease_is_given_work_again() -> None:
    job = small_job(steps=40)
    run = simulate(job, 4, disturb=partial(strike, kind="freeze", at_s=1.5, seconds=5.0))
    members = [{m.worker for m in record.members} for record in of_kind(run.world.log, GenerationOpened)]
    assert worker(1) not in members[1]
    assert worker(1) in members[-1]
    assert run.curve == undisturbed(job, 4).curve


def test_a_false_alarm_about_everybody_costs_no_step() -> None:
    def freeze_all(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 3)
        for name in world.workers:
            world.freeze_worker(name, 5.0)

    job = small_job(steps=6)
    run = simulate(job, 4, disturb=freeze_all)
    assert len(of_kind(run.world.log, GenerationOpened)) > 1
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 4).curve


def test_a_stream_that_falls_silent_while_peers_are_still_reached_costs_no_step() -> None:
    job = small_job(steps=40)
    run = simulate(job, 4, disturb=partial(strike, kind="mute", at_s=1.5, seconds=5.0))
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 4).curve
    members = [{m.worker for m in record.members} for record in of_kind(run.world.log, GenerationOpened)]
    assert worker(1) in members[-1]


def test_a_worker_whose_ops_never_end_is_turned_away() -> None:
    def stick(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 2)
        world.workers[worker(1)].is_stuck = True

    job = small_job(steps=5)
    run = simulate(job, 4, disturb=stick)
    assert worker(1) not in run.world.workers
    assert any("w0001 exits: " in line and "start it again" in line for line in run.world.lines)
    assert run.curve == undisturbed(job, 4).curve


def test_tensors_that_arrive_twice_count_once() -> None:
    def repeat(world: World) -> None:
        world.transport.repeat_every = 2

    run = simulate(JOB, 4, disturb=repeat)
    assert run.curve == undisturbed(JOB, 4).curve
    assert len(of_kind(run.world.log, GenerationOpened)) == 1


def test_who_comes_back_after_a_roll_back_brings_nothing_of_the_old_history() -> None:
    """One holder stands still for too long, the other dies: the job goes back. The coordinator restarts, it wakes."""

    def disturb(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 2)
        plan = plan_of(world)
        first, second = plan.holders(plan.stages[1].index)
        world.freeze_worker(first, LEAST_S + 9.0)
        world.kill_worker(second)
        world.clock.after(LEAST_S + 7.0, world.crash_coordinator)

    job = small_job(steps=8)
    run = simulate(job, 4, disturb=disturb)
    assert run.num_rollbacks == 1
    assert run.curve == undisturbed(job, 4).curve
    assert any("is back, too late" in line for line in run.world.lines)


def test_a_drained_worker_is_let_go_and_its_state_is_passed_on() -> None:
    job = small_job(stages=4, replicas=1, steps=6)

    def drain_one(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 2)
        world.tell(DrainAsked(worker=worker(2)))

    run = simulate(job, 4, disturb=drain_one)
    assert worker(2) not in run.world.workers
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 4).curve


def test_a_newcomer_takes_over_the_only_copy_of_a_stage_without_losing_a_step() -> None:
    """Its donor builds at once and has given the stage up before the newcomer has fetched it."""
    job = small_job(stages=4, replicas=1, steps=24)

    def add_one(world: World) -> None:
        site = world.workers[worker(0)].machine.identity.site
        run_until(world, lambda world: version_of(world) == 2)
        world.add_worker(worker(9), site, flops_per_s=2e9, memory_bytes=2**34)

    run = simulate(job, 3, disturb=add_one)
    plans = [line for line in run.world.lines if "plan:" in line]
    assert "4 of 4 workers" in plans[-1]
    assert len(plans) == 2
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 3).curve


def test_who_was_excluded_for_a_broken_link_is_pardoned_when_nobody_else_is_left() -> None:
    job = small_job(stages=2, replicas=1, steps=6, save_every=1)

    def disturb(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 1)
        sender = plan_of(world).holders(plan_of(world).stages[0].index)[0]
        [receiver] = set(world.workers) - {sender}
        world.network.cut(sender, receiver)
        run_until(world, lambda world: any(f"excluded={receiver}" in line for line in world.lines))
        run_until(world, lambda world: version_of(world) == 3)
        world.kill_worker(sender)

    run = simulate(job, 2, disturb=disturb)
    assert any("pardoned=" in line for line in run.world.lines)
    assert run.curve == undisturbed(job, 2).curve


def test_who_was_excluded_for_a_broken_link_is_pardoned_after_a_while_when_no_plan_exists_without_it() -> (
    None
):
    job = small_job(stages=2, replicas=1, steps=6)

    def disturb(world: World) -> None:
        site = SiteId("site0")
        for index in range(2):
            world.add_worker(worker(index), site, flops_per_s=2e9, memory_bytes=ROOM_FOR_ONE_STAGE)
        run_until(world, lambda world: version_of(world) == 1)
        sender = plan_of(world).holders(plan_of(world).stages[0].index)[0]
        [receiver] = set(world.workers) - {sender}
        world.network.cut(sender, receiver)
        run_until(world, lambda world: any("paused" in line for line in world.lines))
        world.network.heal()

    run = simulate(job, 0, disturb=disturb)
    assert run.num_rollbacks == 0
    assert 30.0 < run.outcome.seconds < 60.0


@pytest.mark.parametrize(("text", "seed"), [("line 2x2", 0), ("loop 3x2 tied", 3)])
def test_who_has_no_room_lets_nobody_ahead_and_the_curve_stays(
    text: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, put_off = shape_of(text), []
    refusal_of = PeerGate.refusal_of

    def seen(gate: PeerGate, envelope: Envelope, *, is_full: bool = False) -> Refusal | None:
        refusal = refusal_of(gate, envelope, is_full=is_full)
        if is_full and refusal is Refusal.NOT_YET and refusal_of(gate, envelope) is None:
            put_off.append(envelope)
        return refusal

    monkeypatch.setattr(PeerGate, "refusal_of", seen)
    judge(shape, disturbed(shape, seed=seed, num_faults=6, kinds=("crowd",)))
    assert put_off
