"""Layers into stages: contiguous, the slowest as fast as it can be, within workers' memory where that is scarce.

Rules of this file
- A matrix of runs of layers, (num_layers + 1) squared, has their first layer as row and their end as column; an
  infinite cell is no run. In `LOOP` the head lies with the first stage, so row 0 has it too.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from skein.config.job import JobSpec
from skein.errors import UserError
from skein.model.layers import LayerSpec
from skein.model.rows import RowCut
from skein.plan.load import ends_spared_bytes, span_bytes
from skein.plan.place import Pool
from skein.plan.plan import Infeasible
from skein.topology.links import F64
from skein.types import Layout, StageIndex, StageSpec
from skein.units import format_bytes

# Sums of equal layers may differ by rounding; 1e-9 is far above that and far below one layer in 512.
_MARGIN = 1 + 1e-9
_MOST_WORK = 3e8
"""Cells that a cut under memory looks at, some seconds; where there would be more, workers count as alike."""


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
    return _specs(_stops(_times(layers, layout, speeds or [1.0] * num_stages)), layout)


def cut_job(job: JobSpec) -> tuple[StageSpec, ...]:
    """The stages of a job, as of `cut`; shards of its vocabulary are cut apart from the layers between.

    Raises:
        UserError: there are fewer layers than stages.
    """
    parallel = job.parallel
    num_layers = most_stages(job) + parallel.layout.num_head_stages
    check_num_stages(num_layers, parallel.num_stages - parallel.num_shards, parallel.layout)
    times = _times(job.layers, parallel.layout, [1.0] * parallel.num_stages, _within_ends(job))
    return _specs(_stops_by_end(job, times), parallel.layout)


def cut_within(
    job: JobSpec, speeds: Sequence[float], rooms_bytes: Sequence[float]
) -> tuple[StageSpec, ...] | None:
    """Stages as of `cut_job` for these speeds, of no more than so many bytes with one slot; None if there are none."""
    layout = job.parallel.layout
    [sizes_bytes] = _sizes_bytes(job, 1)
    times = [
        np.where(sizes_bytes <= room_bytes, part_s, np.inf)
        for part_s, room_bytes in zip(
            _times(job.layers, layout, speeds, _within_ends(job)), rooms_bytes, strict=True
        )
    ]
    stops = _stops_by_end(job, times)
    ends = pairwise((0, *stops))
    return (
        _specs(stops, layout) if all(np.isfinite(x[at]) for x, at in zip(times, ends, strict=True)) else None
    )


def most_stages(job: JobSpec) -> int:
    """Stages that there are layers for, without shards of the vocabulary and the head of `LOOP`."""
    inputs, outputs = _ends(job)
    num_merged = len(_within_ends(job))
    return len(job.layers) - inputs - outputs - num_merged - job.parallel.layout.num_head_stages


def most_shards(job: JobSpec) -> int:
    """Shards that there are blocks of the vocabulary's rows for; 0 where it is not in blocks."""
    # The final norm goes with the layers between.
    return len(job.layers) - job.model.inner_layers.stop - 1


def _ends(job: JobSpec) -> tuple[int, int]:
    """Layers of the list that are blocks of the input's rows, and of the output's."""
    num_inputs, _, num_outputs = job.parallel.shares
    return job.model.inner_layers.start * (num_inputs > 0), most_shards(job) * (num_outputs > 0)


def _within_ends(job: JobSpec) -> list[int]:
    """Layers of blocks of rows that go with the layer before, for that end is not cut into shards."""
    inner, (num_inputs, _, num_outputs) = job.model.inner_layers, job.parallel.shares
    inputs = () if num_inputs else range(1, inner.start)
    outputs = () if num_outputs else range(inner.stop + 1, len(job.layers))
    return [*inputs, *outputs]


