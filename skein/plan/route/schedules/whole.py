"""Orders whose backwards are whole: GPipe, 1F1B to any depth, interleaved, breadth-first."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from skein.errors import UserError
from skein.plan.ops import OpKind
from skein.plan.plan import PlannedOp
from skein.plan.route.schedules.shape import Orders, Shape, group_size, grouped, op_of, told


def gpipe(shape: Shape) -> Orders:
    """All forwards, then all backwards: 1F1B of depth m. Holds m microbatches.

    Source: GPipe, arXiv 1811.06965, Figure 2; backwards in the order of the forwards, as torch runs them.
    """
    return one_f_one_b(shape, [shape.num_microbatches] * shape.num_workers)


def textbook_depths(num_workers: int) -> tuple[int, ...]:
    """K_r = p - r: enough to keep everybody busy when transfers take no time."""
    return tuple(range(num_workers, 0, -1))


def one_f_one_b(shape: Shape, depths: Sequence[int] | None = None) -> Orders:
    """Worker r runs K_r forwards, then backward and forward in turn. Holds min(K_r, m) microbatches.

    Args:
        shape: one chunk on each worker.
        depths: K of each worker, never growing along the pipeline; the textbook's K_r = p - r if None.

    Raises:
        UserError: a depth below 1, or one above the depth before it, which would wait for itself.

    Source: Megatron-LM, arXiv 2104.04473, Section 2.2, for the textbook's depths.
    """
    given = textbook_depths(shape.num_workers) if depths is None else tuple(depths)
    if len(given) != shape.num_workers or min(given) < 1 or any(a < b for a, b in pairwise(given)):
        raise UserError(
            "depths", given, f"give {shape.num_workers} depths of at least 1, none above the last"
        )
    return told(_alternating(r, depth, shape.num_microbatches) for r, depth in enumerate(given))


def interleaved(shape: Shape) -> Orders:
    """1F1B over v chunks per worker, microbatches in groups of p. Worker r holds min(mv, (v-1)p + 2(p-1-r) + 1) chunks.

    Without p | m the groups have m / max(1, m // p) microbatches, which must be a whole number.

    Source: Megatron-LM, arXiv 2104.04473, Section 2.2; groups as torch.distributed.pipelining 2.13 makes them.
    """
    group = group_size(shape)
    units = shape.num_chunks * shape.num_microbatches
    warm = [
        min(units, (shape.num_chunks - 1) * group + 2 * (shape.num_workers - 1 - r))
        for r in range(shape.num_workers)
    ]
    return told(_interleaved(shape, r, min(units, warm[r] + 1)) for r in range(shape.num_workers))


def looped_bfs(shape: Shape) -> Orders:
    """Each chunk's forwards of all microbatches, chunk by chunk; then the backwards, in reverse. Holds m v chunks.

    Source: Breadth-First Pipeline Parallelism, arXiv 2211.05953, Section 4.
    """
    microbatches = range(shape.num_microbatches)
    stages = [[shape.stage(r, chunk) for chunk in range(shape.num_chunks)] for r in range(shape.num_workers)]
    return told(
        [
            *(op_of(OpKind.FORWARD, stage, i) for stage in own for i in microbatches),
            *(op_of(OpKind.BACKWARD, stage, i) for stage in reversed(own) for i in reversed(microbatches)),
        ]
        for own in stages
    )


def _alternating(stage: int, depth: int, num_microbatches: int) -> Iterator[PlannedOp]:
    warm = min(depth, num_microbatches)
    for i in range(warm):
        yield op_of(OpKind.FORWARD, stage, i)
    for i in range(num_microbatches):
        yield op_of(OpKind.BACKWARD, stage, i)
        if warm + i < num_microbatches:
            yield op_of(OpKind.FORWARD, stage, warm + i)


def _interleaved(shape: Shape, worker: int, warm: int) -> Iterator[PlannedOp]:
    forwards = [op_of(OpKind.FORWARD, *visit) for visit in grouped(shape, worker, is_home=False)]
    yield from forwards[:warm]
    for i, visit in enumerate(grouped(shape, worker, is_home=True)):
        yield op_of(OpKind.BACKWARD, *visit)
        yield from forwards[warm + i : warm + i + 1]
