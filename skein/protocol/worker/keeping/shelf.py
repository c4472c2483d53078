"""The shelf: copies of stages that a worker fetches from peers, as far as they have come.

Rules of this file
- A backup stays as it was fetched; a copy that follows takes each committed step once, in order, when it is whole.
- A copy whose fetching has failed stays: asked for again, it goes on with what came, unless another has wanted its room
  meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from skein.protocol.messages.directives import Prefetch, StepRecord
from skein.protocol.worker.worker_io import (
    CopyKind,
    DropCopies,
    PrefetchEnded,
    PrefetchFailed,
)
from skein.types import JobId, StageIndex, StageSpec, Step


class ShelvedCopy:
    """A copy that is fetched as `prefetch` says, and the steps that it has not taken yet."""

    def __init__(self, prefetch: Prefetch) -> None:
        self.prefetch = prefetch
        self.version = prefetch.version
        self.is_whole = False
        self.has_failed = False
        """Whether its fetching has failed, and nobody has asked for it since."""
        self.records: deque[StepRecord] = deque()
        """Committed and not taken yet, the oldest first."""

    @property
    def due(self) -> StepRecord | None:
        """Step to take next; None: it is not whole, or as far as is known."""
        return self.records[0] if self.is_whole and self.records else None

    def stepped(self) -> None:
        """The step that was due is taken."""
        self.version = Step(self.records.popleft().step + 1)

    def lacking(self, version: Step) -> tuple[StepRecord, ...] | None:
        """Steps to take to be at `version`; None: it cannot get there."""
        count = version - self.version
        return tuple(self.records)[:count] if self.is_whole and 0 <= count <= len(self.records) else None

    def ended(self) -> PrefetchEnded:
        """Event that tells that the copy is here, or where it has come to."""
        asked = self.prefetch
        return PrefetchEnded(job=asked.job, stage=asked.stage, version=self.version, kind=kind_of(asked))


def kind_of(prefetch: Prefetch) -> CopyKind:
    """Purpose of a copy."""
    return CopyKind.BACKUP if prefetch.is_backup else CopyKind.FOLLOWED


def failure_of(prefetch: Prefetch, reason: str) -> PrefetchFailed:
    """Event that tells of a copy that cannot be had."""
    return PrefetchFailed(
        job=prefetch.job,
        stage=prefetch.stage,
        version=prefetch.version,
        kind=kind_of(prefetch),
        reason=reason,
    )


C = TypeVar("C", bound=ShelvedCopy)


class CopyShelf(Generic[C]):
    """The fetched copies of one worker; `new` begins one, or raises LocalError where there is no room for it."""

    def __init__(self, new: Callable[[Prefetch], C]) -> None:
        self._new = new
        self._backups: dict[tuple[StageSpec, Step], C] = {}
        self._followed: dict[StageSpec, C] = {}

    def __iter__(self) -> Iterator[C]:
        yield from self._backups.values()
        yield from self._followed.values()

    def asked(self, prefetch: Prefetch) -> C:
        """The copy that is asked for: a new one, or the one that goes on.

        Raises:
            LocalError: there is no room for another.
        """
        place = (prefetch.stage, prefetch.version)
        known = self._backups.get(place) if prefetch.is_backup else self._followed.get(prefetch.stage)
        if known is not None and known.prefetch.version == prefetch.version:
            return known
        copy = self._new(prefetch)
        if prefetch.is_backup:
            self._backups[place] = copy
        else:
            self._followed[prefetch.stage] = copy
        return copy

    def followed(self, job: JobId, stage: StageSpec) -> C | None:
        """The copy that follows a stage, if there is one."""
        copy = self._followed.get(stage)
        return copy if copy is not None and copy.prefetch.job == job else None

    def backups(self, job: JobId, stage: StageIndex, version: Step) -> list[C]:
        """Whole backups at a version; after another cut, of all stages of that index."""
        found = ((spec.index, at, copy) for (spec, at), copy in self._backups.items())
        return [
            x for index, at, x in found if (x.prefetch.job, index, at) == (job, stage, version) and x.is_whole
        ]

    def drop(self, command: DropCopies) -> list[C]:
        """Take what is of no more use off the shelf."""
        above = command.above
        gone = [
            place
            for place in self._backups
            if place[1] < command.backups_before or (above is not None and place[1] > above)
        ]
        stages = [stage for stage in command.followed if stage in self._followed]
        return [self._backups.pop(place) for place in gone] + [self._followed.pop(stage) for stage in stages]

    def make_room(self) -> None:
        """Take off what came of copies whose fetching has failed: those that are asked for come first."""
        self._backups = {place: copy for place, copy in self._backups.items() if not copy.has_failed}
        self._followed = {stage: copy for stage, copy in self._followed.items() if not copy.has_failed}

    def clear(self) -> None:
        """The job is over."""
        self._backups.clear()
        self._followed.clear()
