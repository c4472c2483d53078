"""Repeated measurements of workers' devices: a first one may have been taken at a bad moment.

Rules of this file
- A worker with work is measured by its ops all the time; one without, silent holders too, measures itself now and then,
  each time after a longer pause.
- Where planned and measured ops part, first measurements are what is wrong: every worker measures at once, and under
  later plans that part again only after a pause, for it takes half a second of those who work.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from skein.plan.changing.silent import busy_workers
from skein.protocol.coordinator.runs.improving.replanning import Backoff
from skein.protocol.coordinator.runs.phase import StepPhase
from skein.protocol.coordinator.runs.run import Run
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.types import Generation, JobId, Step, WorkerId

FIRST_PAUSE_S = 60.0
"""Seconds from joining, with a measurement, to the next measurement of a worker without work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPace:
    """Facts of a job that decide when workers measure.

    Microbatches visit those who are `busy`, None: everybody may be; `parted` is the plan's generation if it takes ops
    for much faster or slower than they are.
    """

    busy: frozenset[WorkerId] | None
    parted: Generation | None

    def is_at_work(self, worker: WorkerId) -> bool:
        """Whether a worker may have something to do."""
        return self.busy is None or worker in self.busy


class Pacing:
    """The pace of each active job, looked at once for each step, for everybody's beats ask for it."""

    def __init__(self) -> None:
        self._known: dict[JobId, tuple[tuple[Generation, Step], JobPace]] = {}

    def of(self, run: Run | None, measured: Mapping[JobId, Measured]) -> JobPace:
        """The pace of `run`, as its ops were measured."""
        if run is None:
            return JobPace(busy=frozenset(), parted=None)
        if run.plan is None or not isinstance(run.phase, StepPhase):
            # Amid a change of generation anybody may be busy with building.
            return JobPace(busy=None, parted=None)
        job = run.job
        place, known = (job.generation, job.version), self._known.get(job.job)
        if known is None or known[0] != place:
            parted = job.generation if measured[job.job].has_parted(run.plan) else None
            known = self._known[job.job] = place, JobPace(busy=busy_workers(run.plan), parted=parted)
        return known[1]


class Remeasuring:
    """Time since which each worker has rested from measuring, and the pause until it may measure again."""

    def __init__(self) -> None:
        self._pauses: dict[WorkerId, Backoff] = {}
        self._parted: dict[WorkerId, Generation | None] = {}

    def joined(self, worker: WorkerId, *, now: float) -> None:
        """Note that the worker has measured itself just now."""
        self._pauses[worker] = Backoff(FIRST_PAUSE_S)
        self._pauses[worker].happened(now=now)

    def lost(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self._pauses.pop(worker, None)
        self._parted.pop(worker, None)

    def is_due(self, worker: WorkerId, pace: JobPace, *, now: float) -> bool:
        """Whether this live worker should measure itself now."""
        pause = self._pauses.get(worker)
        has_rested = pause is not None and pause.may(now=now)
        before = self._parted.get(worker)
        if pace.parted not in (None, before) and (before is None or has_rested):
            self._parted[worker] = pace.parted
            return True
        return has_rested and not pace.is_at_work(worker)

    def asked(self, worker: WorkerId, *, now: float) -> None:
        """Note that the worker was asked to measure."""
        if worker in self._pauses:
            self._pauses[worker].happened(now=now)
