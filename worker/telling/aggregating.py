"""Numbers that the compute thread tells while it trains, for metrics and beats to read when asked.

Rules of this file
- One thread writes, others read: a value is set whole or not at all, and readers take copies.
- Only the newest value counts. Changes are counted from the first one on, not from the process's start.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from skein.plan.changing.traffic import TrafficKind
from skein.plan.ops import Direction
from skein.types import JobId, StageIndex

Traffic = Mapping[StageIndex, Mapping[Direction, TrafficKind]]
"""Kinds of what stages send, each way."""


MAX_EXPERTS = 64
"""Experts of all layers here that are told of one by one."""


def told_of_experts(counts: Mapping[tuple[int, int], int]) -> dict[tuple[int, str], float]:
    """Choices by layer and expert; where experts are too many, of the busiest, the idlest and the mean of each layer.

    >>> told_of_experts({(0, 0): 3, (0, 1): 1})
    {(0, '0'): 3, (0, '1'): 1}
    """
    if len(counts) <= MAX_EXPERTS:
        return {(layer, str(expert)): count for (layer, expert), count in counts.items()}
    by_layer: defaultdict[int, list[int]] = defaultdict(list)
    for (layer, _), count in counts.items():
        by_layer[layer].append(count)
    return {
        (layer, name): value
        for layer, row in by_layer.items()
        for name, value in (("most", max(row)), ("least", min(row)), ("mean", sum(row) / len(row)))
    }


class Gauges:
    """The newest numbers of aggregation at this worker, and of what it has put aside."""

    def __init__(self) -> None:
        self.num_leader_changes = 0
        self.pending_bytes = 0
        """Bytes that weight gradients are still to be made of."""
        self.peak_pending_bytes = 0
        """Peak of these in the newest step that has ended, or since."""
        self._peak_now = 0
        self.expert_tokens: Mapping[tuple[int, str], float] = {}
        """Choices in the newest step, by layer, of each expert or as `told_of_experts` says."""
        self._chosen_now: Counter[tuple[int, int]] = Counter()
        self._traffic: Mapping[tuple[JobId, StageIndex], Mapping[Direction, TrafficKind]] = {}
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

    def began(self, job: JobId, rule: str, traffic: Traffic = MappingProxyType({})) -> None:
        """Take numbers of a job whose chunks are held here from now on; those of another job are dropped.

        `traffic` has the kinds of what these chunks send.
        """
        if job not in self._rules:
            self._begin()
        self._rules[job] = rule
        self._traffic = {(job, stage): kinds for stage, kinds in traffic.items()}

    def traffic_of(self, job: JobId, stage: StageIndex, direction: Direction) -> TrafficKind:
        """Kind of what a stage sends; EDGE of one that is not held here any more."""
        kinds = self._traffic.get((job, stage), {})
        return kinds.get(direction, TrafficKind.EDGE)

    def put_aside(self, num_bytes: int) -> None:
        """Note how much is put aside now."""
        self.pending_bytes = num_bytes
        self._peak_now = max(self._peak_now, num_bytes)
        self.peak_pending_bytes = max(self.peak_pending_bytes, num_bytes)

    def routed(self, first_layer: int, counts: Iterable[Sequence[int]]) -> None:
        """Note how many choices of a microbatch went to each expert, from this layer on."""
        for layer, row in enumerate(counts, first_layer):
            self._chosen_now.update({(layer, expert): count for expert, count in enumerate(row)})

    def step_ended(self) -> None:
        """A step is over, and nothing of it is put aside any more."""
        if self._chosen_now:
            self.expert_tokens, self._chosen_now = told_of_experts(self._chosen_now), Counter()
        self.pending_bytes, self.peak_pending_bytes, self._peak_now = 0, self._peak_now, 0

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
