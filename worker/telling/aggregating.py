"""Numbers that the compute thread tells of aggregation while it trains, for metrics and beats to read when asked.

Rules of this file
- One thread writes, others read: a value is set whole or not at all, and readers take copies.
- Only the newest value counts. Changes are counted from the first one on, not from the process's start.
"""

from enum import StrEnum

from skein.types import JobId


class AggregationMeasure(StrEnum):
    """A number about one walker or one chunk, by what it is called in metrics after `skein_worker_`."""

    CONSENSUS_DISTANCE = "consensus_distance"
    """Norm of what parts this chunk's parameters from the mean of all it has just heard of, its own included."""
    ERROR_FEEDBACK_NORM = "error_feedback_norm"
    """Norm of what this chunk has still to say: rounded away so far, and kept for the next exchange."""


class Gauges:
    """The newest numbers of aggregation at this worker."""

    def __init__(self) -> None:
        self._values: dict[tuple[AggregationMeasure, str], float] = {}
        self._rules: dict[JobId, str] = {}
        self._leaders: dict[str, str] = {}
        self._ratio: float | None = None
        self.num_leader_changes = 0

    def began(self, job: JobId, rule: str) -> None:
        """Take numbers of a job whose chunks are held here from now on; those of another job are dropped."""
        if job not in self._rules:
            self._values, self._leaders, self._ratio = {}, {}, None
        self._rules[job] = rule

    def set(self, measure: AggregationMeasure, value: float, *, of: int) -> None:
        """The newest value, of a stage by its index."""
        self._values[measure, str(of)] = value

    def exchanged(self, *, plain_bytes: int, sent_bytes: int) -> None:
        """Note the bytes that an exchange's parts would take in float32, and those that they do take."""
        if sent_bytes > 0:
            self._ratio = plain_bytes / sent_bytes

    def led(self, leader: str, *, of: str) -> None:
        """Note the leader of a group of walkers, which is named by the caller, or of all of them."""
        before = self._leaders.get(of)
        self.num_leader_changes += before is not None and before != leader
        self._leaders[of] = leader

    # --- for readers ---

    def rule_of(self, job: JobId) -> str:
        """The rule of a job that this worker has held something of; "unknown" otherwise."""
        return self._rules.get(job, "unknown")

    def values(self, measure: AggregationMeasure) -> dict[str, float]:
        """By stage."""
        return {
            label: value for (kind, label), value in sorted(dict(self._values).items()) if kind is measure
        }

    @property
    def compression_ratio(self) -> float | None:
        """Ratio of the newest exchange's bytes in float32 to those that it took; None before there was one."""
        return self._ratio
