"""Puts the parts of a worker process together, lets the driver run, and takes them apart in order."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from skein.config.resources import Label
from skein.protocol.messages.directives import Member
from skein.protocol.worker.keeping.desk import Desk
from skein.protocol.worker.worker import Worker
from skein.protocol.worker.worker_io import Exit, Identity
from skein.storage.outside import Outside
from skein.storage.places import ANYWHERE, Places
from skein.topology.fleet import Profile
from skein.types import Generation, Incarnation, SiteId, WorkerId
from skein.units import format_bytes
from skein.wire.calling import Dial
from skein.wire.channel import bind, open_channel, open_channel_to, open_server, require_free
from skein.wire.credentials import Credentials, Wallet
from skein.wire.extra import DialBack, FetchStateRequest, LogLine
from skein.wire.identity.enrolling import certificate_skew, keep_renewed, learn_coordinators
from skein.wire.identity.names import worker_caller
from skein.wire.identity.revocations import Revocations
from skein.wire.leader import split_addresses
from skein.wire.process.clear_text import clear_text_warning, keep_warning
from skein.wire.process.files import raise_open_files
from skein.wire.relay.switchboard import Switchboard
from skein.wire.serving.doorway import GREETED_BYTES, Doorway
from worker.boundary import BoundaryLog
from worker.bundle import WireTensor
from worker.chunks.build import Builder
from worker.chunks.copies import ChunkCopies
from worker.compute.ops import Compute
from worker.compute.payload import Payload, weight_bytes
from worker.data.opening import Datasets
from worker.driver import WorkerDriver
from worker.executor import Executor, waited_s
from worker.inbox import WorkerInbox
from worker.mesh.mesh import Mesh
from worker.probe import measure_device
from worker.service import PeerService
from worker.telling.metrics import WorkerMetrics
from worker.telling.moments import unwatched
from worker.transport.coordinator import CheckpointFiles, ControlStream, Whereabouts
from worker.transport.links import Probed, Sight, look_at
from worker.transport.peers import LOOK_S, Peers
from worker.transport.reach.explorer import Explorer
from worker.transport.reach.ways import WorkerWays
from worker.transport.statistics import Statistics

_log = logging.getLogger(__name__)

_SETTLE_S = 0.5
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetting:
    """Identity and address of a worker; all that is needed to be one.

    `address_of` gives the address that peers use from the port that was bound; `measure` runs on the torch thread, for
    it is that thread's speed that counts. `way_to` gives the address to dial for the one that a peer advertises, where
    something lies between; `compute` makes what carries out the ops, `boundary_log` what keeps boundary tensors.
    `host` is the machine's name, `secret` what a later process of the same name shows to take its place at once.
    `watch` is told of moments as `WorkerDriver` says, and "before Give ..." to a peer that asks for state.
    `places` are what jobs may name; `cache` is the folder of tokens, None: they are not kept. `offers_relay`: carry
    what others send each other. `labels`: what its owner says of it, for jobs to ask for. `devices`: of a mesh, which
    then computes what `device` would; none: there is no mesh.
    """

    worker: WorkerId
    incarnation: Incarnation
    site: SiteId
    join: str
    listen: str
    port: int
    address_of: Callable[[int], str]
    credentials: Credentials
    device: torch.device
    memory_bytes: int | None
    metrics_host: str
    metrics_port: int | None
    take_log_lines: Callable[[], tuple[LogLine, ...]]
    host: str = ""
    secret: str = field(default="", repr=False)
    measure: Callable[[torch.device], Profile] = measure_device
    way_to: Callable[[str], str] = str
    compute: Callable[[torch.device], Compute] = Compute
    boundary_log: Callable[[], BoundaryLog] = BoundaryLog
    watch: Callable[[str], None] = unwatched
    places: Places = ANYWHERE
    cache: Path | None = None
    offers_relay: bool = False
    labels: tuple[Label, ...] = ()
    devices: tuple[str, ...] = ()


async def work(setting: WorkerSetting, on_ready: Callable[[WorkerInbox], None]) -> Exit:
    """Be a worker until nothing depends on it; why it ended.

    Args:
        on_ready: given the inbox before anything happens, so that signals find it.

    Raises:
        UserError: a port is taken, or the coordinator will never take this worker; perhaps inside exception groups.
        MeshLostError: a device of the mesh is lost; likewise.
    """
    compute = setting.compute(setting.device)
    statistics = Statistics(traffic_of=compute.gauges.traffic_of)
    metrics = WorkerMetrics(statistics, compute.gauges)
    async with AsyncExitStack() as stack:
        raise_open_files()
        require_free(setting.listen, setting.port)
        if setting.metrics_port is not None:
            pages = await metrics.serve(setting.metrics_host, setting.metrics_port)
            stack.push_async_callback(pages.close)
        mesh = Mesh(setting.devices) if setting.devices else None
        if mesh is not None:
            stack.callback(mesh.close)
            metrics.watch_mesh(mesh.times, mesh.forms)
            setting = replace(setting, measure=partial(_measure_mesh, mesh))
        executor = Executor(compute, partial(_waited_s, mesh))
        executor.start()
        stack.callback(executor.stop)
        profile = await _measured(setting, executor)
        if mesh is not None:
            mesh.bound_memory(profile.memory_bytes)
        # Not before: gRPC gives no port back at which nothing was served, and a device may be lost until here.
        revocations = Revocations()
        server = open_server(credentials=setting.credentials, named=revocations.named)
        port = bind(server, setting.listen, setting.port, credentials=setting.credentials)
        machine = Worker(_identity(setting, profile, port))
        log = setting.boundary_log()
        stack.callback(log.close)
        desk = Desk[Payload](machine.identity.worker, log, weigh=weight_bytes, release=())
        memory_bytes = machine.identity.profile.memory_bytes
        inbox = WorkerInbox(machine, desk=desk, metrics=metrics, memory_bytes=memory_bytes)
        # A half of its own for what is kept of this worker's chunks, and one for what is fetched.
        half_bytes = memory_bytes // 2
        executor.compute.snapshots.memory_bytes = half_bytes
        copies = ChunkCopies(executor, post=inbox.post, memory_bytes=half_bytes)
        service = _service(setting, machine, inbox, copies, statistics)
        service.attach(server)
        board = Switchboard(is_offered=setting.offers_relay, owner=worker_caller(setting.worker))
        board.attach(server)
        metrics.watch_relay(board)
        await server.start()
        stack.push_async_callback(_settle, asyncio.all_tasks())
        stack.push_async_callback(server.stop, None)
        stack.callback(service.close)
        for kept in _kept(setting, port):
            stack.callback(kept.cancel)
        on_ready(inbox)
        parts = _Parts(
            setting=setting,
            mesh=mesh,
            port=port,
            machine=machine,
            inbox=inbox,
            executor=executor,
            copies=copies,
            service=service,
            revocations=revocations,
        )
        end = await parts.drive(metrics, statistics)
        if mesh is not None and not end.is_clean and mesh.ended_for_turned_away():
            _log.error("turned away: %s", end.reason)
            raise await asyncio.wrap_future(mesh.processes.lost)
        return end


def _service(
    setting: WorkerSetting,
    machine: Worker,
    inbox: WorkerInbox,
    copies: ChunkCopies,
    statistics: Statistics,
) -> PeerService:
    """Service that peers call."""
    probed = Probed(
        incarnation=setting.incarnation,
        may_probe=machine.gate.may_probe,
        dial_back=partial(_is_dialled, setting),
    )
    return PeerService(
        accepts=inbox.accepts,
        on_tensor=inbox.on_tensor,
        state_of=partial(_give, copies, setting.watch),
        statistics=statistics,
        may_fetch=inbox.may_fetch,
        probed=probed,
    )


def _kept(setting: WorkerSetting, port: int) -> Iterator[asyncio.Task[None]]:
    """Tasks that last as long as the worker does: looking after connections, and warning of those in the clear."""
    yield asyncio.create_task(Doorway(port, least_bytes=GREETED_BYTES).keep())
    if (warning := clear_text_warning(setting.listen, setting.credentials)) is not None:
        yield asyncio.create_task(keep_warning(warning, _log))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Parts of a worker that exist before the driver does."""

    setting: WorkerSetting
    mesh: Mesh | None
    port: int
    machine: Worker
    inbox: WorkerInbox
    executor: Executor
    copies: ChunkCopies
    service: PeerService
    revocations: Revocations

    async def drive(self, metrics: WorkerMetrics, statistics: Statistics) -> Exit:
        """Join the coordinator, and let the driver run to its end."""
        setting = self.setting
        dial: Dial = partial(open_channel, credentials=setting.credentials)
        wallet = setting.credentials.wallet
        keep = (lambda _: None) if wallet is None else partial(learn_coordinators, wallet)
        where = Whereabouts(split_addresses("join", setting.join), dial=dial, on_learned=keep)
        files = CheckpointFiles(where, dial=dial)
        explain = None if wallet is None else partial(tls_fault, wallet)
        control = ControlStream(where, dial=dial, listener=self.inbox, explain=explain)
        ways = WorkerWays(
            setting.worker,
            setting.incarnation,
            listen=setting.listen,
            port=self.port,
            credentials=setting.credentials,
            coordinator_at=lambda: where.at,
            way_to=setting.way_to,
        )
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            stack.callback(ways.close)
            peers = Peers(
                setting.worker,
                group=group,
                dial=ways.dial,
                dial_directly=ways.dial_directly,
                relay_trouble=ways.trouble,
                on_failed=self.inbox.on_send_failed,
                on_taken=self.inbox.on_taken,
                statistics=statistics,
                has_checksums=setting.credentials.wallet is None,
            )
            keeping = [] if self.mesh is None else [group.create_task(_end_with(self.mesh))]
            if wallet is not None:
                renewing = keep_renewed(wallet, dial=dial, at=lambda: where.at, clock=time.time)
                revoking = self.revocations.keep(dial=dial, at=lambda: where.at)
                keeping += [group.create_task(renewing), group.create_task(revoking)]
            outside = Outside()
            datasets = Datasets(outside, roots=setting.places.data, cache=setting.cache)
            self.copies.start(group, peers, datasets)
            self.service.give_way(lambda: any(peers.queue_depths().values()))
            builder = Builder(
                setting.worker,
                executor=self.executor,
                copies=self.copies,
                donors=peers,
                files=files,
                device=setting.device,
                memory_bytes=self.machine.identity.profile.memory_bytes,
                places=setting.places,
                outside=outside,
                datasets=datasets,
                mesh=self.mesh,
            )
            driver = WorkerDriver(
                self.machine,
                self.inbox,
                group=group,
                control=control,
                peers=peers,
                explorer=Explorer(self.machine.identity, peers, ways),
                take_ways=ways.take,
                executor=self.executor,
                builder=builder,
                copies=self.copies,
                files=files,
                metrics=metrics,
                measure=partial(setting.measure, setting.device),
                take_log_lines=setting.take_log_lines,
                on_generation=partial(self._forget, peers),
                outside=outside,
                num_moved=lambda: outside.num_moved + statistics.state_parts,
                watch=setting.watch,
            )
            streaming = group.create_task(control.run())
            end = await driver.run()
            driver.close()
            await control.flush(_FLUSH_S)
            streaming.cancel()
            for kept in keeping:
                kept.cancel()
            await peers.close()
        return end

    def _forget(self, peers: Peers, generation: Generation) -> None:
        peers.forget(generation, members=self.machine.peers)
        self.service.forget(generation)


