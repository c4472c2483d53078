"""Status of jobs and workers as clients see it, made of the machine's state and the journal's rates."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import fmean

from coordinator.records.journal import Journal
from coordinator.telling.choices import choice_status
from coordinator.telling.trials import brief_sweep_status, sweep_status
from skein.config.job import ArrayJob, JobSpec
from skein.config.mesh.tensor import MOST_DEVICES
from skein.plan.changing.leeway import settled
from skein.plan.changing.redundancy import Shortfall, shortfalls
from skein.plan.changing.silent import busy_workers
from skein.plan.clock.holding import CollectiveUse, StageForm, WorkerUse, planned_uses
from skein.plan.pieces.collectives import LaneKind
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.view import CoordinatorView, RunView
from skein.protocol.membership.membership import Entry
from skein.topology.fleet import Fleet, Link
from skein.types import Generation, JobId, StageIndex, WorkerId
from skein.wire.views import ChunkTimes, JobKind, JobStatus, TransferTimes, WorkerState, WorkerStatus

MOST_CHARACTERS = 500
"""Limit on a job's reason, and on its plan's, in a list; `Get` has all of them."""
NUM_LOST = 64
"""So many lost workers are remembered."""


Reported = Callable[[str], Mapping[WorkerId, Mapping[str, float]]]
"""Newest values of a statistic that workers report, by worker and label."""


def nothing_reported(_: str) -> Mapping[WorkerId, Mapping[str, float]]:
    """No worker has told anything."""
    return {}


def job_status(
    view: CoordinatorView, journal: Journal, job: JobId, reported: Reported = nothing_reported
) -> JobStatus:
    """A job of the coordinator's history, now, with the times that its plan rests on and those that were measured."""
    status = _own_status(view, journal, job, reported)
    return status if view.history.jobs[job].spec.sweep is None else sweep_status(view, journal, status)


def _own_status(view: CoordinatorView, journal: Journal, job: JobId, reported: Reported) -> JobStatus:
    """Status of a job by its own records: of a sweep nothing that its arrays have come to."""
    history = view.history.jobs[job]
    rates, last, plan = journal.rates(job), history.last_commit, history.plan
    run = view.runs.get(job)
    checkpoint = history.newest_checkpoint
    evaluation = history.last_evaluation
    busiest, idlest = expert_loads(view.crew_of(job), reported)
    return JobStatus(
        job=job,
        name=history.spec.name,
        state=view.state_of(job),
        reason=view.reason_of(job),
        step=history.version,
        total_steps=history.total_steps,
        loss=None if last is None else last.loss,
        balance_loss=None if last is None else last.balance_loss,
        drop_ratio=None if last is None else last.drop_ratio,
        busiest_expert=None if last is None or last.balance_loss is None else busiest,
        idlest_expert=None if last is None or last.balance_loss is None else idlest,
        evaluation_loss=None if evaluation is None else evaluation.loss,
        num_tokens=history.num_tokens,
        num_late_samples=history.num_late_samples,
        tokens_per_s=rates.tokens_per_s,
        step_s=rates.step_s,
        generation=Generation(0) if plan is None else plan.generation,
        num_workers=len(view.crew_of(job)),
        checkpoint_version=None if checkpoint is None else checkpoint.version,
        submitted_wall_s=history.submitted_wall_s,
        spec=history.spec.canonical_json(),
        plan="" if plan is None else str(plan.plan.reason),
        predicted_step_s=0.0 if plan is None else plan.plan.predicted_step_s,
        lower_bound_s=0.0 if plan is None else plan.plan.lower_bound_s,
        num_incidents=len(history.incidents),
        num_steps_lost=sum(incident.num_steps_lost for incident in history.incidents),
        measured_step_s=None if job not in view.measured else view.measured[job].step_s,
        chunk_times=() if plan is None else chunk_times(plan.plan, view.measured.get(job)),
        transfer_times=() if plan is None else transfer_times(plan.plan, view.measured.get(job), view.links),
        predicted_spread=0.0 if plan is None else _spread(view, job, plan.plan),
        uses=() if plan is None or run is None else _uses(plan.plan, history.spec, reported),
        shortfalls=() if run is None else _shortfalls(view, run, history.spec),
        num_train_samples=0 if history.counted is None else history.counted.num_train_samples,
        waiting_since_wall_s=view.waits_since_s(job),
        namespace=history.namespace,
        quotas=view.quotas.of(history.namespace),
        quarantined=tuple(sorted(history.quarantined)),
        exclusions=() if run is None else run.exclusions,
        open_incident=None if run is None else run.open_incident,
        choice=choice_status(history),
        priority=history.spec.priority,
        kind=_kind(history.spec),
    )


def _kind(spec: JobSpec) -> JobKind:
    if spec.sweep is not None:
        return JobKind.SWEEP
    return JobKind.ARRAY if isinstance(spec, ArrayJob) else JobKind.TRAINING


