"""Who has no certificate, or says nothing, cannot keep a coordinator from answering those who have one."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from itertools import islice
from pathlib import Path

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.hostility.messages import methods
from coordinator.service import calls
from skein.wire import channel as channels
from skein.wire.channel import Lane, open_channel, open_enrolment_channel
from skein.wire.credentials import NO_CREDENTIALS, Credentials
from skein.wire.process import files
from skein.wire.serving import doorway, health, pages
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import WAIT_S, eventually
from tests.coordinator.serving import admin_of, connected, coordinator, shown_by_admin

HEALTH_CHECK = "/grpc.health.v1.Health/Check"


@asynccontextmanager
async def strangers(state_dir: Path) -> AsyncIterator[aio.Channel]:
    """A channel to a coordinator of its own."""
    async with coordinator(state_dir) as running, connected(running) as channel:
        yield channel


async def answers(target: str, *, shown: Credentials = NO_CREDENTIALS) -> None:
    """A real call, on a connection of its own."""
    async with (
        open_channel(target, Lane.CONTROL, credentials=shown) as channel,
        asyncio.timeout(WAIT_S),
    ):
        # As long as it takes: who finds all connections taken dials again.
        await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest(), wait_for_ready=True)


def silent_call(channel: aio.Channel, method: str) -> aio.StreamStreamCall[object, object]:
    """A call that has been opened and says nothing: nobody can tell yet of which shape it is."""
    return channel.stream_stream(method)()  # type: ignore[call-arg]


async def test_watchers_of_health_use_up_no_calls_and_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 8)
    async with coordinator(tmp_path) as running:
        target = running.where().address
        async with open_channel(target, Lane.CONTROL, credentials=NO_CREDENTIALS) as stranger:
            stub = health_pb2_grpc.HealthStub(stranger)
            watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(80)]
            # Calls of one connection come in any order, so it is not said which of them are ended.
            endings = asyncio.as_completed([end_of(watch) for watch in watching])
            for ending in islice(endings, len(watching) - health.MAX_CALLS_PER_ADDRESS):
                assert await ending is StatusCode.RESOURCE_EXHAUSTED
            await answers(target)
            # Who only asks is answered beside them, in the place of one.
            assert (
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            ).status == health.SERVING
            assert await next(endings) is StatusCode.RESOURCE_EXHAUSTED


async def end_of(watch: aio.UnaryStreamCall[object, object]) -> StatusCode:
    """How a stream ends, which shows once all is read."""
    with suppress(aio.AioRpcError):
        async with asyncio.timeout(WAIT_S):
            while isinstance(await watch.read(), health_pb2.HealthCheckResponse):
                pass
    return await watch.code()


@pytest.mark.parametrize("method", ["/skein.wire.v1.Jobs/Version", "/skein.wire.v1.Jobs/Watch", "/x.Y/Z"])
async def test_a_silent_call_without_a_certificate_is_over_at_once(tmp_path: Path, method: str) -> None:
    async with coordinator(tmp_path, has_certificates=True), asyncio.timeout(WAIT_S):
        admin = admin_of(tmp_path)
        async with open_enrolment_channel(admin.enrol_addresses, admin.authority) as stranger:
            silent = [silent_call(stranger, method) for _ in range(50)]
            codes = {await call.code() for call in silent}
    assert codes == {StatusCode.UNAUTHENTICATED}


NO_MESSAGE = b"\x0f\xff"
"""Of a wire type that there is not."""
WITH_CERTIFICATES = ("skein.wire.v1.Enrol", "skein.wire.v1.Identities")
"""Services that a coordinator has where it makes certificates out."""


async def test_bytes_that_are_no_message_are_refused_in_a_sentence_whatever_the_method(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with strangers(tmp_path) as channel:
        for method in (method for method in methods() if not method.is_workers):
            if method.path.split("/")[1] in WITH_CERTIFICATES:
                continue
            call = channel.stream_stream(method.path, None, None)(iter([NO_MESSAGE]))
            assert await call.code() is StatusCode.INVALID_ARGUMENT, method.path
            assert f"no request of {method.path.rpartition('/')[2]}" in (await call.details() or "")
    # Where a loop is watched, asyncio tells of turns that were long.
    assert not [record for record in caplog.records if record.name != "asyncio"]


async def test_a_silent_question_for_health_is_over_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "READ_S", 0.05)
    async with strangers(tmp_path) as stranger:
        silent = [silent_call(stranger, HEALTH_CHECK) for _ in range(40)]
        codes = {await call.code() for call in silent}
    assert codes == {StatusCode.RESOURCE_EXHAUSTED}


async def test_the_limit_of_calls_holds_for_those_who_are_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 3)
    async with strangers(tmp_path) as channel:
        held = [silent_call(channel, "/skein.wire.v1.Control/Session") for _ in range(3)]
        await until_answered(channel, StatusCode.RESOURCE_EXHAUSTED)
        for call in held:
            call.cancel()
        await until_answered(channel, StatusCode.OK)


async def until_answered(channel: aio.Channel, wanted: StatusCode) -> None:
    """Asks until the answer is that."""
    code: StatusCode | None = None
    while code is not wanted:
        call = jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest(), timeout=WAIT_S)
        code = await call.code()


@asynccontextmanager
async def half_open(target: str, count: int, *, said: bytes = b"") -> AsyncIterator[list[socket.socket]]:
    """Connections on which nothing more comes."""
    host, port = target.rsplit(":", 1)
    with ExitStack() as stack:

        def open_one() -> socket.socket:
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT_S))
            with suppress(ConnectionError):
                connection.sendall(said)
            return connection

        yield await asyncio.to_thread(lambda: [open_one() for _ in range(count)])


async def is_closed(connection: socket.socket) -> bool:
    """Waits for the other side to end it."""
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        try:
            while await loop.sock_recv(connection, 4096):
                pass
        except ConnectionError:
            return True
    return True


@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n"])
async def test_half_open_connections_are_over_soon_and_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(channels, "_HANDSHAKE_MS", 300)
    async with coordinator(tmp_path, has_certificates=True) as running:
        target, shown = running.where().address, shown_by_admin(tmp_path)
        async with half_open(target, 50, said=said) as opened:
            await answers(target, shown=shown)
            assert all([await is_closed(connection) for connection in opened])
            await answers(target, shown=shown)


async def test_one_address_cannot_take_all_connections_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_HANDSHAKE_MS", 60_000)
    monkeypatch.setattr(channels, "max_connections", lambda: 40)
    monkeypatch.setattr(doorway, "PER_ADDRESS", 8)
    monkeypatch.setattr(doorway, "PERIOD_S", 0.02)
    async with coordinator(tmp_path, has_certificates=True) as running:
        target, shown = running.where().address, shown_by_admin(tmp_path)
        async with open_channel(target, Lane.CONTROL, credentials=shown) as before:
            version = jobs_pb2_grpc.JobsStub(before).Version
            await version(jobs_pb2.VersionRequest(), timeout=WAIT_S)
            async with half_open(target, 120) as opened:
                await answers(target, shown=shown)
                await version(jobs_pb2.VersionRequest(), timeout=WAIT_S)
                assert all([await is_closed(connection) for connection in opened[:20]])


SERVES = """
import asyncio, resource, sys
from pathlib import Path
# By itself, and not between fork and exec: gRPC's threads do not survive a fork.
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from coordinator.serving import Serving, ServingOptions

