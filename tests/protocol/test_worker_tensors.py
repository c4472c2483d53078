"""The Worker machine and tensors that come too early, too late or not for it."""

import pytest

from skein.plan.ops import Direction
from skein.protocol.messages.reports import Suspected
from skein.protocol.messages.tensors import HopTensor, Phase, ShardKind, ShardTensor
from skein.protocol.worker.ops import ApplyOp, LossOp
from skein.protocol.worker.worker_io import DropTensor, SendFailed
from skein.types import Generation, JobId, MicrobatchId, Step, WorkerId, parse_group
from tests.support.hands import envelope
from tests.support.plans import chunk
from tests.support.reports import attempt, ledger
from tests.support.stages import DECIDED, PLAN, gradient, hop, only, ready, stepping, voted


def test_a_tensor_of_an_older_generation_is_dropped() -> None:
    hand = ready()
    hand.settle(PLAN, generation=2)
    hand.start(generation=2)
    hand.run_all()
    hand.arrive(gradient(0), generation=1)
    assert hand.commands == [DropTensor(envelope=envelope(gradient(0), sender="w1a", generation=1))]


def test_a_tensor_of_a_newer_generation_waits_for_it() -> None:
    hand = ready(PLAN, "w1a")
    activation = hop(Direction.FORWARD, 0, 1)
    assert hand.arrive(activation, sender="w0a", generation=2) == []
    hand.fence(PLAN, generation=2)
    hand.acknowledge()
    assign = hand.assignment(PLAN, generation=2)
    hand.hear(assign)
    hand.built(assign)
    assert isinstance(hand.running, LossOp)


def test_a_tensor_that_waited_in_vain_is_dropped() -> None:
    hand = ready(PLAN, "w1a")
    hand.arrive(hop(Direction.FORWARD, 0, 1), sender="w0a", generation=2)
    hand.settle(PLAN, generation=3)
    assert len(hand.found(DropTensor)) == 1


def test_a_tensor_of_the_next_step_waits_for_the_update() -> None:
    hand = ready(PLAN, "w1a")
    hand.start()
    for microbatch in (0, 1):
        hand.arrive(hop(Direction.FORWARD, microbatch, 1), sender="w0a")
        hand.run_all()
    hand.prepare("s1", [ledger(1, "w1a", 0, 1)])
    hand.run_all()
    assert hand.arrive(hop(Direction.FORWARD, 0, 1, step=1), sender="w0a") == []
    hand.commit(DECIDED)
    assert [type(op) for op in hand.run_all()] == [ApplyOp, LossOp]


def test_a_tensor_of_a_step_that_is_over_is_dropped() -> None:
    hand = voted()
    hand.commit(DECIDED)
    hand.end()
    hand.arrive(gradient(0, step=0))
    assert len(hand.found(DropTensor)) == 1


@pytest.mark.parametrize(
    "header",
    [
        hop(Direction.FORWARD, 0, 1),
        HopTensor(
            direction=Direction.BACKWARD,
            phase=Phase.TRAIN,
            step=Step(0),
            microbatch=MicrobatchId(7),
            hop=0,
            path=PLAN.paths[0],
        ),
        ShardTensor(
            kind=ShardKind.PART,
            step=Step(0),
            group=parse_group("s1"),
            attempt=attempt(),
            shard=0,
            member=chunk(1, "w1a"),
        ),
    ],
    ids=["another worker's hop", "unassigned microbatch", "another group"],
)
def test_a_tensor_that_is_not_for_this_worker_is_dropped(header: HopTensor | ShardTensor) -> None:
    hand = stepping()
    hand.arrive(header)
    assert len(hand.found(DropTensor)) == 1


def test_a_tensor_of_another_job_is_dropped() -> None:
    hand = stepping()
    hand.arrive(gradient(0), job=JobId("other-9"))
    assert len(hand.found(DropTensor)) == 1


def test_a_peer_that_takes_nothing_is_suspected_unless_that_is_old_news() -> None:
    hand = stepping()
    hand.give(SendFailed(to=WorkerId("w1a"), generation=Generation(1), reason="refused"))
    assert only(hand.said(), Suspected).peer == "w1a"
    assert hand.give(SendFailed(to=WorkerId("w1a"), generation=Generation(0), reason="refused")) == []
