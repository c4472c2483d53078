"""Work that workers share, however many chunks each holds.

Rules of this file
- Workers are ranked by the lowest stage that each holds. Those are different chunks, so that nobody's rank is below the
  stage of the chunk of that number, and whatever a worker does comes after the way to its lowest stage. Where backwards
  are whole it also ends before the way home from there; weight ops of split ones do not, so they are left out or the
  way home is.
- A second of a worker is worth what its fastest holder takes for the same visits: rates are at most 1. The quickest
  workers may be those who wait least.
- The last k workers hold all chunks but those that the others have room for, which may be the dearest.
"""

from collections.abc import Iterator

import numpy as np

from skein.plan.route.bounds.trips import FAR, Trips, least_visits
from skein.plan.route.problem import F64, Problem


def shared_parts(problem: Problem, trips: Trips) -> list[tuple[str, float]]:
    """Least seconds of a step by the work of all stages, and by that of the workers that wait longest."""
    ends_s = np.array([_ends_s(problem, trips, *window) for window in _windows(problem)]).max(axis=0)
    return [("work of all stages", float(ends_s[-1])), ("work of the last workers", float(ends_s.max()))]


def _windows(problem: Problem) -> Iterator[tuple[F64, F64, bool]]:
    """Seconds of a visit, (num_workers, num_stages), at any hop and at the last, and if a way home follows them."""
    yield problem.visit_s, problem.last_visit_s, not problem.is_split
    if problem.is_split:
        yield problem.out_s + problem.home_s, problem.end_s, True


def _ends_s(problem: Problem, trips: Trips, visit_s: F64, last_s: F64, is_home: bool) -> F64:
    """(num_workers,) least end of a step by the work of the last 1, 2 … workers in rank."""
    op_s, num_visits = _work(problem, visit_s, last_s)
    least_s = op_s.min(axis=0)
    if not np.isfinite(least_s).all():
        return np.full(problem.num_workers, FAR)
    worth = np.divide(least_s, op_s, out=np.zeros_like(op_s), where=op_s > 0.0)
    rates = np.sort(worth.max(axis=1, initial=0.0))[::-1]
    work_s = num_visits * least_s
    ranked_s, reached_s = _ranked_waits_s(problem, is_home), _reached_waits_s(problem, trips, is_home)
    # The loss of a LOOP, behind the stages, is its origin's.
    dearest_s = np.append(0.0, np.cumsum(np.sort(work_s[: problem.num_stages])[::-1]))
    ends_s = np.zeros(problem.num_workers)
    for count in range(1, problem.num_workers):
        num_elsewhere = problem.most_chunks * (problem.num_workers - count)
        left_s = dearest_s[-1] - dearest_s[min(num_elsewhere, problem.num_stages)]
        ends_s[count - 1] = _least_end_s(left_s, rates[:count], ranked_s[-count:])
    ends_s[-1] = _least_end_s(float(work_s.sum()), rates, np.maximum(ranked_s, reached_s))
    return ends_s


def _work(problem: Problem, visit_s: F64, last_s: F64) -> tuple[F64, F64]:
    """(num_workers, num_stages) seconds of a visit, infinite where none can be, and the least visits.

    A LOOP has its loss as one column more.
    """
    op_s = np.where(problem.slots > 0, visit_s, FAR)
    num_visits = [float(least_visits(problem, stage)) for stage in range(problem.num_stages)]
    if problem.layout.comes_back:
        op_s = np.column_stack([op_s, np.where(problem.slots[:, 0] > 0, problem.loss_s, FAR)])
        num_visits.append(float(problem.num_microbatches))
    else:
        op_s[:, -1] = last_s[:, -1]
    return op_s, np.array(num_visits)


def _ranked_waits_s(problem: Problem, is_home: bool) -> F64:
    """(num_workers,) least wait of the worker of each rank; infinite for those who hold nothing."""
    passed_s = problem.out_s + (problem.home_s if is_home else 0.0)
    least_s = np.where(problem.slots > 0, passed_s, FAR).min(axis=0)
    stages = np.arange(problem.num_stages)
    if problem.path_len == problem.num_stages and (problem.max_swaps == 0 or problem.max_jump == 1):
        ways_s = np.append(0.0, np.cumsum(least_s)[:-1])
        num_links = -(-stages // problem.most_chunks)
    else:  # only stage 0 is before the others for certain
        ways_s, num_links = np.where(stages > 0, least_s[0], 0.0), np.minimum(stages, 1)
    apart = ~np.eye(problem.num_workers, dtype=bool)
    link_s = float(problem.transfer_s[apart].min(initial=FAR)) if problem.num_workers > 1 else 0.0
    waits_s = (ways_s + num_links * link_s * (2 if is_home else 1))[problem.stage_of]
    padded_s = np.append(waits_s, np.full(problem.num_workers, FAR))
    return padded_s[: problem.num_workers]


def _reached_waits_s(problem: Problem, trips: Trips, is_home: bool) -> F64:
    """(num_workers,) least waits in rising order, by where workers are; those who begin paths do not wait."""
    away_s = np.sort(trips.head_s() + (trips.tail_s() if is_home else 0.0))
    return np.concatenate([np.zeros(problem.stage_sizes[0]), away_s])[: problem.num_workers]


def _least_end_s(work_s: float, rates: F64, waits_s: F64) -> float:
    """The least T at which workers who wait so long do `work_s` at these rates, falling, with waits rising."""
    if work_s <= 0.0:
        return 0.0
    here = np.isfinite(waits_s) & (rates > 0.0)
    lost_s = np.cumsum(rates[here] * waits_s[here])
    # With the first k at work until T, that is what all their time is worth.
    return float(((work_s + lost_s) / np.cumsum(rates[here])).min(initial=FAR))
