"""Standing of a worker: whom it follows, which generation it has adopted, and how it speaks under both."""

from dataclasses import replace

from skein.protocol.messages.directives import Assign, Member
from skein.protocol.messages.passes import GenerationKey
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
        self.peers: dict[WorkerId, Member] = {}
        """Workers that this one exchanges tensors with or fetches state from, by the newest Assign."""
        self.peer_names: frozenset[WorkerId] = frozenset()
        self._assign: Assign | None = None
        """The newest Assign of the job, whole."""
        self.key = GenerationKey()
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
        self.forget()
        self.doors, self.probe_door = (), None
        self.key = GenerationKey()

    def tell(self, report: Report) -> None:
        """Say something to the coordinator; without a stream it is lost, and a new one begins with everything anew."""
        if self.is_connected:
            self.commands.append(SendReport(report=report))

    def trouble(self, reason: str) -> None:
        """Report that something here went wrong which another try may mend."""
        self.tell(Trouble(generation=self.generation, is_fatal=False, reason=reason))

    def send(self, to: WorkerId, header: TensorHeader) -> None:
        """Send a tensor to a peer."""
        assert self.job is not None
        member = self.peers.get(to)
        if member is None:
            reason = "not a peer in this generation"
            self.tell(Suspected(generation=self.generation, peer=to, reason=reason))
            return
        envelope = Envelope(
            job=self.job,
            epoch=self.epoch,
            generation=self.generation,
            sender=self.identity.worker,
            incarnation=self.identity.incarnation,
            header=header,
            secret=self.key.tensor_secret(self.identity.worker, self.identity.incarnation),
        )
        self.commands.append(SendTensor(to=member, envelope=envelope))

    def adopt(self, key: GenerationKey) -> None:
        """A new generation, with this key; peers stay those of the last Assign until the next one."""
        self.key = key
        door = key.state_secret(self.identity.worker, self.identity.incarnation)
        self.doors = (door, *self.doors[:1])

    def forget(self) -> None:
        """The job is over here, and with it all that was assigned."""
        self.job, self._assign = None, None
        self._set_peers(())

    @property
    def assigned(self) -> Generation:
        """Generation of the newest Assign of the job that is here; 0 for none."""
        return Generation(0) if self._assign is None else self._assign.generation

    def take(self, assign: Assign) -> Assign | None:
        """Follow a new Assign; gives it whole, or None if it is the difference to one that is not here."""
        before = self._assign
        if assign.since:
            if before is None or before.generation != assign.since:
                return None
            gone = {*assign.gone, *(peer.worker for peer in assign.peers)}
            stay = [peer for peer in before.peers if peer.worker not in gone]
            peers, spec = (*stay, *assign.peers), assign.job_spec or before.job_spec
            assign = replace(assign, job_spec=spec, peers=peers, gone=(), since=Generation(0))
        self._assign = assign
        self._set_peers(assign.peers)
        return assign

    def _set_peers(self, peers: tuple[Member, ...]) -> None:
        self.peers = {peer.worker: peer for peer in peers}
        self.peer_names = frozenset(self.peers)

    @property
    def donors(self) -> tuple[Member, ...]:
        """Peers, each with what it wants to be shown where its state is fetched."""
        return tuple(self.key.as_donor(peer) for peer in self.peers.values())
