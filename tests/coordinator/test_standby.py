"""A standby follows and refuses; a leader that is silent, frozen or killed between any two steps loses nothing."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.driver import AppendLog
from coordinator.lead import lease, standby
from coordinator.lead.lease import Lead, PatientLog
from coordinator.lead.standby import Standby
from coordinator.records.logfile import Holder, LogBusy, LogFull
from coordinator.records.store import Fenced, Lookout, RunLog
from coordinator.serving import Serving, ServingOptions
from skein.protocol.log.records import EpochOpened, JobSubmitted, Record
from skein.types import JobId
from skein.wire.channel import Lane, open_channel
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.leader import find_leader, named_leader, split_addresses
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import (
    WAIT_S,
    Clock,
    MemoryLog,
    committed,
    eventually,
    job_spec,
    opened,
    plan_at_once,
    submitted,
)
from tests.support.extent import part

FROZEN = Holder(name="frozen", address="10.0.0.1:7411")
SOON_S = 0.3
"""Silence after which a standby leads: some renewals of 0.05 s."""


def dial(address: str, lane: Lane) -> aio.Channel:
    return open_channel(address, lane, credentials=NO_CREDENTIALS)


def options(state_dir: Path, name: str) -> ServingOptions:
    return ServingOptions(state_dir=state_dir, name=name, takeover_s=SOON_S)


@asynccontextmanager
async def leading(state_dir: Path) -> AsyncIterator[Serving]:
    running = await Serving.start(options(state_dir, "first"), plan_at_once)
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def standing_by(state_dir: Path) -> AsyncIterator[tuple[Standby, "asyncio.Task[Serving]"]]:
    """A standby, and when it leads."""
    waits = await Standby.start(options(state_dir, "second"))
    leads = asyncio.create_task(waits.lead(plan_at_once))
    try:
        yield waits, leads
    finally:
        if leads.done() and not leads.exception():
            await leads.result().stop()
        else:
            leads.cancel()
            await asyncio.wait({leads})
            await waits.close()


async def submit(address: str, key: str) -> str:
    async with dial(address, Lane.CONTROL) as channel:
        request = jobs_pb2.SubmitRequest(key=key, spec=job_spec().canonical_json())
        return (await jobs_pb2_grpc.JobsStub(channel).Submit(request, timeout=WAIT_S)).job


async def refusal_of(address: str) -> aio.AioRpcError:
    async with dial(address, Lane.CONTROL) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())
    return caught.value


async def health_of(address: str, service: str) -> int:
    async with dial(address, Lane.CONTROL) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "POLL_S", 0.02)
    monkeypatch.setattr(lease, "AGAIN_S", 0.01)


async def test_a_standby_refuses_and_names_the_leader(tmp_path: Path) -> None:
    async with leading(tmp_path) as leader, standing_by(tmp_path) as (waits, leads):
        address = leader.where().address
        await eventually(lambda: waits.leader == address)
        error = await refusal_of(waits.address)
        assert error.code() is StatusCode.UNAVAILABLE
        assert error.details() == f"standby; the leader is {address}"
        assert named_leader(error) == address
        assert await health_of(waits.address, "") == health_pb2.HealthCheckResponse.SERVING
        assert (
            await health_of(waits.address, "skein.wire.v1.Jobs") == health_pb2.HealthCheckResponse.NOT_SERVING
        )
        assert not leads.done()


async def test_a_standby_leads_when_the_leader_is_silent_and_that_one_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(tmp_path) as leader, standing_by(tmp_path) as (waits, leads):
        before = leader.where().address
        job = await submit(before, "a")
        renew = RunLog.renew

        def renew_unless_stuck(log: RunLog, address: str) -> None:
            if address == before and not leads.done():
                raise LogBusy("stuck")
            renew(log, address)

        monkeypatch.setattr(RunLog, "renew", renew_unless_stuck)
        async with asyncio.timeout(WAIT_S):
            after = await leads
            assert after.where().epoch == 2
            assert after.where().address == waits.address
            assert await submit(waits.address, "a") == job
            line = await leader.ended()
        assert "epoch 1 is over" in line
        assert f"{waits.address} leads now" in line
        assert await health_of(waits.address, "skein.wire.v1.Jobs") == health_pb2.HealthCheckResponse.SERVING
        assert "skein_coordinator_is_leader 1.0" in after.metrics.render().decode()


async def test_a_standby_is_warm_and_reads_the_rest_when_it_leads(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FROZEN) as frozen:
        frozen.append([submitted("j1"), *(committed("j1", step, wall_s=1.0 + step) for step in range(300))])
        async with standing_by(tmp_path) as (waits, leads), asyncio.timeout(WAIT_S):
            await eventually(lambda: waits.num_replayed == 302)
            frozen.append([committed("j1", 300, wall_s=400.0)])
            serving = await leads
            assert list(serving.driver.machine.history.jobs) == [JobId("j1")]
            assert serving.driver.machine.history.jobs[JobId("j1")].version == 301
            with pytest.raises(Fenced):
                frozen.append([committed("j1", 301, wall_s=401.0)])


async def test_a_restarted_process_of_the_launcher_that_led_does_not_wait(tmp_path: Path) -> None:
    RunLog.open(tmp_path, wall_s=1.0, holder=Holder(name="second", address="x:1"))._connection.close()
    waits = await Standby.start(ServingOptions(state_dir=tmp_path, name="second", takeover_s=1e6))
    async with asyncio.timeout(WAIT_S):
        serving = await waits.lead(plan_at_once)
    assert serving.where().epoch == 2
    await serving.stop()


async def test_a_log_whose_owner_has_no_lock_is_had_once_that_one_is_silent(tmp_path: Path) -> None:
    RunLog.open(tmp_path, wall_s=1.0).close()
    lookout = Lookout(tmp_path)
    gone = lookout.take(lookout.lease(), wall_s=2.0, holder=FROZEN)
    assert gone is not None
    async with leading(tmp_path) as serving:
        assert serving.where().epoch == 3
        with pytest.raises(Fenced):
            gone.append([])


# --- who leads, as others see it ---


async def test_the_leader_is_found_among_a_standby_and_the_dead(tmp_path: Path) -> None:
    async with leading(tmp_path) as leader, standing_by(tmp_path) as (waits, _):
        address = leader.where().address
        dead = "127.0.0.1:1"
        assert await find_leader([dead, waits.address, address], dial=dial) == address
        await eventually(lambda: waits.leader == address)
        assert await find_leader([waits.address], dial=dial) == address
        assert await find_leader([dead], dial=dial, patience_s=0.5) is None


async def test_of_two_that_think_they_lead_the_newer_is_believed(tmp_path: Path) -> None:
    RunLog.open(tmp_path / "b", wall_s=1.0).close()
    async with leading(tmp_path / "a") as older, leading(tmp_path / "b") as newer:
        both = [older.where().address, newer.where().address]
        assert await find_leader(both, dial=dial) == newer.where().address


def test_addresses_are_split_at_commas() -> None:
    assert split_addresses("join", "a:1,b:2") == ("a:1", "b:2")
    with pytest.raises(ValueError, match="join: 'b': give host:port"):
        split_addresses("join", "a:1,b")


# --- doubt ---


async def test_nothing_is_said_while_a_standby_may_lead_already(tmp_path: Path) -> None:
    clock = Clock()
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        lead = Lead(log, "x:1", takeover_s=3.0, clock=clock)
        await lead.certain()
        clock.now += 3.1
        asking = asyncio.create_task(lead.certain())
        _, pending = await asyncio.wait({asking}, timeout=0)
        assert pending
        keeping = asyncio.create_task(lead.keep())
        async with asyncio.timeout(WAIT_S):
            await asking
        keeping.cancel()
        lead.close()


async def test_streams_end_when_the_log_answers_no_more(tmp_path: Path) -> None:
    clock = Clock()
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        lead = Lead(log, "x:1", takeover_s=3.0, clock=clock)
        waiting = asyncio.create_task(lead.lost())
        _, pending = await asyncio.wait({waiting}, timeout=0)
        assert pending
        waiting.cancel()
        clock.now += 6.1
        async with asyncio.timeout(WAIT_S):
            await lead.lost()
        lead.close()


async def test_who_wakes_up_after_a_takeover_says_nothing_and_ends(tmp_path: Path) -> None:
    clock = Clock()
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        lead = Lead(log, "x:1", takeover_s=3.0, clock=clock)
        clock.now += 3.1
        asking = asyncio.create_task(lead.certain())
        (tmp_path / "lock").unlink()
        with RunLog.open(tmp_path, wall_s=2.0), pytest.raises(Fenced, match="epoch 1 is over"):
            async with asyncio.timeout(WAIT_S):
                await lead.keep()
        assert not asking.done()
        asking.cancel()
        lead.close()


# --- a full disk ---


class FullLog:
    """Takes nothing while the disk is full."""

    def __init__(self, log: AppendLog) -> None:
        self._log = log
        self.is_full = False
        self.num_refused = 0

    def append(self, records: Sequence[Record]) -> None:
        if self.is_full:
            self.num_refused += 1
            raise LogFull("database or disk is full")
        self._log.append(records)

    def read(self, job: JobId | None = None) -> Iterator[Record]:
        return self._log.read(job)


async def test_a_full_disk_pauses_a_coordinator_until_there_is_room(tmp_path: Path) -> None:
    full: list[FullLog] = []

    def wrap(log: AppendLog) -> AppendLog:
        full.append(FullLog(log))
        return full[0]

    serving = await Serving.start(options(tmp_path, "first"), plan_at_once, wrap=wrap)
    address = serving.where().address
    await submit(address, "a")
    full[0].is_full = True
    submitting = asyncio.create_task(submit(address, "b"))
    await eventually(lambda: full[0].num_refused > 2)
    assert not submitting.done()
    full[0].is_full = False
    async with asyncio.timeout(WAIT_S):
        second = await submitting
        assert await submit(address, "b") == second
    full[0].is_full = True
    submitting = asyncio.create_task(submit(address, "c"))
    await eventually(lambda: full[0].num_refused > 5)
    async with asyncio.timeout(WAIT_S):
        await serving.stop()
    with pytest.raises(aio.AioRpcError):
        await submitting
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        assert [r.key for r in log.read() if isinstance(r, JobSubmitted)] == ["a", "b"]


def test_what_is_no_matter_of_room_is_not_waited_for() -> None:
    log = MemoryLog([opened(1)])
    log.error = Fenced("epoch 1 is over")
    with pytest.raises(Fenced):
        PatientLog(log).append([submitted("a")])


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"f_flag": os.ST_RDONLY}, "is read-only: mount it for writing"),
        ({"f_bavail": 0}, "is full: make room"),
        ({"f_files": 1000, "f_favail": 0}, "is full: make room"),
        ({}, "see the log of the operating system"),
    ],
)
def test_a_log_that_waits_says_why_its_directory_takes_nothing(
    changes: dict[str, int], cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(MemoryLog):
        num_refused = 0

        def append(self, records: Sequence[Record]) -> None:
            self.num_refused += 1
            if self.num_refused < 3:
                raise LogFull("disk I/O error")
            seen.append(patient.obstacle)
            super().append(records)

    real = os.statvfs(tmp_path)
    roomy = {"f_bavail": 1 << 30, "f_files": 0, "f_flag": real.f_flag & ~os.ST_RDONLY}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**{**state_of(real), **roomy, **changes}))
    monkeypatch.setattr(lease, "AGAIN_S", 0.0)
    seen: list[str] = []
    patient = PatientLog(Refusing([opened(1)]), tmp_path)
    patient.append([submitted("a")])
    assert [why.endswith(cure) for why in seen] == [True]
    assert patient.obstacle == ""


def state_of(found: os.statvfs_result) -> dict[str, int]:
    """Fields of a file system's state by name."""
    return {name: getattr(found, name) for name in ("f_bavail", "f_frsize", "f_favail", "f_files", "f_flag")}


