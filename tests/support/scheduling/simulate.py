"""When every op of a schedule starts and ends: an exact event simulation.

An op starts when the op before it in its worker's list has ended and its input has arrived. Its output leaves when it
ends. Transfers cost no computing time.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from tests.support.scheduling.legality import Peak, deadlock, peaks
from tests.support.scheduling.ops import Op, PipelineOpKind, PipelineSchedule
from tests.support.scheduling.pricing import Links, Sharing, StageCost


class Transfer(NamedTuple):
    """The output of `op` on its way: the first byte leaves at `start_s`, the last arrives at `end_s`."""

    op: Op
    sender: int
    receiver: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a schedule takes. `starts_s[r][k]` and `ends_s[r][k]` are those of worker r's op number k."""

    makespan_s: float
    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    peaks: tuple[Peak, ...]
    transfers: tuple[Transfer, ...]

    @property
    def spans_s(self) -> tuple[float, ...]:
        """From each worker's first op's start to its last op's end."""
        return tuple(ends[-1] - starts[0] for starts, ends in zip(self.starts_s, self.ends_s, strict=True))


def simulate(schedule: PipelineSchedule, stages: Sequence[StageCost], links: Links) -> Simulation:
    """Run `schedule` strictly in its order.

    Args:
        schedule: one without violations.
        stages: costs of each of its stages.
        links: between its workers.

    Raises:
        ValueError: it deadlocks; the message says who waits for whom.
    """
    run = _Run(schedule, stages, links)
    run.finish()
    if any(len(ends) < len(ops) for ends, ops in zip(run.ends_s, schedule.ops_by_worker, strict=True)):
        raise ValueError(deadlock(schedule) or "some op never gets its input")
    return Simulation(
        makespan_s=max(ends[-1] for ends in run.ends_s),
        starts_s=tuple(map(tuple, run.starts_s)),
        ends_s=tuple(map(tuple, run.ends_s)),
        busy_s=tuple(sum(stages[op.stage].op_s(op.kind) for op in ops) for ops in schedule.ops_by_worker),
        peaks=peaks(schedule, stages),
        transfers=tuple(sorted(run.transfers, key=attrgetter("start_s"))),
    )


class _Way(NamedTuple):
    """Where a stage's activations or gradients go: `latency_s` for the first byte, `carried_s` for all to pass."""

    to_stage: int
    sender: int
    receiver: int
    latency_s: float
    carried_s: float


class _Request(NamedTuple):
    """An output that is ready to be sent. The earlier compares less; of one moment, backward before forward."""

    at_s: float
    is_activation: bool
    microbatch: int
    stage: int
    op: Op
    way: _Way


