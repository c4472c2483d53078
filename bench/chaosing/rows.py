"""A verdict as the line of JSON: rows beside their goals, and the figures themselves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.chaosing.blows import OF_COORDINATOR, Fault
from bench.chaosing.judge import Verdict
from bench.report import Figures, Row

REL_LOSS = 1e-5
"""Of any step. Float32 sums in another order; tests/e2e/test_parity.py asks the same of the services."""
FINAL_REL_LOSS = 1e-4
"""Of the last step, to which rounding has grown since the first."""
DETECTION_S, DEATH_STEP, RECOVERY_S, THROUGHPUT = 0.5, 2.0, 10.0, 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Most:
    """A figure that is to be at most `goal`."""

    what: str
    value: float
    unit: str
    against: str
    goal: float


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The least of `values` that at least `percent` % do not exceed; None of none.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([3.0, 1.0, 2.0, 4.0], 99)
    (2.0, 4.0)
    """
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1] if values else None


def _spread(values: Sequence[float], *percents: float) -> dict[str, float | int | None]:
    return {f"p{percent:g}": percentile(values, percent) for percent in percents} | {
        "max": max(values, default=None),
        "count": len(values),
    }


def figures_of(verdict: Verdict) -> Figures:
    """What stands beside the rows."""
    counts, bends, incidents = verdict.counts, verdict.bends, verdict.incidents
    return {
        "kills": verdict.num_strikes(Fault.KILL),
        "freezes": verdict.num_strikes(Fault.FREEZE),
        "cuts": verdict.num_strikes(Fault.CUT),
        "coordinator_kills": verdict.num_strikes(*OF_COORDINATOR),
        "steps_committed": counts.committed,
        "steps_lost": counts.lost,
        "steps_missing": counts.missing,
        "steps_doubled": counts.doubled,
        "microbatches_lost": verdict.microbatches_lost,
        "double_counted": verdict.double_counted,
        "max_rel_loss_diff": bends.loss,
        "max_rel_norm_diff": bends.norm,
        "final_rel_loss_diff": bends.final,
        "first_bent_step": bends.first_bent_step,
        "last_holders_struck": verdict.num_last_holders,
        "deaths_unnoticed": verdict.num_unnoticed,
        "detection_s": _spread(verdict.detection_s, 50, 99),
        "recovery_s": _spread(verdict.recovery_s, 50, 99),
        "commit_after_death_s": _spread(verdict.commit_s, 50, 99),
        "coordinator_recovery_s": _spread(verdict.coordinator_recovery_s, 50, 99),
        "death_step_ratio": _spread(verdict.death_step_ratio, 50, 95),
        "incidents": {kind.value: count for kind, count in sorted(incidents.num_by_kind.items())},
        "remedies": {remedy.value: count for remedy, count in sorted(incidents.num_by_remedy.items())},
        "contributions_replayed": incidents.num_replayed,
        "samples_repeated": incidents.num_samples_repeated,
        "capacity": verdict.capacity,
        "steps_per_s": verdict.steps_per_s,
        "undisturbed_steps_per_s": verdict.undisturbed_steps_per_s,
        "throughput_ratio": verdict.throughput_ratio,
    }


def rows_of(verdict: Verdict) -> list[Row]:
    """The figures that have a goal."""
    counts, bends, calm = verdict.counts, verdict.bends, "the undisturbed job"
    most = [
        _Most(
            what="committed steps that were lost, left out or committed twice",
            value=counts.lost + counts.missing + counts.doubled,
            unit="steps",
            against=f"{counts.committed} committed",
            goal=0,
        ),
        _Most(
            what="microbatches lost or counted twice",
            value=verdict.microbatches_lost + verdict.double_counted,
            unit="microbatches",
            against=calm,
            goal=0,
        ),
        _Most(what="loss of a step, most off", value=bends.loss, unit="", against=calm, goal=REL_LOSS),
        _Most(what="loss of the last step", value=bends.final, unit="", against=calm, goal=FINAL_REL_LOSS),
        *_times(verdict),
    ]
    return [_ends_row(verdict), *map(_row, most), _pace_row(verdict)]


def crashed_row(num_crashed: int) -> Row:
    """That no worker ended but those that were killed."""
    what = "workers that ended without having been killed"
    return _row(_Most(what=what, value=num_crashed, unit="processes", against="all workers", goal=0))


def _times(verdict: Verdict) -> list[_Most]:
    """None of what never happened."""
    found = [
        ("death of a worker noticed, p99", percentile(verdict.detection_s, 99), "s", DETECTION_S),
        (
            "step in which a worker dies, p95, in median steps",
            percentile(verdict.death_step_ratio, 95),
            "",
            DEATH_STEP,
        ),
        (
            "coordinator killed until a step is committed, most",
            max(verdict.coordinator_recovery_s, default=None),
            "s",
            RECOVERY_S,
        ),
    ]
    return [
        _Most(what=what, value=value, unit=unit, against="the blow", goal=goal)
        for what, value, unit, goal in found
        if value is not None
    ]


def _row(figure: _Most) -> Row:
    return Row(
        what=figure.what,
        value=figure.value,
        unit=figure.unit,
        against=figure.against,
        ratio=figure.value / figure.goal if figure.goal else figure.value,
        goal=f"<= {figure.goal:g}",
        holds=figure.value <= figure.goal,
        spread=0.0,
    )


def _ends_row(verdict: Verdict) -> Row:
    return Row(
        what="the disturbed job ends well",
        value=float(verdict.is_finished),
        unit="",
        against="the undisturbed job",
        ratio=float(verdict.is_finished),
        goal="1",
        holds=verdict.is_finished,
        spread=0.0,
    )


def _pace_row(verdict: Verdict) -> Row:
    calm = (
        f"{verdict.undisturbed_steps_per_s:.3f} steps/s undisturbed x {verdict.capacity:.3f} of the workers"
    )
    return Row(
        what="throughput while struck",
        value=verdict.steps_per_s,
        unit="steps/s",
        against=calm,
        ratio=verdict.throughput_ratio,
        goal=f">= {THROUGHPUT}",
        holds=verdict.throughput_ratio >= THROUGHPUT,
        spread=0.0,
    )
