"""Standing of each trial of a sweep, as the records of its arrays have it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from skein.config.job import ArrayJob
from skein.config.sweep.rows import RowOrigin
from skein.config.sweep.spec import SweepSpec
from skein.config.sweep.trials import SweepTrial, trials_of
from skein.plan.sweeping.hyperband import Goal, best_of
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.row_history import saved_numbers
from skein.protocol.messages.array_rounds import RowNumbers
from skein.types import JobId, JobState, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStand:
    """A trial, and the array that it was in last with its row there; None: it waits to begin."""

    trial: SweepTrial
    array: JobHistory | None
    row: int = 0
    begun: RowNumbers | None = None
    """Numbers of the row that it goes on from there; None: it was drawn."""

    @property
    def numbers(self) -> RowNumbers | None:
        """Numbers of its newest step; None before the first."""
        if self.array is None:
            return None
        if not self.array.spec.rows:
            last = self.array.last_commit
            return None if last is None else last.rows[self.row]
        return self._numbers_at(self.array.version)

    def _numbers_at(self, version: Step | None) -> RowNumbers | None:
        """Numbers of its row at a version that is saved, or the newest; before the first round those that it had."""
        rows = self.array.rounds.get(version, ()) if self.array is not None and version else ()
        return rows[self.row] if rows else self.begun

    @property
    def num_steps(self) -> int:
        """Steps that it has made, and that count."""
        if self.array is None:
            return 0
        if not isinstance(self.array.spec, ArrayJob):
            return self.array.version
        return _num_updates(self.numbers)

    @property
    def num_steps_wanted(self) -> int:
        """Steps that its budget is, as far as its data were counted."""
        if self.array is None or isinstance(self.array.spec, ArrayJob):
            return self.trial.job.total_steps
        return self.array.total_steps

    @property
    def loss(self) -> float | None:
        """Loss of its newest step, nats; None before the first."""
        return None if self.numbers is None else self.numbers.loss

    @property
    def evaluation_loss(self) -> float | None:
        """Loss of its newest evaluation, nats; None before the first."""
        found = None if self.array is None else self.array.last_evaluation
        if found is None:
            return None
        return found.rows[self.row].mean if found.rows else found.loss

    @property
    def failure(self) -> str:
        """Reason why it makes no more steps though its budget is not spent; "" if there is none."""
        if self.array is None:
            return ""
        if self.numbers is not None and self.numbers.retired:
            return self.numbers.retired
        end, spec = self.array.end, self.array.spec
        if end is not None and end.state is JobState.FAILED:
            return end.reason
        is_over = end is not None and end.state is JobState.FINISHED
        # An array that was packed anew has ended before all of its rounds were made.
        has_made_all = is_over and isinstance(spec, ArrayJob) and self.array.version >= self.array.total_steps
        has_gone_on = self.numbers is not None and _progress(self.numbers) > _progress(self.begun)
        return "made no step in its array" if has_made_all and not has_gone_on else ""

    @property
    def num_steps_saved(self) -> int:
        """Steps that it need not make again."""
        if self.array is not None and not isinstance(self.array.spec, ArrayJob):
            return 0 if self.checkpoint is None else self.num_steps
        return _num_updates(self._numbers_at(self.checkpoint))

    @property
    def origin(self) -> RowOrigin | None:
        """Row as it was saved last, in its array or before that began; None: it was not."""
        if self.array is None:
            return None
        if self.checkpoint is not None:
            return RowOrigin(job=self.array.job, version=self.checkpoint, row=self.row)
        rows = self.array.spec.rows
        return rows[self.row].origin if rows else None

    @property
    def is_done(self) -> bool:
        """Whether it is trained to its end."""
        end = None if self.array is None else self.array.end
        is_over = end is not None and end.state is JobState.FINISHED and not self.failure
        return is_over and self.num_steps >= self.num_steps_wanted

    @property
    def is_at_work(self) -> bool:
        """Whether an array that has not come to its end has it."""
        return self.array is not None and self.array.end is None

    @property
    def checkpoint(self) -> Step | None:
        """Version of its array's newest checkpoint that is whole."""
        newest = None if self.array is None else self.array.newest_checkpoint
        return None if newest is None else newest.version


def _num_updates(numbers: RowNumbers | None) -> int:
    return 0 if numbers is None else numbers.num_updates


def _progress(numbers: RowNumbers | None) -> tuple[int, int]:
    """Number that grows with every step of a row that counts, and where it is put back."""
    return (0, 0) if numbers is None else (numbers.num_rewinds, numbers.num_updates)


def stands_in(array: JobHistory, trials: Sequence[SweepTrial], history: History) -> Iterator[TrialStand]:
    """Standing of the trials in an array, in the order of its rows; `trials` are all of the sweep."""
    origins = [row.origin for row in array.spec.rows] or [None]
    for row, (trial, origin) in enumerate(zip(array.trials, origins, strict=True)):
        begun = None if origin is None else saved_numbers(origin, history.jobs[JobId(origin.job)].rounds)
        yield TrialStand(trial=trials[trial], array=array, row=row, begun=begun)


def stands_of(sweep: JobHistory, history: History) -> tuple[TrialStand, ...]:
    """Standing of all trials of a sweep, in the order of their numbers."""
    newest: dict[int, TrialStand] = {}
    trials = trials_of(sweep.spec)
    for array in (history.jobs[job] for job in sweep.arrays):
        newest |= {stand.trial.number: stand for stand in stands_in(array, trials, history)}
    return tuple(newest.get(trial.number) or TrialStand(trial=trial, array=None) for trial in trials)


def asked_of(sweep: JobHistory) -> SweepSpec:
    """Trials that the job of a sweep asks for, and how they are compared."""
    assert sweep.spec.sweep is not None, f"{sweep.job} is no sweep"
    return sweep.spec.sweep


def measure_of(stand: TrialStand, sweep: JobHistory) -> float:
    """Measure that a trial is compared by; not finite: nothing yet, or it has failed."""
    measured = stand.loss if asked_of(sweep).metric == "loss" else stand.evaluation_loss
    return float("nan") if measured is None or stand.failure else measured


def best_trial(stands: tuple[TrialStand, ...], sweep: JobHistory) -> TrialStand | None:
    """The best trial of those that are trained to their end, else of all; None before there is a finite value."""
    done = [stand for stand in stands if stand.is_done] or stands
    values = {x.trial.number: found for x in done if isfinite(found := measure_of(x, sweep))}
    best = best_of(values, 1, Goal(asked_of(sweep).goal))
    return stands[best[0]] if best else None
