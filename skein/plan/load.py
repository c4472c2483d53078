"""Load of a chunk on its worker: arithmetic, memory and traffic of one microbatch, from the model's layer list."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from skein.config.job import JobSpec
from skein.model.layers import LayerSpec, pending_bytes, stage_cost, tied_sizes
from skein.topology.links import F64
from skein.types import ChunkRef, Layout, StageIndex, StageSpec, WorkerId

_OWN_COPIES = 2
"""Copies of each parameter that every job has: itself and its sum of gradients. The rule says what it holds besides."""
_ROW_COPIES = 11
"""The same of an array's rows: each with two moments, all that once more in the copy that a round works on and in what
is voted on, and gradients, twice where one more batch adds to them."""
_STATE_COPIES = 3
_SHARED_COPIES = 4
"""Copies that tied stages of one worker have together: each sums gradients of its own (docs/adr/0018)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Load of one chunk of `stage`; FLOPs, slots and outputs are of one microbatch.

    It takes `fixed_bytes + slots * slot_bytes` of memory, alone; several on one worker take `together_bytes`.
    `parameter_bytes` are those of its parameters, `tied_bytes` of those that another stage may have too, by name,
    `output_bytes` of the boundary tensor that it hands on (and of the gradient that comes back).
    """

    stage: StageSpec
    forward_flops: int
    backward_flops: int
    fixed_bytes: int
    slot_bytes: int
    output_bytes: int
    parameter_bytes: int
    tied_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        """Bytes that move if the chunk moves alone: parameters and two moments."""
        return _STATE_COPIES * self.parameter_bytes

    @property
    def flops(self) -> int:
        """Forward and backward together."""
        return self.forward_flops + self.backward_flops

    def memory_bytes(self, slots: int) -> int:
        """Bytes of memory that the chunk takes with so many slots, alone on its worker."""
        return self.fixed_bytes + slots * self.slot_bytes


def together_bytes(loads: Sequence[StageLoad], slots: Sequence[int]) -> int:
    """Bytes of memory that the chunks of one worker take together, with so many slots each."""
    needed = sum(load.memory_bytes(num) for load, num in zip(loads, slots, strict=True))
    return needed - sum(spared_bytes(loads).values())


def spared_bytes(loads: Sequence[StageLoad]) -> dict[tuple[int, int], int]:
    """Bytes that two chunks take less on one worker than on two, by their places in `loads`; without pairs of none.

    What is tied has two holders in a path at most, so pairs tell all.
    """
    tied = [(place, load.tied_bytes) for place, load in enumerate(loads) if load.tied_bytes]
    return {
        (one, other): _SHARED_COPIES * sum(held[name] for name in shared)
        for (one, held), (other, beside) in combinations(tied, 2)
        if (shared := held.keys() & beside.keys())
    }


def arriving_bytes(loads: Sequence[StageLoad], stage: int, beside: Iterable[int]) -> int:
    """Bytes of state that a stage brings to a worker that has these others by then: what is tied comes once."""
    there = {name for other in beside for name in loads[other].tied_bytes}
    tied = sum(size for name, size in loads[stage].tied_bytes.items() if name in there)
    return loads[stage].state_bytes - _STATE_COPIES * tied


def moved_bytes(loads: Sequence[StageLoad], layout: Layout) -> tuple[int, ...]:
    """Bytes of state that each stage brings along; the head of `LOOP` goes with the first, which has what is tied."""
    own = [load.state_bytes for load in loads]
    if layout.comes_back:
        own[-1] = arriving_bytes(loads, len(loads) - 1, [0])
    return tuple(own)


def brought_bytes(
    loads: Sequence[StageLoad], layout: Layout, moved: Iterable[ChunkRef], there: Iterable[ChunkRef]
) -> int:
    """Bytes of state that the chunks `moved` bring to their workers, with all that will be `there`.

    Workers build the chunks of lower stages first, so what is tied comes with these.
    """
    own, stages_at = moved_bytes(loads, layout), defaultdict[WorkerId, list[int]](list)
    for chunk in there:
        stages_at[chunk.worker].append(chunk.stage)
    return sum(
        min(
            own[chunk.stage],
            arriving_bytes(loads, chunk.stage, [x for x in stages_at[chunk.worker] if x < chunk.stage]),
        )
        for chunk in moved
    )


def stage_loads(job: JobSpec, stages: Sequence[StageSpec]) -> tuple[StageLoad, ...]:
    """Loads of `stages`, in their order."""
    layers = job.layers
    return tuple(_load(job, layers, stage) for stage in stages)


def split_stages(job: JobSpec, stages: Sequence[StageSpec]) -> frozenset[StageIndex]:
    """Stages whose backwards are split: all but the head stage of `LOOP`, if any."""
    num_split = job.parallel.num_stages * job.plan.splits
    return frozenset(stage.index for stage in stages if stage.index < num_split)


def span_bytes(job: JobSpec, num_stages: int) -> F64:
    """Memory with a slot each of the layers from row up to column as so many stages, infinite where those are fewer.

    As much as the worst of their cuts takes, in a matrix of (num_layers + 1) squared.
    """
    layers, samples = job.layers, _num_rows(job) * job.batch.microbatch_samples
    output_bytes = samples * np.array([0, *(x.output_bytes for x in layers)], np.float64)
    copies = _copies(job)
    own_bytes = [copies * job.word_bytes * x.num_parameters + _slot_bytes(job, x) for x in layers]
    sums = np.cumsum([0, *own_bytes])
    spans: F64 = sums[None, :] - sums[:, None] + 2.0 * (output_bytes[:, None] + output_bytes[None, :])
    # Both ends are on one worker: in one stage, or in two.
    num_once = copies if num_stages == 1 else _SHARED_COPIES
    spans[0] -= num_once * job.word_bytes * np.cumsum([0, *(x.num_tied_parameters for x in layers)])
    for first in range(len(layers)):
        # Each cut between has an output twice on both of its sides.
        within = np.maximum.accumulate(output_bytes[first + 1 : -1])
        spans[first, first + 2 :] += 4.0 * (num_stages - 1) * within
    spans[np.tril_indices(len(sums), num_stages - 1)] = np.inf
    return spans


def ends_spared_bytes(job: JobSpec) -> int:
    """Bytes that the head takes less beside the first stage than on another worker."""
    return _SHARED_COPIES * job.word_bytes * job.layers[-1].num_tied_parameters


def _slot_bytes(job: JobSpec, layer: LayerSpec) -> int:
    """Bytes of one microbatch that a layer keeps at most, alone."""
    samples = _num_rows(job) * job.batch.microbatch_samples
    pending_bytes = samples * layer.pending_bytes + layer.num_early_gradients * job.word_bytes
    return max(samples * layer.activation_bytes, pending_bytes * job.plan.splits)


def _num_rows(job: JobSpec) -> int:
    """Models that a chunk holds side by side."""
    return max(1, len(job.rows))


def _copies(job: JobSpec) -> float:
    """Numbers that a chunk holds for each parameter of the model at its fullest moment."""
    if job.rows:
        return _ROW_COPIES * len(job.rows)
    held = job.aggregation.held(job)
    return _OWN_COPIES + held.state + held.exchange


def _load(job: JobSpec, layers: Sequence[LayerSpec], stage: StageSpec) -> StageLoad:
    cost = stage_cost(layers, stage)
    samples = _num_rows(job) * job.batch.microbatch_samples
    input_bytes = layers[stage.first - 1].output_bytes if stage.first else 0
    # A slot keeps the input as it came from the wire and the output as it went there, besides what autograd keeps;
    # one more input and one more gradient wait to be taken.
    boundary_bytes = samples * (input_bytes + cost.output_bytes)
    parameter_bytes = cost.num_parameters * job.word_bytes
    # Then what an input op puts aside, while it lets go of what autograd keeps.
    aside_bytes = 0
    if split_stages(job, [stage]):
        aside_bytes = pending_bytes(
            job.model,
            stage,
            num_samples=samples,
            sequence_tokens=job.data.sequence_tokens,
            precision=job.precision,
        )
    return StageLoad(
        stage=stage,
        forward_flops=samples * cost.forward_flops,
        backward_flops=samples * cost.backward_flops,
        fixed_bytes=math.ceil(_copies(job) * parameter_bytes) + boundary_bytes,
        slot_bytes=max(samples * cost.activation_bytes, aside_bytes) + boundary_bytes,
        output_bytes=samples * cost.output_bytes,
        parameter_bytes=_num_rows(job) * parameter_bytes,
        tied_bytes={
            name: size * job.word_bytes
            for sizes in tied_sizes(job.model)[stage.first : stage.stop]
            for name, size in sizes.items()
        },
    )


def slots_within(loads: Sequence[StageLoad], wanted: Sequence[int], memory_bytes: int) -> tuple[int, ...]:
    """Slots for the chunks of one worker: as wanted if that fits, else cut in proportion, never below one each."""
    most = max(wanted)

    def portion(n: int) -> tuple[int, ...]:
        return tuple(max(1, want * n // most) for want in wanted)

    fitting = bisect_right(range(most + 1), memory_bytes, key=lambda n: together_bytes(loads, portion(n)))
    return portion(max(0, fitting - 1))


LEAST_SHARD_BYTES = 2**20
"""Smallest shard of a reduction: smaller ones cost more in messages than they spare."""


def num_shards(num_bytes: int, num_workers: int) -> int:
    """Into how many parts a reduction is cut: one per worker, but no part below `LEAST_SHARD_BYTES`."""
    return min(num_workers, max(1, math.ceil(num_bytes / LEAST_SHARD_BYTES)))