def _spread(view: CoordinatorView, job: JobId, plan: Plan) -> float:
    """Largest spread of first measurements that the prediction of `plan` still rests on."""
    live, measured = view.live, view.measured.get(job)
    stages = {stage.index: stage for stage in plan.stages}
    known = {
        x.chunk.worker
        for x in plan.chunk_times
        if measured is not None and measured.chunk_time(x.chunk, stages[x.chunk.stage]) is not None
    }
    spreads = (live[worker].hello.profile.spread for worker in busy_workers(plan) - known if worker in live)
    return max(spreads, default=0.0)


def _uses(plan: Plan, spec: JobSpec, reported: Reported) -> tuple[WorkerUse, ...]:
    return with_told(planned_uses(plan, settled(spec, plan)), reported)


def _shortfalls(view: CoordinatorView, run: RunView, spec: JobSpec) -> tuple[Shortfall, ...]:
    """Shortfalls of an active job's plan, with the workers of it that could hold a stage if they had the memory."""
    entries = [view.live[worker] for worker in run.crew if worker in view.live]
    may_work = tuple(entry.fleet_worker for entry in entries if not entry.is_going)
    return () if run.plan is None else shortfalls(run.plan, spec, Fleet(workers=may_work, links=()))


def brief_status(
    view: CoordinatorView, journal: Journal, job: JobId, reported: Reported = nothing_reported
) -> JobStatus:
    """A job in a list: without its specification, and without a line for each chunk, link, stage and trial."""
    status, history = _own_status(view, journal, job, reported), view.history
    if history.jobs[job].spec.sweep is not None:
        totals = journal.totals.of(history.jobs[job], history)
        status = brief_sweep_status(view, journal, status, totals)
    return replace(
        status,
        spec="",
        plan=status.plan[:MOST_CHARACTERS],
        reason=status.reason[:MOST_CHARACTERS],
        chunk_times=(),
        transfer_times=(),
        shortfalls=(),
        uses=(),
        exclusions=(),
        open_incident=None,
        choice=None,
    )


def with_told(uses: Iterable[WorkerUse], reported: Reported) -> tuple[WorkerUse, ...]:
    """Uses of workers with what these told."""
    peaks, bubbles = reported("skein_worker_stage_peak_microbatches"), reported("skein_worker_bubble_ratio")
    return tuple(
        use.told(
            {StageIndex(int(x)): int(peak) for x, peak in peaks.get(use.worker, {}).items() if x.isdecimal()},
            bubbles.get(use.worker, {}).get(""),
            _collectives(use.worker, reported) if _shares_any(use, reported) else (),
            _forms(use.worker, reported),
        )
        for use in uses
    )


def _shares_any(use: WorkerUse, reported: Reported) -> bool:
    """Whether devices share a stage of the job; else collectives, counted since the worker began, are of others."""
    return any(x.num_devices > 1 and x.stage in use.stages for x in _forms(use.worker, reported))


def expert_tokens(crew: Iterable[WorkerId], reported: Reported) -> Mapping[int, Mapping[str, float]]:
    """Choices of each expert in the newest step, by layer; of many the most, the least and the mean.

    Replicas of a layer count together; where they tell of their busiest and idlest alone, as if these were the same.
    """
    told = reported("skein_worker_expert_tokens")
    by_layer: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for worker in crew:
        for label, value in told.get(worker, {}).items():
            layer, _, expert = label.partition("/")
            if layer.isdecimal():
                by_layer[int(layer)][expert] += value
    return by_layer


def expert_loads(crew: Iterable[WorkerId], reported: Reported) -> tuple[float | None, float | None]:
    """Choices of the busiest and of the idlest expert of any layer, over an even share; None: nobody has told."""
    loads = []
    for counts in expert_tokens(crew, reported).values():
        mean = counts["mean"] if "mean" in counts else fmean(counts.values())
        loads += [value / mean for value in counts.values()] if mean > 0 else []
    return (max(loads), min(loads)) if loads else (None, None)


def _collectives(worker: WorkerId, reported: Reported) -> tuple[CollectiveUse, ...]:
    """Collectives of a worker's mesh by kind; nothing of kinds that it had none of."""
    num, measured_s, predicted_s, num_fits = (
        reported(f"skein_worker_{name}_total").get(worker, {})
        for name in ("collectives", "collective_seconds", "collective_predicted_seconds", "collective_fits")
    )
    r_squared = reported("skein_worker_collective_fit_r_squared").get(worker, {})
    return tuple(
        CollectiveUse(
            kind=kind.value,
            num_collectives=int(num[kind.value]),
            predicted_s=predicted_s.get(kind.value, 0.0),
            measured_s=measured_s.get(kind.value, 0.0),
            num_fits=int(num_fits.get(kind.value, 0)),
            r_squared=r_squared.get(kind.value),
        )
        for kind in LaneKind
        if num.get(kind.value)
    )


