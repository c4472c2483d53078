"""Plans drawn at random: paths that leave out and reorder stages, and schedules that were once carried out."""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from skein.plan.ops import OpKind
from skein.plan.order import PlacedOp, ops_of
from skein.plan.plan import Path, Plan, PlannedOp, Schedule
from skein.types import ChunkRef, Layout, MicrobatchId, StageIndex, WorkerId
from tests.support.plans import chunk, path, plan_of

_KINDS = tuple(OpKind)


def random_plan(luck: random.Random) -> Plan:
    """Any cut on any workers: stages may share a worker, paths cross as they like; every slot count from 1.

    Paths begin at stage 0 and end at the head; between them they visit any stages in any order, by ascending schedules.
    """
    num_stages, num_workers = luck.randint(1, 5), luck.randint(1, 5)
    layout = luck.choice(list(Layout))
    workers = [f"w{i}" for i in range(num_workers)]
    seats = [luck.sample(workers, luck.randint(1, num_workers)) for _ in range(num_stages)]
    last = [num_stages - 1] if layout is Layout.LINE and num_stages > 1 else []
    between = range(1, num_stages - len(last))

    def drawn(middle: Iterable[int]) -> Path:
        hops = [chunk(stage, luck.choice(seats[stage])) for stage in (0, *middle, *last)]
        if layout is Layout.LOOP:
            hops.append(chunk(num_stages, hops[0].worker))
        return path(*hops)

    paths = [drawn(luck.sample(between, luck.randint(0, len(between)))) for _ in range(luck.randint(1, 8))]
    full_paths = [drawn(between) for _ in range(luck.randint(1, 4))]
    chunks = {chunk(stage, worker) for stage in range(num_stages) for worker in seats[stage]}
    if layout is Layout.LOOP:
        chunks |= {chunk(num_stages, worker) for worker in seats[0]}
    slots = luck.randint(1, 3)
    if luck.random() < 0.5:
        paths = [replace(x, split=_some(range(1, len(x.hops) - 1), luck)) for x in paths]
    return plan_of(chunks, paths, full_paths=full_paths, layout=layout, slots=slots)


def _some(hops: Sequence[int], luck: random.Random) -> tuple[int, ...]:
    return tuple(sorted(luck.sample(hops, luck.randint(0, len(hops)))))


def carried_out(
    paths: Sequence[Path], slots: Mapping[ChunkRef, int], luck: random.Random
) -> tuple[Schedule, ...] | None:
    """The order in which a step was made by doing any op that could be done; None if it came to a halt."""
    ways = [list(ops_of(MicrobatchId(m), way)) for m, way in enumerate(paths)]
    free = dict(slots)
    done: dict[WorkerId, list[PlannedOp]] = {x.worker: [] for x in slots}
    while any(ways):
        able = [way for way in ways if way and _may_run(way[0], free)]
        if not able:
            return None
        placed = luck.choice(able).pop(0)
        free[placed.chunk] -= placed.op.kind.row.slots
        done[placed.chunk.worker].append(placed.op)
    return tuple(Schedule(worker=worker, ops=tuple(done[worker])) for worker in sorted(done))


def _may_run(placed: PlacedOp, free: Mapping[ChunkRef, int]) -> bool:
    return placed.op.kind.row.slots <= 0 or free[placed.chunk] > 0


def shuffled(schedules: Iterable[Schedule], luck: random.Random) -> tuple[Schedule, ...]:
    """Each list in any order that has a microbatch's forward before its backward, whole or in two."""
    return tuple(Schedule(worker=x.worker, ops=tuple(_shuffled(x.ops, luck))) for x in schedules)


def _shuffled(ops: Iterable[PlannedOp], luck: random.Random) -> list[PlannedOp]:
    mixed = list(ops)
    luck.shuffle(mixed)
    places: defaultdict[tuple[StageIndex, MicrobatchId], list[int]] = defaultdict(list)
    for i, op in enumerate(mixed):
        places[op.stage, op.microbatch].append(i)
    for own in places.values():
        in_order = sorted((mixed[i] for i in own), key=lambda op: _KINDS.index(op.kind))
        for i, op in zip(own, in_order, strict=True):
            mixed[i] = op
    return mixed
