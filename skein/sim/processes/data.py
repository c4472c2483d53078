"""The data of a job as simulated workers read them: each its own copy, which may be gone for a while."""

from collections.abc import Callable
from functools import partial

from skein.errors import UnfitError
from skein.protocol.worker.worker_io import OpeningEnded, StartOpening, WorkerEvent
from skein.sim.clock import Clock
from skein.sim.processes.worker import SimWorker
from skein.types import Incarnation, JobId, WorkerId

OPEN_S = 0.4
LACKING = ("data.sources[0].path", "data://simulated", "is not offered by this worker")
"""Data that a worker does not offer, as `UserError` has it."""


class SimData:
    """Data of the workers: who has them, and who has them open. `give` hands a worker an event."""

    def __init__(self, clock: Clock, *, give: Callable[[SimWorker, WorkerEvent], None]) -> None:
        self._clock = clock
        self._give = give
        self._gone_until: dict[WorkerId, float] = {}
        self._open: set[tuple[Incarnation, JobId]] = set()

    def lose(self, worker: WorkerId, seconds: float) -> None:
        """A worker does not see its data for so long; what it has open it keeps."""
        self._gone_until[worker] = max(self._gone_until.get(worker, 0.0), self._clock.now + seconds)

    def has(self, worker: SimWorker, job: JobId) -> bool:
        """Whether a build finds the data, which are open from then on."""
        identity = worker.machine.identity
        key = identity.incarnation, job
        if key not in self._open and self._clock.now < self._gone_until.get(identity.worker, 0.0):
            return False
        self._open.add(key)
        return True

    def start(self, worker: SimWorker, command: StartOpening) -> None:
        """Open the data beside everything else."""
        ended = partial(self._ended, worker, command.opens.job)
        self._clock.after(OPEN_S, partial(worker.when_running, ended))

    def _ended(self, worker: SimWorker, job: JobId) -> None:
        has = self.has(worker, job)
        self._give(
            worker, OpeningEnded(job=job, error="" if has else str(UnfitError(*LACKING)), is_unfit=not has)
        )
