"""Schedules with the output matrix in rows over all workers: each has scores (S) and a term (T) of each microbatch.

Rules of this file
- One microbatch's ops are laid out on every worker, and the next one's follow an interval later: whatever S and T take
  is part of the interval, so that S of one microbatch and T of another one have a gap of their own in each.
- S and T take the first gaps after what they wait for has come, backwards the first of their places after that. What
  latency costs is so many intervals more between forward and backward, and as many activations more.
- The order of starts is all that is kept; ops are then run as soon as they can be.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, arXiv 2411.05288, Sections 4 and 5.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from skein.plan.route.schedules.shape import Shape
from skein.plan.route.schedules.vshape import INTERVAL, v_half_block
from tests.support.scheduling.ops import Op, PipelineOpKind, PipelineSchedule, listed, told_op
from tests.support.scheduling.pricing import Cut, Links

_ROUNDING = 1e-9
"""Part of an interval by which a start may be too early: sums in another order."""


def one_f_one_b_shards(
    cut: Cut, links: Links, num_microbatches: int, *, is_split: bool = False
) -> PipelineSchedule:
    """1F1B with shards, as deep as the times ask for: without latency worker r holds p - r + 1 microbatches.

    With two barriers it is p - r + 2. With one the step takes m intervals, and the ways to the last worker and back.

    Args:
        cut: one chunk on each worker, with shards.
        links: between the workers.
        num_microbatches: of a step.
        is_split: gradients of inputs are sent on before those of weights are made.
    """
    shape, last = cut.shape(num_microbatches), cut.num_workers - 1
    workers = range(cut.num_workers)
    stages, shards = cut.stages, cut.shards
    interval_s = max(
        stages[r].forward_s + shards[r].forward_s + shards[r].backward_s + stages[r].backward_s
        for r in workers
    )
    forward_s = [0.0]
    for r in workers[:-1]:
        there_s = links.seconds(r, r + 1, stages[r].output_bytes)
        forward_s.append(forward_s[-1] + stages[r].forward_s + there_s)
    gap_s = [forward_s[r] + stages[r].forward_s for r in workers]
    scores_s, term_s, ready_s = _exchange(cut, links, gap_s, interval_s, gap_s[last], last)
    backward_s = [0.0] * cut.num_workers
    for r in reversed(workers):
        place_s = gap_s[r] + shards[r].forward_s + shards[r].backward_s
        backward_s[r] = _first(place_s, interval_s, ready_s)
        passed_s = stages[r].input_s if is_split else stages[r].backward_s
        ready_s = (
            backward_s[r] + passed_s + links.seconds(r, r - 1, stages[r - 1].gradient_bytes) if r else 0.0
        )
    blocks = []
    for r in workers:
        kind = PipelineOpKind.BACKWARD_INPUT if is_split else PipelineOpKind.BACKWARD
        block = {
            Op(PipelineOpKind.FORWARD, r, 0): forward_s[r],
            Op(PipelineOpKind.SCORES, cut.num_workers + r, 0): scores_s[r],
            Op(PipelineOpKind.TERM, cut.num_workers + r, 0): term_s[r],
            Op(kind, r, 0): backward_s[r],
        }
        if is_split:
            block[Op(PipelineOpKind.BACKWARD_WEIGHT, r, 0)] = backward_s[r] + stages[r].input_s
        blocks.append(block)
    return _repeated(shape, blocks, interval_s, cut.num_barriers)


def v_half_shards(cut: Cut, links: Links, num_microbatches: int) -> PipelineSchedule:
    """V-Half with shards: a gap for S and T at the same time on all workers, once in an interval.

    Without latency all hold what they hold in V-Half: S and T lie between the last stage's forward and its backward.

    Args:
        cut: two chunks on each worker in a V, with shards.
        links: between the workers; what chunks send costs no depth here, as in V-Half.
        num_microbatches: of a step.
    """
    shape = cut.shape(num_microbatches)
    slot_s = max(x.forward_s + x.backward_s for x in cut.stages) / 3
    shard_s = max(x.forward_s + x.backward_s for x in cut.shards)
    interval_s = INTERVAL * slot_s + shard_s
    blocks = [
        {told_op(op): at for op, at in v_half_block(shape, r).items()} for r in range(shape.num_workers)
    ]
    last = cut.num_workers * 2 - 1
    forward, gradient = Op(PipelineOpKind.FORWARD, last, 0), Op(PipelineOpKind.BACKWARD_INPUT, last, 0)
    holder = shape.worker_by_stage[last]
    # The gap is before this slot of each interval.
    slot = blocks[holder][forward] + 1

    def start_s(at: int) -> float:
        return at * slot_s + (at - slot) // INTERVAL * shard_s + shard_s

    gap_s = [slot * slot_s] * shape.num_workers
    end_s = start_s(blocks[holder][forward]) + cut.stages[last].forward_s
    scores_s, term_s, ready_s = _exchange(cut, links, gap_s, interval_s, end_s, holder)
    late_s = _first(start_s(blocks[holder][gradient]), interval_s, ready_s) - start_s(
        blocks[holder][gradient]
    )
    starts = []
    for r, block in enumerate(blocks):
        starts_s = {
            op: start_s(at) + (0.0 if op.kind is PipelineOpKind.FORWARD else late_s)
            for op, at in block.items()
        }
        starts_s[Op(PipelineOpKind.SCORES, last + 1 + r, 0)] = scores_s[r]
        starts_s[Op(PipelineOpKind.TERM, last + 1 + r, 0)] = term_s[r]
        starts.append(starts_s)
    return _repeated(shape, starts, interval_s, cut.num_barriers)


def _exchange(
    cut: Cut, links: Links, gap_s: Sequence[float], interval_s: float, end_s: float, holder: int
) -> tuple[list[float], list[float], float]:
    """Starts of the first microbatch's S and T on each worker, and when the last stage's holder may go on.

    Args:
        cut: with shards.
        links: between the workers.
        gap_s: start of one of each worker's gaps; others are whole intervals away.
        interval_s: from one gap to the next.
        end_s: when the last stage's forward ends.
        holder: who holds the last stage.
    """
    workers, shards = range(cut.num_workers), cut.shards
    output_bytes = cut.stages[-1].output_bytes
    scores_s = [_first(gap_s[r], interval_s, end_s + links.seconds(holder, r, output_bytes)) for r in workers]
    all_s = max(
        scores_s[r] + shards[r].forward_s + links.seconds(r, holder, shards[r].output_bytes) for r in workers
    )
    term_s = [
        _first(gap_s[r] + shards[r].forward_s, interval_s, all_s + links.seconds(holder, r, 0))
        for r in workers
    ]
    if cut.num_barriers == 1:
        return scores_s, term_s, all_s
    ends_s = (
        term_s[r] + shards[r].backward_s + links.seconds(r, holder, shards[r].gradient_bytes) for r in workers
    )
    return scores_s, term_s, max(ends_s)


def _first(place_s: float, interval_s: float, ready_s: float) -> float:
    """The first of places an interval apart that is not before `ready_s`."""
    return place_s + interval_s * math.ceil((ready_s - place_s) / interval_s - _ROUNDING)


def _repeated(
    shape: Shape, blocks: Sequence[Mapping[Op, float]], interval_s: float, num_barriers: int
) -> PipelineSchedule:
    """The schedule whose ops begin in the order of these blocks, repeated every interval."""

    def in_order(block: Mapping[Op, float]) -> Iterator[Op]:
        starts = [
            (start_s / interval_s + i, place, op._replace(microbatch=i))
            for place, (op, start_s) in enumerate(sorted(block.items(), key=lambda x: x[1]))
            for i in range(shape.num_microbatches)
        ]
        # Starts that are equal but for rounding are of ops that take no time.
        return (op for _, _, op in sorted(starts, key=lambda x: (round(x[0], 9), x[1], x[2])))

    return listed(shape, map(in_order, blocks), num_barriers=num_barriers)
