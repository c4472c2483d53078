"""Crews: the workers of each run. A worker is with one run at most."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from skein.protocol.membership.membership import Entry
from skein.types import JobId, WorkerId


class Crews:
    """Live workers by run. What a run sees of the membership is its crew alone."""

    def __init__(self) -> None:
        self._live: dict[JobId, dict[WorkerId, Entry]] = {}
        self._owner: dict[WorkerId, JobId] = {}
        self._bound_for: dict[WorkerId, JobId | None] = {}
        """Workers that were called away, and the job that they are for; None: for none yet."""
        self._called_at: dict[WorkerId, float] = {}
        self._sorted: dict[JobId, tuple[WorkerId, ...]] = {}
        """Names of crews that have not changed since they were asked for."""

    def __len__(self) -> int:
        """Workers that are with a run."""
        return len(self._owner)

    def open(self, job: JobId) -> Mapping[WorkerId, Entry]:
        """The crew of a run that begins, without anybody yet."""
        return MappingProxyType(self._live.setdefault(job, {}))

    def of(self, job: JobId) -> Mapping[WorkerId, Entry]:
        """The crew of a run."""
        return self._live[job]

    def names(self, job: JobId) -> tuple[WorkerId, ...]:
        """Workers in the crew of a run, sorted."""
        if job not in self._sorted:
            self._sorted[job] = tuple(sorted(self._live[job]))
        return self._sorted[job]

    def close(self, job: JobId) -> None:
        """A run is over: its workers are free."""
        for worker in tuple(self._live[job]):
            self.lose(worker)
        del self._live[job]
        self._sorted.pop(job, None)

    def owner(self, worker: WorkerId) -> JobId | None:
        """The job that a worker is with."""
        return self._owner.get(worker)

    def take(self, job: JobId, entry: Entry) -> None:
        """A free worker is with this run from now on."""
        worker = entry.hello.worker
        assert worker not in self._owner, f"{worker} is with {self._owner[worker]}"
        self._owner[worker] = job
        self._live[job][worker] = entry
        self._sorted.pop(job, None)

    def lose(self, worker: WorkerId) -> JobId | None:
        """A worker is not with its run any more; gives whose it was."""
        job = self._owner.pop(worker, None)
        if job is not None:
            self._sorted.pop(job, None)
            self.keep(self._live[job].pop(worker))
        return job

    # --- moving ---

    def call(self, entry: Entry, job: JobId | None, *, now: float) -> bool:
        """Have a worker be called away for another job; whether that is news to its run."""
        is_news = not entry.is_called_away
        entry.call_away()
        self._bound_for[entry.hello.worker] = job
        self._called_at.setdefault(entry.hello.worker, now)
        return is_news

    def keep(self, entry: Entry) -> None:
        """A worker stays where it is."""
        entry.stay()
        self._bound_for.pop(entry.hello.worker, None)
        self._called_at.pop(entry.hello.worker, None)

    def bound_for(self, worker: WorkerId) -> JobId | None:
        """The job that a worker was called away for."""
        return self._bound_for.get(worker)

    def called_at(self, worker: WorkerId) -> float:
        """Time at which a worker was called away; never: it was not."""
        return self._called_at.get(worker, inf)

    @property
    def called(self) -> tuple[WorkerId, ...]:
        """Workers that were called away and are with their run still."""
        return tuple(sorted(self._bound_for))
