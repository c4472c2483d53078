"""Every metric of the coordinator; those that workers report with their beats are in `coordinator.telling.exporting`.

Rules of this file
- `skein_<noun>_<unit>[_total]`, SI base units. Labels are bounded: jobs to the newest, workers to the live ones, and a
  worker's statistics to the names of a table.
- What follows from records is counted from records, at replay too: a restart resets none of it.
- Setting happens on the event loop, reading on the threads of scrapes; what they share is replaced whole.
"""

import math
import shutil
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client import generate_latest as render_text

import skein
from coordinator.records.journal import Fold
from coordinator.telling.arrays import ArrayMetrics
from coordinator.telling.choices import ChoiceMetrics
from coordinator.telling.exporting import MAX_LABELS, MAX_WORKERS, StatisticsCollector, counts_by_name
from coordinator.telling.queued import QueueGauges, SweepGauges
from coordinator.telling.status import chunk_times
from coordinator.telling.uses import UseGauges
from skein.plan.plan import ChunkTime, Infeasible, Plan
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.view import CoordinatorView, RunView
from skein.protocol.log.incident import num_replayed
from skein.protocol.log.records import (
    Averaged,
    CheckpointChecked,
    CheckpointCommitted,
    CheckpointDeleted,
    CoresetChosen,
    DataCounted,
    Diverged,
    Drained,
    EpochOpened,
    Evaluated,
    GenerationOpened,
    HaltAsked,
    Incident,
    IncidentKind,
    JobEnded,
    JobHeld,
    JobResumed,
    JobSubmitted,
    PlanAdopted,
    Quarantined,
    Record,
    Remedy,
    RolledBack,
    StepCommitted,
    job_of_record,
)
from skein.protocol.messages.directives import Decision
from skein.protocol.messages.reports import Beat, EvaluationDone, Report
from skein.types import JobId, JobState, WorkerId
from skein.wire.relay.switchboard import Switchboard
from skein.wire.views import WorkerState, WorkerStatus

MAX_JOBS = 32
"""Older jobs' series end."""
STEP_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 300.0, 600.0)
INCIDENT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_APPEND_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_PLAN_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class _Disk(NamedTuple):
    total: float
    free: float


def _disk(folder: Path) -> _Disk:
    """Bytes of the disk that a folder is on; not numbers where it cannot be asked."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return _Disk(math.nan, math.nan)
    return _Disk(usage.total, usage.free)


Metric = TypeVar("Metric", Gauge, Counter, Histogram)


@dataclass(slots=True)
class _Job:
    """State of a job that is kept between records."""

    fold: Fold = field(default_factory=Fold)
    checkpoint_wall_s: float | None = None
    _series: dict[str, object] = field(default_factory=dict)

    def series(self, job: JobId, metric: Metric) -> Metric:
        """The job's series of a metric; `prometheus_client` takes longer to find it than to change it."""
        found = self._series.get(metric._name)
        if found is None:
            found = self._series[metric._name] = metric.labels(job)
        return cast("Metric", found)


