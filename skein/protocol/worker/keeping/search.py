"""The search for what an assignment's chunks begin with: which places are looked at, in order, and who is to blame.

Rules of this file
- What is here comes before what travels, and what has travelled already before what would have to.
- A place that has nothing is passed over for the next; a place that fails ends the search, and so does the last one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar, assert_never

from skein.errors import LocalError, RemoteError, SkeinError, UnfitError, UserError
from skein.protocol.messages.directives import Assign, ChunkAssignment, Member, SourceKind
from skein.protocol.messages.reports import CheckpointUnread, Suspected, Trouble
from skein.protocol.worker.worker_io import BuildFailed
from skein.types import StageSpec, Step, WorkerId

T = TypeVar("T")


class StatePlace(StrEnum):
    """Place of what a build needs: first what all of it does, then a chunk's own state."""

    ARCHIVE = "where checkpoints are to lie"
    DATA = "the job's data"
    CHECKPOINT = "the checkpoint"
    INITIAL = "what the job begins with"
    CHUNK = "a chunk that is here, or was given up of late"
    COPY = "a snapshot or a backup here"
    FOLLOWED = "a copy here that has followed the commits"
    PEER = "a peer"


@dataclass(slots=True, kw_only=True)
class StateLook(Generic[T]):
    """Look for the state of `stage`, or what is wanted of it; whoever takes it says what was `found`, None: nothing."""

    place: StatePlace
    stage: StageSpec
    version: Step
    weight: float = 1.0
    """Share in what is made of several."""
    peer: WorkerId | None = None
    """Donor that the coordinator names."""
    peers: tuple[Member, ...] = ()
    """All that could give something, the donor first: it has come as far as the version that is wanted."""
    found: T | None = None


class StateSearch(Generic[T]):
    """Search of one build at worker `me`, among `donors`."""

    def __init__(self, assign: Assign, me: WorkerId, donors: tuple[Member, ...]) -> None:
        self.parts: list[StateLook[T]] = []
        """Looks that found what the last chunk is made of."""
        self._assign = assign
        self._me = me
        self._others = tuple(donor for donor in donors if donor.worker != me)
        self._place: StatePlace | None = None
        self._asked: WorkerId | None = None

    @property
    def checkpoint(self) -> Step | None:
        """Version of the checkpoint that chunks come from; None: none does."""
        sources = (chunk.source for chunk in self._assign.chunks)
        return next((x.version for x in sources if x.kind is SourceKind.CHECKPOINT), None)

    @property
    def is_origin(self) -> bool:
        """Whether a path begins here, which takes data."""
        return bool(self._assign.origins or self._assign.evaluation_origins)

    def needs(self) -> Iterator[StatePlace]:
        """Needs of the build as a whole, in the order in which to see to them."""
        wanted = {
            # Better now than when there is something to lose.
            StatePlace.ARCHIVE: self._assign.version == 0,
            StatePlace.DATA: self.is_origin,
            StatePlace.CHECKPOINT: self.checkpoint is not None,
        }
        for self._place in [place for place, is_wanted in wanted.items() if is_wanted]:
            yield self._place
        self._place = None

    def looks(self, wanted: ChunkAssignment) -> Iterator[StateLook[T]]:
        """Places to look at for each part of a chunk, until one has it; the looks that found something are `parts`.

        Raises:
            LocalError: no place has it.
        """
        self.parts = []
        for places in self._parts_of(wanted):
            for look in places:
                if look.place is StatePlace.PEER and look.peer not in [x.worker for x in look.peers[:1]]:
                    raise LocalError(
                        f"{look.peer}, which should give stage {look.stage.index}, is not a peer"
                    )
                self._place, self._asked = look.place, look.peer
                yield look
                self._place = None
                if look.found is not None:
                    self.parts.append(look)
                    break
            else:
                purpose = "make another of it" if wanted.source.neighbours else "be kept"
                raise LocalError(f"{look.stage} at version {look.version} is not here to {purpose}")

    def failed(self, error: Exception, reason: str) -> BuildFailed:
        """Event that tells of the error that has ended the search, and whose fault it is, in `reason`'s words."""
        generation, version = self._assign.generation, self.checkpoint
        is_unfit, is_users = isinstance(error, UnfitError), isinstance(error, UserError)
        report: CheckpointUnread | Suspected | Trouble
        match self._place:
            case StatePlace.PEER if self._asked is not None and isinstance(error, RemoteError):
                report = Suspected(generation=generation, peer=self._asked, reason=reason)
            case StatePlace.CHECKPOINT if version is not None and isinstance(error, SkeinError | OSError):
                # Whether that is its fault or this worker's is for the coordinator to find out.
                report = CheckpointUnread(generation=generation, version=version, reason=reason)
            case StatePlace.ARCHIVE if not is_users:
                where = f"checkpoint.url: {reason}"
                report = CheckpointUnread(generation=generation, version=Step(0), reason=where)
            case _:
                is_fatal = is_users and not is_unfit
                report = Trouble(generation=generation, is_fatal=is_fatal, reason=reason, is_unfit=is_unfit)
        return BuildFailed(report=report)

    def _parts_of(self, wanted: ChunkAssignment) -> Iterator[list[StateLook[T]]]:
        source, stage = wanted.source, wanted.stage
        match source.kind:
            case SourceKind.INITIAL:
                yield self._at(wanted, stage, StatePlace.INITIAL)
            case SourceKind.CHECKPOINT:
                yield self._at(wanted, stage, StatePlace.CHECKPOINT)
            case SourceKind.KEEP:
                yield self._at(wanted, stage, StatePlace.CHUNK, StatePlace.COPY)
            case SourceKind.PEER if source.peer == self._me:
                yield self._at(wanted, stage, StatePlace.COPY)
            case SourceKind.PEER if source.was_averaged:
                # What followed the commits is of the stage as it was before.
                yield self._at(wanted, stage, StatePlace.PEER, peer=source.peer)
            case SourceKind.PEER:
                yield self._at(wanted, stage, StatePlace.FOLLOWED, StatePlace.PEER, peer=source.peer)
            case SourceKind.NEIGHBOURS:
                for beside in source.neighbours:
                    place = StatePlace.CHUNK if beside.peer == self._me else StatePlace.PEER
                    yield self._at(wanted, beside.stage, place, peer=beside.peer, weight=beside.weight)
            case _:
                assert_never(source.kind)

    def _at(
        self,
        wanted: ChunkAssignment,
        stage: StageSpec,
        *places: StatePlace,
        peer: WorkerId | None = None,
        weight: float = 1.0,
    ) -> list[StateLook[T]]:
        nearest = tuple(sorted(self._others, key=lambda member: member.worker != peer))
        version = wanted.source.version
        return [
            StateLook(place=place, stage=stage, version=version, weight=weight, peer=peer, peers=nearest)
            for place in places
        ]
