"""Quotas of namespaces at work: how much there is of each, and who is refused because of them.

Rules of this file
- What is asked for is refused before anything comes of it, with how much there is and what to do. What was taken on
  goes on: workers above a quota are called away at the end of a step, and no step is lost for want of room.
- A checkpoint that steps do not wait for is not stored above the quota. One that a run waits for is: else steps would
  be lost, or workers held. Until there is room again its namespace submits nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from skein.config.explain import Words
from skein.config.job import JobSpec
from skein.config.quota import QuotasSpec, QuotaUse
from skein.errors import UserError
from skein.protocol.coordinator.runs.checkpoints.keeping import kept_with
from skein.protocol.log.history import History, JobHistory
from skein.types import JobId, Step

_MORE = "or ask the operator of the coordinator for a larger quota"


class OverQuotaError(UserError):
    """Request of a client that is beyond the quota of its namespace; later it may work."""


@dataclass(slots=True, kw_only=True)
class QuotaUses:
    """Quotas of a coordinator at one moment, and what their namespaces have of them; `crews` are sizes."""

    quotas: QuotasSpec
    history: History
    crews: Mapping[JobId, int]
    _known: dict[str, tuple[QuotaUse, ...]] = field(default_factory=dict)

    def of(self, namespace: str) -> tuple[QuotaUse, ...]:
        """Quotas of a namespace that have a bound; that of a job file, which is of one job alone, is none of these."""
        if namespace not in self._known:
            self._known[namespace] = tuple(self._uses(namespace))
        return self._known[namespace]

    def _uses(self, namespace: str) -> Iterator[QuotaUse]:
        quota = self.quotas.of(namespace)
        crews = Counter[JobId]()
        for job, num in self.crews.items():
            if self.history.jobs[job].namespace == namespace:
                # Arrays are no jobs of their own.
                crews[self.history.jobs[job].asked_as] += num
        if quota.workers is not None:
            yield QuotaUse(quota="workers", used=crews.total(), most=quota.workers)
        if quota.running_jobs is not None:
            running = sum(map(bool, crews.values()))
            yield QuotaUse(quota="running_jobs", used=running, most=quota.running_jobs)
        if quota.queued_jobs is not None:
            queue = [job for job in self.history.queue() if job.namespace == namespace]
            num_queued = sum(not crews[job.job] for job in queue)
            yield QuotaUse(quota="queued_jobs", used=num_queued, most=quota.queued_jobs)
        if quota.stored_bytes is not None:
            yield QuotaUse(
                quota="stored_bytes", used=stored_bytes(self.history, namespace), most=quota.stored_bytes
            )

    def check_submit(self, namespace: str, spec: JobSpec) -> None:
        """Returns if a namespace may submit a job now.

        Raises:
            OverQuotaError: it may not; naming quota, use, bound, and what to do.
        """
        self.check_queue(namespace)
        least, most = spec.resources.min_workers, self.quotas.of(namespace).workers
        if least is not None and most is not None and least > most:
            hint = f"namespace {namespace} may have {most} workers: give at most that, {_MORE}"
            raise OverQuotaError("resources.min_workers", least, hint)

    def check_queue(self, namespace: str) -> None:
        """Returns if one more job of a namespace may come into the queue.

        Raises:
            OverQuotaError: it may not.
        """
        for use in self.of(namespace):
            shown = Words(use.shown.partition(" ")[2])
            if use.quota == "queued_jobs" and use.used >= use.most:
                hint = f"so many jobs of namespace {namespace} wait already: cancel or pause some, {_MORE}"
                raise OverQuotaError("quota.queued_jobs", shown, hint)
            if use.quota == "stored_bytes" and use.used >= use.most:
                hint = f"so much is stored for namespace {namespace}: skein checkpoints delete, {_MORE}"
                raise OverQuotaError("quota.stored_bytes", shown, hint)

    def check_size(self, namespace: str, num_bytes: int) -> None:
        """Returns if a job file may be of that size.

        Raises:
            OverQuotaError: it may not.
        """
        most = self.quotas.of(namespace).job_bytes
        if most is not None and num_bytes > most:
            shown = Words(f"{num_bytes} of {most} bytes")
            hint = f"is the most that a job of namespace {namespace} may have: make it smaller, {_MORE}"
            raise OverQuotaError("quota.job_bytes", shown, hint)


def stored_bytes(history: History, namespace: str) -> int:
    """Bytes of the checkpoints of all jobs of a namespace."""
    resident = sum(job.stored_bytes for job in history.jobs.resident() if job.namespace == namespace)
    return resident + history.jobs.stored_shelved[namespace]


def stored_by_namespace(history: History) -> Mapping[str, int]:
    """Bytes of the checkpoints of all jobs, by the namespaces that have jobs."""
    found = Counter(history.jobs.stored_shelved)
    for job in history.jobs.resident():
        found[job.namespace] += job.stored_bytes
    return found


def stored_with(history: History, job: JobHistory, version: Step, num_bytes: int) -> int:
    """Bytes that the namespace of a job has stored once this has a checkpoint of that size, and older ones went."""
    kept = kept_with(job, version, history.jobs.resident())
    stay = sum(x.num_bytes for x in job.checkpoints if x.version in kept and x.version != version)
    others = stored_bytes(history, job.namespace) - job.stored_bytes
    return others + stay + num_bytes
