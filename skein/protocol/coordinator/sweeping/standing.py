"""Standing of each trial of a sweep, as the records of its arrays have it."""

from dataclasses import dataclass
from math import isfinite

from skein.config.job import ArrayJob
from skein.config.sweep.spec import SweepSpec
from skein.config.sweep.trials import SweepTrial, trials_of
from skein.plan.sweeping.hyperband import Goal, best_of
from skein.protocol.log.history import History, JobHistory
from skein.protocol.messages.array_rounds import RowNumbers
from skein.types import JobState, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStand:
    """A trial, and the array that it was in last with its row there; None: it waits to begin."""

    trial: SweepTrial
    array: JobHistory | None
    row: int = 0

    @property
    def numbers(self) -> RowNumbers | None:
        """Numbers of its newest step; None before the first."""
        last = None if self.array is None else self.array.last_commit
        return None if last is None else last.rows[self.row]

    @property
    def num_steps(self) -> int:
        """Steps that it has made, and that count."""
        if self.array is None:
            return 0
        spec = self.array.spec
        if not isinstance(spec, ArrayJob):
            return self.array.version
        return spec.array.first_step if self.numbers is None else self.numbers.num_updates

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
        if is_over and isinstance(spec, ArrayJob) and self.num_steps <= spec.array.first_step:
            was_put_back = self.numbers is not None and self.numbers.num_rewinds > 0
            return "" if was_put_back else "made no step in its array"
        return ""

    @property
    def num_steps_saved(self) -> int:
        """Steps that it need not make again."""
        return 0 if self.checkpoint is None else self.num_steps

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


def stands_of(sweep: JobHistory, history: History) -> tuple[TrialStand, ...]:
    """Standing of all trials of a sweep, in the order of their numbers."""
    newest: dict[int, TrialStand] = {}
    trials = trials_of(sweep.spec)
    for array in (history.jobs[job] for job in sweep.arrays):
        for row, trial in enumerate(array.trials):
            newest[trial] = TrialStand(trial=trials[trial], array=array, row=row)
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
