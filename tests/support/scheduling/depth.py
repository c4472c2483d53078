"""Depths of a pipeline that has a cut and links: the planner's, and what may be put off beside them."""

from collections.abc import Sequence

from skein.plan.route import depths
from tests.support.scheduling.pricing import Cut, Links


def depth_options(
    cut: Cut, links: Links, num_microbatches: int, memory_bytes: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """The planner's depths, within what each worker has for activations; one chunk on each worker."""
    hop_s = [
        links.seconds(r, r + 1, stage.output_bytes) + links.seconds(r + 1, r, stage.gradient_bytes)
        for r, stage in enumerate(cut.stages[:-1])
    ]
    slots = [
        num_microbatches if memory_bytes is None else memory_bytes[r] // max(1, stage.activation_bytes)
        for r, stage in enumerate(cut.stages)
    ]
    op_s = [stage.forward_s + stage.backward_s for stage in cut.stages]
    return depths.depth_options(op_s, hop_s, slots, num_microbatches)


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
