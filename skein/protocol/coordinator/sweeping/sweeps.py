"""Sweeps: which arrays of theirs are to be made, and what becomes of a sweep once all have come to rest.

Rules of this file
- What is to be done follows from the records alone, so a coordinator that starts again goes on where the last was.
- As many arrays are begun as workers are here, and a few more, so that no worker waits for a decision; what is left
  is packed when it is their turn, for the workers of that time.
- Arrays are packed anew where workers come, go or have none, and where rows are retired: they end with their rounds,
  and their rows are due like any others. Nothing else begins until they have, unless a worker would wait for them.
- A sweep has no run. It ends, or is held, when all its arrays have.
"""

from collections.abc import Mapping, Sequence
from math import ceil

from skein.config.job import ArrayJob, JobSpec
from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec
from skein.config.sweep.trials import SweepTrial
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible
from skein.plan.sweeping.fitting import array_bytes
from skein.plan.sweeping.packing import packed, parting, round_steps, row_seconds, unmeasured_steps
from skein.protocol.coordinator import lifecycle
from skein.protocol.coordinator.coordinator_io import CancelAsked, Outbox, PauseAsked, ResumeAsked
from skein.protocol.coordinator.quotas import QuotaUses
from skein.protocol.coordinator.runs.phase import GatherPhase
from skein.protocol.coordinator.runs.run import Run
from skein.protocol.coordinator.scheduling.scheduler import Scheduler
from skein.protocol.coordinator.sweeping.anew import chosen_anew
from skein.protocol.coordinator.sweeping.deciding import SweepCourse, course_of, progress_words
from skein.protocol.coordinator.sweeping.measured import is_off, measured_bytes, measured_row_s
from skein.protocol.coordinator.sweeping.pruning import spare_checkpoints
from skein.protocol.coordinator.sweeping.standing import TrialStand, asked_of
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import HaltAsked, JobEnded, JobHeld, JobResumed, JobSubmitted
from skein.protocol.membership.membership import Entry
from skein.topology.fleet import Fleet
from skein.types import DEFAULT_NAMESPACE, JobId, JobState, WorkerId
from skein.units import counted

_NUM_AHEAD = 2
"""Arrays that wait, so that a worker whose array has ended finds another."""
_HALTED = (JobState.HELD, JobState.CANCELLED)
"""States that an array comes to with its sweep only."""
_SETTLE_S = 2.0
"""Seconds after a worker has come in which others may, before trials are shared out among them."""


