"""Times against two other ways to find them: relaxation until nothing changes, and a clock that ticks."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given

from skein.plan.route.schedules.shape import Shape
from tests.plan.schedules.builders import backward, forward, priced
from tests.support.scheduling.ops import Op, PipelineOpKind, PipelineSchedule
from tests.support.scheduling.pricing import Links, Sharing, StageCost
from tests.support.scheduling.simulate import simulate
from tests.support.scheduling.table import make_schedule


def source(op: Op, schedule: PipelineSchedule) -> Op | None:
    """The op whose output `op` waits for, besides the one before it on its worker."""
    if op.kind is PipelineOpKind.FORWARD:
        return forward(op.stage - 1, op.microbatch) if op.stage else None
    if op.kind is PipelineOpKind.BACKWARD_WEIGHT or op.stage == schedule.num_stages - 1:
        return None
    return op._replace(stage=op.stage + 1)


def relaxed(schedule: PipelineSchedule, stages: Sequence[StageCost], links: Links) -> dict[Op, float]:
    """Ends of all ops by the longest way to each, links shared by nobody."""
    end_s = {op: 0.0 for ops in schedule.ops_by_worker for op in ops}
    changed = True
    while changed:
        changed = False
        for worker, ops in enumerate(schedule.ops_by_worker):
            free_s = 0.0
            for op in ops:
                before = source(op, schedule)
                arrival_s = 0.0
                if before is not None:
                    sender = schedule.worker_by_stage[before.stage]
                    num_bytes = carried_bytes(before, stages)
                    arrival_s = end_s[before] + links.seconds(sender, worker, num_bytes)
                free_s = max(free_s, arrival_s) + stages[op.stage].op_s(op.kind)
                changed |= free_s != end_s[op]
                end_s[op] = free_s
    return end_s


def carried_bytes(op: Op, stages: Sequence[StageCost]) -> int:
    if op.kind is PipelineOpKind.FORWARD:
        return stages[op.stage].output_bytes
    return stages[op.stage - 1].gradient_bytes


class Ticking:
    """Second by second; a transfer waits for lines that are in use or that an earlier one waits for."""

    def __init__(self, schedule: PipelineSchedule, stages: Sequence[StageCost], links: Links) -> None:
        self.schedule, self.stages, self.links = schedule, stages, links
        self.now = 0
        self.to_run = [deque(ops) for ops in schedule.ops_by_worker]
        self.free_at = [0] * schedule.num_workers
        self.end_s: dict[Op, float] = {}
        self.arrived: set[Op] = set()
        self.waiting: list[tuple[int, bool, int, int, Op]] = []
        self.line_free_at: dict[tuple[str, int], int] = {}
        self.due: list[tuple[int, str, Op]] = []

    def run(self) -> dict[Op, float]:
        while any(self.to_run) or self.due or self.waiting:
            self._fall_due()
            self._start_ops()
            self._start_transfers()
            self.now += 1
        return self.end_s

    def _fall_due(self) -> None:
        for item in [x for x in self.due if x[0] == self.now]:
            self.due.remove(item)
            _, what, op = item
            if what == "ended":
                self._leave(op)
            else:
                self.arrived.add(op)

    def _ways(self, op: Op) -> tuple[int, int]:
        place = self.schedule.worker_by_stage
        return place[op.stage], place[op.stage + (1 if op.kind is PipelineOpKind.FORWARD else -1)]

    def _leave(self, op: Op) -> None:
        is_last = op.stage == (self.schedule.num_stages - 1 if op.kind is PipelineOpKind.FORWARD else 0)
        if op.kind is PipelineOpKind.BACKWARD_WEIGHT or is_last:
            return
        sender, receiver = self._ways(op)
        latency = int(self.links.latency_s[sender, receiver])
        if sender == receiver:
            self.arrived.add(op)
        elif carried_bytes(op, self.stages) == 0:
            # Ops start after this in the same second.
            if latency:
                self.due.append((self.now + latency, "arrived", op))
            else:
                self.arrived.add(op)
        else:
            self.waiting.append((self.now, op.kind is PipelineOpKind.FORWARD, op.microbatch, op.stage, op))

    def _start_ops(self) -> None:
        for worker, ops in enumerate(self.to_run):
            if not ops or self.free_at[worker] > self.now:
                continue
            before = source(ops[0], self.schedule)
            if before is None or before in self.arrived:
                op = ops.popleft()
                self.free_at[worker] = self.now + int(self.stages[op.stage].op_s(op.kind))
                self.end_s[op] = self.free_at[worker]
                self.due.append((self.free_at[worker], "ended", op))

    def _start_transfers(self) -> None:
        taken = {line for line, free_at in self.line_free_at.items() if free_at > self.now}
        for request in sorted(self.waiting):
            op = request[-1]
            sender, receiver = self._ways(op)
            lines = {("up", sender), ("down", receiver)}
            if taken.isdisjoint(lines):
                self.waiting.remove(request)
                seconds = carried_bytes(op, self.stages)
                self.line_free_at.update(dict.fromkeys(lines, self.now + seconds))
                latency = int(self.links.latency_s[sender, receiver])
                self.due.append((self.now + seconds + latency, "arrived", op))
            taken |= lines


def ends(schedule: PipelineSchedule, stages: Sequence[StageCost], links: Links) -> dict[Op, float]:
    ran = simulate(schedule, stages, links)
    return {
        op: end_s
        for ops, listed in zip(schedule.ops_by_worker, ran.ends_s, strict=True)
        for op, end_s in zip(ops, listed, strict=True)
    }


Priced = tuple[PipelineSchedule, tuple[StageCost, ...], Links]


@given(priced(Sharing.NONE))
def test_times_over_links_of_their_own_are_those_of_the_longest_way(pipeline: Priced) -> None:
    assert ends(*pipeline) == relaxed(*pipeline)


@given(priced(Sharing.ENDS))
def test_times_over_shared_ends_are_those_of_a_ticking_clock(pipeline: Priced) -> None:
    assert ends(*pipeline) == Ticking(*pipeline).run()


@given(priced(Sharing.ENDS))
def test_transfers_never_overlap_on_an_uplink_or_a_downlink(pipeline: Priced) -> None:
    schedule, stages, links = pipeline
    sent = [x for x in simulate(schedule, stages, links).transfers if carried_bytes(x.op, stages)]
    for worker in range(schedule.num_workers):
        for mine in ([x for x in sent if x.sender == worker], [x for x in sent if x.receiver == worker]):
            for one, other in pairwise(mine):
                assert one.start_s + carried_bytes(one.op, stages) <= other.start_s


def three_workers(sharing: Sharing) -> tuple[PipelineSchedule, list[StageCost], Links]:
    """Two microbatches, 1 s per op, 4 s per transfer, over links of 1 s."""
    stages = [
        StageCost(forward_s=1, input_s=0.5, weight_s=0.5, output_bytes=4, gradient_bytes=4) for _ in range(3)
    ]
    latency_s = np.ones((3, 3)) - np.eye(3)
    links = Links(latency_s=latency_s, bytes_per_s=np.ones((3, 3)), sharing=sharing)
    return make_schedule("gpipe", Shape(num_workers=3, num_microbatches=2)), stages, links


def test_an_uplink_carries_one_transfer_after_the_other() -> None:
    alone = ends(*three_workers(Sharing.NONE))
    # F0 0-1, there 6; F1 1-2, there 7.
    assert (alone[forward(1, 0)], alone[forward(1, 1)], alone[forward(2, 1)]) == (7, 8, 14)
    shared = ends(*three_workers(Sharing.ENDS))
    # F1's activation leaves at 5, when F0's last byte has left, and is there at 10.
    assert (shared[forward(1, 0)], shared[forward(1, 1)]) == (7, 11)
    # The same again at the next worker: 7 to 12 and 11 to 16, then backwards 14 and 18 on the last one.
    assert (shared[forward(2, 0)], shared[forward(2, 1)]) == (13, 17)
    assert (shared[backward(2, 0)], shared[backward(2, 1)]) == (18, 19)


def test_what_stays_on_a_worker_takes_no_time_on_a_link() -> None:
    schedule = make_schedule("looped_bfs", Shape(num_workers=1, num_microbatches=2, num_chunks=2))
    stages = [StageCost(forward_s=1, input_s=1, weight_s=1, output_bytes=100, gradient_bytes=100)] * 2
    ran = simulate(schedule, stages, Links(latency_s=np.zeros((1, 1)), bytes_per_s=np.ones((1, 1))))
    assert (ran.makespan_s, ran.transfers) == (12.0, ())
