"""Layers into stages: contiguous, with the slowest stage as fast as it can be."""

from collections.abc import Sequence

import numpy as np

from skein.config.job import JobSpec
from skein.errors import UserError
from skein.model.layers import LayerSpec
from skein.topology.links import F64
from skein.types import Layout, StageIndex, StageSpec

# Sums of equal layers may differ by rounding; 1e-9 is far above that and far below one layer in 512.
_MARGIN = 1 + 1e-9


def cut(
    layers: Sequence[LayerSpec], num_stages: int, layout: Layout, *, speeds: Sequence[float] | None = None
) -> tuple[StageSpec, ...]:
    """The stages of a model, balanced by FLOPs of forward and backward.

    Of all cuts with the least greatest time it gives the one with the least sum of squared times. In `LOOP` the head
    is one stage more, last in the list; as stage 0's workers run it, its FLOPs count there.

    Args:
        layers: the model's layer list, head last.
        num_stages: without the head stage of `LOOP`; at least 1.
        layout: where the head is.
        speeds: FLOP/s at which each of the stages will run; None: all alike.

    Raises:
        UserError: there are fewer layers than stages.
    """
    check_num_stages(len(layers), num_stages, layout)
    return cut_costs([x.forward_flops + x.backward_flops for x in layers], num_stages, layout, speeds=speeds)


def cut_costs(
    costs: Sequence[float], num_stages: int, layout: Layout, *, speeds: Sequence[float] | None = None
) -> tuple[StageSpec, ...]:
    """Stages as of `cut`, for any cost per layer (bytes, say) and what each stage can bear of it."""
    array = np.asarray(costs, dtype=np.float64)
    if layout is Layout.LINE:
        return _specs(partition(array, num_stages, speeds=speeds))
    body = partition(array[:-1], num_stages, speeds=speeds, extra_first=float(array[-1]))
    return _specs((*body, len(array)))


def check_num_stages(num_layers: int, num_stages: int, layout: Layout) -> None:
    """Refuses more stages than layers.

    Raises:
        UserError: with field `parallel.stages`.
    """
    most = num_layers if layout is Layout.LINE else num_layers - 1
    if num_stages > most:
        kept = "" if layout is Layout.LINE else " (the head stays with the first stage)"
        raise UserError(
            "parallel.stages", num_stages, f"the model has {most} layers to cut{kept}: give at most {most}"
        )


def check_job(job: JobSpec) -> None:
    """Refuses at submit what no fleet could run.

    Raises:
        UserError: more stages than layers, samples longer than the model's positions, or more replicas than
            microbatches to share.
    """
    check_num_stages(len(job.layers), job.parallel.stages, job.parallel.layout)
    most = job.batch.num_microbatches
    if job.parallel.replicas > most:
        hint = f"a step has {most} microbatches to share: give at most {most}, or raise batch.samples"
        raise UserError("parallel.replicas", job.parallel.replicas, hint)


def partition(
    costs: F64, num_parts: int, *, speeds: Sequence[float] | None = None, extra_first: float = 0.0
) -> tuple[int, ...]:
    """Stops of `num_parts` contiguous, non-empty parts of `costs`, such that max(cost / speed) is least.

    >>> partition(np.array([1.0, 1.0, 1.0, 3.0]), 2)
    (3, 4)
    """
    if speeds is not None and len(speeds) != num_parts:
        raise ValueError(f"{len(speeds)} speeds for {num_parts} parts")
    times = _Times(costs, speeds or [1.0] * num_parts, extra_first)
    # Two passes: first the least greatest time, then the evenest of those that keep to it.
    worst = np.full(len(costs) + 1, np.inf)
    worst[0] = 0.0
    for part in range(num_parts):
        worst = np.maximum(worst[:, None], times.of(part)).min(axis=0)
    bound = worst[-1] * _MARGIN
    total = np.full(len(costs) + 1, np.inf)
    total[0] = 0.0
    choices = []
    for part in range(num_parts):
        part_s = times.of(part)
        sums = total[:, None] + np.where(part_s <= bound, part_s * part_s, np.inf)
        choices.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    stops = [len(costs)]
    for choice in reversed(choices[1:]):
        stops.append(int(choice[stops[-1]]))
    return tuple(reversed(stops))


class _Times:
    """Per part a matrix: its time for the items from row up to column, infinite where there are none."""

    def __init__(self, costs: F64, speeds: Sequence[float], extra_first: float) -> None:
        sums = np.concatenate([[0.0], np.cumsum(costs)])
        ranges = sums[None, :] - sums[:, None]
        ranges[np.tril_indices(len(sums))] = np.inf
        scale = max(float(sums[-1]) + extra_first, 1.0)
        self._costs = ranges / scale
        self._extra = extra_first / scale
        self._speeds = [speed / max(speeds) for speed in speeds]

    def of(self, part: int) -> F64:
        costs: F64 = (self._costs + self._extra if part == 0 else self._costs) / self._speeds[part]
        return costs


def _specs(stops: Sequence[int]) -> tuple[StageSpec, ...]:
    firsts = (0, *stops[:-1])
    return tuple(
        StageSpec(index=StageIndex(i), first=first, stop=stop)
        for i, (first, stop) in enumerate(zip(firsts, stops, strict=True))
    )
