"""Metrics of choices of rows along a run, all of them from records."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from skein.protocol.log.records import CoresetChosen
from skein.types import JobId


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
            "skein_choice_farness", "Distance from all rows to those that stand for them, summed, at most"
        )
        self._weight = gauge("skein_choice_weight_max", "Largest weight of a row, the mean being 1")
        self._seen = gauge("skein_choice_seen_ratio", "Share of the rows that was ever drawn, or may be now")
        self._aside = gauge("skein_choice_set_aside_rows", "Rows whose features were not finite")
        self._faults = counter("skein_choice_faults_total", "Workers whose candidates were wanting")
        self._chance = counter(
            "skein_choice_chance_rows_total",
            "Rows that those drawn by chance stand for, for want of candidates",
        )
        self._seen_rows: dict[JobId, NDArray[np.bool_]] = {}

    def chosen(self, record: CoresetChosen) -> None:
        """A choice is recorded."""
        job, choice = record.job, record.told.read()
        self._choices.labels(job).inc()
        self._seconds.labels(job).inc(record.seconds)
        if record.overhead is not None:
            self._share.labels(job).set(record.overhead)
        if record.farness is not None:
            self._farness.labels(job).set(record.farness)
        self._weight.labels(job).set(float(choice.weights.max()))
        # Before the first choice all rows are drawn, if anything is.
        fresh = np.full(record.num_rows, record.version > 0)
        seen = self._seen_rows.setdefault(job, fresh)
        seen[choice.ids] = True
        self._seen.labels(job).set(float(seen.mean()))
        self._aside.labels(job).set(record.num_set_aside)
        self._faults.labels(job).inc(record.num_faults)
        self._chance.labels(job).inc(record.num_by_chance)

    def forget(self, job: JobId) -> None:
        """A job is shown no more."""
        self._seen_rows.pop(job, None)
