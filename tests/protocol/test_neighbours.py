"""Peers: each worker is told of its own neighbours, and later of what has changed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.neighbours import Assigned, difference, neighbours_of
from skein.protocol.messages.directives import Assign, Ledger, NewGeneration
from skein.protocol.messages.reports import Ack, StageDone, Trouble
from skein.protocol.worker.worker_io import Build
from skein.types import Generation, Incarnation, JobId, Layout, StageIndex, WorkerId
from tests.support.desk import Desk
from tests.support.hands import JOB, Hand, peer
from tests.support.plans import chunk, grid_plan, path, plan_of
from tests.support.runs import PAIRS, PAIRS_SPEC, began, stepping

GRID = grid_plan(stages=4, replicas=3, num_microbatches=3)
STRAIGHT = plan_of(
    [chunk(stage, f"w{stage}{name}") for stage in range(3) for name in "ab"],
    [path(*(chunk(stage, f"w{stage}{name}") for stage in range(3))) for name in "ab"],
    num_shards=2,
)


@pytest.mark.parametrize("plan", [GRID, STRAIGHT, grid_plan(layout=Layout.LOOP), grid_plan(is_tied=True)])
def test_a_worker_is_near_those_that_its_tensors_go_to_and_come_from(plan: Plan) -> None:
    near = neighbours_of(plan)
    for way in (*plan.paths, *plan.evaluation_paths):
        for one, other in pairwise(way.hops):
            assert one.worker == other.worker or other.worker in near[one.worker]
    for group in plan.groups:
        for worker in group.workers:
            assert near[worker] >= set(group.workers) - {worker}
    assert all(worker in near[other] for worker in near for other in near[worker])
    assert not any(worker in others for worker, others in near.items())


def test_a_worker_is_near_no_others() -> None:
    assert neighbours_of(STRAIGHT)[WorkerId("w0a")] == {"w0b", "w1a"}
    assert neighbours_of(STRAIGHT)[WorkerId("w1b")] == {"w1a", "w0b", "w2b"}


# --- at the coordinator ---


def acknowledge(desk: Desk, *, assigned: int) -> None:
    """All that are here have the Assign of this generation."""
    said = Ack(generation=desk.generation, chunks=(), progress=(), backups=(), assigned=Generation(assigned))
    for worker in desk.live:
        desk.report(worker, said)


def again(*, assigned: int) -> dict[str, Assign]:
    """What a generation assigns after one of whose workers one came back on a new stream."""
    desk = stepping(PAIRS_SPEC, PAIRS)
    first = desk.generation
    desk.join("w1b")
    assert desk.generation == first + 1
    acknowledge(desk, assigned=first if assigned else 0)
    desk.adopt(PAIRS)
    return desk.told(Assign)


def test_the_first_assignment_is_whole() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.acknowledge(desk.live)
    desk.plan(PAIRS)
    told = desk.told(Assign)["w0a"]
    assert {peer.worker for peer in told.peers} == neighbours_of(PAIRS)[WorkerId("w0a")]
    assert (told.since, told.gone) == (0, ())
    assert told.job_spec


def test_a_later_assignment_is_the_difference_to_the_one_that_a_worker_has() -> None:
    for told in again(assigned=1).values():
        assert (told.since, told.job_spec, told.peers, told.gone) == (1, "", (), ())


def test_a_worker_that_lacks_the_last_assignment_is_told_all_of_the_next() -> None:
    told = again(assigned=0)["w0a"]
    assert told.since == 0
    assert told.job_spec
    assert {peer.worker for peer in told.peers} == neighbours_of(PAIRS)[WorkerId("w0a")]


def test_of_peers_those_are_told_that_are_new_or_another_process_and_those_that_are_gone() -> None:
    before, moved = [peer(WorkerId(name)) for name in "abc"], replace(peer(WorkerId("b")), address="b:2")
    known = Assigned(generation=Generation(4), job=JOB, peers={one.worker: one for one in before})
    whole = replace(Hand().assignment(PAIRS), job=JOB)
    told = difference(whole, [before[0], moved, peer(WorkerId("d"))], known)
    assert told.peers == (moved, peer(WorkerId("d")))
    assert (told.gone, told.since, told.job_spec) == (("c",), 4, "")
    of_another_job = difference(replace(whole, job=JobId("other-2")), before, known)
    assert (of_another_job.peers, of_another_job.since) == (tuple(before), 0)
    assert of_another_job.job_spec == whole.job_spec


def test_a_commit_is_not_told_again_to_workers_that_have_reported_of_the_step_after_it() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    run = desk.machine.run
    assert run is not None
    ledger = Ledger(stage=StageIndex(0), worker=WorkerId("w0a"), microbatches=())
    done = StageDone(generation=desk.generation, step=run.job.version, ledger=ledger, loss_sum=0.0, tokens=())
    desk.report("w0a", done)
    desk.join("w1b")
    fences = desk.told(NewGeneration)
    assert {worker for worker, fence in fences.items() if fence.last_commit is None} == {"w0a"}


def test_a_worker_that_has_reported_nothing_of_a_step_is_told_the_commit_before_it() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.join("w1b")
    fences = desk.told(NewGeneration)
    assert all(fence.last_commit is not None and fence.last_commit.step == 0 for fence in fences.values())
    assert len({fence.key for fence in fences.values()}) == 1


# --- at a worker ---


def test_a_worker_puts_a_difference_to_what_it_has() -> None:
    hand = Hand()
    hand.connect()
    hand.settle(PAIRS)
    whole = hand.assignment(PAIRS)
    assert {one.worker for one in whole.peers} == {"w0b", "w1b"}
    hand.fence(PAIRS, generation=2)
    assert hand.acknowledge().assigned == 1
    other = replace(peer(WorkerId("w1b")), incarnation=Incarnation("w1b-2"))
    told = replace(
        hand.assignment(PAIRS, generation=2),
        job_spec="",
        peers=(other,),
        gone=(WorkerId("w0b"),),
        since=Generation(1),
    )
    [build] = hand.hear(told)
    assert isinstance(build, Build)
    assert build.assign == replace(
        told, job_spec=whole.job_spec, peers=(other,), gone=(), since=Generation(0)
    )
    assert hand.machine.peers == {"w1b"}


def test_a_difference_to_what_is_not_here_is_trouble() -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PAIRS)
    assert hand.acknowledge().assigned == 0
    hand.hear(replace(hand.assignment(PAIRS), since=Generation(7)))
    assert [said.reason for said in hand.said() if isinstance(said, Trouble)] == [
        "the Assign of generation 7 is not here"
    ]
    assert not hand.found(Build)


def test_another_job_ends_what_was_assigned() -> None:
    hand = Hand()
    hand.connect()
    hand.settle(PAIRS)
    hand.fence(PAIRS, generation=2, job=JobId("other-2"))
    assert hand.acknowledge().assigned == 0
    assert hand.machine.peers == frozenset()