class _Run:
    """The state of a simulation.

    An op's times follow from its input's arrival as soon as that is known, so workers are run ahead as far as they
    can go. Only where transfers wait for each other must they be taken in the order of time: those go through a heap.
    """

    def __init__(self, schedule: PipelineSchedule, stages: Sequence[StageCost], links: Links) -> None:
        self._schedule, self._sharing = schedule, links.sharing
        num_stages, num_workers = schedule.num_stages, schedule.num_workers
        never: list[float | None] = [None] * schedule.num_microbatches
        at_once: list[float | None] = [0.0] * schedule.num_microbatches
        # Of a shard: the last stage's output, and what it makes of all scores.
        self._activation_s = [at_once, *([*never] for _ in range(num_stages - 1))]
        self._gradient_s = [[*never] for _ in range(num_stages)]
        self._op_s = [{kind: stage.op_s(kind) for kind in PipelineOpKind} for stage in stages]
        self._stages, self._links = stages, links
        self._way_by_ends: dict[tuple[int, int, int], _Way] = {}
        self._num_answers: Counter[Op] = Counter()
        self._answered_s: dict[Op, float] = {}
        self._uplink_free_s, self._downlink_free_s = [0.0] * num_workers, [0.0] * num_workers
        self._requests: list[_Request] = []
        self._may_go = list(range(num_workers))
        self.starts_s: list[list[float]] = [[] for _ in range(num_workers)]
        self.ends_s: list[list[float]] = [[] for _ in range(num_workers)]
        self.transfers: list[Transfer] = []

    def finish(self) -> None:
        """Run everything that can run."""
        self._advance_all()
        while self._requests:
            self._transfer(heappop(self._requests))
            self._advance_all()

    def _advance_all(self) -> None:
        while self._may_go:
            self._advance(self._may_go.pop())

    def _advance(self, worker: int) -> None:
        ops, starts, ends = self._schedule.ops_by_worker[worker], self.starts_s[worker], self.ends_s[worker]
        free_s = ends[-1] if ends else 0.0
        for i in range(len(ends), len(ops)):
            op = ops[i]
            arrived_s = self._input_s(op)
            if arrived_s is None:
                return
            start_s = max(free_s, arrived_s)
            free_s = start_s + self._op_s[op.stage][op.kind]
            starts.append(start_s)
            ends.append(free_s)
            self._leave(op, free_s)

    def _input_s(self, op: Op) -> float | None:
        match op.kind:
            case PipelineOpKind.FORWARD | PipelineOpKind.SCORES:
                return self._activation_s[op.stage][op.microbatch]
            case PipelineOpKind.BACKWARD_WEIGHT:
                return 0.0  # its input gradient is earlier in the same list
            case _:
                return self._gradient_s[op.stage][op.microbatch]

    def _leave(self, op: Op, end_s: float) -> None:
        for way in self._ways(op):
            self._send(op, way, end_s)
        if (
            op.kind is PipelineOpKind.FORWARD
            and op.stage == self._schedule.last_stage
            and not self._schedule.shards
        ):
            self._gradient_s[op.stage][op.microbatch] = end_s

    def _ways(self, op: Op) -> Iterator[_Way]:
        schedule, cost = self._schedule, self._stages[op.stage]
        last = schedule.last_stage
        match op.kind:
            case PipelineOpKind.FORWARD if op.stage < last:
                yield self._way(op.stage, op.stage + 1, cost.output_bytes)
            case PipelineOpKind.FORWARD:
                yield from (self._way(last, shard, cost.output_bytes) for shard in schedule.shards)
            case PipelineOpKind.SCORES:
                yield self._way(op.stage, last, cost.output_bytes)
            case PipelineOpKind.TERM:
                if schedule.num_barriers > 1:
                    yield self._way(op.stage, last, cost.gradient_bytes)
            case PipelineOpKind.BACKWARD | PipelineOpKind.BACKWARD_INPUT if op.stage > 0:
                yield self._way(op.stage, op.stage - 1, self._stages[op.stage - 1].gradient_bytes)
            case _:
                return

    def _way(self, stage: int, to_stage: int, num_bytes: int) -> _Way:
        key = stage, to_stage, num_bytes
        if key not in self._way_by_ends:
            self._way_by_ends[key] = _way(self._schedule.worker_by_stage, *key, self._links)
        return self._way_by_ends[key]

    def _send(self, op: Op, way: _Way, now_s: float) -> None:
        if way.sender == way.receiver:
            self._arrive(op, way, now_s)
        elif self._sharing is Sharing.NONE or way.carried_s == 0:
            arrival_s = now_s + (way.latency_s + way.carried_s)
            self.transfers.append(Transfer(op, way.sender, way.receiver, now_s, arrival_s))
            self._arrive(op, way, arrival_s)
        else:
            is_activation = op.kind is PipelineOpKind.FORWARD
            heappush(self._requests, _Request(now_s, is_activation, op.microbatch, op.stage, op, way))

    def _transfer(self, request: _Request) -> None:
        way = request.way
        free_s = max(self._uplink_free_s[way.sender], self._downlink_free_s[way.receiver])
        start_s = max(request.at_s, free_s)
        self._uplink_free_s[way.sender] = self._downlink_free_s[way.receiver] = start_s + way.carried_s
        arrival_s = start_s + (way.latency_s + way.carried_s)
        self.transfers.append(Transfer(request.op, way.sender, way.receiver, start_s, arrival_s))
        self._arrive(request.op, way, arrival_s)

    def _arrive(self, op: Op, way: _Way, now_s: float) -> None:
        if op.stage in self._schedule.shards and way.to_stage == self._schedule.last_stage:
            self._answer(op, now_s)
            return
        arrivals_s = self._activation_s if op.kind is PipelineOpKind.FORWARD else self._gradient_s
        arrivals_s[way.to_stage][op.microbatch] = now_s
        self._may_go.append(way.receiver)

    def _answer(self, op: Op, now_s: float) -> None:
        """Take a shard's answer at the last stage, which goes on when it has those of all."""
        last, to = self._schedule.last_stage, op._replace(stage=self._schedule.last_stage)
        self._num_answers[to] += 1
        self._answered_s[to] = max(self._answered_s.get(to, 0.0), now_s)
        if self._num_answers[to] < len(self._schedule.shards):
            return
        all_s = self._answered_s[to]
        if op.kind is PipelineOpKind.SCORES:
            for shard in self._schedule.shards:
                self._send(op, self._way(last, shard, 0), all_s)
        if (op.kind is PipelineOpKind.SCORES) == (self._schedule.num_barriers == 1):
            self._gradient_s[last][op.microbatch] = all_s
            self._may_go.append(self._schedule.worker_by_stage[last])


def _way(worker_by_stage: Sequence[int], stage: int, to_stage: int, num_bytes: int, links: Links) -> _Way:
    sender, receiver = worker_by_stage[stage], worker_by_stage[to_stage]
    latency_s, carried_s = links.parts_s(sender, receiver, num_bytes)
    return _Way(to_stage, sender, receiver, latency_s, carried_s)