async def _give(
    copies: ChunkCopies, watch: Callable[[str], None], request: FetchStateRequest
) -> Mapping[str, WireTensor] | None:
    watch(f"before Give {request.kind}")
    return await copies.give(request)


async def _is_dialled(setting: WorkerSetting, back_to: DialBack) -> bool:
    """Whether a process that this one was asked to dial answers at its address."""
    member = Member(worker=back_to.worker, incarnation=back_to.incarnation, address=back_to.address)
    dial = open_channel_to(back_to.worker, credentials=setting.credentials, way_to=setting.way_to)
    return await look_at(member, dial=dial, patience_s=LOOK_S) is Sight.REACHED


async def _settle(before: set[asyncio.Task[object]]) -> None:
    """Let calls that were cancelled end by themselves; gRPC would print those that the closing loop ends.

    Args:
        before: whoever runs the worker, and what else was under way; its end is not waited for.
    """
    others = asyncio.all_tasks() - before
    if others:
        await asyncio.wait(others, timeout=_SETTLE_S)


async def _end_with(mesh: Mesh) -> None:
    """Until a device is lost.

    Raises:
        MeshLostError: one is.
    """
    # A worker that is turned away asks once more: that this is cancelled must not cancel what it waits for.
    raise await asyncio.shield(asyncio.wrap_future(mesh.processes.lost))


