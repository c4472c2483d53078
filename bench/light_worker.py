"""A light worker: a control stream that answers as a worker does that computes nothing and is always well.

It joins, beats, acknowledges, builds, reports ledgers and votes by what the coordinator has assigned to it. Messages
are read as they are on the wire, so that a thousand such workers fit into one process.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

from grpc import aio

from coordinator.service.control import COMPRESSED
from skein import PROTOCOL_VERSION
from skein.wire.v1 import control_pb2, control_pb2_grpc, ids_pb2

SAMPLE = 10
"""Of so many workers one counts what it is told."""
COMPRESSED_KINDS = frozenset(one.__name__.lower() for one in COMPRESSED)
NUM_SAMPLES = 1 << 20
"""Training samples that each origin has; of samples for validation it has the same."""
TOKENS_PER_MICROBATCH = 64
REDIAL_S = 0.05
LATENCY_S, BYTES_PER_S = 0.0005, 1e9
"""Links that a light worker reports for each peer that it is asked to probe."""
OP_S = 0.001
_GIB = 1 << 30
_LAST_STAGE_KINDS = frozenset({ids_pb2.OP_KIND_LOSS})

Report = control_pb2.Report
ControlCall = aio.StreamStreamCall[control_pb2.Report, control_pb2.Directive]


@dataclass(slots=True)
class FleetCounts:
    """What all light workers of a process have seen."""

    welcomes: int = 0
    longest_late_s: float = 0.0
    """Seconds by which a beat was late, at most, because this process had no time for it."""
    longest_write_s: float = 0.0
    """Seconds that writing a report took, at most."""
    lost_streams: Counter[str] = field(default_factory=Counter)
    """Reasons for which streams ended."""
    refused: Counter[str] = field(default_factory=Counter)
    told_bytes: dict[int, Counter[str]] = field(default_factory=dict)
    """By generation: bytes of the directives that the workers of the sample were told, by kind of directive."""
    sent_bytes: dict[int, Counter[str]] = field(default_factory=dict)
    """The same, compressed as they are sent."""
    num_sampled: int = 0
    num_commits: Counter[int] = field(default_factory=Counter)
    """By step: workers that were told of its commit."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def reach(self, *, welcomes: int = 0, commits: int = 0) -> None:
        """Return once so many workers were welcome, and a worker was told of so many commits."""
        while self.welcomes < welcomes or len(self.num_commits) < commits:
            self._changed.clear()
            await self._changed.wait()

    def count(
        self, generation: int, kind: str, directive: control_pb2.Directive, *, is_sampled: bool
    ) -> None:
        """A worker was told a directive of this kind; of workers in the sample its size is counted."""
        if is_sampled:
            data = directive.SerializeToString()
            # As gRPC sends it.
            sent = len(zlib.compress(data)) if kind in COMPRESSED_KINDS else len(data)
            self.told_bytes.setdefault(generation, Counter())[kind] += len(data)
            self.sent_bytes.setdefault(generation, Counter())[kind] += sent
        self._changed.set()


