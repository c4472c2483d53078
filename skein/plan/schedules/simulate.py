"""When every op of a schedule starts and ends: an exact event simulation.

An op starts when the op before it in its worker's list has ended and its input has arrived. Its output leaves when it
ends. Transfers cost no computing time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from skein.plan.schedules.check import Peak, deadlock, peaks
from skein.plan.schedules.cost import Links, Sharing, StageCost
from skein.plan.schedules.ops import Op, OpKind, Schedule


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


def simulate(schedule: Schedule, stages: Sequence[StageCost], links: Links) -> Simulation:
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
        transfers=tuple(sorted(run.transfers, key=lambda x: (x.start_s, x.op))),
    )


_UPLINK, _DOWNLINK = 0, 1


class _Request(NamedTuple):
    """A transfer that asks for one end of its way; compared, the earlier goes first, then backward before forward."""

    at_s: float
    leg: int
    is_activation: bool
    microbatch: int
    stage: int
    start_s: float
    op: Op


class _Run:
    """The state of a simulation.

    An op's times follow from its input's arrival as soon as that is known, so workers are run ahead as far as they
    can go. Only where transfers wait for each other must they be taken in the order of time: those go through a heap.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[StageCost], links: Links) -> None:
        self._schedule, self._stages, self._links = schedule, stages, links
        num_stages, num_workers = schedule.num_stages, schedule.num_workers
        never: list[float | None] = [None] * schedule.num_microbatches
        at_once: list[float | None] = [0.0] * schedule.num_microbatches
        self._activation_s = [at_once, *([*never] for _ in range(num_stages - 1))]
        self._gradient_s = [[*never] for _ in range(num_stages)]
        self._op_s = [{kind: stage.op_s(kind) for kind in OpKind} for stage in stages]
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
            request = heappop(self._requests)
            if request.leg == _UPLINK:
                self._take_uplink(request)
            else:
                self._take_downlink(request)
            self._advance_all()

    def _advance_all(self) -> None:
        while self._may_go:
            self._advance(self._may_go.pop())

    def _advance(self, worker: int) -> None:
        ops, starts, ends = self._schedule.ops_by_worker[worker], self.starts_s[worker], self.ends_s[worker]
        free_s = ends[-1] if ends else 0.0
        for op in ops[len(ends) :]:
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
            case OpKind.FORWARD:
                return self._activation_s[op.stage][op.microbatch]
            case OpKind.BACKWARD_WEIGHT:
                return 0.0  # its input gradient is earlier in the same list
            case _:
                return self._gradient_s[op.stage][op.microbatch]

    def _leave(self, op: Op, end_s: float) -> None:
        if op.kind is OpKind.BACKWARD_WEIGHT:
            return
        if op.kind is OpKind.FORWARD and op.stage == self._schedule.num_stages - 1:
            self._gradient_s[op.stage][op.microbatch] = end_s
            return
        if op.kind is not OpKind.FORWARD and op.stage == 0:
            return
        sender, receiver = self._ends(op)
        if sender == receiver:
            self._arrive(op, end_s)
        elif self._links.sharing is Sharing.NONE:
            arrival_s = end_s + self._links.seconds(sender, receiver, self._num_bytes(op))
            self.transfers.append(Transfer(op, sender, receiver, end_s, arrival_s))
            self._arrive(op, arrival_s)
        else:
            self._ask(_UPLINK, op, end_s, end_s)

    def _arrive(self, op: Op, now_s: float) -> None:
        is_activation = op.kind is OpKind.FORWARD
        to = op.stage + 1 if is_activation else op.stage - 1
        (self._activation_s if is_activation else self._gradient_s)[to][op.microbatch] = now_s
        self._may_go.append(self._schedule.worker_by_stage[to])

    def _ends(self, op: Op) -> tuple[int, int]:
        place = self._schedule.worker_by_stage
        return place[op.stage], place[op.stage + (1 if op.kind is OpKind.FORWARD else -1)]

    def _num_bytes(self, op: Op) -> int:
        if op.kind is OpKind.FORWARD:
            return self._stages[op.stage].output_bytes
        return self._stages[op.stage - 1].gradient_bytes

    def _ask(self, leg: int, op: Op, at_s: float, start_s: float) -> None:
        is_activation = op.kind is OpKind.FORWARD
        heappush(self._requests, _Request(at_s, leg, is_activation, op.microbatch, op.stage, start_s, op))

    def _take_uplink(self, request: _Request) -> None:
        sender, receiver = self._ends(request.op)
        start_s = max(request.at_s, self._uplink_free_s[sender])
        self._uplink_free_s[sender] = start_s + self._carried_s(request.op, sender, receiver)
        first_byte_s = start_s + float(self._links.latency_s[sender, receiver])
        self._ask(_DOWNLINK, request.op, first_byte_s, start_s)

    def _take_downlink(self, request: _Request) -> None:
        sender, receiver = self._ends(request.op)
        start_s = max(request.at_s, self._downlink_free_s[receiver])
        end_s = start_s + self._carried_s(request.op, sender, receiver)
        self._downlink_free_s[receiver] = end_s
        self.transfers.append(Transfer(request.op, sender, receiver, request.start_s, end_s))
        self._arrive(request.op, end_s)

    def _carried_s(self, op: Op, sender: int, receiver: int) -> float:
        return float(self._num_bytes(op) / self._links.bytes_per_s[sender, receiver])