class _Incidents:
    """Costs of failures, all jobs together. Every series is there from the start: no failure is a 0, not a gap."""

    def __init__(self, registry: CollectorRegistry) -> None:
        new_counter = partial(Counter, registry=registry)
        self._total = new_counter(
            "skein_incidents_total",
            "Failures that are over, by what failed and what was done",
            ["kind", "remedy"],
        )
        self._seconds = Histogram(
            "skein_incident_seconds",
            "From the notice of a failure until work went on",
            ["kind"],
            buckets=INCIDENT_BUCKETS,
            registry=registry,
        )
        self._steps_lost = new_counter(
            "skein_incident_steps_lost_total", "Committed steps that incidents cost"
        )
        self._samples = new_counter("skein_samples_repeated_total", "Samples computed again after failures")
        self._replayed = new_counter(
            "skein_contributions_replayed_total",
            "Contributions (one microbatch, one stage) that were lost and computed again",
        )
        self._rerouted = new_counter("skein_hops_rerouted_total", "Hops given to another worker by failures")
        self.metrics: tuple[Recorded, ...] = (
            self._total,
            self._seconds,
            self._steps_lost,
            self._samples,
            self._replayed,
            self._rerouted,
        )
        for kind in IncidentKind:
            self._seconds.labels(kind)
            for remedy in Remedy:
                self._total.labels(kind, remedy)

    def ended(self, incident: Incident) -> None:
        """An incident is recorded."""
        self._total.labels(incident.kind, incident.remedy).inc()
        self._seconds.labels(incident.kind).observe(incident.seconds)
        self._steps_lost.inc(incident.num_steps_lost)
        self._samples.inc(incident.num_samples_repeated)
        self._replayed.inc(num_replayed(incident))
        self._rerouted.inc(incident.num_rerouted)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesValue:
    """Values of one series: of a counter or a gauge one; of a histogram its buckets', each by itself, and their sum."""

    metric: str
    labels: tuple[str, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsState:
    """Metrics that follow from records, as a snapshot of the run log has them. Jobs are the newest, oldest first."""

    series: tuple[SeriesValue, ...]
    jobs: tuple[tuple[JobId, float | None], ...]
    """Jobs with series, and when the newest checkpoint of each was complete."""
    retired_rows: Mapping[JobId, frozenset[int]]
    seen_rows: Mapping[JobId, Mapping[int, bytes]]


Recorded = Gauge | Counter | Histogram


def _children(metric: Recorded) -> list[tuple[tuple[str, ...], Recorded]]:
    """The series of a metric by their labels; `prometheus_client` has no public way to ask for them."""
    if not metric._labelnames:
        return [((), metric)]
    return [(tuple(labels), cast("Recorded", child)) for labels, child in metric._metrics.items()]


def _values(series: Recorded) -> tuple[float, ...]:
    if isinstance(series, Histogram):
        return (*(bucket.get() for bucket in series._buckets), series._sum.get())
    return (series._value.get(),)


def _set_values(series: Recorded, values: Sequence[float]) -> None:
    cells = [*series._buckets, series._sum] if isinstance(series, Histogram) else [series._value]
    for cell, value in zip(cells, values, strict=True):
        cell.set(value)


class CoordinatorMetrics:
    """Metrics of one coordinator; a `Meter` for the driver."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        new_gauge, new_counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        new_histogram = partial(Histogram, registry=registry)
        self._statistics = StatisticsCollector()
        registry.register(self._statistics)
        self._jobs: OrderedDict[JobId, _Job] = OrderedDict()
        self._counts: dict[WorkerId, Mapping[str, Mapping[str, float]]] = {}
        self._leased: set[WorkerId] = set()
        self._scores: dict[WorkerId, float] = {}
        self._per_job: list[Gauge | Counter | Histogram] = []
        # --- jobs ---
        self._loss = self._gauge("skein_loss_nats", "Training loss of the newest step, per token")
        self._evaluation_loss = self._gauge("skein_evaluation_loss_nats", "Validation loss, per token")
        self._gradient_norm = self._gauge("skein_gradient_norm", "Global norm of the newest gradient")
        self._balance = self._gauge("skein_balance_loss", "Mean of sparse layers; 1: experts are used evenly")
        self._drop_ratio = self._gauge("skein_dropped_choices_ratio", "Share of choices that are dropped")
        self._learning_rate = self._gauge("skein_learning_rate", "Learning rate of the newest step")
        self._throughput = self._gauge("skein_throughput_tokens_per_second", "Tokens trained on, smoothed")
        self._version = self._gauge("skein_version_steps", "Committed steps that count")
        self._predicted = self._gauge("skein_predicted_step_seconds", "What the plan expects of a step")
        self._lower_bound = self._gauge("skein_lower_bound_step_seconds", "No plan could be faster")
        self._choices = ChoiceMetrics(self._gauge, self._counter)
        retired = new_counter("skein_array_retired_rows_total", "Rows that were retired", ["reason"])
        self._arrays = ArrayMetrics(self._gauge, retired)
        self._plan_step = new_gauge(
            "skein_plan_step_seconds",
            "A step as the plan has it, and the median of the last ones",
            ["job", "kind"],
        )
        self._stage_op = new_gauge(
            "skein_stage_op_seconds",
            "An op for one microbatch as the plan has it and as measured, mean over a stage's holders",
            ["job", "stage", "op", "kind"],
        )
        self._uses = UseGauges(registry)
        self._timed: dict[JobId, set[tuple[str, ...]]] = {}
        self._checkpoint_age = self._gauge("skein_checkpoint_age_seconds", "Since the newest checkpoint")
        self._probe_score = new_gauge(
            "skein_probe_score_nats",
            "Loss on the probe batch, per token, by the worker of the walker's head",
            ["walker"],
        )
        self._tokens = self._counter("skein_trained_tokens_total", "Tokens trained on")
        self._late_samples = self._counter(
            "skein_late_samples_total", "Samples left out of steps whose walkers were late"
        )
        self._steps = self._counter(
            "skein_committed_steps_total", "Committed steps, rolled back ones included"
        )
        self._skipped = self._counter("skein_skipped_steps_total", "Steps whose gradient was not applied")
        self._generations = self._counter("skein_generations_total", "Plans put into place")
        self._checkpoints = self._counter("skein_checkpoints_total", "Checkpoints completed")
        self._damaged = self._counter(
            "skein_checkpoints_damaged_total", "Checkpoints that were found damaged and set aside"
        )
        self._rollbacks = self._counter("skein_rollbacks_total", "Returns to an older version")
        self._lost_steps = self._counter("skein_rolled_back_steps_total", "Steps given up by rollbacks")
        self._divergences = self._counter("skein_divergences_total", "Times that training learned no more")
        self._quarantined = self._counter(
            "skein_quarantined_workers_total", "Workers that were shown to contribute wrongly"
        )
        self._step_seconds = new_histogram(
            "skein_step_seconds", "From one commit to the next", ["job"], buckets=STEP_BUCKETS
        )
        self._per_job.append(self._step_seconds)
        self._incidents = _Incidents(registry)
        # --- the coordinator ---
        self._jobs_by_state = new_gauge("skein_jobs", "Jobs, by state", ["state"])
        self._queue = QueueGauges(registry)
        self._sweeps = SweepGauges(registry)
        self._workers = new_gauge("skein_workers", "Workers, by state", ["state"])
        self._lease = new_gauge("skein_lease_remaining_seconds", "Until a worker counts as lost", ["worker"])
        self._generation = new_gauge("skein_generation_number", "Of the newest plan")
        self._epoch = new_gauge("skein_epoch_number", "Openings of the run log")
        self._leads = new_gauge(
            "skein_coordinator_is_leader", "1 where this coordinator leads, 0 while it stands by"
        )
        self._relayed = new_gauge(
            "skein_relayed_links", "Directed links of workers that take a relay, by what carries", ["relay"]
        )
        self._relay_bytes = new_counter("skein_relay_bytes_total", "Bytes that this host carried for workers")
        self._relay_connections = new_gauge(
            "skein_relay_connections", "Connections of workers that this host carries now"
        )
        self._num_relayed = 0
        self._streams = new_gauge("skein_control_streams", "Control streams that are open")
        self._unaware = new_gauge(
            "skein_workers_unaware_of_standby",
            "Workers that have no stream, and so cannot be told of a standby that is there",
        )
        self._lag = new_gauge("skein_event_loop_lag_seconds", "How late a timer fired")
        self._append_seconds = new_histogram(
            "skein_run_log_append_seconds", "Until a turn's records were durable", buckets=_APPEND_BUCKETS
        )
        self._entries = new_counter("skein_run_log_entries_total", "Records in the run log")
        self._plan_seconds = new_histogram(
            "skein_plan_seconds", "Until the planner answered", buckets=_PLAN_BUCKETS
        )
        self._plans = new_counter("skein_plans_total", "Answers of the planner", ["result"])
        self._rpc_errors = new_counter(
            "skein_rpc_errors_total", "Calls that were refused", ["method", "reason"]
        )
        self._free = new_gauge("skein_state_free_bytes", "Room left on the disk of the state directory")
        self._size = new_gauge("skein_state_size_bytes", "Size of that disk")
        self._certificates = new_gauge(
            "skein_certificate_left_seconds", "For how long certificates count", ["role", "name"]
        )
        info = new_gauge("skein_build_info", "1", ["release", "protocol"])
        info.labels(skein.__version__, str(skein.PROTOCOL_VERSION)).set(1)

    def _gauge(self, name: str, about: str) -> Gauge:
        gauge = Gauge(name, about, ["job"], registry=self._registry)
        self._per_job.append(gauge)
        return gauge

    def _counter(self, name: str, about: str) -> Counter:
        counter = Counter(name, about, ["job"], registry=self._registry)
        self._per_job.append(counter)
        return counter

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return render_text(self._registry)

    def watch_disk(self, state_dir: Path) -> None:
        """Show how much room the disk of the state directory has, looked up on the threads that make pages."""
        self._free.set_function(lambda: _disk(state_dir).free)
        self._size.set_function(lambda: _disk(state_dir).total)

    # --- snapshots ---

    def kept(self) -> MetricsState:
        """All that follows from records so far."""
        series = [
            SeriesValue(metric=metric._name, labels=labels, values=_values(child))
            for metric in self._from_records()
            for labels, child in _children(metric)
        ]
        return MetricsState(
            series=tuple(series),
            jobs=tuple((job, kept.checkpoint_wall_s) for job, kept in self._jobs.items()),
            retired_rows=self._arrays.kept(),
            seen_rows=self._choices.kept(),
        )

    def recall(self, state: MetricsState, fold_of: Callable[[JobId], Fold]) -> None:
        """Begin with what a snapshot has; `fold_of` gives a fold of a job's events that no other object changes."""
        metrics = {metric._name: metric for metric in self._from_records()}
        for found in state.series:
            metric = metrics[found.metric]
            _set_values(metric.labels(*found.labels) if found.labels else metric, found.values)
        for job, wall_s in state.jobs:
            self._jobs[job] = _Job(fold=fold_of(job), checkpoint_wall_s=wall_s)
        self._arrays.recall(state.retired_rows)
        self._choices.recall(state.seen_rows)

    def _from_records(self) -> list[Recorded]:
        return [
            *self._per_job,
            self._plan_step,
            self._entries,
            *self._arrays.counters,
            *self._incidents.metrics,
        ]

    # --- what happened ---

    def appended(self, records: Sequence[Record], seconds: float) -> None:
        """Count records that became durable in one append, and its seconds."""
        self._append_seconds.observe(seconds)
        self.recorded(records)

    def planned(self, result: Plan | Infeasible, seconds: float) -> None:
        """The planner answered."""
        self._plan_seconds.observe(seconds)
        self._plans.labels("infeasible" if isinstance(result, Infeasible) else "plan").inc()

    def heard(self, worker: WorkerId, report: Report) -> None:
        """A worker reported."""
        if isinstance(report, Beat) and report.statistics:
            self._counts[worker] = counts_by_name(report.statistics)
        if isinstance(report, EvaluationDone) and report.phase.scores_walkers and report.num_tokens:
            self._scores[worker] = report.loss_sum / report.num_tokens

    def reported(self, name: str) -> Mapping[WorkerId, Mapping[str, float]]:
        """Newest values of a statistic, by worker and label."""
        return {worker: counts[name] for worker, counts in self._counts.items() if name in counts}

    def led(self) -> None:
        """Note that this coordinator leads from now on."""
        self._leads.set(1)

    def refused(self, method: str, reason: str) -> None:
        """A call failed."""
        self._rpc_errors.labels(method, reason).inc()

    def recorded(self, records: Iterable[Record]) -> None:
        """Count records that are in the run log; from `appended`, or from replay."""
        for record in records:
            self._entries.inc()
            job = job_of_record(record)
            if job is not None:
                kept = self._kept(job)
                _ = kept.fold.take(record)
                self._of_job(job, kept, record)

    def _of_job(self, job: JobId, kept: _Job, record: Record) -> None:
        match record:
            case StepCommitted():
                self._stepped(job, kept, record)
            case Evaluated():
                self._evaluation_loss.labels(job).set(record.loss)
            case CoresetChosen():
                self._choices.chosen(record)
            case PlanAdopted():
                self._predicted.labels(job).set(record.plan.predicted_step_s)
                self._plan_step.labels(job, "planned").set(record.plan.predicted_step_s)
                self._lower_bound.labels(job).set(record.plan.lower_bound_s)
            case GenerationOpened():
                self._generations.labels(job).inc()
            case CheckpointCommitted():
                self._checkpoints.labels(job).inc()
                kept.checkpoint_wall_s = record.wall_s
            case CheckpointChecked():
                self._damaged.labels(job).inc(not record.is_whole)
            case RolledBack():
                self._rollbacks.labels(job).inc()
                self._lost_steps.labels(job).inc(record.from_version - record.to_version)
                self._version.labels(job).set(record.to_version)
            case Diverged():
                self._divergences.labels(job).inc()
            case Quarantined():
                self._quarantined.labels(job).inc()
            case Incident():
                self._incidents.ended(record)
            case JobEnded() | JobHeld():
                kept.checkpoint_wall_s = None
                self._throughput.labels(job).set(0)
            case (
                EpochOpened()
                | JobSubmitted()
                | Drained()
                | Averaged()
                | HaltAsked()
                | CheckpointDeleted()
                | JobResumed()
                | DataCounted()
            ):
                pass

    def _stepped(self, job: JobId, kept: _Job, record: StepCommitted) -> None:
        step, fold, of = record.record, kept.fold, partial(kept.series, job)
        of(self._steps).inc()
        if step.decision is not Decision.APPLY:
            of(self._skipped).inc()
        of(self._version).set(step.step + 1)
        of(self._tokens).inc(step.num_tokens)
        of(self._late_samples).inc(step.num_late_samples)
        of(self._loss).set(step.loss)
        of(self._gradient_norm).set(step.gradient_norm)
        if step.balance_loss is not None:
            of(self._balance).set(step.balance_loss)
        if step.drop_ratio is not None:
            of(self._drop_ratio).set(step.drop_ratio)
        if step.array is not None:
            self._arrays.rounded(job, step.array)
        of(self._learning_rate).set(step.learning_rate)
        of(self._throughput).set(fold.tokens_per_s)
        if fold.last_step_s is not None:
            of(self._step_seconds).observe(fold.last_step_s)

    def _kept(self, job: JobId) -> _Job:
        if job not in self._jobs:
            self._jobs[job] = _Job()
            for counter in (
                self._steps,
                self._tokens,
                self._checkpoints,
                self._damaged,
                self._rollbacks,
                self._generations,
                self._divergences,
                self._quarantined,
            ):
                counter.labels(job)
            if len(self._jobs) > MAX_JOBS:
                oldest, _ = self._jobs.popitem(last=False)
                for metric in self._per_job:
                    metric.remove(oldest)
                self._show_stages(oldest, {})
                self._choices.forget(oldest)
                self._arrays.forget(oldest)
                for kind in ("planned", "measured"):
                    self._plan_step.remove(oldest, kind)
        return self._jobs[job]

    # --- what is ---

    def sample(
        self,
        view: CoordinatorView,
        workers: Sequence[WorkerStatus],
        *,
        relay: Switchboard,
        num_streams: int,
        num_unaware: int,
        lag_s: float,
        now: float,
    ) -> None:
        """Take the state of the moment; wanted every second or so."""
        history, live = view.history, view.live
        self._epoch.set(history.epoch)
        self._generation.set(history.generation)
        self._streams.set(num_streams)
        self._unaware.set(num_unaware)
        self._sample_relays(view, relay)
        self._lag.set(lag_s)
        states = Counts(history.jobs.num_shelved)
        states.update(view.state_of(job.job) for job in history.jobs.resident() if job.sweep is None)
        for state in JobState:
            self._jobs_by_state.labels(state).set(states[state])
        self._queue.sample(view, now=now)
        self._sweeps.sample(view)
        _set_by_state(self._workers, WorkerState, [worker.state for worker in workers])
        leased = sorted(live)[:MAX_WORKERS]
        for worker in leased:
            self._lease.labels(worker).set(max(0.0, live[worker].lease_until - now))
        for worker in self._leased.difference(leased):
            self._lease.remove(worker)
        self._leased = set(leased)
        self._sample_scores(live)
        for run in view.runs.values():
            self._sample_times(run, view.measured[run.job.job])
        self._uses.sample(view.runs.values(), self.reported)
        self._counts = {worker: counts for worker, counts in self._counts.items() if worker in live}
        self._statistics.counts_by_worker = self._counts
        for job, kept in self._jobs.items():
            if kept.checkpoint_wall_s is not None:
                self._checkpoint_age.labels(job).set(max(0.0, now - kept.checkpoint_wall_s))

    def show_certificates(self, left_s: Mapping[tuple[str, str], float]) -> None:
        """Show for how long certificates count, by role and name."""
        self._certificates.clear()
        for labels in sorted(left_s)[:MAX_WORKERS]:
            self._certificates.labels(*labels).set(left_s[labels])

    def _sample_relays(self, view: CoordinatorView, relay: Switchboard) -> None:
        """Relays that carry, and what this host carried."""
        self._relayed.clear()
        # Whoever is dialled by the other calls it back: nobody carries for the two.
        carriers = (relay for (sender, _), relay in view.relays.items() if relay != sender)
        for carrier, num in Counts(carriers).most_common(MAX_WORKERS):
            self._relayed.labels(carrier or "coordinator").set(num)
        self._relay_connections.set(relay.num_connections)
        self._relay_bytes.inc(relay.num_bytes - self._num_relayed)
        self._num_relayed = relay.num_bytes

    def _sample_scores(self, live: Collection[WorkerId]) -> None:
        """The newest scores of walkers whose heads' workers are here."""
        self._scores = {worker: score for worker, score in self._scores.items() if worker in live}
        self._probe_score.clear()
        for worker in sorted(self._scores)[:MAX_WORKERS]:
            self._probe_score.labels(worker).set(self._scores[worker])

    def _sample_times(self, run: RunView, measured: Measured) -> None:
        """Planned and measured times of an active job."""
        if run.plan is None:
            return
        job = run.job.job
        if measured.step_s is not None:
            self._plan_step.labels(job, "measured").set(measured.step_s)
        values: dict[tuple[str, ...], list[float]] = {}
        for times in chunk_times(run.plan, measured):
            if times.planned.chunk.stage >= MAX_LABELS:
                continue
            for kind, time in (("planned", times.planned), ("measured", times.measured)):
                for op, seconds in () if time is None else _ops(time):
                    values.setdefault((str(times.planned.chunk.stage), op, kind), []).append(seconds)
        self._show_stages(job, {labels: fmean(found) for labels, found in values.items()})

    def _show_stages(self, job: JobId, values: Mapping[tuple[str, ...], float]) -> None:
        for labels, value in values.items():
            self._stage_op.labels(job, *labels).set(value)
        for labels in self._timed.pop(job, set()) - values.keys():
            self._stage_op.remove(job, *labels)
        if values:
            self._timed[job] = set(values)


def _ops(time: ChunkTime) -> Iterator[tuple[str, float]]:
    """The ops that there are."""
    for op, seconds in (("forward", time.forward_s), ("backward", time.backward_s), ("loss", time.loss_s)):
        if seconds > 0:
            yield op, seconds


def _set_by_state(gauge: Gauge, states: Iterable[str], found: Sequence[str]) -> None:
    for state in states:
        gauge.labels(state).set(sum(1 for one in found if one == state))
