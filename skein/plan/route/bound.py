"""Seconds that no plan of a problem can beat, whatever the placement, the paths and the order.

Each part is a proof of its own; the bound is the largest. What they rest on:

- *trip*: a microbatch takes its ops and links one after the other. At least as many trips begin at different workers
  as there are origins, so the slowest of them is no faster than the num_origins-th fastest worker's best trip.
- *origin's device*: an origin computes its forwards, its backwards and, in a `LOOP`, its losses one by one.
- *origin's slots*: `skein.plan.route.lots`, with the shortest trip for every microbatch.
- *work of a stage*: between the first forward's arrival and the last backward's way home a worker has time for a whole
  number of visits; those of the best n_s workers must be as many as the stage has.
- *aggregation*: the last backward of all is at stage 0, whose holders reduce then, over links no better than the best
  group has; another stage's last backward ends no earlier than its work allows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from skein.plan.route.lots import alone_s
from skein.plan.route.problem import F64, Problem, Reduction
from skein.plan.route.trips import Trips, trips_of
from skein.types import Layout

_TOLERANCE = 1e-9
"""Relative; bounds are lowered by it, since sums in another order differ in the last bits."""


class Effort(IntEnum):
    """How much work a bound may be: `SIMPLE` formulas only, `ROUTES` one linear program, `FULL` all there is."""

    SIMPLE = 0
    ROUTES = 1
    FULL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No plan takes less than `seconds` for its step, nor less than `makespan_s` until its last backward ends.

    Args:
        seconds: with aggregation, if the problem has it.
        makespan_s: without.
        binding: which part decides, in words.
        parts: each part's name and the seconds that it proves, largest first.
    """

    seconds: float
    makespan_s: float
    binding: str
    parts: tuple[tuple[str, float], ...]


def lower_bound(problem: Problem, *, cutoff_s: float | None = None, effort: Effort = Effort.FULL) -> Bound:  # noqa: ARG001
    """The best lower bound within `effort`.

    Args:
        problem: any; one without a plan has a bound too.
        cutoff_s: a known plan's step or makespan; proofs of more than that are not tried. It never makes a bound wrong.
        effort: raise it if the gap matters more than a few seconds of one core.
    """
    trips = trips_of(problem)
    parts = simple_parts(problem, trips)
    parts = sorted(((name, value * (1 - _TOLERANCE)) for name, value in parts), key=lambda x: (-x[1], x[0]))
    name, makespan_s = parts[0]
    if problem.reduction is None:
        return Bound(seconds=makespan_s, makespan_s=makespan_s, binding=name, parts=tuple(parts))
    after_s = reduce_least_s(problem, problem.reduction, 0)
    stages = [
        (f"stage {stage} and its aggregation", end_s + reduce_least_s(problem, problem.reduction, stage))
        for stage, end_s in stage_ends(problem, trips)
    ]
    steps = [(f"{name}, then aggregation of stage 0", makespan_s + after_s), *stages]
    binding, seconds = max(steps, key=lambda x: x[1])
    told = sorted([*parts, *steps], key=lambda x: (-x[1], x[0]))
    return Bound(
        seconds=seconds * (1 - _TOLERANCE), makespan_s=makespan_s, binding=binding, parts=tuple(told)
    )


def simple_parts(problem: Problem, trips: Trips) -> list[tuple[str, float]]:
    """Parts in closed form, of the makespan."""
    trip_s = trips.least_s()
    own_s = trips.both_s[0] + (trips.loss_s if trips.is_loop else 0.0)
    chains: list[tuple[str, Callable[[int], F64]]] = [
        ("trip", lambda _: trip_s),
        ("origin's device", lambda count: count * own_s),
        ("origin's slots", lambda count: alone_s(trips, trip_s, count)),
    ]
    work = [(f"work of stage {s}", x) for s, x in stage_ends(problem, trips, tail_s=trips.tail_s())]
    return [*((name, _of_origins(problem, seconds)) for name, seconds in chains), *work]


def _of_origins(problem: Problem, seconds: Callable[[int], F64]) -> float:
    """What the slowest origin takes at least if worker w takes `seconds(count)[w]` for `count` microbatches.

    The k origins with most microbatches are k workers, unless workers hold several chunks: the slowest of them is no
    better than the k-th best worker with the least of their counts.
    """
    is_single = problem.num_chunks <= problem.num_workers
    counts = sorted((count for count in problem.num_by_origin if count), reverse=True)
    found = (np.sort(seconds(count))[k if is_single else 0] for k, count in enumerate(counts))
    return float(max(found, default=0.0))


def stage_ends(problem: Problem, trips: Trips, *, tail_s: F64 | None = None) -> list[tuple[int, float]]:
    """For each stage, when its last backward can have ended (`tail_s` later, if given) by its work alone."""
    found = []
    for stage in range(problem.num_stages):
        is_last = problem.layout is Layout.LINE and stage == problem.num_stages - 1
        both_s = problem.forward_s[:, stage] + problem.backward_s[:, stage]
        visit_s = problem.loss_s if is_last else both_s
        can = np.ones(problem.num_workers, bool) if is_last else problem.slots[:, stage] > 0
        around_s = np.zeros(problem.num_workers)
        if stage > 0 and trips.is_single:
            around_s = trips.head_s() + (0.0 if tail_s is None else tail_s)
        visits = problem.visits_by_stage[stage]
        found.append((stage, _least_window(visit_s[can], around_s[can], problem.stage_sizes[stage], visits)))
    return found


def _least_window(visit_s: F64, around_s: F64, num_holders: int, num_visits: int) -> float:
    """The least T in which the `num_holders` most able workers fit `num_visits` visits into T - `around_s`."""
    if not num_visits or not len(visit_s):
        return 0.0
    # T is where some worker gets room for one visit more.
    ends_s = np.sort((around_s[:, None] + visit_s[:, None] * np.arange(1, num_visits + 1)).ravel())

    def is_enough(end_s: float) -> bool:
        rooms = np.floor((end_s - around_s) / np.maximum(visit_s, 1e-12) + 1e-9)
        rooms = np.clip(rooms, 0, num_visits)
        return bool(np.sort(rooms)[-num_holders:].sum() >= num_visits)

    low, high = 0, len(ends_s) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(ends_s[middle]) else (middle + 1, high)
    return float(ends_s[low])


def reduce_least_s(problem: Problem, reduction: Reduction, stage: int) -> float:
    """What the best holders of a stage take to aggregate: some worker has its k - 1 best links in the group."""
    size = problem.stage_sizes[stage]
    if size < 2 or not problem.visits_by_stage[stage] or problem.num_chunks > problem.num_workers:
        return 0.0
    part_bytes = (size - 1) * reduction.num_bytes[stage] / size
    one_way_s = reduction.latency_s + part_bytes / reduction.bytes_per_s
    pair_s = 2 * np.maximum(one_way_s, one_way_s.T)
    np.fill_diagonal(pair_s, 0.0)
    return float(np.sort(pair_s, axis=1)[:, size - 1].min())
