"""A coordinator that serves in this process, and what its tests ask it for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import StatusCode, aio

from coordinator.identity.office import ADMIN_FILE, FOLDER
from coordinator.records.store import RunLog
from coordinator.serving import Serving, ServingOptions
from skein.config.quota import UNBOUNDED, QuotasSpec
from skein.protocol.log.records import Record
from skein.wire import codec
from skein.wire.channel import Lane, open_channel
from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.extra import Downward, Upward
from skein.wire.identity.passport import Passport
from skein.wire.v1 import control_pb2, control_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import WAIT_S, job_spec, plan_at_once


@asynccontextmanager
async def coordinator(
    state_dir: Path,
    *,
    has_certificates: bool = False,
    metrics_port: int | None = None,
    quotas: QuotasSpec = UNBOUNDED,
) -> AsyncIterator[Serving]:
    options = ServingOptions(
        state_dir=state_dir,
        has_certificates=has_certificates,
        metrics_port=metrics_port,
        quotas=quotas,
    )
    running = await Serving.start(options, plan_at_once)
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def connected(running: Serving) -> AsyncIterator[aio.Channel]:
    channel = open_channel(running.where().address, Lane.CONTROL, credentials=NO_CREDENTIALS)
    async with channel, asyncio.timeout(WAIT_S):
        yield channel


def admin_of(state_dir: Path) -> Passport:
    """Admin of a coordinator with certificates."""
    return Passport.load(state_dir / FOLDER / ADMIN_FILE)


def shown_by_admin(state_dir: Path) -> Credentials:
    """Credentials of that admin."""
    return Credentials(wallet=Wallet(admin_of(state_dir)))


def write_log(state_dir: Path, records: Sequence[Record]) -> None:
    """A state directory with a past."""
    with RunLog.open(state_dir, wall_s=1.0) as log:
        log.append(records)


class ScriptedWorker:
    """A control stream that says what a test tells it to."""

    def __init__(self, channel: aio.Channel) -> None:
        self.call = control_pb2_grpc.ControlStub(channel).Session()  # type: ignore[call-arg]

    async def say(self, report: Upward) -> None:
        await self.call.write(codec.REPORT.encode(report))

    async def hear(self) -> Downward:
        message = await self.call.read()
        assert isinstance(message, control_pb2.Directive), "the stream has ended"
        return codec.DIRECTIVE.decode(message)


async def submit(channel: aio.Channel, key: str = "k", spec: str | None = None) -> jobs_pb2.SubmitReply:
    request = jobs_pb2.SubmitRequest(key=key, spec=spec or job_spec().canonical_json())
    return await jobs_pb2_grpc.JobsStub(channel).Submit(request)


async def status_of(call: Awaitable[object]) -> StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code()


def count_of(running: Serving, method: str, reason: str) -> float:
    """Refusals of a kind, as metrics have them."""
    wanted = f'skein_rpc_errors_total{{method="{method}",reason="{reason}"}} '
    lines = running.metrics.render().decode().splitlines()
    return float(next((line.removeprefix(wanted) for line in lines if line.startswith(wanted)), 0))
