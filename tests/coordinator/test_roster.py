"""Who was here and is gone: lost ones are remembered, those that meant to leave are not."""

from dataclasses import replace

from coordinator.telling.metrics import CoordinatorMetrics
from coordinator.telling.status import Roster
from skein import PROTOCOL_VERSION
from skein.config.resources import Label
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import DrainAsked, ReportArrived, StreamBroken
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import EpochOpened
from skein.protocol.messages.reports import Hello, LinksMeasured
from skein.protocol.messages.ways import COORDINATOR_RELAY, Unreached
from skein.topology.fleet import Link, Profile
from skein.types import Epoch, Incarnation, SiteId, WorkerId
from skein.wire.relay.switchboard import Switchboard
from skein.wire.views import WorkerState
from tests.support import reports as support
from tests.support.desk import Desk

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


def test_a_worker_says_its_labels_by_which_relays_it_is_reached_and_whether_it_is_one() -> None:
    desk = Desk()
    desk.join("a", "b")
    labels = (Label(key="gpu", value="h100"),)
    desk.report("c", replace(support.hello("c"), offers_relay=True, labels=labels, offers=("books",)))
    desk.incarnations[WorkerId("c")] = Incarnation("c-1")
    for one, other in (("a", "b"), ("b", "a"), ("c", "a")):
        desk.report(one, LinksMeasured(links=(), unreached=(Unreached(peer=WorkerId(other)),)))
    back = Link(sender=WorkerId("a"), receiver=WorkerId("c"), latency_s=0.01, bytes_per_s=1e6)
    desk.report("a", LinksMeasured(links=(back,), shut_out=(WorkerId("c"),)))
    found = {status.worker: status for status in Roster(desk.machine).workers(now=desk.now)}
    assert found[WorkerId("a")].reached_by == (COORDINATOR_RELAY, "a")
    assert (found[WorkerId("b")].reached_by, found[WorkerId("c")].reached_by) == ((COORDINATOR_RELAY,), ())
    assert [status.offers_relay for status in found.values()] == [False, False, True]
    assert [status.labels for status in found.values()] == [(), (), labels]
    assert [status.offers for status in found.values()] == [(), (), ("books",)]
    metrics = CoordinatorMetrics()
    metrics.sample(
        desk.machine.view,
        (),
        relay=Switchboard(is_offered=True),
        num_streams=0,
        num_unaware=0,
        lag_s=0.0,
        now=desk.now,
    )
    assert 'skein_relayed_links{relay="coordinator"} 2.0' in metrics.render().decode()


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
