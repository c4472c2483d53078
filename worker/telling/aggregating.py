"""Numbers that the compute thread tells of aggregation while it trains, for metrics and beats to read when asked.

Rules of this file
- One thread writes, others read: a value is set whole or not at all, and readers take copies.
- Only the newest value counts. Changes are counted from the first one on, not from the process's start.
"""

from skein.types import JobId


class Gauges:
    """The newest numbers of aggregation at this worker."""

    def __init__(self) -> None:
        self.num_leader_changes = 0
        self._rules: dict[JobId, str] = {}
        self._begin()

    def _begin(self) -> None:
        self.consensus_distance: dict[int, float] = {}
        """Norms of what parts chunks' parameters from the mean of all just heard of, their own included, by stage."""
        self.error_feedback_norm: dict[int, float] = {}
        """Norms of what chunks have still to say: rounded away so far, and kept for the next exchange, by stage."""
        self.compression_ratio: float | None = None
        """Ratio of the newest exchange's bytes in float32 to those that it took; None before there was one."""
        self._leaders: dict[str, str] = {}

    def began(self, job: JobId, rule: str) -> None:
        """Take numbers of a job whose chunks are held here from now on; those of another job are dropped."""
        if job not in self._rules:
            self._begin()
        self._rules[job] = rule

    def exchanged(self, *, plain_bytes: int, sent_bytes: int) -> None:
        """Note the bytes that an exchange's parts would take in float32, and those that they do take."""
        if sent_bytes > 0:
            self.compression_ratio = plain_bytes / sent_bytes

    def led(self, leader: str, *, of: str) -> None:
        """Note the leader of a group of walkers, which is named by the caller, or of all of them."""
        before = self._leaders.get(of)
        self.num_leader_changes += before is not None and before != leader
        self._leaders[of] = leader

    def rule_of(self, job: JobId) -> str:
        """The rule of a job that this worker has held something of; "unknown" otherwise."""
        return self._rules.get(job, "unknown")
