"""Idle time that a plan leaves its workers, and how many steps of it some forwards take."""

from collections import defaultdict
from math import ceil

from skein.plan.clock.holding import busy_s
from skein.plan.plan import Plan
from skein.types import WorkerId

_COUNTED = 0.5
"""Part of the idle time that is counted on: it comes in pieces, which no forward fits exactly."""
_FORWARD = 1 / 3
"""Part of a loss op that its forward is: going back takes twice as long."""


def steps_beside(plan: Plan, num_microbatches: int) -> int | None:
    """Steps in whose idle time so many microbatches go forward along the plan's evaluation paths; None: in no number.

    Args:
        plan: with the times by which it was predicted.
        num_microbatches: number m takes evaluation path m modulo their number.
    """
    if not plan.evaluation_paths:
        return None
    busy, wanted_s = busy_s(plan), _forwards_s(plan, num_microbatches)
    idle_s = {worker: _COUNTED * (plan.predicted_step_s - busy[worker]) for worker in wanted_s}
    if min(idle_s.values()) <= 0:
        return None
    return max(1, *(ceil(wanted_s[worker] / idle_s[worker]) for worker in wanted_s))


def _forwards_s(plan: Plan, num_microbatches: int) -> dict[WorkerId, float]:
    """Seconds of each worker for all of them."""
    times = {time.chunk: time.forward_s or _FORWARD * time.loss_s for time in plan.chunk_times}
    num_ways = len(plan.evaluation_paths)
    found: defaultdict[WorkerId, float] = defaultdict(float)
    for way, path in enumerate(plan.evaluation_paths):
        count = len(range(way, num_microbatches, num_ways))
        for hop in path.hops:
            found[hop.worker] += count * times.get(hop, 0.0)
    return dict(found)