class Sweeps:
    """Sweeps of a coordinator.

    Args:
        live: its workers.
        scheduler: knows the runs of all jobs, and which workers are whose.
        outbox: for what is decided.
    """

    def __init__(self, live: Mapping[WorkerId, Entry], scheduler: Scheduler, outbox: Outbox) -> None:
        self._live = live
        self._scheduler = scheduler
        self._runs: Mapping[JobId, Run] = scheduler.runs
        self._out = outbox
        self._seen = (-1, -1)
        self._settles_at: float | None = None
        """Time at which workers are counted that come one after the other; None: all are."""

    def look(self, *, now: float) -> bool:
        """Begin arrays that are due, and end sweeps that are over; whether anything was recorded."""
        history = self._out.history
        num_records = history.num_records
        if len(self._live) > self._seen[1] >= 0 and self._settles_at is None:
            # Whoever comes and goes all the time keeps nobody waiting for longer.
            self._settles_at = now + _SETTLE_S
        has_settled = self._settles_at is not None and now >= self._settles_at
        if has_settled:
            self._settles_at = None
        # At almost every event no job has begun or ended, and nobody came.
        while has_settled or self._seen != (history.num_turns, len(self._live)):
            self._seen, has_settled = (history.num_turns, len(self._live)), False
            for sweep in history.sweeps():
                self._go_on(sweep, now=now)
        return history.num_records > num_records

    def deadline(self) -> float | None:
        """Time at which `look` is wanted next; None: it is not."""
        return self._settles_at if self._out.history.sweeps() else None

    def _go_on(self, sweep: JobHistory, *, now: float) -> None:
        for array, versions in spare_checkpoints(sweep, self._out.history):
            lifecycle.drop_checkpoints(array, versions, self._out, now=now)
        active = self._active(sweep)
        if sweep.halt is not None:
            self._halt(sweep, active, now=now)
            return
        # A coordinator may have died when it had recorded that the sweep goes on, and not of all its arrays.
        if self._resume_arrays(sweep, _HALTED, now=now):
            active = self._active(sweep)
        is_settling = not self._live or self._settles_at is not None
        if active and (is_settling or self._waits_for_rounds(active)):
            return
        course = course_of(sweep, self._out.history)
        num_wanted = len(self._workers(sweep)) + _NUM_AHEAD - len(active)
        if course.due and is_settling:
            return  # Rows are shared out among all who are here.
        if self._pack_anew(sweep, active, course, now=now):
            return
        if course.due and (num_wanted > 0 or not active):
            self._begin_due(sweep, course, most=max(1, num_wanted), now=now)
        elif not course.due and not active:
            self._end(sweep, course, now=now)

    def _waits_for_rounds(self, active: Sequence[JobHistory]) -> bool:
        """Whether rows of arrays are to be packed with others once their rounds are over."""
        return any(array.ends_with_round and not self._waits(array.job) for array in active)

    def _waits(self, array: JobId) -> bool:
        """Whether no worker has an array."""
        run = self._runs.get(array)
        return run is None or isinstance(run.phase, GatherPhase)

    def _pack_anew(
        self, sweep: JobHistory, active: Sequence[JobHistory], course: SweepCourse, *, now: float
    ) -> bool:
        """Have arrays end with their rounds whose rows are better packed otherwise; whether there are any."""
        chosen, reason = chosen_anew(
            active,
            [array.job for array in active if self._waits(array.job)],
            course,
            num_spare=self._scheduler.spare(sweep),
            most_rows=asked_of(sweep).most_rows,
        )
        if not chosen and asked_of(sweep).round_steps is None:
            off = [x for x in active if x.halt is None and is_off(x, course.stands[x.trials[0]])]
            chosen, reason = (
                tuple(x.job for x in off),
                "its rounds take much longer or shorter than they should",
            )
        for job in chosen:
            array, run = self._out.history.jobs[job], self._runs.get(job)
            lifecycle.round_end_asked(array, run, reason, self._out, now=now)
        return bool(chosen)

    def _begin_due(self, sweep: JobHistory, course: SweepCourse, *, most: int, now: float) -> None:
        """Begin so many arrays of those that are due; those that have come farthest go first, beside each other."""
        by_end: dict[tuple[int, int], list[TrialStand]] = {}
        for advance in course.due:
            stand = course.stands[advance.trial]
            # Rows that are asked for one choice are at one step.
            least = stand.num_steps_saved if stand.trial.job.data.coreset.is_shared else 0
            by_end.setdefault((advance.num_steps, least), []).append(stand)
        # Whoever has something to do keeps it.
        num_spare = self._scheduler.spare(sweep)
        num_workers = num_spare if num_spare > 0 else len(self._workers(sweep))
        for (last_step, _), stands in sorted(by_end.items(), reverse=True):
            share = ceil(num_workers * len(stands) / len(course.due))
            stands.sort(key=lambda stand: -stand.num_steps_saved)
            for trials in self._packed(sweep, stands, num_workers=share):
                if most:
                    most -= 1
                    own = [course.stands[trial.number] for trial in trials]
                    self._begin(sweep, own, last_step, now=now)

    def _packed(
        self, sweep: JobHistory, stands: Sequence[TrialStand], *, num_workers: int
    ) -> tuple[tuple[SweepTrial, ...], ...]:
        trials = [stand.trial for stand in stands]
        return packed(trials, most_rows=asked_of(sweep).most_rows, num_workers=num_workers)

    def _active(self, sweep: JobHistory) -> list[JobHistory]:
        """Arrays that have not come to rest."""
        arrays = (self._out.history.jobs[job] for job in sweep.arrays)
        return [array for array in arrays if not array.is_at_rest]

    def _workers(self, sweep: JobHistory) -> list[Entry]:
        """Workers that arrays are made for: those that may have one, or all where none may, and arrays say why."""
        return [self._live[worker] for worker in self._scheduler.usable(sweep)] or list(self._live.values())

    def _begin(self, sweep: JobHistory, stands: Sequence[TrialStand], last_step: int, *, now: float) -> None:
        """Begin an array of these trials, or of the first of them if no worker has memory for all."""
        num_wanted = len(stands)
        while True:
            spec = self._array(sweep, stands, last_step)
            if len(stands) == 1 or self._fits(sweep, stands[0], spec):
                break
            stands = stands[: ceil(len(stands) / 2)]
        job = JobId(f"{sweep.job}-a{len(sweep.arrays) + 1}")
        if len(stands) < num_wanted:
            fewer = f"{job} has {counted(len(stands), 'row')} of {num_wanted}: no worker has memory for more"
            self._out.log(fewer, job=sweep.job)
        submitted = JobSubmitted(
            job=job,
            key=job,
            spec=spec.canonical_json(),
            wall_s=now,
            namespace="" if sweep.namespace == DEFAULT_NAMESPACE else sweep.namespace,
            sweep=sweep.job,
            trials=tuple(stand.trial.number for stand in stands),
        )
        self._out.record(submitted)
        named = ", ".join(str(stand.trial.number) for stand in stands)
        self._out.log(f"begins {job} with trials {named}, to step {last_step}", job=sweep.job)

    def _array(self, sweep: JobHistory, stands: Sequence[TrialStand], last_step: int) -> JobSpec:
        """The job that an array is; of a trial that nothing is compared with on the way, its own."""
        asked, trial = asked_of(sweep), stands[0].trial.job
        if asked.search != "hyperband" and len(stands) == 1 and stands[0].origin is None:
            return _alone(trial)
        array = ArraySpec(
            rows=tuple(map(_row, stands)),
            first_step=min(stand.num_steps_saved for stand in stands),
            last_step=last_step,
            schedule_steps=trial.total_steps,
            fuse=asked.fuse,
            min_speedup=asked.min_speedup,
            on_divergence="rewind" if trial.on_divergence == "rewind" else "retire",
        )
        steps = asked.round_steps or self._round_steps(sweep, stands, array.num_steps)
        return array_job(trial, array, round_steps=min(steps, array.num_steps))

    def _round_steps(self, sweep: JobHistory, stands: Sequence[TrialStand], num_steps: int) -> int:
        """Steps of a round of these trials, by what rows like them have taken, if they were measured."""
        trial = stands[0].trial
        measured = measured_row_s(sweep, parting(trial), self._out.history)
        speeds = [entry.hello.profile.flops_per_s for entry in self._workers(sweep)]
        row_s = measured or row_seconds(trial.job, flops_per_s=max(speeds))
        num_rows = len(stands)
        steps = round_steps(
            trial.job, num_rows=num_rows, num_saved=num_rows, num_steps=num_steps, row_s=row_s
        )
        return steps if measured else min(steps, unmeasured_steps(num_steps))

    def _fits(self, sweep: JobHistory, stand: TrialStand, spec: JobSpec) -> bool:
        """Whether the roomiest worker has memory for an array, as reckoned and as rows like its were measured."""
        workers = (entry.fleet_worker for entry in self._workers(sweep))
        roomiest = max(workers, key=lambda x: x.profile.memory_bytes)
        made = make_balanced_plan(spec, Fleet(workers=(roomiest,), links=()), None, 0)
        if isinstance(made, Infeasible) or not isinstance(spec, ArrayJob):
            return not isinstance(made, Infeasible)
        measured = measured_bytes(sweep, parting(stand.trial), self._out.history)
        return array_bytes(spec, measured) <= roomiest.profile.memory_bytes

    def _end(self, sweep: JobHistory, course: SweepCourse, *, now: float) -> None:
        failures = [stand for stand in course.stands if stand.failure]
        if len(failures) == len(course.stands):
            first = failures[0]
            reason = f"no trial could be trained; trial {first.trial.number}: {first.failure}"
            state = JobState.FAILED
        else:
            reason, state = progress_words(course, sweep), JobState.FINISHED
        self._out.record(JobEnded(job=sweep.job, state=state, reason=reason, wall_s=now))
        self._out.log(f"{state.value}: {reason}", job=sweep.job)

    # --- wishes ---

    def wish(
        self,
        sweep: JobHistory,
        event: CancelAsked | PauseAsked | ResumeAsked,
        quotas: QuotaUses,
        *,
        now: float,
    ) -> None:
        """Have all arrays of a sweep end, be held or go on, and then itself."""
        match event:
            case CancelAsked() if sweep.held is not None:
                self._cancel_held(sweep, event.reason or "cancelled while it was held", now=now)
            case CancelAsked() if sweep.end is None:
                reason = event.reason or "cancelled by a client"
                is_news = sweep.halt is None or sweep.halt.state is not JobState.CANCELLED
                if is_news or event.discards:
                    self._ask_to_halt(sweep, JobState.CANCELLED, reason, discards=event.discards, now=now)
            case PauseAsked() if not sweep.is_at_rest and sweep.halt is None:
                reason = event.reason or "paused by a client"
                self._ask_to_halt(sweep, JobState.HELD, reason, discards=False, now=now)
            case ResumeAsked():
                was_at_rest = sweep.is_at_rest or sweep.halt is not None
                lifecycle.resume_asked(sweep, None, event, quotas, self._out, now=now)
                if was_at_rest and not sweep.is_at_rest and sweep.halt is None:
                    self._resume_arrays(sweep, (*_HALTED, JobState.FAILED), now=now)
            case _:
                pass  # It is so already.

    def _cancel_held(self, sweep: JobHistory, reason: str, *, now: float) -> None:
        for array in (self._out.history.jobs[job] for job in sweep.arrays):
            wish = CancelAsked(job=array.job, reason=reason)
            lifecycle.cancel_asked(array, None, wish, self._out, now=now)
        ended = JobEnded(job=sweep.job, state=JobState.CANCELLED, reason=reason, wall_s=now)
        self._out.record(ended)

    def _ask_to_halt(
        self, sweep: JobHistory, state: JobState, reason: str, *, discards: bool, now: float
    ) -> None:
        self._out.record(HaltAsked(job=sweep.job, state=state, reason=reason, wall_s=now))
        self._out.log(f"is to be {state.value}: {reason}", job=sweep.job)
        if discards:
            for array in self._active(sweep):
                wish = CancelAsked(job=array.job, reason=reason, discards=True)
                lifecycle.cancel_asked(array, self._runs.get(array.job), wish, self._out, now=now)

    def _halt(self, sweep: JobHistory, active: list[JobHistory], *, now: float) -> None:
        """Have every array come to rest, and the sweep once all have."""
        halt = sweep.halt
        assert halt is not None, "asked by the caller"
        is_end = halt.state is JobState.CANCELLED
        for array in active:
            if array.halt is not None and array.halt.state is halt.state:
                continue  # It is being saved.
            run = self._runs.get(array.job)
            if run is None and array.members:
                # It was begun by an earlier coordinator: its run, which is yet to begin here, saves what workers have.
                halted = HaltAsked(job=array.job, state=halt.state, reason=halt.reason, wall_s=now)
                self._out.record(halted)
            elif is_end:
                wish = CancelAsked(job=array.job, reason=halt.reason)
                lifecycle.cancel_asked(array, run, wish, self._out, now=now)
            else:
                pause = PauseAsked(job=array.job, reason=halt.reason)
                lifecycle.pause_asked(array, run, pause, self._out, now=now)
        if self._active(sweep):
            return
        if is_end:
            ended = JobEnded(job=sweep.job, state=halt.state, reason=halt.reason, wall_s=now)
            self._out.record(ended)
        else:
            self._out.record(JobHeld(job=sweep.job, reason=halt.reason, wall_s=now))

    def _resume_arrays(self, sweep: JobHistory, states: Sequence[JobState], *, now: float) -> bool:
        """Have arrays go on that are in one of these states, or about to come to rest; whether there were any."""
        history = self._out.history
        arrays = [history.jobs[job] for job in sweep.arrays]
        resumed = [
            x
            for x in arrays
            if (x.halt is not None and not x.ends_with_round) or history.state_of(x.job) in states
        ]
        for array in resumed:
            self._out.record(JobResumed(job=array.job, steps=None, wall_s=now))
        return bool(resumed)


def _row(stand: TrialStand) -> ArrayRow:
    trial = stand.trial
    return ArrayRow(
        trial=trial.number,
        optimizer=trial.job.optimizer,
        seed=trial.job.seed,
        label_smoothing=trial.job.model.smoothing,
        origin=stand.origin,
    )


def _alone(trial: JobSpec) -> JobSpec:
    """A trial's job, on one worker."""
    resources = trial.resources.model_copy(update={"min_workers": 1, "max_workers": 1})
    return trial.model_copy(update={"resources": resources})