def _stops_by_end(job: JobSpec, times: Sequence[F64]) -> tuple[int, ...]:
    """Stops as of `_stops`, within each end of the pipeline that is cut into shards, and between the ends.

    Shards of the input take no time, so they are cut as those of the output are.
    """
    num_inputs, num_between, num_outputs = job.parallel.shares
    if not num_outputs:
        return _stops(times)
    inputs, outputs = _ends(job)
    last = len(job.layers) - outputs

    def within(first: int, stop: int, parts: Sequence[F64]) -> tuple[int, ...]:
        return tuple(first + x for x in _stops([part[first : stop + 1, first : stop + 1] for part in parts]))

    rows = within(last, len(job.layers), times[num_inputs + num_between :])
    between = within(inputs, last, times[num_inputs : num_inputs + num_between])
    return (*(x - last for x in rows[:num_inputs]), *between, *rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingCut:
    """Stages, the head of `LOOP` last, and for each of the others the position in the pool of who has room for it."""

    stages: tuple[StageSpec, ...]
    worker_by_stage: tuple[int, ...]


def cut_under_memory(job: JobSpec, pool: Pool) -> FittingCut | Infeasible:
    """The cut whose slowest worker is the fastest, of all that keep to every worker's memory with one slot a stage.

    A worker holds one stage, or several adjacent ones where one each does not fit. Workers are taken in every order:
    a dynamic programme over who is used and how far the layers are cut, least[used + w][j] = min over i of
    max(least[used][i], cost(i..j) / speed_w) where bytes(i..j) fits w. Of a dozen workers or more, those most alike
    count as the slowest and the smallest of them.
    """
    if job.parallel.num_shards:
        rows = job.parallel.vocabulary.rows
        evenly, cure = ("even ", "parallel.vocabulary.rows: memory, ") if rows is RowCut.EVEN else ("", "")
        reason = f"no {evenly}cut into shards of the vocabulary fits the workers' memory"
        return Infeasible(reason=f"{reason}: set {cure}more parallel.stages, or add workers")
    nearest = None
    for most_held in sorted({1, job.parallel.num_stages}):
        programme = _programme(job, pool, most_held)
        if programme is None:
            break
        runs = programme.runs(programme.paces)
        if runs is not None:
            return _fitting(job, pool, programme, runs)
        nearest = programme
    runs = None if nearest is None else nearest.runs(nearest.shares)
    if nearest is None or runs is None:
        reason = f"{len(job.layers)} layers are too many to cut by the bytes of {len(pool.workers)} workers"
        return Infeasible(reason=f"{reason}: set fewer parallel.stages, or add workers")
    return _shortage(pool, nearest, runs)


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
        UserError: more stages, chunks or shards than layers, samples longer than the model's positions, or more
            replicas than microbatches to share.
    """
    parallel = job.parallel
    most = most_stages(job)
    check_num_stages(most + parallel.layout.num_head_stages, parallel.stages, parallel.layout)
    most //= parallel.stages
    if parallel.num_shards and parallel.stages > (num_blocks := most_shards(job)):
        hint = f"the vocabulary is cut into {num_blocks} shards at most: give off, or fewer parallel.stages"
        raise UserError("parallel.vocabulary.split", parallel.vocabulary.split.value, hint)
    if parallel.chunks != "auto" and parallel.chunks > most:
        num_stages = parallel.num_stages - parallel.num_shards
        hint = f"{num_stages} stages are more than the model has layers to cut: give at most {most}"
        raise UserError("parallel.chunks", parallel.chunks, hint)
    most = job.batch.num_microbatches
    if job.parallel.replicas > most:
        hint = f"a step has {most} microbatches to share: give at most {most}, or raise batch.samples"
        raise UserError("parallel.replicas", job.parallel.replicas, hint)


def _specs(stops: Sequence[int], layout: Layout) -> tuple[StageSpec, ...]:
    every = (*stops, stops[-1] + 1) if layout.comes_back else stops
    return tuple(
        StageSpec(index=StageIndex(i), first=first, stop=stop)
        for i, (first, stop) in enumerate(pairwise((0, *every)))
    )


def _times(
    layers: Sequence[LayerSpec], layout: Layout, speeds: Sequence[float], merged: Sequence[int] = ()
) -> list[F64]:
    """For each speed the times of all runs of layers, over that of the whole model at the greatest speed.

    No run begins with one of `merged`, which go with the layer before.
    """
    sums = np.cumsum([0.0, *(x.forward_flops + x.backward_flops for x in layers)])
    spans = sums[None, :] - sums[:, None]
    spans[np.tril_indices(len(sums))] = np.inf
    spans[list(merged), :] = np.inf
    spans[:, list(merged)] = np.inf
    spans = spans / max(float(sums[-1]), 1.0)
    shares = _with_head(spans, spans, layout)
    return [shares / (speed / max(speeds)) for speed in speeds]


def _with_head(spans: F64, single: F64, layout: Layout) -> F64:
    """The runs that stages may be, of those of all layers: in `LOOP` the head, as in `single`, lies with the first."""
    if not layout.comes_back:
        return spans
    body = spans[:-1, :-1].copy()
    body[0] += single[-2, -1]
    return body


def _sizes_bytes(job: JobSpec, most_held: int) -> list[F64]:
    """Bytes of all runs of layers as one stage, two, and so on."""
    layout = job.parallel.layout
    sizes_bytes = [span_bytes(job, held) for held in range(1, most_held + 1)]
    shares_bytes = [_with_head(x, sizes_bytes[0], layout) for x in sizes_bytes]
    for share_bytes in shares_bytes if layout.comes_back else ():
        share_bytes[0] -= ends_spared_bytes(job)
    return shares_bytes


def _stops(times: Sequence[F64]) -> tuple[int, ...]:
    """Stops of contiguous, non-empty parts, such that the greatest is least.

    >>> _stops([np.array([[np.inf, 1.0, 4.0], [np.inf, np.inf, 3.0], [np.inf] * 3])] * 2)
    (1, 2)
    """
    # Two passes: first the least greatest time, then the evenest of those that keep to it.
    worst = np.full(len(times[0]), np.inf)
    worst[0] = 0.0
    for part_s in times:
        worst = np.maximum(worst[:, None], part_s).min(axis=0)
    bound = worst[-1] * _MARGIN
    total = np.full(len(times[0]), np.inf)
    total[0] = 0.0
    choices = []
    for part_s in times:
        sums = total[:, None] + np.where(part_s <= bound, part_s * part_s, np.inf)
        choices.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    stops = [len(total) - 1]
    for choice in reversed(choices[1:]):
        stops.append(int(choice[stops[-1]]))
    return tuple(reversed(stops))


class _Kind(NamedTuple):
    """Workers that a cut need not tell apart: the slowest's speed and the smallest's memory stand for all."""

    workers: tuple[int, ...]
    speed: float
    room_bytes: float


_Run = tuple[int, int]
"""A kind, and how many adjacent stages one of its workers holds."""
_State = tuple[tuple[int, ...], int]
"""Number of used workers of each kind, and of stages that are cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Programme:
    """The cut of a model for kinds of workers.

    `times` as of `_times`, one for each kind; `sizes_bytes[n - 1]` those of runs of layers as n stages.
    """

    kinds: tuple[_Kind, ...]
    num_stages: int
    times: Sequence[F64]
    sizes_bytes: Sequence[F64]

    def paces(self, run: _Run) -> F64:
        """Times of what fits."""
        kind, held = run
        return np.where(self.sizes_bytes[held - 1] <= self.kinds[kind].room_bytes, self.times[kind], np.inf)

    def shares(self, run: _Run) -> F64:
        """Bytes over those that there are."""
        kind, held = run
        shares: F64 = self.sizes_bytes[held - 1] / max(self.kinds[kind].room_bytes, 1.0)
        return shares

    def runs(self, measure: Callable[[_Run], F64]) -> tuple[_Run, ...] | None:
        """Runs, first to last, whose greatest measure is least; None if every cut has an infinite one."""
        every = product(range(len(self.kinds)), range(1, len(self.sizes_bytes) + 1))
        options = {run: measure(run) for run in every}
        begin = np.full(len(self.times[0]), np.inf)
        begin[0] = 0.0
        # Of each state the least greatest measure up to each layer.
        least: dict[_State, F64] = {((0,) * len(self.kinds), 0): begin}
        edge = [*least]
        while edge:
            found: dict[_State, F64] = {}
            for state, run in product(edge, options):
                after = self._moved(state, run, 1)
                if after is not None:
                    row = np.maximum(least[state][:, None], options[run]).min(axis=0)
                    found[after] = np.minimum(found.get(after, np.inf), row)
            least |= found
            edge = [state for state, row in found.items() if np.isfinite(row).any()]
        ends = [state for state, row in least.items() if state[1] == self.num_stages and np.isfinite(row[-1])]
        return self._back(min(ends, key=lambda state: least[state][-1]), least, options) if ends else None

    def _moved(self, state: _State, run: _Run, by: int) -> _State | None:
        """The state with a run more (`by` 1) or less (-1); None if there is none."""
        (kind, held), (used, num_cut) = run, state
        count, num_cut = used[kind] + by, num_cut + by * held
        if not 0 <= count <= len(self.kinds[kind].workers) or not 0 <= num_cut <= self.num_stages:
            return None
        return (*used[:kind], count, *used[kind + 1 :]), num_cut

    def _back(
        self, state: _State, least: Mapping[_State, F64], options: Mapping[_Run, F64]
    ) -> tuple[_Run, ...]:
        """Runs that lead to the end of the layers in `state`."""
        runs: list[_Run] = []
        stop = len(least[state]) - 1
        while state[1]:
            run, state, stop = next(self._steps_back(state, stop, least, options))
            runs.append(run)
        return tuple(reversed(runs))

    def _steps_back(
        self, state: _State, stop: int, least: Mapping[_State, F64], options: Mapping[_Run, F64]
    ) -> Iterator[tuple[_Run, _State, int]]:
        """Last runs that may lead to `stop` in `state`, each with the state before it and its first layer."""
        for run, measured in options.items():
            before = self._moved(state, run, -1)
            if before is not None and before in least:
                row = np.maximum(least[before], measured[:, stop])
                if row.min() == least[state][stop]:
                    yield run, before, int(row.argmin())


def _programme(job: JobSpec, pool: Pool, most_held: int) -> _Programme | None:
    """The programme in which a worker holds up to so many stages; None if that takes too long even for one kind."""
    layout, num_stages = job.parallel.layout, job.parallel.num_stages
    sizes_bytes = _sizes_bytes(job, most_held)
    most = _MOST_WORK / (sizes_bytes[0].size * most_held * (num_stages if most_held > 1 else 1))
    if most < 1:
        return None
    kinds = _kinds(pool, num_stages, most)
    times = _times(job.layers, layout, [kind.speed for kind in kinds], _within_ends(job))
    return _Programme(kinds=kinds, num_stages=num_stages, times=times, sizes_bytes=sizes_bytes)


def _kinds(pool: Pool, num_stages: int, most: float) -> tuple[_Kind, ...]:
    """Kinds of workers, told apart where they differ most, as long as there are at most so many ways to use them."""
    order = np.lexsort((pool.speeds, pool.memory_bytes))
    sizes = np.log(np.maximum([pool.memory_bytes[order], pool.speeds[order]], 1.0))
    gaps = np.abs(np.diff(sizes)).sum(axis=0)
    kinds = [order]
    for num_gaps in range(1, np.count_nonzero(gaps) + 1):
        finer = np.split(order, np.sort(np.argsort(-gaps, kind="stable")[:num_gaps]) + 1)
        if len(finer) * math.prod(min(len(members), num_stages) + 1 for members in finer) > most:
            break
        kinds = finer
    return tuple(
        _Kind(
            workers=tuple(members.tolist()),
            speed=float(pool.speeds[members].min()),
            room_bytes=float(pool.memory_bytes[members].min()),
        )
        for members in kinds
    )


def _fitting(job: JobSpec, pool: Pool, programme: _Programme, runs: Sequence[_Run]) -> FittingCut:
    ends = [*pairwise((0, *_stops([programme.paces(run) for run in runs])))]
    stops: list[int] = []
    workers = [0] * len(runs)
    # Of a kind, the fastest have the longest runs.
    free = {kind: sorted(x.workers, key=lambda w: pool.speeds[w]) for kind, x in enumerate(programme.kinds)}
    for at in sorted(range(len(runs)), key=lambda at: -programme.times[runs[at][0]][ends[at]]):
        workers[at] = free[runs[at][0]].pop()
    for (kind, held), (first, stop) in zip(runs, ends, strict=True):
        within = programme.times[kind][first : stop + 1, first : stop + 1]
        stops += [first + x for x in _stops([within] * held)]
    return FittingCut(
        stages=_specs(stops, job.parallel.layout),
        worker_by_stage=tuple(w for w, (_, held) in zip(workers, runs, strict=True) for _ in range(held)),
    )


def _shortage(pool: Pool, programme: _Programme, runs: Sequence[_Run]) -> Infeasible:
    """Refusal that names the first stage and worker that do not fit, of these runs, and how much is missing."""
    stops = _stops([programme.shares(run) for run in runs])
    reached = 0
    for (kind, held), ends in zip(runs, pairwise((0, *stops)), strict=True):
        needed, there_is = programme.sizes_bytes[held - 1][ends], programme.kinds[kind].room_bytes
        if needed > there_is:
            break
        reached += held
    worker = min(programme.kinds[kind].workers, key=lambda w: pool.memory_bytes[w])
    which = f"stage {reached} needs" if held == 1 else f"stages {reached} to {reached + held - 1} need"
    needs = f"{which} {format_bytes(int(needed))} ({int(needed)} bytes) of memory"
    has = f"{pool.workers[worker]} has {format_bytes(int(there_is))} ({int(there_is)} bytes)"
    missing_bytes = math.ceil(needed - there_is)
    return Infeasible(
        reason=f"{needs} and {has}: {format_bytes(missing_bytes)} are missing in the cut that comes nearest",
        missing_bytes=missing_bytes,
    )
