"""Transport of tensors from worker to worker: offered until the peer has taken them, or until it counts as gone.

Effects are those of `worker/transport` over gRPC: a tensor that a broken stream lost is offered again, so it may
arrive twice; a peer that gives no sign for longer than patience lasts is reported, though it may take the tensor later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from skein.protocol.messages.tensors import Envelope, HopTensor, Refusal, ShardKind, ShardTensor
from skein.protocol.worker.keeping.desk import key_of
from skein.protocol.worker.ops import hop_key
from skein.protocol.worker.worker_io import (
    LogShortened,
    SendFailed,
    SendTensor,
    TensorArrived,
    TensorTaken,
    WorkerEvent,
)
from skein.sim.clock import Clock
from skein.sim.compute.executor import Payload
from skein.sim.judging.invariants import Violated
from skein.sim.lines.network import Network
from skein.sim.processes.worker import SimWorker
from skein.types import Attempt, ChunkRef, Incarnation, JobId, Own, StageIndex, WorkerId

REFUSED_S = 0.3
"""Seconds that a sender tries where its peer's machine says that nobody is there."""
PATIENCE_S = 2.2
"""Seconds that a sender tries where nothing is heard at all."""
AGAIN_S = 0.25
"""Seconds from a lost tensor to the next offer."""

Give = Callable[[SimWorker, WorkerEvent], None]


@dataclass(slots=True)
class _Parcel:
    sender: SimWorker
    command: SendTensor
    payload: Payload
    since_s: float
    heard_s: float
    """Time of the peer's last sign of life; of the first offer before any."""
    is_over: bool = False
    """Whether the peer has taken the tensor, or its sender given it up."""


class Transport:
    """Carries out SendTensor.

    Args:
        workers: all processes, by name; the caller changes it.
        give: hands a worker an event.

    Of every `repeat_every` tensors that peers take, one arrives twice; 0: none does.
    """

    def __init__(
        self, clock: Clock, network: Network, workers: Mapping[WorkerId, SimWorker], *, give: Give
    ) -> None:
        self.repeat_every = 0
        self._clock = clock
        self._network = network
        self._workers = workers
        self._give = give
        self._num_taken = 0

    def send(self, sender: SimWorker, command: SendTensor) -> None:
        """Begin to offer a tensor."""
        payload = sender.executor.payload(command.envelope)
        if payload is None:
            assert isinstance(command.envelope.header, HopTensor)
            lacking = LogShortened(keys=(hop_key(command.envelope.header),), is_wanted=True)
            self._clock.after(0.0, partial(self._give, sender, lacking))
            return
        now = self._clock.now
        self._offer(_Parcel(sender, command, payload, since_s=now, heard_s=now))

    def forge(self, name: WorkerId, incarnation: Incarnation) -> None:
        """Offer everybody a result in this worker's name, as who is let in can, without that one's secret."""
        for worker in self._workers.values():
            machine = worker.machine
            attempt = Attempt(epoch=machine.epoch, generation=machine.generation, number=0)
            member = ChunkRef(stage=StageIndex(0), worker=name)
            envelope = Envelope(
                job=machine.job or JobId(""),
                epoch=machine.epoch,
                generation=machine.generation,
                sender=name,
                incarnation=incarnation,
                header=ShardTensor(
                    kind=ShardKind.RESULT,
                    step=machine.version,
                    group=Own(member.stage),
                    attempt=attempt,
                    shard=0,
                    member=member,
                ),
                secret="another",  # noqa: S106 - as good as any
            )
            if machine.gate.refusal_of(envelope) is None:
                raise Violated(f"{machine.identity.worker} takes what is forged: {envelope}")

    def _offer(self, parcel: _Parcel) -> None:
        machine, to = parcel.sender.machine, parcel.command.to.worker
        # A new generation forgets what belongs to older ones.
        if parcel.is_over or machine.generation > parcel.command.envelope.generation:
            return
        me, now = machine.identity.worker, self._clock.now
        arrival_s = self._network.arrival_s(me, to, parcel.payload.num_bytes, now=now)
        is_lost, is_repeated, late_s = self._network.fate(me, to)
        if arrival_s is None or is_lost:
            self._offer_again(parcel, "silent")
            return
        self._clock.at(arrival_s + late_s, partial(self._arrive, parcel))
        if is_repeated:
            self._clock.at(arrival_s + 2 * late_s, partial(self._arrive, parcel))

    def _offer_again(self, parcel: _Parcel, reason: str) -> None:
        if self._clock.now - parcel.heard_s >= PATIENCE_S:
            self._give_up(parcel, reason)
        else:
            again = partial(parcel.sender.when_running, partial(self._offer, parcel))
            self._clock.after(AGAIN_S, again)

    def _give_up(self, parcel: _Parcel, reason: str) -> None:
        if parcel.is_over:
            return
        parcel.is_over = True
        command = parcel.command
        failed = SendFailed(to=command.to.worker, generation=command.envelope.generation, reason=reason)
        self._give(parcel.sender, failed)

    def _arrive(self, parcel: _Parcel) -> None:
        to = parcel.command.to
        receiver = self._workers.get(to.worker)
        if receiver is None or receiver.machine.identity.incarnation != to.incarnation:
            self._clock.after(REFUSED_S, partial(self._give_up, parcel, "connection refused"))
            return
        if receiver.is_frozen:
            # Its kernel has the bytes, and nobody answers.
            until_s = parcel.heard_s + PATIENCE_S
            self._clock.at(until_s, partial(self._give_up, parcel, "silent"))
        receiver.when_running(partial(self._take, parcel, receiver))

    def _take(self, parcel: _Parcel, receiver: SimWorker) -> None:
        envelope = parcel.command.envelope
        is_full = receiver.executor.desk.num_bytes > receiver.room_bytes
        refusal = receiver.machine.gate.refusal_of(envelope, is_full=is_full)
        if refusal is not None:
            self._refused(parcel, refusal)
            return
        self._num_taken += 1
        is_repeated = self.repeat_every and self._num_taken % self.repeat_every == 0
        self._answer(parcel)
        for _ in range(2 if is_repeated else 1):
            receiver.executor.desk.file(envelope.generation, key_of(envelope.header), parcel.payload)
            self._give(receiver, TensorArrived(envelope=envelope))

    def _refused(self, parcel: _Parcel, refusal: Refusal) -> None:
        """Act as the peer's gate says: what is old is of no use to anybody, what is early is offered again."""
        if refusal is Refusal.NOT_YET:
            parcel.heard_s = self._clock.now
            self._offer_again(parcel, refusal)
        elif refusal is Refusal.STALE:
            parcel.is_over = True
        else:
            self._give_up(parcel, f"refused as {refusal}")

    def _answer(self, parcel: _Parcel) -> None:
        """Tell the sender, a latency too early: that saves the clock an action for each tensor."""
        envelope, to = parcel.command.envelope, parcel.command.to.worker
        me = parcel.sender.machine.identity.worker
        if parcel.is_over:
            return
        if self._network.is_cut(to, me):
            self._offer_again(parcel, "silent")
            return
        parcel.is_over = True
        if isinstance(envelope.header, HopTensor):
            back_s = self._network.latency_s(to, me)
            seconds = self._clock.now + back_s - parcel.since_s
            num_bytes = parcel.payload.num_bytes
            self._give(
                parcel.sender, TensorTaken(to=to, envelope=envelope, num_bytes=num_bytes, seconds=seconds)
            )
