"""Seconds that no plan of a problem can beat, whatever the placement, the paths and the order.

Each part is a proof of its own; the bound is the largest. What they rest on:

- *trip*: a microbatch takes its ops and links one after the other. At least as many trips begin at different workers
  as there are origins, so the slowest of them is no faster than the num_origins-th fastest worker's best trip.
- *origin's device*: an origin computes its forwards, its backwards and, in a `LOOP`, its losses one by one.
- *origin's slots*: `skein.plan.route.bounds.lots`, with the shortest trip for every microbatch.
- *work of a stage*: between the first forward's arrival and the last backward's way home a worker has time for a whole
  number of visits; those of the best n_s workers must be as many as the stage has.
- *work of all stages*, *of the last workers*: `skein.plan.route.bounds.shared`, for any number of chunks on a worker.
- *lots*: `skein.plan.route.bounds.program`; with origins decided, a branch and bound over who is an origin.
- *aggregation*: the last backward of all is at stage 0, whose holders reduce then, over links no better than the best
  group has; another stage's last backward ends no earlier than its work allows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from skein.plan.route.bounds.catalogue import catalogue, longest_s
from skein.plan.route.bounds.lots import alone_s
from skein.plan.route.bounds.program import Program
from skein.plan.route.bounds.shared import shared_parts
from skein.plan.route.bounds.trips import FAR, Trips, least_visits, trips_of
from skein.plan.route.problem import F64, Problem, Reduction

_TOLERANCE = 1e-9
"""Relative; bounds are lowered by it, since sums in another order differ in the last bits."""
_CLOSE = 0.003
"""Part of a bound at which looking for a higher one ends."""
_MOST_ABOVE = 2.0
"""Times the simple bound: where looking ends if no plan is known."""
_ROUNDS_BY_SHARES = 40
_ROUNDS_BY_CASES = 80
"""Programs per question: 5 to 15 ms each at 20 workers."""
_FULL_STRENGTH = 24
"""Workers up to which there are so many programs; beyond, each takes longer, so there are fewer."""


class Effort(IntEnum):
    """Work that a bound may be: `SIMPLE` formulas only, `ROUTES` linear programs, `FULL` cases too."""

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


def lower_bound(problem: Problem, *, cutoff_s: float | None = None, effort: Effort = Effort.FULL) -> Bound:
    """The best lower bound within `effort`.

    Args:
        problem: any; one without a plan has a bound too.
        cutoff_s: a known plan's step or makespan; proofs of more than that are not tried. It never makes a bound wrong.
        effort: raise it if the gap matters more than a few seconds of one core.
    """
    trips = trips_of(problem)
    reduction = problem.reduction
    after_s = 0.0 if reduction is None else reduce_least_s(problem, reduction, 0)
    parts = simple_parts(problem, trips)
    if effort > Effort.SIMPLE:
        # Programs bound the makespan, and aggregation follows it: no more than the rest is worth proving.
        high_s = FAR if cutoff_s is None else cutoff_s - after_s
        parts += program_parts(problem, trips, max(value for _, value in parts), high_s, effort)
    parts = sorted(((name, value * (1 - _TOLERANCE)) for name, value in parts), key=lambda x: (-x[1], x[0]))
    name, makespan_s = parts[0]
    if reduction is None:
        return Bound(seconds=makespan_s, makespan_s=makespan_s, binding=name, parts=tuple(parts))
    stages = [
        (f"stage {stage} and its aggregation", end_s + reduce_least_s(problem, reduction, stage))
        for stage, end_s in stage_ends(problem, trips)
    ]
    steps = [(f"{name}, then aggregation of stage 0", makespan_s + after_s), *stages]
    binding, seconds = max(steps, key=lambda x: x[1])
    told = sorted([*parts, *steps], key=lambda x: (-x[1], x[0]))
    return Bound(
        seconds=seconds * (1 - _TOLERANCE), makespan_s=makespan_s, binding=binding, parts=tuple(told)
    )


def program_parts(
    problem: Problem, trips: Trips, low_s: float, high_s: float, effort: Effort
) -> list[tuple[str, float]]:
    """Parts that a linear program proves, from the makespan `low_s` on and never above `high_s`."""
    high_s = min(high_s, _MOST_ABOVE * low_s)
    is_posed = trips.num_hops and trips.is_single and not problem.is_split
    if not is_posed or not np.isfinite(low_s) or low_s >= high_s:
        return []
    listed = catalogue(trips, longest_s(trips, problem.num_by_origin, high_s))
    if listed is None:
        return []
    program = Program(problem=problem, trips=trips, listed=listed)
    num_by_shares, num_by_cases = (
        max(4, most * _FULL_STRENGTH**2 // max(_FULL_STRENGTH, problem.num_workers) ** 2)
        for most in (_ROUNDS_BY_SHARES, _ROUNDS_BY_CASES)
    )

    def by_shares(end_s: float) -> bool:
        return program.is_proven_beyond(end_s, num_rounds=num_by_shares, may_split=False)

    def by_cases(end_s: float) -> bool:
        return program.is_proven_beyond(end_s, num_rounds=num_by_cases, may_split=True)

    shared_s = _climb(by_shares, low_s, high_s)
    parts = [("lots of all origins", shared_s)]
    if effort >= Effort.FULL:
        parts.append(("lots, origins decided", _climb(by_cases, shared_s, high_s)))
    return [(name, value) for name, value in parts if value > low_s]


def _climb(is_proven_beyond: Callable[[float], bool], low_s: float, high_s: float) -> float:
    """The highest of some ends from `low_s` to `high_s` that is proven, by growing steps and then halving."""
    step_s = _CLOSE * low_s
    while low_s + step_s < high_s and is_proven_beyond(low_s + step_s):
        low_s, step_s = low_s + step_s, 2 * step_s
    high_s = min(high_s, low_s + step_s)
    while high_s - low_s > _CLOSE * low_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if is_proven_beyond(middle_s) else (low_s, middle_s)
    return low_s


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
    work += shared_parts(problem, trips)
    if not trips.num_hops:  # one stage that keeps nothing from forward to backward: all ops are losses
        return work
    return [*((name, _of_origins(problem, seconds)) for name, seconds in chains), *work]


def _of_origins(problem: Problem, seconds: Callable[[int], F64]) -> float:
    """Seconds that the slowest origin takes at least if worker w takes `seconds(count)[w]` for `count` microbatches.

    The k origins with most microbatches are k workers, for none holds a stage twice: the slowest of them is no better
    than the k-th best worker with the least of their counts.
    """
    counts = sorted((count for count in problem.num_by_origin if count), reverse=True)
    found = (np.sort(seconds(count))[min(k, problem.num_workers - 1)] for k, count in enumerate(counts))
    return float(max(found, default=0.0))


def stage_ends(problem: Problem, trips: Trips, *, tail_s: F64 | None = None) -> list[tuple[int, float]]:
    """For each stage, when its last backward can have ended (`tail_s` later, if given) by its work alone.

    Weight ops need not lie before a gradient's way home.
    """
    found = []
    for stage in range(problem.num_stages):
        is_last = not problem.layout.comes_back and stage == problem.num_stages - 1
        can = np.ones(problem.num_workers, bool) if is_last else problem.slots[:, stage] > 0
        head_s = trips.head_s() if stage > 0 and trips.is_single else np.zeros(problem.num_workers)
        both_s = head_s if stage == 0 or not trips.is_single or tail_s is None else head_s + tail_s
        passed_s = problem.end_s if is_last else problem.out_s + problem.home_s
        windows = [(passed_s, both_s)]
        if problem.is_split:
            windows.append((problem.last_visit_s if is_last else problem.visit_s, head_s))
        ends_s = []
        for visit_s, around_s in windows:
            may = can & np.isfinite(around_s)
            ends_s.append(
                _least_window(
                    visit_s[may, stage],
                    around_s[may],
                    problem.stage_sizes[stage],
                    least_visits(problem, stage),
                )
            )
        found.append((stage, max(ends_s)))
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
    """Seconds that the best holders of a stage take to aggregate; of the first also what it shares with the last."""
    if not least_visits(problem, stage):
        return 0.0
    own_s = _among_least_s(problem, reduction, problem.stage_sizes[stage], float(reduction.num_bytes[stage]))
    other = reduction.tied_to(stage)
    if other is None:
        return own_s
    first, last = problem.stage_sizes[stage], problem.stage_sizes[other]
    size = first + last if problem.most_chunks == 1 else max(first, last)
    return max(own_s, _among_least_s(problem, reduction, size, reduction.tied_bytes))


def _among_least_s(problem: Problem, reduction: Reduction, size: int, num_bytes: float) -> float:
    """Seconds that so many workers take at least: one of them has its size - 1 best links in the group."""
    if not 2 <= size <= problem.num_workers or num_bytes == 0:
        return 0.0
    part_bytes = reduction.part_bytes(num_bytes, size)
    one_way_s = reduction.latency_s + part_bytes / reduction.bytes_per_s
    pair_s = 2 * np.maximum(one_way_s, one_way_s.T)
    np.fill_diagonal(pair_s, 0.0)
    return float(np.sort(pair_s, axis=1)[:, size - 1].min())
