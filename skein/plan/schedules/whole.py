"""Schedules whose backwards are whole: GPipe, 1F1B to any depth, interleaved, breadth-first.

In the formulas p is the number of workers, r the position of one, v its chunks and m the microbatches.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from skein.errors import UserError
from skein.plan.schedules.ops import Op, PipelineOpKind, PipelineSchedule, Shape, schedule_of


def gpipe(shape: Shape) -> PipelineSchedule:
    """All forwards, then all backwards: 1F1B of depth m. Holds m microbatches.

    Source: GPipe, arXiv 1811.06965, Figure 2; backwards in the order of the forwards, as torch runs them.
    """
    return one_f_one_b(shape, [shape.num_microbatches] * shape.num_workers)


def textbook_depths(num_workers: int) -> tuple[int, ...]:
    """K_r = p - r: enough to keep everybody busy when transfers take no time."""
    return tuple(range(num_workers, 0, -1))


def one_f_one_b(shape: Shape, depths: Sequence[int] | None = None) -> PipelineSchedule:
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
    return schedule_of(
        shape, (_alternating(r, depth, shape.num_microbatches) for r, depth in enumerate(given))
    )


def interleaved(shape: Shape) -> PipelineSchedule:
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
    return schedule_of(
        shape, (_interleaved(shape, r, min(units, warm[r] + 1)) for r in range(shape.num_workers))
    )


def looped_bfs(shape: Shape) -> PipelineSchedule:
    """Each chunk's forwards of all microbatches, chunk by chunk; then the backwards, in reverse. Holds m v chunks.

    Source: Breadth-First Pipeline Parallelism, arXiv 2211.05953, Section 4.
    """
    microbatches = range(shape.num_microbatches)
    chunks = range(shape.num_chunks)
    return schedule_of(
        shape,
        (
            [Op(PipelineOpKind.FORWARD, shape.stage(r, chunk), i) for chunk in chunks for i in microbatches]
            + [
                Op(PipelineOpKind.BACKWARD, shape.stage(r, chunk), i)
                for chunk in reversed(chunks)
                for i in reversed(microbatches)
            ]
            for r in range(shape.num_workers)
        ),
    )


def group_size(shape: Shape) -> int:
    """Microbatches that an interleaved order takes through one chunk before it turns to the next: p if p | m.

    Raises:
        UserError: the microbatches do not fall into equal groups.
    """
    rounds = max(1, shape.num_microbatches // shape.num_workers)
    if shape.num_microbatches % rounds:
        hint = f"give a multiple of {rounds}, or of the {shape.num_workers} workers"
        raise UserError("num_microbatches", shape.num_microbatches, hint)
    return shape.num_microbatches // rounds


def grouped(shape: Shape, worker: int, *, kind: PipelineOpKind) -> Iterator[Op]:
    """One kind of op of all chunks of `worker` in interleaved order: groups, chunks in them, microbatches in those."""
    group = group_size(shape)
    chunks = range(shape.num_chunks)
    for first in range(0, shape.num_microbatches, group):
        for chunk in chunks if kind is PipelineOpKind.FORWARD else reversed(chunks):
            for microbatch in range(first, first + group):
                yield Op(kind, shape.stage(worker, chunk), microbatch)


def _alternating(stage: int, depth: int, num_microbatches: int) -> Iterator[Op]:
    warm = min(depth, num_microbatches)
    for i in range(warm):
        yield Op(PipelineOpKind.FORWARD, stage, i)
    for i in range(num_microbatches):
        yield Op(PipelineOpKind.BACKWARD, stage, i)
        if warm + i < num_microbatches:
            yield Op(PipelineOpKind.FORWARD, stage, warm + i)


def _interleaved(shape: Shape, worker: int, warm: int) -> Iterator[Op]:
    forwards = list(grouped(shape, worker, kind=PipelineOpKind.FORWARD))
    yield from forwards[:warm]
    for i, backward in enumerate(grouped(shape, worker, kind=PipelineOpKind.BACKWARD)):
        yield backward
        yield from forwards[warm + i : warm + i + 1]
