"""Warm-up depths from measured times: what the textbook's p - r forwards are where transfers take no time."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from skein.plan.clock.timing import warm_up_depths
from tests.support.scheduling.pricing import Cut, Links

_SPARE = (0, 1)
"""Forwards per hop beyond what the times ask for: with unequal workers or split backwards one more often pays."""
_ROUNDING = 1e-9


def latency_aware_depths(
    cut: Cut, links: Links, num_microbatches: int, *, num_spare: int = 0
) -> tuple[int, ...]:
    """Forwards before each worker's first backward that keep the slowest one busy.

    Args:
        cut: one chunk on each worker.
        links: between the workers, uncontended.
        num_microbatches: of a step; nobody needs a greater depth.
        num_spare: forwards more for each hop that follows.

    Source: the recurrence of `skein.plan.clock.timing.warm_up_depths`.
    """
    op_s = [stage.forward_s + stage.backward_s for stage in cut.stages]
    hop_s = [
        links.seconds(r, r + 1, stage.output_bytes) + links.seconds(r + 1, r, stage.gradient_bytes)
        for r, stage in enumerate(cut.stages[:-1])
    ]
    depths = warm_up_depths(op_s, hop_s, [max(op_s)] * len(op_s))
    num_hops = reversed(range(cut.num_workers))
    return tuple(
        min(num_microbatches, depth + num_spare * hops) for depth, hops in zip(depths, num_hops, strict=True)
    )


def depth_options(
    cut: Cut, links: Links, num_microbatches: int, memory_bytes: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Depths worth simulating, within what each worker has for activations (too little for one counts as one).

    Where memory cuts, no closed form holds and no single rule is best. To cut only the deepest workers is bad: those
    after them then wait for microbatches that cannot come. Mostly all must go down in proportion.
    """
    slots = _slots(cut, num_microbatches, memory_bytes)
    options = (
        shrunk
        for num_spare in _SPARE
        for shrunk in _shrunk(latency_aware_depths(cut, links, num_microbatches, num_spare=num_spare), slots)
    )
    return tuple(dict.fromkeys(options))


def kept_weights(
    cut: Cut, depths: Sequence[int], num_microbatches: int, memory_bytes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Weight gradients that each worker may put off so that all hold as many microbatches as the first one.

    In the zero-bubble orders of unlimited memory this is r for K_r = p - r, and 2r for K_r = 2(p - r) - 1.
    """
    kept = []
    for r, (stage, depth) in enumerate(zip(cut.stages, depths, strict=True)):
        most = max(min(depths[0], num_microbatches) - depth, 0)
        if memory_bytes is not None and stage.kept_bytes:
            left_bytes = memory_bytes[r] - depth * stage.activation_bytes
            most = min(most, max(left_bytes, 0) // stage.kept_bytes)
        kept.append(most)
    return tuple(kept)


def _shrunk(depths: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Within `slots`: what is above cut off, or all in proportion, rounded in three ways."""
    yield cut_depths(depths, slots)
    part = min((s - 1) / (k - 1) if k > s else 1.0 for k, s in zip(depths, slots, strict=True))
    rounded: tuple[Callable[[float], int], ...] = (
        lambda x: math.ceil(x - _ROUNDING),
        lambda x: math.floor(x + 0.5),
        lambda x: math.floor(x + _ROUNDING),
    )
    for to_whole in rounded:
        yield cut_depths([1 + to_whole((k - 1) * part) for k in depths], slots)


def _slots(cut: Cut, num_microbatches: int, memory_bytes: Sequence[int] | None) -> list[int]:
    slots = [num_microbatches] * cut.num_workers
    if memory_bytes is None:
        return slots
    return [
        max(1, min(most, available // max(1, stage.activation_bytes)))
        for most, stage, available in zip(slots, cut.stages, memory_bytes, strict=True)
    ]


def cut_depths(depths: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
    """`depths` within `slots` of each worker; a worker cannot go deeper than the one before it feeds it.

    >>> cut_depths([10, 7, 4, 1], [16, 5, 6, 6])
    (10, 5, 4, 1)
    """
    return tuple(accumulate(map(min, depths, slots), min))
