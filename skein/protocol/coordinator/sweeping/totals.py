"""Figures of a sweep over all its trials, for whoever lists jobs."""

from dataclasses import dataclass

from skein.plan.sweeping.hyperband import steps_of
from skein.plan.sweeping.packing import brackets_of_sweep
from skein.protocol.coordinator.sweeping.standing import TrialStand, best_trial, stands_of
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import JobEnded, JobHeld
from skein.types import JobId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTotals:
    """Steps that all trials of a sweep have made, of those that they are to make; losses of the best one."""

    step: Step
    total_steps: int
    loss: float | None
    evaluation_loss: float | None


def totals_of(sweep: JobHistory, stands: tuple[TrialStand, ...]) -> SweepTotals:
    """Totals of a sweep whose trials stand so."""
    to_rungs = sum(map(steps_of, brackets_of_sweep(sweep.spec)))
    best = best_trial(stands, sweep)
    return SweepTotals(
        step=Step(sum(stand.num_steps for stand in stands)),
        total_steps=to_rungs or sum(stand.num_steps_wanted for stand in stands),
        loss=None if best is None else best.loss,
        evaluation_loss=None if best is None else best.evaluation_loss,
    )


class KnownTotals:
    """Totals of sweeps. Those of one at rest do not change, and going over the trials of many takes long."""

    def __init__(self) -> None:
        self._known: dict[JobId, tuple[JobEnded | JobHeld, SweepTotals]] = {}

    def of(self, sweep: JobHistory, history: History) -> SweepTotals:
        """Totals of a sweep at the moment."""
        rest = sweep.end or sweep.held
        if rest is None:
            return totals_of(sweep, stands_of(sweep, history))
        if sweep.job not in self._known or self._known[sweep.job][0] is not rest:
            self._known[sweep.job] = rest, totals_of(sweep, stands_of(sweep, history))
        return self._known[sweep.job][1]
