"""A whole worker process, but for the process: control stream, draining, errors. Real gRPC on loopback."""

import time
from dataclasses import replace

import pytest

from skein import PROTOCOL_VERSION
from skein.errors import UserError
from skein.protocol.messages.directives import Dismiss, Look, Member, Probe, Refused
from skein.protocol.messages.reports import Beat, Leaving, LinksMeasured, PeersSeen
from skein.protocol.worker.worker_io import StopRequested
from skein.types import Incarnation, WorkerId
from skein.wire.credentials import Credentials, Wallet
from skein.wire.extra import LogLevel, LogLine, LogLines
from skein.wire.identity.authority import Authority
from skein.wire.identity.callers import NamedCallers
from skein.wire.identity.names import COORDINATOR, worker_caller
from tests.worker.puppet import WELCOME, Session, puppet, running, setting

STOP = StopRequested(reason="enough")


async def test_a_worker_says_who_it_is_and_beats() -> None:
    line = LogLine(level=LogLevel.INFO, wall_s=1.0, text="hello")
    lines = [line]

    def take() -> tuple[LogLine, ...]:
        taken, lines[:] = tuple(lines), []
        return taken

    async with puppet() as (coordinator, port), running(setting(port, take_log_lines=take)):
        session = await coordinator.session()
        hello = session.hello
        assert (hello.worker, hello.protocol_version, hello.site) == ("w0", PROTOCOL_VERSION, "lab")
        assert hello.profile.flops_per_s > 0
        session.say(WELCOME)
        assert await session.heard(LogLines) == LogLines(lines=(line,))
        names = {count.name for count in (await session.heard(Beat)).statistics}
        assert {"skein_worker_control_streams", "skein_worker_bubble_ratio"} <= names


async def test_a_lost_stream_is_opened_again_by_the_same_incarnation() -> None:
    async with puppet() as (coordinator, port), running(setting(port)):
        first = await coordinator.session()
        first.say(WELCOME)
        await first.heard(Beat)
        first.end()
        second = await coordinator.session()
        assert second.hello.incarnation == first.hello.incarnation
        assert second.hello.epoch == WELCOME.epoch


async def test_a_coordinator_that_comes_back_is_found_again() -> None:
    async with puppet() as (coordinator, port):
        worker = running(setting(port))
        await worker.__aenter__()
        (await coordinator.session()).say(WELCOME)
    try:
        async with puppet(port=port) as (returned, _):
            assert (await returned.session()).hello.worker == "w0"
    finally:
        await worker.__aexit__(None, None, None)


async def test_draining_asks_first_and_leaves_when_it_may() -> None:
    async with puppet() as (coordinator, port), running(setting(port)) as worker:
        session = await coordinator.session()
        session.say(WELCOME)
        worker.inbox.post(STOP)
        assert isinstance(await session.next(), Leaving)
        await session.heard(Beat)
        assert not worker.ended.done()
        session.say(Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        assert (await worker.end()).is_clean


async def test_a_refusal_ends_the_worker_with_the_reason() -> None:
    async with puppet() as (coordinator, port), running(setting(port)) as worker:
        (await coordinator.session()).say(Refused(reason="protocol version 9 is needed"))
        end = await worker.end()
        assert not end.is_clean
        assert "version 9" in end.reason


async def test_without_a_coordinator_stopping_needs_nobody() -> None:
    async with puppet() as (_, port):
        pass
    async with running(setting(port)) as worker:
        worker.inbox.post(STOP)
        assert (await worker.end()).is_clean


async def test_to_be_revoked_is_fatal_and_says_so() -> None:
    authority, now_s = Authority.new(now_s=time.time()), time.time()
    own, theirs = (
        Credentials(wallet=Wallet(authority.make_out(caller, now_s=now_s)))
        for caller in (COORDINATOR, worker_caller("w0"))
    )
    async with (
        puppet(credentials=own, named=NamedCallers(lambda _: True)) as (_, port),
        running(setting(port, credentials=theirs)) as worker,
    ):
        with pytest.raises(ExceptionGroup) as failure:
            await worker.end()
        error = failure.value.exceptions[0]
        assert isinstance(error, UserError)
        assert "worker w0 was revoked" in str(error)


async def test_a_port_in_use_is_named() -> None:
    async with puppet() as (_, port):
        with pytest.raises(UserError, match=str(port)):
            async with running(replace(setting(port), port=port)):
                pass


async def to_be_probed(session: Session) -> Member:
    """A worker, once it has heard what those show who are told to probe it."""
    session.say(replace(WELCOME, door="told"), Look(peers=()))
    _ = await session.heard(PeersSeen)
    told = session.hello
    return Member(worker=told.worker, incarnation=told.incarnation, address=told.address, door="told")


async def test_links_are_measured_in_both_directions() -> None:
    async with (
        puppet() as (coordinator, port),
        running(setting(port)),
        running(setting(port, name="w1", incarnation="i1")),
    ):
        sessions = {s.hello.worker: s for s in (await coordinator.session(), await coordinator.session())}
        peer = await to_be_probed(sessions[WorkerId("w1")])
        nobody = Member(worker=WorkerId("w9"), incarnation=Incarnation("i9"), address=f"127.0.0.1:{port}")
        sessions[WorkerId("w0")].say(WELCOME, Probe(peers=(nobody, peer)))
        links = (await sessions[WorkerId("w0")].heard(LinksMeasured)).links
        assert [(link.sender, link.receiver) for link in links] == [("w0", "w1"), ("w1", "w0")]
        assert all(link.bytes_per_s > 0 and link.latency_s > 0 for link in links)
        # Another than could never be dialled: of that one a refusal says nothing.
        gone = replace(nobody, incarnation=Incarnation("i8"), address="127.0.0.1:1")
        sessions[WorkerId("w0")].say(Look(peers=(gone, peer)))
        seen = await sessions[WorkerId("w0")].heard(PeersSeen)
        assert (seen.reached, seen.gone) == ((peer.incarnation,), (gone.incarnation,))


async def test_a_peer_is_dialled_where_the_setting_says() -> None:
    """The advertised address answers calls too, but not as a worker does."""
    async with puppet() as (coordinator, port), running(setting(port, name="w1", incarnation="i1")):
        peer = await to_be_probed(await coordinator.session())
        ways = {f"127.0.0.1:{port}": peer.address}
        async with running(replace(setting(port), way_to=lambda address: ways[address])):
            session = await coordinator.session()
            advertised = replace(peer, address=f"127.0.0.1:{port}")
            session.say(WELCOME, Probe(peers=(advertised,)))
            links = (await session.heard(LinksMeasured)).links
            assert {link.sender for link in links} == {"w0", "w1"}