class LightWorker:
    """One worker of the fleet.

    Args:
        name: of the worker.
        site: where it says that it is.
        channel: to the coordinator; nothing else uses it.
        counts: shared by the fleet.
    """

    def __init__(self, name: str, site: str, channel: aio.Channel, counts: FleetCounts) -> None:
        self._name = name
        self._site = site
        self._stub = control_pb2_grpc.ControlStub(channel)
        self._counts = counts
        self._is_sampled = int(name[1:]) % SAMPLE == 0
        counts.num_sampled += self._is_sampled
        self._beat_s = 1.0
        self._epoch = 0
        self._generation = 0
        self._progress = 0
        self._version = 0
        self._assigned = 0
        """Generation of the newest Assign."""
        self._held: tuple[control_pb2.ChunkAssignment, ...] = ()
        self._ledgers: Mapping[int, tuple[int, ...]] = {}
        self._last_stage: int | None = None
        self._is_origin = False
        self._outgoing: asyncio.Queue[Report] = asyncio.Queue()

    async def run(self) -> None:
        """Keep a stream open until this is cancelled."""
        while True:
            self._outgoing = asyncio.Queue()
            self._counts.lost_streams[await self._converse()] += 1
            await asyncio.sleep(REDIAL_S)

    async def _converse(self) -> str:
        """Open a stream and answer on it until it ends; gives the reason of its end."""
        call = self._stub.Session()  # type: ignore[call-arg]
        beside = [asyncio.create_task(self._write(call)), asyncio.create_task(self._beat())]
        self._tell(self._hello())
        try:
            while isinstance(directive := await call.read(), control_pb2.Directive):
                self._take(directive)
            return f"{(await call.code()).name}: {await call.details()}"
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            for task in beside:
                task.cancel()
            call.cancel()

    async def _write(self, call: ControlCall) -> None:
        loop = asyncio.get_running_loop()
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                report = await self._outgoing.get()
                began_s = loop.time()
                await call.write(report)
                self._counts.longest_write_s = max(self._counts.longest_write_s, loop.time() - began_s)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._beat_s
            await asyncio.sleep(self._beat_s)
            self._counts.longest_late_s = max(self._counts.longest_late_s, loop.time() - due_s)
            self._tell(Report(beat=control_pb2.Beat(progress=self._progress)))

    def _tell(self, report: Report) -> None:
        self._outgoing.put_nowait(report)

    def _hello(self) -> Report:
        number = int(self._name[1:])
        profile = ids_pb2.Profile(
            device="cpu", device_name="light", flops_per_s=1e12, memory_bytes=16 * _GIB, spread=0.01
        )
        hello = control_pb2.Hello(
            worker=self._name,
            incarnation=sha256(self._name.encode()).hexdigest()[:16],
            protocol_version=PROTOCOL_VERSION,
            site=self._site,
            address=f"10.{number // 250}.{number % 250}.1:{30_000 + 7919 * number % 30_000}",
            profile=profile,
            epoch=self._epoch,
            secret=f"of {self._name}",
        )
        return Report(hello=hello)

    # --- directives ---

    def _take(self, directive: control_pb2.Directive) -> None:
        kind = directive.WhichOneof("body") or ""
        told = getattr(directive, kind)
        match kind:
            case "welcome":
                self._counts.welcomes += 1
                self._epoch, self._beat_s = told.epoch, told.beat_s
            case "refused":
                self._counts.refused[told.reason] += 1
            case "new_generation":
                self._adopt(told)
            case "probe":
                self._probe(told)
            case "measure":
                self._tell(Report(speed_measured=control_pb2.SpeedMeasured(flops_per_s=1e12, spread=0.01)))
            case "open_data":
                self._tell(Report(data_opened=control_pb2.DataOpened(job=told.job)))
            case "prefetch":
                prefetched = control_pb2.Prefetched(job=told.job, stage=told.stage, version=told.version)
                self._tell(Report(prefetched=prefetched))
            case "dismiss":
                self._held, self._assigned = (), 0
            case _ if getattr(told, "generation", self._generation) == self._generation:
                self._take_of_generation(kind, told)
        self._counts.count(self._generation, kind, directive, is_sampled=self._is_sampled)

    def _take_of_generation(self, kind: str, told: object) -> None:
        match told:
            case control_pb2.Assign():
                self._build(told)
            case control_pb2.Start():
                self._do_step()
            case control_pb2.Prepare():
                self._vote(told)
            case control_pb2.Commit():
                self._version = told.record.step + 1
                self._counts.num_commits[told.record.step] += 1
                if told.goes_on:
                    self._do_step()
            case control_pb2.Evaluate():
                self._evaluate(told)
            case _:
                pass

    def _adopt(self, told: control_pb2.NewGeneration) -> None:
        self._generation = told.generation
        if told.HasField("last_commit"):
            self._version = max(self._version, told.last_commit.step + 1)
        chunks = [control_pb2.ChunkVersion(stage=x.stage, version=self._version) for x in self._held]
        ack = control_pb2.Ack(generation=self._generation, chunks=chunks, assigned=self._assigned)
        self._tell(Report(ack=ack))

    def _build(self, told: control_pb2.Assign) -> None:
        if told.since != self._assigned and told.since:
            raise RuntimeError(f"{self._name} is told a difference to an Assign that it does not have")
        self._assigned = told.generation
        self._held = tuple(told.chunks)
        self._version = told.version
        done: dict[int, list[int]] = {chunk.stage.index: [] for chunk in told.chunks}
        self._last_stage = None
        for op in told.schedule.ops:
            if op.kind in (ids_pb2.OP_KIND_FORWARD, *_LAST_STAGE_KINDS):
                done[op.stage].append(op.microbatch)
            if op.kind in _LAST_STAGE_KINDS:
                self._last_stage = op.stage
        self._ledgers = {stage: tuple(sorted(numbers)) for stage, numbers in done.items()}
        self._is_origin = bool(told.origins or told.evaluation_origins)
        counted = NUM_SAMPLES if self._is_origin else 0
        ready = control_pb2.ChunksReady(
            generation=self._generation,
            num_train_samples=counted,
            num_validation_samples=counted,
            data_fingerprint="light" if self._is_origin else "",
        )
        self._tell(Report(chunks_ready=ready))

    def _do_step(self) -> None:
        self._progress += 1
        for stage, microbatches in self._ledgers.items():
            tokens = [TOKENS_PER_MICROBATCH] * len(microbatches) if stage == self._last_stage else []
            done = control_pb2.StageDone(
                generation=self._generation,
                step=self._version,
                ledger=ids_pb2.Ledger(stage=stage, worker=self._name, microbatches=microbatches),
                loss_sum=float(2 * sum(tokens)),
                tokens=tokens,
            )
            self._tell(Report(stage_done=done))

    def _vote(self, told: control_pb2.Prepare) -> None:
        self._progress += 1
        vote = control_pb2.Vote(
            generation=self._generation,
            step=told.step,
            group=told.group.group,
            attempt=told.attempt,
            digest=sha256(told.group.group.encode()).hexdigest(),
            squared_norm=1.0,
            is_finite=True,
        )
        self._tell(Report(vote=vote))

    def _evaluate(self, told: control_pb2.Evaluate) -> None:
        raise NotImplementedError

    def _probe(self, told: control_pb2.Probe) -> None:
        pairs = [
            pair for peer in told.peers for pair in ((self._name, peer.worker), (peer.worker, self._name))
        ]
        links = [
            ids_pb2.Link(sender=a, receiver=b, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S) for a, b in pairs
        ]
        self._tell(Report(links_measured=control_pb2.LinksMeasured(links=links)))
