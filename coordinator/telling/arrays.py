"""Metrics of arrays of trials, all of them from the records of their rounds."""

from collections.abc import Callable, Mapping

from prometheus_client import Counter, Gauge

from skein.protocol.messages.array_rounds import REASONS, ArrayRound, PassKind
from skein.types import JobId

_OTHER = "other"


class ArrayMetrics:
    """Gauges by job, and retirements of all; jobs that are no arrays have none.

    Args:
        gauge: makes a gauge by job, of a name and what it is.
        retired: counts retirements by reason.
    """

    def __init__(self, gauge: Callable[[str, str], Gauge], retired: Counter) -> None:
        self._rows = gauge("skein_array_rows", "Rows of an array")
        self._alive = gauge("skein_array_alive_rows", "Rows of an array that are not retired")
        self._local_steps = gauge("skein_array_round_steps", "Steps of each row in the newest round")
        self._together = gauge(
            "skein_array_together", "1 where all rows go through one pass, fused or mapped; 0: in turn"
        )
        self._speedup = gauge(
            "skein_array_speedup_ratio", "Times as fast as in turn that one pass over all rows was measured"
        )
        self._retired = retired
        for reason in (*REASONS, _OTHER):
            retired.labels(reason)
        self._gone: dict[JobId, set[int]] = {}
        """Rows whose retirement was counted: a round that is made again retires them again."""

    @property
    def counters(self) -> tuple[Counter, ...]:
        """Counters that are not by job."""
        return (self._retired,)

    def kept(self) -> Mapping[JobId, frozenset[int]]:
        """Rows by array whose retirement was counted."""
        return {job: frozenset(rows) for job, rows in self._gone.items()}

    def recall(self, retired: Mapping[JobId, frozenset[int]]) -> None:
        """Begin with rows whose retirement is counted already."""
        self._gone = {job: set(rows) for job, rows in retired.items()}

    def rounded(self, job: JobId, array: ArrayRound) -> None:
        """A round is recorded."""
        self._rows.labels(job).set(len(array.rows))
        self._alive.labels(job).set(array.num_alive)
        self._local_steps.labels(job).set(array.num_local_steps)
        self._together.labels(job).set(array.pass_kind is not PassKind.LOOPED)
        self._speedup.labels(job).set(array.speedup)
        gone = self._gone.setdefault(job, set())
        for place, row in enumerate(array.rows):
            if row.retired and place not in gone:
                gone.add(place)
                self._retired.labels(row.retired if row.retired in REASONS else _OTHER).inc()

    def forget(self, job: JobId) -> None:
        """A job is shown no more."""
        self._gone.pop(job, None)