def tls_fault(wallet: Wallet, address: str) -> str | None:
    """Fault of this worker's certificate, or of the one shown at `address`, by this machine's clock; None: no fault."""
    now_s = time.time()
    return wallet.passport.fault(now_s=now_s) or certificate_skew(address, now_s=now_s)


def _measure_mesh(mesh: Mesh, _host: torch.device) -> Profile:
    return mesh.measure()


def _waited_s(mesh: Mesh | None, thread: int) -> float:
    """Seconds that a thread, or the device that has waited longest, was kept from the processors."""
    return waited_s(thread) + (0.0 if mesh is None else max(mesh.processes.waited_s()))


async def _measured(setting: WorkerSetting, executor: Executor) -> Profile:
    """Profile of the device, with no more memory than the setting lets a job use."""
    profile = await asyncio.wrap_future(executor.call(partial(setting.measure, setting.device)))
    if setting.memory_bytes is None:
        return profile
    return replace(profile, memory_bytes=min(setting.memory_bytes, profile.memory_bytes))


def _identity(setting: WorkerSetting, profile: Profile, port: int) -> Identity:
    identity = Identity(
        worker=setting.worker,
        incarnation=setting.incarnation,
        site=setting.site,
        address=setting.address_of(port),
        profile=profile,
        host=setting.host,
        secret=setting.secret,
        offers_relay=setting.offers_relay,
        labels=setting.labels,
        offers=tuple(sorted(setting.places.data.offers)),
    )
    _log.info(
        "worker=%s site=%s address=%s joins %s: %s",
        identity.worker,
        identity.site,
        identity.address,
        setting.join,
        _shown(profile),
    )
    return identity


def _shown(profile: Profile) -> str:
    return (
        f"{profile.device} ({profile.device_name}), {profile.flops_per_s / 1e9:.0f} GFLOP/s, "
        f"{format_bytes(profile.memory_bytes)}"
    )
