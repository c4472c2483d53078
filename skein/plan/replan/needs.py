"""Seconds that each stage keeps its holders busy, in closed form: they tell promising placements from hopeless ones."""

from dataclasses import dataclass

import numpy as np

from skein.plan.replan.before import Seats, num_held
from skein.plan.route.kernels.arrays import PASS, fixed, state
from skein.plan.route.kernels.cost import fit
from skein.plan.route.problem import F64, I64, Problem

_NORM = 8
_TINY_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Needs:
    """Visits that stages ask, and rates at which workers serve them.

    Args:
        visits: (num_stages,) in a step.
        per_s: (num_workers, num_stages) visits that a worker can serve in a second.
        around_s: (num_workers, num_workers) a boundary tensor there and a gradient back.
    """

    visits: F64
    per_s: F64
    around_s: F64

    def busy_s(self, seats: Seats) -> F64:
        """(num_stages,) seconds that each stage's holders need for its visits; infinite with nobody."""
        shared = num_held(seats)
        together = [
            sum(self.per_s[worker, stage] / shared[worker] for worker in held)
            for stage, held in enumerate(seats)
        ]
        return np.array(
            [
                visits / rate if rate > 0 else np.inf if visits else 0.0
                for visits, rate in zip(self.visits, together, strict=True)
            ]
        )

    def about_s(self, seats: Seats) -> float:
        """A single figure for a placement: a norm of its stages' seconds, in which the busiest counts most."""
        busy_s = self.busy_s(seats)
        most_s = float(busy_s.max())
        if not 0 < most_s < np.inf:
            return most_s
        return most_s * float(((busy_s / most_s) ** _NORM).sum() ** (1 / _NORM))

    def away_s(self, seats: Seats) -> F64:
        """(num_workers, num_stages): how far each worker is from the nearest holders of all other stages, in sum."""
        nearest_s = np.stack(
            [
                self.around_s[:, list(held)].min(axis=1) if held else np.zeros(len(self.around_s))
                for held in seats
            ],
            axis=1,
        )
        away_s: F64 = nearest_s.sum(axis=1, keepdims=True) - nearest_s
        return away_s


def needs_of_devices(problem: Problem) -> Needs:
    """The needs of `problem` as far as its devices' speeds say."""
    both_s = problem.visit_s
    return Needs(
        visits=np.array(problem.visits_by_stage, np.float64),
        per_s=1 / np.maximum(both_s, _TINY_S),
        around_s=problem.transfer_s + problem.transfer_s.T,
    )


def needs_of(problem: Problem, worker_of: I64, path: I64) -> Needs:
    """The needs of `problem` where microbatches go these ways.

    A visit takes a slot until its gradient is back, which is what is left of its trip. So a worker serves `slots`
    visits in that time, or what its device computes, if that is less.
    """
    hold_s = _hold_s(problem, worker_of, path)
    both_s = problem.visit_s
    per_s = np.minimum(problem.slots / hold_s, 1 / np.maximum(both_s, _TINY_S))
    if not problem.layout.comes_back:
        per_s[:, -1] = 1 / np.maximum(problem.loss_s, _TINY_S)
    return Needs(
        visits=np.array(problem.visits_by_stage, np.float64),
        per_s=per_s,
        around_s=problem.transfer_s + problem.transfer_s.T,
    )


def _hold_s(problem: Problem, worker_of: I64, path: I64) -> F64:
    """(num_stages,) how long a visit holds its slot if nothing waits, on average; where nobody visits, the longest."""
    here = state(problem, worker_of, path)
    fit(fixed(problem), here)
    worker = here.holder[path]
    total_s, visits = np.zeros(problem.num_stages), np.zeros(problem.num_stages)
    left_s = here.trip_s.copy()
    for hop in range(problem.num_hops):
        chunk, a, b = path[:, hop], worker[:, hop], worker[:, hop + 1]
        np.add.at(total_s, problem.stage_of[chunk], left_s)
        np.add.at(visits, problem.stage_of[chunk], 1.0)
        left_s -= here.spent_s[PASS, chunk]
        left_s -= problem.transfer_s[a, b] + problem.transfer_s[b, a]
    mean_s = np.maximum(total_s, _TINY_S) / np.maximum(visits, 1.0)
    return np.where(visits > 0, mean_s, mean_s.max())
