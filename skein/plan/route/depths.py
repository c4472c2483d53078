"""Warm-up depths worth simulating for one pipeline: those that times ask for, within what memory holds."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from skein.plan.clock.timing import warm_up_depths

_SPARE = (0, 1)
"""Forwards per hop beyond what the times ask for: with unequal workers or split backwards one more often pays."""
_ROUNDING = 1e-9


def depth_options(
    op_s: Sequence[float], hop_s: Sequence[float], slots: Sequence[int], num_microbatches: int
) -> tuple[tuple[int, ...], ...]:
    """Forwards of each worker before its first backward, in ways of which simulation has to tell the best.

    Where memory cuts, no closed form holds and no single rule is best. To cut only the deepest workers is bad: those
    after them then wait for microbatches that cannot come. Mostly all must go down in proportion.

    Args:
        op_s: forward and backward of one microbatch at each worker, seconds.
        hop_s: activation from each worker to the next and gradient back, seconds.
        slots: microbatches that each worker has memory for; less than one counts as one.
        num_microbatches: of a step; nobody needs a greater depth, so that more is no want of memory.
    """
    asked = warm_up_depths(op_s, hop_s, [max(op_s)] * len(op_s))
    within = [max(1, min(num_microbatches, held)) for held in slots]
    spared = (
        [min(num_microbatches, depth + spare * hops) for hops, depth in enumerate(reversed(asked))][::-1]
        for spare in _SPARE
    )
    return tuple(dict.fromkeys(shrunk for depths in spared for shrunk in _shrunk(depths, within)))


def _shrunk(depths: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Depths within `slots`: those above cut off, or all in proportion, rounded in three ways."""
    yield cut_depths(depths, slots)
    part = min((s - 1) / (k - 1) if k > s else 1.0 for k, s in zip(depths, slots, strict=True))
    rounded: tuple[Callable[[float], int], ...] = (
        lambda x: math.ceil(x - _ROUNDING),
        lambda x: math.floor(x + 0.5),
        lambda x: math.floor(x + _ROUNDING),
    )
    for to_whole in rounded:
        yield cut_depths([1 + to_whole((k - 1) * part) for k in depths], slots)


def cut_depths(depths: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
    """`depths` within `slots` of each worker; a worker cannot go deeper than the one before it feeds it.

    >>> cut_depths([10, 7, 4, 1], [16, 5, 6, 6])
    (10, 5, 4, 1)
    """
    return tuple(accumulate(map(min, depths, slots), min))
