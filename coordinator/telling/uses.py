"""Gauges of what plans use of workers: holders of stages, activations at their peaks, shares without an op."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge

from coordinator.telling.exporting import MAX_LABELS, MAX_WORKERS
from coordinator.telling.status import Reported, with_told
from skein.plan.changing.leeway import settled
from skein.plan.clock.holding import WorkerUse, planned_uses
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.workers.probation import ExclusionCause
from skein.protocol.coordinator.view import RunView
from skein.types import JobId


class UseGauges:
    """Uses of the workers of active jobs. What is planned is reckoned once for each plan."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._holders = Gauge(
            "skein_stage_holders",
            "Workers that hold a stage, and how many the job asks for",
            ["job", "stage", "kind"],
            registry=registry,
        )
        self._excluded = Gauge(
            "skein_excluded_workers",
            "Workers that get no more work of a job for now, by cause: link, failure, lacking or proof",
            ["job", "cause"],
            registry=registry,
        )
        self._activations = Gauge(
            "skein_activation_bytes",
            "Activations at their peaks, as planned and as held in the newest step, reckoned by microbatches",
            ["job", "worker", "kind"],
            registry=registry,
        )
        self._bubble = Gauge(
            "skein_planned_bubble_ratio",
            "Share of the predicted step in which a worker runs no op",
            ["job", "worker"],
            registry=registry,
        )
        self._planned: dict[JobId, tuple[Plan, tuple[WorkerUse, ...]]] = {}

    def sample(self, runs: Iterable[RunView], reported: Reported) -> None:
        """Show the active jobs as they are now; nothing without any."""
        self._holders.clear()
        self._excluded.clear()
        self._activations.clear()
        self._bubble.clear()
        before, self._planned = self._planned, {}
        for run in runs:
            self._show_excluded(run)
            if run.plan is None:
                continue
            job, known = run.job.job, before.get(run.job.job)
            if known is None or known[0] is not run.plan:
                known = run.plan, planned_uses(run.plan, settled(run.job.spec, run.plan))
            self._planned[job] = known
            self._show_holders(run, run.plan)
            self._show(job, with_told(known[1][:MAX_WORKERS], reported))

    def _show_excluded(self, run: RunView) -> None:
        counts = Counter(exclusion.cause for exclusion in run.exclusions)
        for cause in ExclusionCause:
            self._excluded.labels(run.job.job, cause).set(counts[cause])

    def _show_holders(self, run: RunView, plan: Plan) -> None:
        for stage in plan.stages[:MAX_LABELS]:
            labels = run.job.job, str(stage.index)
            self._holders.labels(*labels, "held").set(len(plan.holders(stage.index)))
            self._holders.labels(*labels, "asked").set(run.job.spec.parallel.replicas)

    def _show(self, job: JobId, uses: Iterable[WorkerUse]) -> None:
        for use in uses:
            self._activations.labels(job, use.worker, "planned").set(use.planned_bytes)
            self._activations.labels(job, use.worker, "held").set(use.held_bytes)
            self._bubble.labels(job, use.worker).set(use.planned_bubble)
