"""The ops of a plan's step as bars over time, at whatever times somebody was told: planned, or measured."""

from collections.abc import Mapping, Sequence

import numpy as np

from skein.plan.clock.walked import Bar, Pace, Walk
from skein.plan.place import Pool
from skein.plan.plan import ChunkTime, Plan, TransferTime
from skein.topology.links import LinkMatrices
from skein.types import WorkerId

MOST_BARS = 4000
"""Ops of a step that are drawn; nobody reads more."""


def bars_of(
    plan: Plan,
    ops: Sequence[ChunkTime],
    ways: Sequence[TransferTime],
    latency_s: Mapping[tuple[WorkerId, WorkerId], float],
) -> tuple[Bar, ...] | None:
    """All ops of a step of `plan` at these times; None if they are too many, or wait for each other.

    Args:
        plan: what is done where, in which order.
        ops: of its chunks.
        ways: of its boundary tensors.
        latency_s: of links, as far as known: the part of a way during which its line is free for others.
    """
    if sum(len(schedule.ops) for schedule in plan.schedules) > MOST_BARS:
        return None
    walk = Walk(plan.paths, plan.schedules, _told_pace(plan, ops, ways, latency_s))
    walk.ends_s()
    return None if walk.is_stuck else tuple(walk.bars)


def _told_pace(
    plan: Plan,
    ops: Sequence[ChunkTime],
    ways: Sequence[TransferTime],
    latency_s: Mapping[tuple[WorkerId, WorkerId], float],
) -> Pace:
    """The pace that times say which somebody was told; every tensor counts as the one of its link."""
    workers = plan.workers
    at = {worker: i for i, worker in enumerate(workers)}
    forward_s, backward_s, weight_s = np.zeros((3, len(workers), len(plan.stages)))
    for op in ops:
        place = at[op.chunk.worker], op.chunk.stage
        forward_s[place], backward_s[place] = op.forward_s + op.loss_s, op.backward_s
        weight_s[place] = op.weight_s
    waits_s, bytes_per_s = np.zeros((len(workers),) * 2), np.full((len(workers),) * 2, np.inf)
    # A plan that goes on without a worker has the ways of all that it was made with.
    for way in (way for way in ways if {way.sender, way.receiver} <= at.keys()):
        pair = way.sender, way.receiver
        between = at[way.sender], at[way.receiver]
        waits_s[between] = min(latency_s.get(pair, 0.0), way.seconds)
        # In units of one tensor.
        bytes_per_s[between] = 1 / max(way.seconds - waits_s[between], 1e-12)
    links = LinkMatrices(latency_s=waits_s, bytes_per_s=bytes_per_s, crosses_sites=waits_s > 0)
    nothing = np.zeros(len(workers))
    pool = Pool(
        workers=workers,
        speeds=nothing,
        memory_bytes=nothing.astype(np.int64),
        links=links,
        round_trip_s=links.round_trip_s(1.0),
    )
    return Pace(pool=pool, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s, output_bytes=1.0)
