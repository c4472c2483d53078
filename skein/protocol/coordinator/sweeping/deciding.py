"""Course of a sweep: how far each of its trials is to go now, and which are ended early.

Rules of this file
- All follows from the records of arrays that have ended, in the order in which these began; so a coordinator that
  starts again comes to the same.
- A trial that was retired, or whose array failed, is the worst of its rung.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import nan

from skein.config.job import ArrayJob
from skein.config.sweep.trials import trials_of
from skein.plan.sweeping.hyperband import Advance, Goal, Hyperband
from skein.plan.sweeping.packing import brackets_of_sweep
from skein.protocol.coordinator.sweeping.standing import (
    TrialStand,
    asked_of,
    best_trial,
    measure_of,
    stands_in,
    stands_of,
)
from skein.protocol.log.history import History, JobHistory
from skein.types import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCourse:
    """Course of a sweep: standing of its trials, those that are to go on now, and why others were ended early."""

    stands: tuple[TrialStand, ...]
    due: tuple[Advance, ...]
    ended: Mapping[int, str] = field(default_factory=dict)


def course_of(sweep: JobHistory, history: History) -> SweepCourse:
    """Course of a sweep at the moment."""
    stands = stands_of(sweep, history)
    brackets = brackets_of_sweep(sweep.spec)
    if not brackets:
        due = [
            Advance(trial=stand.trial.number, num_steps=stand.num_steps_wanted)
            for stand in stands
            if not (stand.is_done or stand.is_at_work or stand.failure)
        ]
        return SweepCourse(stands=stands, due=tuple(due))
    return _compared(sweep, history, stands)


def _compared(sweep: JobHistory, history: History, stands: tuple[TrialStand, ...]) -> SweepCourse:
    results = list(_results(sweep, history))
    due: list[Advance] = []
    ended: dict[int, str] = {}
    first = 0
    for rungs in brackets_of_sweep(sweep.spec):
        bracket = Hyperband(rungs, first_trial=first, goal=Goal(asked_of(sweep).goal))
        own = range(first, first := first + rungs[0].num_trials)
        _carry_out(bracket, [(made, value) for made, value in results if made.trial in own], ended)
        due += bracket.due
    going = [advance for advance in due if not stands[advance.trial].is_at_work]
    worse = {trial: why for trial, why in ended.items() if not stands[trial].failure}
    return SweepCourse(stands=stands, due=tuple(going), ended=worse)


def _carry_out(bracket: Hyperband, results: list[tuple[Advance, float]], ended: dict[int, str]) -> None:
    """Tell a bracket what its trials came to, and note which ended at which rung."""
    for made, value in results:
        if not bracket.may_hear(made):
            continue  # An array of an earlier rung goes on again that had failed: what followed waits for it.
        before = {*bracket.survivors}
        bracket.told(made, value)
        for trial in sorted(before.difference(bracket.survivors)):
            ended[trial] = f"ended after {made.num_steps} steps, where others were better"


def _results(sweep: JobHistory, history: History) -> Iterator[tuple[Advance, float]]:
    """Values that rows came to where their arrays ended; of a row that did not get so far, none."""
    trials = trials_of(sweep.spec)
    for array in (history.jobs[job] for job in sweep.arrays):
        spec, end = array.spec, array.end
        if end is None or end.state is JobState.CANCELLED or not isinstance(spec, ArrayJob):
            continue
        for trial in stands_in(array, trials, history):
            made = Advance(trial=trial.trial.number, num_steps=spec.array.last_step)
            if trial.failure:
                yield made, nan
            elif trial.num_steps >= spec.array.last_step:
                yield made, measure_of(trial, sweep)


def progress_words(course: SweepCourse, sweep: JobHistory) -> str:
    """Progress of a sweep in a line."""
    stands = course.stands
    counts = {
        "trained": sum(stand.is_done for stand in stands),
        "ended early": len(course.ended),
        "retired": sum(bool(stand.failure) for stand in stands),
    }
    told = ", ".join(f"{num} {what}" for what, num in counts.items() if num or what == "trained")
    # Of trials at work the best is another one every step.
    best = best_trial(stands, sweep) if counts["trained"] else None
    led = "" if best is None else f"; best: trial {best.trial.number}, {measure_of(best, sweep):.4g}"
    return f"{len(stands)} trials: {told}{led}"
