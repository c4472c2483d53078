"""Orders on a V of two chunks per worker, worker r holding stages r and 2p - 1 - r: ZB-V, V-Half, V-Min."""

from collections.abc import Iterator, Mapping

from skein.plan.ops import OpKind
from skein.plan.plan import PlannedOp
from skein.plan.route.schedules.shape import Orders, Shape, op_of, told
from skein.plan.route.schedules.split import weight

INTERVAL = 6
"""Slots from one microbatch to the next: two stages of F, I and W, one slot each."""


def zb_v(shape: Shape) -> Orders:
    """No idle time between a worker's first and last op when f = i = w and m >= 2p - 1. All hold 2p half-stages.

    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, Section 6; phases as torch.distributed.pipelining 2.13
    runs them.
    """
    # With fewer microbatches the same order is run without those that do not exist.
    num_planned = max(2 * shape.num_workers - 1, shape.num_microbatches)
    return told(
        (
            [op for op in _zb_v(shape, r, num_planned) if op.microbatch < shape.num_microbatches]
            for r in range(shape.num_workers)
        ),
    )


def v_half(shape: Shape) -> Orders:
    """Half the memory of 1F1B, equal on all workers: (p + 2) // 2 stages.

    Source: Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, Section 3.
    """
    return told(_repeated(shape, v_half_block(shape, r)) for r in range(shape.num_workers))


def v_half_block(shape: Shape, worker: int) -> dict[PlannedOp, int]:
    """Slots of a worker's first microbatch's ops; the next microbatch's are an `INTERVAL` later."""
    p, r = shape.num_workers, worker
    gap = 0 if p % 2 else 3
    return _block(shape, r, (2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2))


def v_min(shape: Shape) -> Orders:
    """The least memory that keeps a steady pace: (p + 4) // 3 stages, equal on all workers.

    Source: arXiv 2405.15362, Section 3.
    """
    p = shape.num_workers
    gap = 0 if p % 3 else 2
    return told(
        _repeated(shape, _block(shape, r, (r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1)))
        for r in range(p)
    )


def _block(shape: Shape, worker: int, starts: tuple[int, int, int, int]) -> dict[PlannedOp, int]:
    """Slots of a worker's first microbatch's ops, each weight gradient in the next that is free.

    Args:
        shape: two chunks in a V.
        worker: whose ops.
        starts: slots of the first microbatch's F of the first and of the second chunk, I of the second and the first.
    """
    first, second = shape.stage(worker, 0), shape.stage(worker, 1)
    block = {
        op_of(OpKind.FORWARD, first, 0): starts[0],
        op_of(OpKind.FORWARD, second, 0): starts[1],
        op_of(OpKind.INPUT, second, 0): starts[2],
        op_of(OpKind.INPUT, first, 0): starts[3],
    }
    taken = {start % INTERVAL for start in starts}
    assert len(taken) == len(starts), f"{starts} collide"
    for op in sorted(block, key=lambda op: block[op]):
        if op.kind is OpKind.INPUT:
            slot = next(s for s in range(block[op] + 1, block[op] + INTERVAL) if s % INTERVAL not in taken)
            block[weight(op)] = slot
            taken.add(slot % INTERVAL)
    return block


def _repeated(shape: Shape, block: Mapping[PlannedOp, int]) -> Iterator[PlannedOp]:
    """Ops in the order of a block repeated every interval."""
    slots = [
        (start + INTERVAL * i, op_of(op.kind, op.stage, i))
        for op, start in block.items()
        for i in range(shape.num_microbatches)
    ]
    return (op for _, op in sorted(slots))


def _zb_v(shape: Shape, worker: int, num_microbatches: int) -> Iterator[PlannedOp]:
    p, r = shape.num_workers, worker
    first, second = _Chunk(shape.stage(r, 0)), _Chunk(shape.stage(r, 1))
    # The first chunk fills the pipeline until its first microbatch comes back down the V.
    for _ in range(2 * (p - r) - 1):
        yield first.forward()
    for _ in range(r):
        yield second.forward()
        yield first.forward()
    for _ in range(p - r):
        yield from (second.forward(), second.input(), second.weight())
    # Steady: one microbatch in, one out.
    while second.num_forwards < num_microbatches:
        if first.num_forwards < num_microbatches:
            yield first.forward()
        yield from (first.input(), first.weight())
        yield from (second.forward(), second.input(), second.weight())
    # Drain: input gradients first, for others wait for them.
    for _ in range(r):
        yield from (first.input(), second.input())
    for _ in range(p - r):
        yield from (first.input(), first.weight())
    for chunk in (second, first):
        while chunk.num_weights < num_microbatches:
            yield chunk.weight()


class _Chunk:
    """Counts the ops of each kind, each the next microbatch's."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.num_forwards = self.num_inputs = self.num_weights = 0

    def forward(self) -> PlannedOp:
        self.num_forwards += 1
        return op_of(OpKind.FORWARD, self._stage, self.num_forwards - 1)

    def input(self) -> PlannedOp:
        self.num_inputs += 1
        return op_of(OpKind.INPUT, self._stage, self.num_inputs - 1)

    def weight(self) -> PlannedOp:
        self.num_weights += 1
        return op_of(OpKind.WEIGHT, self._stage, self.num_weights - 1)
