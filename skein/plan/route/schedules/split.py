"""Orders that split the backward, so that weight gradients fill what would be idle: ZB-H1, ZB-H2, interleaved."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from skein.plan.ops import OpKind
from skein.plan.plan import PlannedOp
from skein.plan.route.schedules.shape import Orders, Shape, group_size, grouped, op_of, told
from skein.plan.route.schedules.whole import textbook_depths


def zb_h1(shape: Shape) -> Orders:
    """1F1B with worker r keeping up to r weight gradients for later. All hold p microbatches, r of them only for that.

    Source: Zero Bubble Pipeline Parallelism, arXiv 2401.10241, Section 2.2.
    """
    return one_f_one_i(shape, textbook_depths(shape.num_workers), range(shape.num_workers))


def zb_h2(shape: Shape) -> Orders:
    """ZB-H1 with 2(p - r) - 1 forwards first and 2r kept weight gradients. All hold 2p - 1 microbatches.

    Each worker is busy from its first op to its last when f = i = w; their spans are shifted against each other, so
    steps follow without a gap only if each stage updates as soon as it is done.

    Source: arXiv 2401.10241, Section 2.3.
    """
    p = shape.num_workers
    return one_f_one_i(shape, [2 * (p - r) - 1 for r in range(p)], range(0, 2 * p, 2))


def one_f_one_i(shape: Shape, depths: Sequence[int], num_kept: Sequence[int]) -> Orders:
    """1F1B with worker r's weight gradients done num_kept[r] microbatches after their input gradients."""
    return told(
        (
            _delayed(r, depth, kept, shape.num_microbatches)
            for r, (depth, kept) in enumerate(zip(depths, num_kept, strict=True))
        ),
    )


def interleaved_zb(shape: Shape) -> Orders:
    """Interleaved with split backwards: (v-1)p + p-1-r forwards first, r kept weight gradients. Holds v p chunks.

    Source: the order that torch.distributed.pipelining 2.13 calls InterleavedZeroBubble; arXiv 2401.10241.
    """
    group = group_size(shape)
    units = shape.num_chunks * shape.num_microbatches
    ahead = (shape.num_chunks - 1) * group + shape.num_workers
    return told(_interleaved(shape, r, min(units, ahead - r)) for r in range(shape.num_workers))


def weight(op: PlannedOp) -> PlannedOp:
    """The weight gradient that completes an input gradient."""
    return op_of(OpKind.WEIGHT, op.stage, op.microbatch)


def _delayed(stage: int, depth: int, num_kept: int, num_microbatches: int) -> Iterator[PlannedOp]:
    forwards = [op_of(OpKind.FORWARD, stage, i) for i in range(num_microbatches)]
    inputs = [op_of(OpKind.INPUT, stage, i) for i in range(num_microbatches)]
    return _alternating(forwards, inputs, min(depth, num_microbatches), num_kept)


def _interleaved(shape: Shape, worker: int, warm: int) -> Iterator[PlannedOp]:
    forwards = [op_of(OpKind.FORWARD, *visit) for visit in grouped(shape, worker, is_home=False)]
    inputs = (op_of(OpKind.INPUT, *visit) for visit in grouped(shape, worker, is_home=True))
    return _alternating(forwards, inputs, warm, worker)


def _alternating(
    forwards: Sequence[PlannedOp], inputs: Iterable[PlannedOp], warm: int, num_kept: int
) -> Iterator[PlannedOp]:
    kept: deque[PlannedOp] = deque()
    yield from forwards[:warm]
    for i, op in enumerate(inputs):
        yield op
        kept.append(weight(op))
        if len(kept) > num_kept:
            yield kept.popleft()
        yield from forwards[warm + i : warm + i + 1]
    yield from kept
