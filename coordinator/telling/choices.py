"""Choices of rows along a run as clients see them, and their metrics; all from records."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from skein.protocol.log.choosing import choice_due_at
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import CoresetChosen
from skein.protocol.log.row_choices import choice_by_row
from skein.types import JobId, Step
from skein.wire.views import ChoiceStatus


class ChoiceMetrics:
    """Gauges and counters of jobs that choose rows; jobs that do not have none.

    Args:
        gauge: makes a gauge by job, of a name and what it is.
        counter: makes a counter by job.
    """

    def __init__(self, gauge: Callable[[str, str], Gauge], counter: Callable[[str, str], Counter]) -> None:
        self._choices = counter("skein_choices_total", "Choices of rows that were recorded")
        self._seconds = counter(
            "skein_choice_seconds_total", "Seconds of selections, training standing still"
        )
        self._share = gauge(
            "skein_choice_overhead_ratio", "Seconds of the newest choice over those of the training before"
        )
        self._farness = gauge(
            "skein_choice_farness", "Distance from all rows to those that stand for them, summed, about"
        )
        self._chance_farness = gauge(
            "skein_choice_chance_farness", "The same distance to as many rows drawn by chance, about"
        )
        self._weight = gauge("skein_choice_weight_max", "Largest weight of a row, the mean being 1")
        self._seen = gauge("skein_choice_seen_ratio", "Share of the rows that was ever drawn, or may be now")
        self._aside = gauge("skein_choice_set_aside_rows", "Rows whose features were not finite")
        self._faults = counter("skein_choice_faults_total", "Workers whose candidates were wanting")
        self._chance = counter(
            "skein_choice_chance_rows_total",
            "Rows that those drawn by chance stand for, for want of candidates",
        )
        self._seen_rows: dict[JobId, dict[int, NDArray[np.bool_]]] = {}
        """By the row of an array, each of which has its own training rows; of any other job as of row 0."""

    def kept(self) -> Mapping[JobId, Mapping[int, bytes]]:
        """Rows of the data that were ever drawn, by job and row of an array, a byte each."""
        return {
            job: {row: seen.tobytes() for row, seen in by_row.items()}
            for job, by_row in self._seen_rows.items()
        }

    def recall(self, kept: Mapping[JobId, Mapping[int, bytes]]) -> None:
        """Begin with rows that were drawn already."""
        self._seen_rows = {
            job: {row: np.frombuffer(seen, np.bool_).copy() for row, seen in by_row.items()}
            for job, by_row in kept.items()
        }

    def chosen(self, record: CoresetChosen) -> None:
        """A choice is recorded."""
        job, choice = record.job, record.told.read()
        self._choices.labels(job).inc()
        self._seconds.labels(job).inc(record.seconds)
        if record.overhead is not None:
            self._share.labels(job).set(record.overhead)
        if record.farness is not None:
            self._farness.labels(job).set(record.farness)
        if record.chance_farness is not None:
            self._chance_farness.labels(job).set(record.chance_farness)
        self._weight.labels(job).set(float(choice.weights.max()))
        for row, since in [(x.row, x.since) for x in record.rows] or [(0, record.version)]:
            # Before the first choice all rows are drawn, if anything is.
            fresh = np.full(record.num_rows, since > 0)
            self._seen_rows.setdefault(job, {}).setdefault(row, fresh)[choice.ids] = True
        self._seen.labels(job).set(float(np.mean([x.mean() for x in self._seen_rows[job].values()])))
        self._aside.labels(job).set(record.num_set_aside)
        self._faults.labels(job).inc(record.num_faults)
        self._chance.labels(job).inc(record.num_by_chance)

    def forget(self, job: JobId) -> None:
        """A job is shown no more."""
        self._seen_rows.pop(job, None)


def choice_status(history: JobHistory) -> ChoiceStatus | None:
    """The newest choice of rows along a job's run; None if it has none."""
    if not history.chosen:
        return None
    chosen = history.chosen[-1]
    # Of an array all that were made at the same time.
    together = [x for x in history.chosen if x.version == chosen.version]
    return replace(
        _shown(chosen, since=chosen.version, until=choice_due_at(history)),
        num_set_aside=sum(x.num_set_aside for x in together),
        num_by_chance=sum(x.num_by_chance for x in together),
        largest_weight=max(float(x.told.read().weights.max()) for x in together),
        seconds=sum(x.seconds for x in together),
    )


def choice_of_row(array: JobHistory, row: int) -> ChoiceStatus | None:
    """The choice that a row of an array draws by, told by its own steps; None if it has none."""
    found = choice_by_row(array.chosen).get(row)
    return None if found is None else _shown(found[0], since=found[1].since, until=found[1].until)


def _shown(chosen: CoresetChosen, *, since: Step, until: Step | None) -> ChoiceStatus:
    """A choice as clients see it, which holds from one step to another."""
    return ChoiceStatus(
        version=since,
        num_picks=chosen.told.num_picks,
        num_rows=chosen.num_rows,
        num_set_aside=chosen.num_set_aside,
        num_by_chance=chosen.num_by_chance,
        largest_weight=float(chosen.told.read().weights.max()),
        seconds=chosen.seconds,
        overhead=chosen.overhead,
        next_version=until,
        farness=chosen.farness,
        chance_farness=chosen.chance_farness,
    )
