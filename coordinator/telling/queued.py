"""Metrics of jobs that wait, of what namespaces have of their quotas, and of what becomes of trials."""

from collections import Counter

from prometheus_client import CollectorRegistry, Gauge

from coordinator.telling.exporting import MAX_LABELS
from skein.protocol.coordinator.quotas import stored_by_namespace
from skein.protocol.coordinator.sweeping.deciding import SweepCourse, course_of
from skein.protocol.coordinator.sweeping.standing import TrialStand
from skein.protocol.coordinator.view import CoordinatorView
from skein.types import JobId

_STATES = ("waiting", "training", "trained", "ended early", "retired")


class QueueGauges:
    """Gauges that follow from the state of the moment; labels are those that have waited longest, or store most."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = Gauge("skein_queue_jobs", "Jobs that wait for workers", registry=registry)
        self._waiting = Gauge(
            "skein_queue_waiting_seconds", "So long a job has waited for workers", ["job"], registry=registry
        )
        self._quotas = Gauge(
            "skein_quota_used_ratio",
            "Share of a bounded quota that its namespace has",
            ["namespace", "quota"],
            registry=registry,
        )
        self._stored = Gauge(
            "skein_stored_bytes", "Checkpoints of a namespace's jobs", ["namespace"], registry=registry
        )

    def sample(self, view: CoordinatorView, *, now: float) -> None:
        """Take the state of the moment."""
        # Jobs that have ended wait for nothing, and to ask would read each of them from the shelf.
        queue = [job.job for job in view.history.queue()]
        since = {job: at for job in queue if (at := view.waits_since_s(job)) is not None}
        self._queue.set(len(since))
        self._waiting.clear()
        for job in sorted(since, key=lambda job: since[job])[:MAX_LABELS]:
            self._waiting.labels(job).set(max(0.0, now - since[job]))
        self._quotas.clear()
        self._stored.clear()
        for namespace, num_bytes in Counter(stored_by_namespace(view.history)).most_common(MAX_LABELS):
            self._stored.labels(namespace).set(num_bytes)
            for use in view.quotas.of(namespace):
                self._quotas.labels(namespace, use.quota).set(use.used / use.most)


class SweepGauges:
    """Gauges that follow from the state of the moment, of sweeps that have not ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._trials = Gauge(
            "skein_sweep_trials",
            "Trials of a sweep, by what became of them",
            ["job", "state"],
            registry=registry,
        )
        self._num_records = -1

    def sample(self, view: CoordinatorView) -> None:
        """Take the state of the moment, if anything was recorded since the last."""
        if view.history.num_records == self._num_records:
            return
        self._num_records = view.history.num_records
        self._trials.clear()
        for sweep in view.history.sweeps()[:MAX_LABELS]:
            self._show(sweep.job, course_of(sweep, view.history))

    def _show(self, job: JobId, course: SweepCourse) -> None:
        counts = Counter(map(_state, course.stands))
        # They wait for nothing any more.
        counts["ended early"] = len(course.ended)
        counts["waiting"] -= len(course.ended)
        for state in _STATES:
            self._trials.labels(job, state).set(counts[state])


def _state(stand: TrialStand) -> str:
    if stand.failure:
        return "retired"
    if stand.is_done:
        return "trained"
    return "training" if stand.is_at_work else "waiting"
