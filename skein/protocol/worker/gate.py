"""The gate: what of all that others send to a worker, or ask of it, is let in.

Rules of this file
- It is asked before anything is kept of a tensor, and again when that is complete.
- Who is refused learns why; refused for now is not lost, the sender offers it again.
"""

from collections.abc import Callable
from hmac import compare_digest

from skein.protocol.messages.tensors import Envelope, Refusal, ShardTensor
from skein.protocol.worker.standing import Standing
from skein.types import Generation, Step, WorkerId

_MAX_TOLD = 256
"""Names and generations of which something is told, however many come."""


class PeerGate:
    """Gate of one worker, which lets in by where the worker stands; `version` is that of its chunks."""

    def __init__(self, standing: Standing, version: Callable[[], Step]) -> None:
        self._standing = standing
        self._version = version
        self._told: set[tuple[WorkerId, Generation]] = set()

    def refusal_of(self, envelope: Envelope, *, is_full: bool = False) -> Refusal | None:
        """Reason not to take a peer's tensor; None: it is taken. `is_full`: what came early leaves no room for more.

        Of a newer generation nobody can tell whose it is; nobody has work of one that not all have acknowledged.
        """
        standing, header, version = self._standing, envelope.header, self._version()
        place, here = (envelope.epoch, envelope.generation), standing.place
        if place < here or (place == here and header.step < version and not header.outlasts_steps):
            return Refusal.STALE
        if place > here:
            return Refusal.NOT_YET
        if envelope.job != standing.job:
            return Refusal.UNKNOWN_JOB
        if not self._is_authentic(envelope):
            return Refusal.FORGED
        if isinstance(header, ShardTensor) and header.kind.is_own and header.member.worker != envelope.sender:
            return Refusal.UNEXPECTED
        return Refusal.NOT_YET if is_full and header.step > version else None

    def _is_authentic(self, envelope: Envelope) -> bool:
        """Whether a tensor of the present generation was sent by the peer that it names, which is a member."""
        peer = self._standing.peers.get(envelope.sender)
        if peer is None or peer.incarnation != envelope.incarnation:
            return False
        secret = self._standing.key.tensor_secret(peer.worker, peer.incarnation)
        return compare_digest(secret.encode(), envelope.secret.encode())

    def may_fetch(self, door: str) -> bool:
        """Whether the coordinator has told whoever shows this to fetch state here."""
        return any(own and compare_digest(door.encode(), own.encode()) for own in self._standing.doors)

    def may_probe(self, door: str) -> bool:
        """Whether the coordinator has told whoever shows this to measure the link to this worker."""
        own = self._standing.probe_door
        return own is not None and compare_digest(door.encode(), own.encode())

    def is_news(self, worker: WorkerId) -> bool:
        """Whether a refusal is the first of this name in this generation, and there is room to tell; then it counts."""
        about = worker, self._standing.generation
        if about in self._told or len(self._told) >= _MAX_TOLD:
            return False
        self._told.add(about)
        return True
