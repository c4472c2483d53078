"""Who was here and is gone: lost ones are remembered, those that meant to leave are not."""

from coordinator.telling.status import Roster
from skein import PROTOCOL_VERSION
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import DrainAsked, ReportArrived, StreamBroken
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import EpochOpened
from skein.protocol.messages.reports import Hello
from skein.topology.fleet import Profile
from skein.types import Epoch, Incarnation, SiteId, WorkerId
from skein.wire.views import WorkerState

WORKER, FIRST = WorkerId("w1"), Incarnation("first")
LONG_AFTER_S = 100.0


def hello() -> Hello:
    return Hello(
        worker=WORKER,
        incarnation=FIRST,
        protocol_version=PROTOCOL_VERSION,
        site=SiteId("here"),
        address="127.0.0.1:1",
        profile=Profile(device="cpu", device_name="test", flops_per_s=1e9, memory_bytes=1 << 30),
        epoch=Epoch(1),
    )


def joined() -> tuple[Coordinator, Roster]:
    machine = Coordinator(lease_s=3.0)
    machine.replay([EpochOpened(epoch=Epoch(1), wall_s=0.0)])
    machine.handle(ReportArrived(worker=WORKER, incarnation=FIRST, report=hello()), now=0.0)
    roster = Roster(machine)
    roster.look()
    return machine, roster


def test_a_worker_whose_stream_broke_is_lost_and_stays_listed() -> None:
    machine, roster = joined()
    machine.handle(StreamBroken(worker=WORKER, incarnation=FIRST, reason="killed"), now=1.0)
    machine.handle(TimePassed(), now=machine.deadline() or 0.0)
    [status] = roster.workers(now=LONG_AFTER_S)
    assert status.state is WorkerState.LOST


def test_a_worker_that_was_drained_and_left_is_not_lost() -> None:
    machine, roster = joined()
    machine.handle(DrainAsked(worker=WORKER), now=1.0)
    assert [status.state for status in roster.workers(now=1.0)] == [WorkerState.DRAINING]
    machine.handle(StreamBroken(worker=WORKER, incarnation=FIRST, reason="left"), now=2.0)
    machine.handle(TimePassed(), now=machine.deadline() or 0.0)
    assert roster.workers(now=LONG_AFTER_S) == ()


def test_a_lost_worker_that_comes_back_is_lost_no_more() -> None:
    machine, roster = joined()
    machine.handle(StreamBroken(worker=WORKER, incarnation=FIRST, reason="link"), now=1.0)
    machine.handle(TimePassed(), now=10.0)
    roster.look()
    machine.handle(ReportArrived(worker=WORKER, incarnation=FIRST, report=hello()), now=11.0)
    assert [status.state for status in roster.workers(now=11.0)] == [WorkerState.IDLE]
