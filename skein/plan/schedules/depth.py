"""Warm-up depths from measured times: what the textbook's p - r forwards are where transfers take no time."""

from collections.abc import Sequence

from skein.plan.schedules.cost import Cut, Links
from skein.plan.schedules.whole import cut_depths
from skein.plan.timing import warm_up_depths


def latency_aware_depths(
    cut: Cut,
    links: Links,
    num_microbatches: int,
    memory_bytes: Sequence[int] | None = None,
    *,
    num_spare: int = 0,
) -> tuple[int, ...]:
    """Forwards before each worker's first backward that keep the slowest one busy, as far as memory allows.

    Args:
        cut: one chunk on each worker.
        links: between the workers, uncontended.
        num_microbatches: of a step; nobody needs a greater depth.
        memory_bytes: what each worker has for activations. Too little for one counts as one.
        num_spare: forwards more for each hop that follows.

    Cut by memory, the makespan is in no closed form any more: simulate it.
    """
    spare = [num_spare * hops for hops in reversed(range(cut.num_workers))]
    wanted = [depth + more for depth, more in zip(_deepest(cut, links), spare, strict=True)]
    return cut_depths(wanted, _slots(cut, num_microbatches, memory_bytes))


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


def _deepest(cut: Cut, links: Links) -> tuple[int, ...]:
    """Source: the recurrence of `skein.plan.timing.warm_up_depths`."""
    op_s = [stage.forward_s + stage.backward_s for stage in cut.stages]
    hop_s = [
        links.seconds(r, r + 1, stage.output_bytes) + links.seconds(r + 1, r, stage.gradient_bytes)
        for r, stage in enumerate(cut.stages[:-1])
    ]
    return warm_up_depths(op_s, hop_s, [max(op_s)] * len(op_s))


def _slots(cut: Cut, num_microbatches: int, memory_bytes: Sequence[int] | None) -> list[int]:
    slots = [num_microbatches] * cut.num_workers
    if memory_bytes is None:
        return slots
    return [
        max(1, min(most, available // max(1, stage.activation_bytes)))
        for most, stage, available in zip(slots, cut.stages, memory_bytes, strict=True)
    ]