# --- killed at a boundary ---

MORTAL = """
import asyncio, os, signal, sys
from pathlib import Path
from coordinator.serving import Serving, ServingOptions
from tests.coordinator.builders import plan_at_once

class MortalLog:
    def __init__(self, log):
        self.log, self.left = log, int(sys.argv[2])

    def append(self, records):
        self.left -= 1
        if self.left == 0 and sys.argv[3] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.log.append(records)
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def read(self, job=None):
        return self.log.read(job)

async def main():
    serving = await Serving.start(ServingOptions(state_dir=Path(sys.argv[1])), plan_at_once, wrap=MortalLog)
    print(serving.where().address, flush=True)
    await serving.ended()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("which", "where"), part([(1, "before"), (1, "after"), (3, "before"), (3, "after")], every=3)
)
async def test_a_coordinator_killed_at_an_append_loses_nothing_it_had_said(
    tmp_path: Path, which: int, where: str
) -> None:
    command = [sys.executable, "-c", MORTAL, str(tmp_path), str(which), where]
    mortal = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert mortal.stdout is not None
    address = (await mortal.stdout.readline()).decode().strip()
    told = [await submit(address, f"k{number}") for number in range(which - 1)]
    with pytest.raises(aio.AioRpcError):
        await submit(address, f"k{which - 1}")
    assert await mortal.wait() == -9
    async with leading(tmp_path) as serving:
        # What was not said may be there or not; asked again it is there once.
        again = [await submit(serving.where().address, f"k{number}") for number in range(which)]
        jobs = [str(job) for job in serving.driver.machine.history.jobs]
        records = [r async for piece in serving.driver.read_records() for r in piece]
    assert again[:-1] == told
    assert jobs == again
    assert [r.epoch for r in records if isinstance(r, EpochOpened)] == [1, 2]
    between = records.index(next(r for r in records if isinstance(r, EpochOpened) and r.epoch == 2))
    was_there = any(isinstance(r, JobSubmitted) and r.job == again[-1] for r in records[:between])
    assert was_there == (where == "after")
