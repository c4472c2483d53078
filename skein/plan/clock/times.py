"""What a plan's prediction rests on: seconds of each chunk's ops, and of each boundary tensor's way."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from skein.plan.load import StageLoad
from skein.plan.place import Pool
from skein.plan.plan import ChunkTime, Plan, TransferTime
from skein.topology.fleet import Fleet
from skein.topology.links import F64
from skein.types import WorkerId


def op_times(fleet: Fleet, loads: Sequence[StageLoad], pool: Pool) -> tuple[F64, F64]:
    """Seconds of forward and backward of every stage at every worker, both (num_workers, all stages).

    What was measured counts; a stage that a worker has not run yet takes as long as its arithmetic at the speed the
    worker showed on others, or else in its profile.
    """
    speeds = pool.speeds.copy()
    flops_by_stage = {load.stage: load for load in loads}
    measured = [x for x in fleet.stage_times if x.stage in flops_by_stage and x.worker in pool.workers]
    position = {worker: i for i, worker in enumerate(pool.workers)}
    for worker in {x.worker for x in measured}:
        own = [x for x in measured if x.worker == worker]
        flops = sum(flops_by_stage[x.stage].flops for x in own)
        if flops > 0:  # looking up embeddings is no arithmetic, and tells nothing about other stages
            speeds[position[worker]] = flops / sum(x.forward_s + x.backward_s for x in own)
    forward_s = np.array([load.forward_flops for load in loads])[None, :] / speeds[:, None]
    backward_s = np.array([load.backward_flops for load in loads])[None, :] / speeds[:, None]
    for x in measured:
        at = position[x.worker], x.stage.index
        forward_s[at], backward_s[at] = x.forward_s, x.backward_s
    return forward_s, backward_s


def with_times(plan: Plan, loads: Sequence[StageLoad], pool: Pool, forward_s: F64, backward_s: F64) -> Plan:
    """`plan` with the times that it was made by.

    Args:
        plan: of stages with these loads, on workers of `pool`.
        loads: (num_stages,), the head of `LOOP` included.
        pool: the fleet's links.
        forward_s: (num_workers, num_stages), one microbatch.
        backward_s: same shape.
    """
    position = {worker: i for i, worker in enumerate(pool.workers)}
    last = len(plan.stages) - 1
    times = []
    for placed in sorted(plan.chunks, key=lambda x: x.chunk):
        at = position[placed.chunk.worker], placed.chunk.stage
        ahead_s, back_s = float(forward_s[at]), float(backward_s[at])
        is_last = placed.chunk.stage == last
        times.append(
            ChunkTime(
                chunk=placed.chunk,
                forward_s=0.0 if is_last else ahead_s,
                backward_s=0.0 if is_last else back_s,
                loss_s=ahead_s + back_s if is_last else 0.0,
            )
        )
    return replace(plan, chunk_times=tuple(times), transfer_times=_transfers(plan, loads, pool, position))


def _transfers(
    plan: Plan, loads: Sequence[StageLoad], pool: Pool, position: dict[WorkerId, int]
) -> tuple[TransferTime, ...]:
    """One for each directed link in use; where tensors of several sizes take it, of the largest."""
    bytes_by_link: dict[tuple[WorkerId, WorkerId], int] = {}
    for path in plan.paths:
        for here, there in pairwise(path.hops):
            if here.worker != there.worker:
                num_bytes = loads[here.stage].output_bytes
                for link in ((here.worker, there.worker), (there.worker, here.worker)):
                    bytes_by_link[link] = max(bytes_by_link.get(link, 0), num_bytes)
    return tuple(
        TransferTime(
            sender=sender,
            receiver=receiver,
            num_bytes=num_bytes,
            seconds=pool.links.seconds_of(position[sender], position[receiver], num_bytes),
        )
        for (sender, receiver), num_bytes in sorted(bytes_by_link.items())
    )