async def never(asked):
    raise AssertionError

async def main():
    serving = await Serving.start(ServingOptions(state_dir=Path(sys.argv[1])), never)
    print(serving.where().address, flush=True)
    await serving.ended()

asyncio.run(main())
"""
"""A coordinator with as many files as a shell gives."""


def served(state_dir: Path) -> "subprocess.Popen[str]":
    """`SERVES`, as a process."""
    return subprocess.Popen([sys.executable, "-c", SERVES, str(state_dir)], stdout=subprocess.PIPE, text=True)


async def test_a_thousand_half_open_connections_stop_no_coordinator_where_shells_give_so_many_files(
    tmp_path: Path,
) -> None:
    files.raise_open_files()  # of this process, which is to hold the other ends
    with served(tmp_path) as process:
        try:
            assert process.stdout is not None
            target = (await asyncio.to_thread(process.stdout.readline)).strip()
            async with half_open(target, 1100):
                for _ in range(20):
                    await answers(target)
            assert process.poll() is None
        finally:
            process.kill()


async def test_half_requests_for_metrics_make_no_threads_and_keep_no_scrape_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SECONDS", 60.0)
    async with coordinator(tmp_path, metrics_port=0) as running:
        target = running.where().metrics_address
        assert target is not None
        assert "skein_build_info" in await scraped(target)
        num_threads = threading.active_count()
        async with half_open(target, 150, said=b"GET /metrics HTTP/1.1\r\nHost: x\r\n") as opened:
            for _ in range(5):
                assert "skein_build_info" in await scraped(target)
            # Others come and go meanwhile, but none for each of them.
            assert threading.active_count() < num_threads + 10
            # The others of this address were let go for those who came after them.
            num_left = pages.MAX_CONNECTIONS_PER_ADDRESS
            assert all([await is_closed(connection) for connection in opened[:-num_left]])


async def scraped(target: str, request: str = "GET /metrics HTTP/1.1") -> str:
    reader, writer = await asyncio.open_connection(*target.rsplit(":", 1))
    writer.write(f"{request}\r\nHost: {target}\r\n\r\n".encode())
    async with asyncio.timeout(WAIT_S):
        page = await reader.read()
    writer.close()
    return page.decode()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("HEAD /metrics HTTP/1.1", "200 OK"),
        ("POST /metrics HTTP/1.1", "405 Method Not Allowed"),
        ("GET /nothing HTTP/1.0", "404 Not Found"),
        ("GET http://[x/metrics HTTP/1.1", "404 Not Found"),
        ("nonsense", "405 Method Not Allowed"),
    ],
)
async def test_whatever_is_asked_has_an_answer(tmp_path: Path, request_line: str, status: str) -> None:
    async with coordinator(tmp_path, metrics_port=0) as running:
        target = running.where().metrics_address
        assert target is not None
        page = await scraped(target, request_line)
        assert page.startswith(f"HTTP/1.0 {status}\r\n")
        assert "skein_build_info" not in page


async def test_a_head_without_an_end_is_dropped(tmp_path: Path) -> None:
    async with coordinator(tmp_path, metrics_port=0) as running:
        target = running.where().metrics_address
        assert target is not None
        async with half_open(target, 1, said=b"GET / HTTP/1.1\r\n" + b"x" * 20_000) as [connection]:
            assert await is_closed(connection)


async def test_a_closed_coordinator_lets_half_requests_go(tmp_path: Path) -> None:
    async with coordinator(tmp_path, metrics_port=0) as running:
        target = running.where().metrics_address
        assert target is not None
        async with half_open(target, 3, said=b"GET") as opened:
            await eventually(lambda: len(running._doors.pages._room) == 3)  # type: ignore[union-attr]
            await running.stop()
            assert all([await is_closed(connection) for connection in opened])