def _forms(worker: WorkerId, reported: Reported) -> tuple[StageForm, ...]:
    """Forms of a worker's mesh, by stage; nothing of a worker with one device."""
    told = reported("skein_worker_stage_devices").get(worker, {})
    parts = ((*label.partition("/"), int(min(value, MOST_DEVICES))) for label, value in told.items())
    found = (
        StageForm(stage=StageIndex(int(stage)), form=form, num_devices=num_devices)
        for stage, _, form, num_devices in parts
        if stage.isdecimal()
    )
    return tuple(sorted(found, key=lambda x: x.stage))


def chunk_times(plan: Plan, measured: Measured | None) -> tuple[ChunkTimes, ...]:
    """Each chunk of a plan, planned and measured."""
    stages = {stage.index: stage for stage in plan.stages}
    return tuple(
        ChunkTimes(
            planned=planned,
            measured=None
            if measured is None
            else measured.chunk_time(planned.chunk, stages[planned.chunk.stage]),
        )
        for planned in plan.chunk_times
    )


def transfer_times(
    plan: Plan, measured: Measured | None, links: Mapping[tuple[WorkerId, WorkerId], Link]
) -> tuple[TransferTimes, ...]:
    """Each directed link that a plan sends boundary tensors over, planned and measured."""
    return tuple(
        TransferTimes(
            planned=planned,
            measured=None
            if measured is None
            else measured.transfer_time(planned.sender, planned.receiver, links),
        )
        for planned in plan.transfer_times
    )


class Roster:
    """Workers as clients see them; remembers the lost ones that the machine forgets, not those that meant to leave."""

    def __init__(self, machine: Coordinator) -> None:
        self._machine = machine
        self._seen: dict[WorkerId, Entry] = {}
        self._lost: OrderedDict[WorkerId, Entry] = OrderedDict()

    def look(self) -> None:
        """Notice who came and went; wanted now and then."""
        live = self._machine.view.live
        for worker in self._seen.keys() - live.keys():
            if not self._seen[worker].is_leaving:
                self._lost[worker] = self._seen[worker]
                self._lost.move_to_end(worker)
        for worker in self._lost.keys() & live.keys():
            del self._lost[worker]
        while len(self._lost) > NUM_LOST:
            self._lost.popitem(last=False)
        self._seen = dict(live)

    def workers(self, *, now: float) -> tuple[WorkerStatus, ...]:
        """Every worker, lost ones included, by id."""
        self.look()
        entries, view = {**self._lost, **self._seen}, self._machine.view
        jobs = {worker: run.job.job for run in view.runs.values() for worker in run.crew}
        stages, reached_by = _stages(view), _reached_by(view)
        return tuple(
            self._status(
                worker,
                entries[worker],
                stages=() if worker in self._lost else tuple(stages.get(worker, ())),
                job=jobs.get(worker),
                reached_by=tuple(sorted(reached_by.get(worker, ()))),
                now=now,
            )
            for worker in sorted(entries)
        )

    def _status(
        self,
        worker: WorkerId,
        entry: Entry,
        *,
        stages: tuple[StageIndex, ...],
        job: JobId | None,
        reached_by: tuple[WorkerId, ...],
        now: float,
    ) -> WorkerStatus:
        return WorkerStatus(
            worker=worker,
            site=entry.hello.site,
            address=entry.hello.address,
            state=self._state(worker, entry, has_work=bool(stages)),
            job=job if stages else None,
            profile=entry.hello.profile,
            stages=stages,
            beat_age_s=max(0.0, now - entry.heard_at),
            measured_age_s=max(0.0, now - entry.measured_at),
            offers_relay=entry.hello.offers_relay,
            labels=entry.hello.labels,
            offers=entry.hello.offers,
            reached_by=reached_by,
        )

    def _state(self, worker: WorkerId, entry: Entry, *, has_work: bool) -> WorkerState:
        if worker in self._lost:
            return WorkerState.LOST
        if entry.is_leaving:
            return WorkerState.DRAINING
        return WorkerState.WORKING if has_work else WorkerState.IDLE


def _stages(view: CoordinatorView) -> dict[WorkerId, list[StageIndex]]:
    """Stages that each worker holds by the plan of the run that it is with, in the order of the plan."""
    found: dict[WorkerId, list[StageIndex]] = defaultdict(list)
    for run in view.runs.values():
        crew = set(run.crew)
        for placed in () if run.plan is None else run.plan.chunks:
            if placed.chunk.worker in crew:
                found[placed.chunk.worker].append(placed.chunk.stage)
    return found


def _reached_by(view: CoordinatorView) -> dict[WorkerId, set[WorkerId]]:
    """Relays by which each worker is reached; its own name where it calls peers back, which dial it in vain."""
    found: dict[WorkerId, set[WorkerId]] = defaultdict(set)
    for (sender, receiver), relay in view.relays.items():
        # A worker calls back the peers that it dials: its relay is that peer itself.
        found[receiver].add(receiver if relay == sender else relay)
    return found
