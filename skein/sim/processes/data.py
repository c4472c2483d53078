"""The data of a job as simulated workers read them: each its own copy, which may be gone or another one for a while."""

from collections.abc import Callable
from functools import partial

from skein.data.agreement import other_data
from skein.errors import UnfitError
from skein.protocol.worker.worker_io import OpeningEnded, StartOpening, WorkerEvent
from skein.sim.clock import Clock
from skein.sim.processes.worker import SimWorker
from skein.types import Incarnation, JobId, WorkerId

OPEN_S = 0.4
LACKING = ("data.sources[0].path", "data://simulated", "is not offered by this worker")
"""Data that a worker does not offer, as `UserError` has it."""
USUAL = "data"
"""Fingerprint of the data that all workers have, unless theirs were replaced."""


class SimData:
    """Data of the workers: who has which, and who has them open. `give` hands a worker an event."""

    def __init__(self, clock: Clock, *, give: Callable[[SimWorker, WorkerEvent], None]) -> None:
        self._clock = clock
        self._give = give
        self._gone_until: dict[WorkerId, float] = {}
        self._replaced: dict[WorkerId, tuple[float, str, frozenset[JobId] | None]] = {}
        """Until when a worker's files are other ones, their fingerprint, and the jobs that read them; None: all."""
        self._open: dict[tuple[Incarnation, JobId], str] = {}

    def lose(self, worker: WorkerId, seconds: float) -> None:
        """A worker does not see its data for so long; what it has open it keeps."""
        self._gone_until[worker] = max(self._gone_until.get(worker, 0.0), self._clock.now + seconds)

    def replace(
        self, worker: WorkerId, seconds: float, fingerprint: str, jobs: frozenset[JobId] | None
    ) -> None:
        """The files of a worker are other ones for so long, for `jobs` or all; what it has open it keeps."""
        self._replaced[worker] = self._clock.now + seconds, fingerprint, jobs

    def opened(self, worker: SimWorker, job: JobId, trained_on: str) -> str:
        """Fingerprint of the data that are open from then on.

        Raises:
            UnfitError: the worker does not see them, or has other data than the job was trained on.
        """
        identity = worker.machine.identity
        key = identity.incarnation, job
        if key not in self._open or trained_on not in ("", self._open[key]):
            if self._clock.now < self._gone_until.get(identity.worker, 0.0):
                raise UnfitError(*LACKING)
            self._open[key] = self._found(identity.worker, job)
        if trained_on not in ("", self._open[key]):
            raise other_data(self._open.pop(key), trained_on)
        return self._open[key]

    def _found(self, worker: WorkerId, job: JobId) -> str:
        until, fingerprint, jobs = self._replaced.get(worker, (0.0, USUAL, None))
        return fingerprint if self._clock.now < until and (jobs is None or job in jobs) else USUAL

    def start(self, worker: SimWorker, command: StartOpening) -> None:
        """Open the data beside everything else."""
        ended = partial(self._ended, worker, command.opens.job, command.opens.data_fingerprint)
        self._clock.after(OPEN_S, partial(worker.when_running, ended))

    def _ended(self, worker: SimWorker, job: JobId, trained_on: str) -> None:
        try:
            self.opened(worker, job, trained_on)
        except UnfitError as error:
            self._give(worker, OpeningEnded(job=job, error=str(error), is_unfit=True))
        else:
            self._give(worker, OpeningEnded(job=job, error="", is_unfit=False))
