"""A coordinator on real Ray, killed in every way: one at a time serves, from the run log, and nothing stays behind."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from grpc import aio

from client.local import free_port
from skein.wire.channel import Lane, is_loopback, open_channel
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.process.tether import tethered
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import job_spec

START_S = 300.0
"""Ray's first start on a busy machine takes most of a minute."""
AGAIN_S = 60.0
"""After a crash of the coordinator; it takes about 0.6 s when nothing else runs, and 10 s are promised."""
GONE_S = 60.0
"""It takes 0.2 s when nothing else runs."""
_POLL_S = 0.02


@dataclass
class Up:
    """A coordinator that was brought up; `ready` is its line, and `answers` when which epoch answered."""

    port: int
    launcher: subprocess.Popen[str]
    errors: Path
    ready: str = ""
    answers: list[tuple[float, int]] = field(default_factory=list)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def named(self, name: str) -> psutil.Process:
        """The one process below the launcher whose title or program is `name`."""
        (found,) = [p for p in self.descendants() if name in (p.name(), *p.cmdline()[:1])]
        return found

    async def epoch(self) -> int | None:
        """The epoch that answers on the port now; None if none does."""
        async with open_channel(
            f"127.0.0.1:{self.port}", Lane.CONTROL, credentials=NO_CREDENTIALS
        ) as channel:
            try:
                call = jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest(), timeout=2.0)
                reply = await call
            except aio.AioRpcError:
                return None
        self.answers.append((time.monotonic(), reply.epoch))
        return reply.epoch

    async def until_epoch(self, holds: Callable[[int | None], bool], limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            while not holds(await self.epoch()):  # noqa: ASYNC110 - another process knows no events of ours
                await asyncio.sleep(_POLL_S)

    async def jobs(self) -> list[str]:
        async with open_channel(
            f"127.0.0.1:{self.port}", Lane.CONTROL, credentials=NO_CREDENTIALS
        ) as channel:
            listed = await jobs_pb2_grpc.JobsStub(channel).List(jobs_pb2.ListJobsRequest(), timeout=5.0)
        return [job.job for job in listed.jobs]

    async def submit(self, key: str) -> str:
        async with open_channel(
            f"127.0.0.1:{self.port}", Lane.CONTROL, credentials=NO_CREDENTIALS
        ) as channel:
            request = jobs_pb2.SubmitRequest(key=key, spec=job_spec().canonical_json())
            return (await jobs_pb2_grpc.JobsStub(channel).Submit(request, timeout=5.0)).job


@asynccontextmanager
async def brought_up(directory: Path, *, port: int | None = None) -> AsyncIterator[Up]:
    """`skein coordinator up` on a state directory; killed at the end if it still runs."""
    port = port or free_port()
    ports = ["--port", str(port), "--metrics-port", str(free_port())]
    arguments = [sys.executable, "-m", "coordinator", "--state-dir", str(directory / "state"), *ports]
    errors = directory / f"{port}.err"
    launcher = launch(arguments, errors)
    assert launcher.stdout is not None
    up = Up(port, launcher, errors)
    try:
        async with asyncio.timeout(START_S):
            up.ready = await asyncio.to_thread(launcher.stdout.readline)
        assert f"ready on 127.0.0.1:{port} epoch=" in up.ready, errors.read_text()
        yield up
    finally:
        launcher.kill()
        launcher.communicate()


def launch(arguments: list[str], errors: Path) -> subprocess.Popen[str]:
    command = tethered(arguments, number=signal.SIGKILL)
    with errors.open("ab") as out:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, text=True)


def gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after `GONE_S`."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    left = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


def folder_of(raylet: psutil.Process) -> Path:
    """Ray's folder, as it was told."""
    [folder] = (a.partition("=")[2] for a in raylet.cmdline() if a.startswith("--temp_dir="))
    return Path(folder)


def mode_of(path: Path) -> int | None:
    """Who may do what with it; None if it is not there."""
    return path.stat().st_mode & 0o777 if path.exists() else None


async def test_a_killed_coordinator_is_back_with_its_jobs_and_the_next_epoch(tmp_path: Path) -> None:
    async with brought_up(tmp_path) as up:
        before = await up.epoch()
        assert before == 1
        job = await up.submit("a")
        for epoch in (2, 3):
            up.named("ray::Host").kill()
            await up.until_epoch(lambda now, epoch=epoch: now == epoch, AGAIN_S)  # type: ignore[misc]
            assert await up.jobs() == [job]
            assert await up.submit("a") == job
        open_to_others = [
            connection.laddr
            for process in up.descendants()
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
            and not is_loopback(connection.laddr.ip.removeprefix("::ffff:"))
        ]
        assert open_to_others == []
        folder = folder_of(up.named("raylet"))
        # Ray lets everybody into what it makes, so nobody is let into what that lies in.
        assert (mode_of(folder), mode_of(folder.parent)) == (0o777, 0o700)
        left_behind = up.descendants()
        up.launcher.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(up.launcher.wait, START_S) == 0
        assert gone(left_behind) == []
        assert mode_of(folder) is None


@pytest.mark.long
async def test_a_killed_launcher_takes_everything_along_and_its_successor_is_alone_and_outlives_its_raylet_once(
    tmp_path: Path,
) -> None:
    async with brought_up(tmp_path) as first:
        job = await first.submit("a")
        orphans = first.descendants()
        first.launcher.kill()
        # The successor comes at once, elsewhere; both are asked all the time.
        asking = asyncio.create_task(first.until_epoch(lambda _: False, START_S))
        async with brought_up(tmp_path) as second:
            assert await second.epoch() == 2
            assert await second.jobs() == [job]
            assert max((at for at, _ in first.answers), default=0.0) < min(at for at, _ in second.answers)
            assert gone(orphans) == []
            assert await first.epoch() is None
            asking.cancel()
            # Without its raylet Ray is broken, and would never say so. The launcher starts anew, once.
            broken = second.descendants()
            second.named("raylet").kill()
            await second.until_epoch(lambda now: now == 3, START_S)
            assert gone(broken) == []
            assert await second.jobs() == [job]
            second.named("gcs_server").kill()
            assert await asyncio.to_thread(second.launcher.wait, GONE_S) == 1
            said = second.errors.read_text()
            assert said.count("has ended, so the coordinator stops; the state is intact") == 2
            assert said.count("starts anew by itself") == 1
            assert await second.epoch() is None
