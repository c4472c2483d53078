"""Standing of a worker: whom it follows, which generation it has adopted, and how it speaks under both."""

from collections.abc import Iterable

from skein.protocol.messages.directives import Member
from skein.protocol.messages.positions import LogPosition
from skein.protocol.messages.reports import Report, Suspected, Trouble
from skein.protocol.messages.tensors import Envelope, TensorHeader
from skein.protocol.worker.worker_io import Identity, SendReport, SendTensor, WorkerCommand
from skein.types import Epoch, Generation, JobId, WorkerId


class Standing:
    """Shared by the parts of one Worker machine; `commands` are what the event in hand has caused so far."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.epoch = Epoch(0)
        self.position: LogPosition | None = None
        """Position of the run log that this worker has heard of; None for nothing."""
        self.generation = Generation(0)
        self.job: JobId | None = None
        self.members: dict[WorkerId, Member] = {}
        self.probe_door: str | None = None
        self.doors: tuple[str, ...] = ()
        """Doors that peers show to fetch state here: of this generation and the last, as fetching outlasts a change."""
        self.is_connected = False
        self.commands: list[WorkerCommand] = []

    @property
    def place(self) -> tuple[Epoch, Generation]:
        """Epoch and generation that every directive and tensor is compared with."""
        return self.epoch, self.generation

    def drain(self) -> list[WorkerCommand]:
        """All commands since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def heard_of(self, position: LogPosition | None) -> None:
        """The coordinator that welcomed this worker has written so much; kept as it was said, with its signature."""
        if position is not None and (self.position is None or position.entry > self.position.entry):
            self.position = position

    def follow_another_log(self) -> None:
        """Forget which coordinator and which run log were followed: the next Welcome may be of any."""
        self.epoch, self.generation, self.position = Epoch(0), Generation(0), None
        self.members, self.doors, self.probe_door = {}, (), None

    def tell(self, report: Report) -> None:
        """Say something to the coordinator; without a stream it is lost, and a new one begins with everything anew."""
        if self.is_connected:
            self.commands.append(SendReport(report=report))

    def trouble(self, reason: str) -> None:
        """Report that something here went wrong which another try may mend."""
        self.tell(Trouble(generation=self.generation, is_fatal=False, reason=reason))

    def send(self, to: WorkerId, header: TensorHeader) -> None:
        """Send a tensor to a member of the generation."""
        assert self.job is not None
        member = self.members.get(to)
        if member is None:
            reason = "not a member of the generation"
            self.tell(Suspected(generation=self.generation, peer=to, reason=reason))
            return
        envelope = Envelope(
            job=self.job,
            epoch=self.epoch,
            generation=self.generation,
            sender=self.identity.worker,
            incarnation=self.identity.incarnation,
            header=header,
            secret=self._secret_of(self.identity.worker),
        )
        self.commands.append(SendTensor(to=member, envelope=envelope))

    def adopt(self, members: Iterable[Member]) -> None:
        """A new generation, of these members."""
        self.members = {member.worker: member for member in members}
        me = self.members.get(self.identity.worker)
        self.doors = (*(() if me is None else (me.door,)), *self.doors[:1])

    def _secret_of(self, worker: WorkerId) -> str:
        member = self.members.get(worker)
        return "" if member is None else member.secret
