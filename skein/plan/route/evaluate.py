"""A routing as seen from outside: when everything happens, how it bears jitter, and an order where it has none yet."""

from dataclasses import dataclass, replace

import numpy as np

from skein.plan.route.kernels.anneal import order_first_come
from skein.plan.route.kernels.arrays import Fixed, fixed, routing, state, with_times_of
from skein.plan.route.kernels.cost import BLOCKED, NEVER, fit, fitted, run_sequence, scratch_for
from skein.plan.route.problem import F64, I64, Problem, Routing, Timeline
from skein.rng import stream


def timeline(problem: Problem, routing: Routing, arrays: Fixed | None = None) -> Timeline:
    """Start and end of everything, each worker doing its ops in the routing's order.

    Args:
        problem: what `routing` is an answer to.
        routing: the answer.
        arrays: those of `problem`, where they are made already.

    Raises:
        ValueError: a chunk would hold more than its slots in that order.
    """
    arrays = fixed(problem) if arrays is None else arrays
    here = fitted(problem, arrays, routing)
    work = scratch_for(arrays, here)
    step_s = run_sequence(arrays, here, work, arrays.graph, NEVER)
    if step_s == BLOCKED:
        raise ValueError("in this order a chunk would hold more microbatches than it has slots")
    begin_s = np.zeros((problem.num_microbatches, len(problem.ops)))
    begin_s.ravel()[routing.sequence] = work.begin_s
    end_s = work.input_s.copy()
    return Timeline(
        begin_s=begin_s,
        end_s=end_s,
        reduced_s=work.reduced_s.copy(),
        makespan_s=float(end_s.max()),
        step_s=float(step_s),
    )


def jittered(problem: Problem, *, jitter: float, num_draws: int, seed: int) -> tuple[Problem, ...]:
    """`num_draws` copies in which each worker's ops and each directed link take 1 +- `jitter` times as long."""
    random = stream(seed, "jitter", problem.name)
    copies = []
    for _ in range(num_draws):
        of_worker = random.uniform(1 - jitter, 1 + jitter, problem.num_workers)
        of_link = random.uniform(1 - jitter, 1 + jitter, problem.transfer_s.shape)
        copies.append(
            replace(
                problem,
                forward_s=problem.forward_s * of_worker[:, None],
                backward_s=problem.backward_s * of_worker[:, None],
                loss_s=problem.loss_s * of_worker,
                weight_s=None if problem.weight_s is None else problem.weight_s * of_worker[:, None],
                transfer_s=problem.transfer_s * of_link,
                wire_s=problem.wire_s * of_link,
            )
        )
    return tuple(copies)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """A problem, and draws of its times under jitter: its routings are compared by their mean over these."""

    problem: Problem
    measured: Fixed
    drawn: tuple[Fixed, ...]

    def mean_s(self, routing: Routing) -> float:
        """Mean seconds of the step when times are some percent off what was measured; the order stays.

        A plan must not live on a lucky tie. In one order the step is a maximum of sums of times, so its mean is never
        below the step as measured; that of a few draws may be, by chance, and then below what any plan needs.

        Raises:
            ValueError: a chunk would hold more than its slots in that order.
        """
        # One state for all: no draw has others in its seats, or other paths.
        here = fitted(self.problem, self.measured, routing)
        work = scratch_for(self.measured, here)
        step_s = run_sequence(self.measured, here, work, self.measured.graph, NEVER)
        if step_s == BLOCKED:
            raise ValueError("in this order a chunk would hold more microbatches than it has slots")
        drawn_s = []
        for arrays in self.drawn:
            fit(arrays, here)
            drawn_s.append(run_sequence(arrays, here, work, arrays.graph, NEVER))
        return max(float(np.mean(drawn_s)), float(step_s))


def draws_of(problem: Problem, *, jitter: float = 0.03, num_draws: int = 32, seed: int = 0) -> Draws:
    """Draws of the times of `problem`, each 1 +- `jitter` times what was measured."""
    measured = fixed(problem)
    copies = jittered(problem, jitter=jitter, num_draws=num_draws, seed=seed)
    return Draws(problem=problem, measured=measured, drawn=tuple(with_times_of(measured, x) for x in copies))


def jittered_mean_s(
    problem: Problem, routing: Routing, *, jitter: float = 0.03, num_draws: int = 32, seed: int = 0
) -> float:
    """`Draws.mean_s` of one routing alone."""
    return draws_of(problem, jitter=jitter, num_draws=num_draws, seed=seed).mean_s(routing)


def sequence_of(begin_s: F64) -> I64:
    """The order of all ops by their starts; of one start, by microbatch. `begin_s` as in `Timeline`."""
    return np.argsort(begin_s.ravel(), kind="stable").astype(np.int64)


def ordered(problem: Problem, worker_of: I64, path: I64) -> Routing | None:
    """Placement and paths with the order in which workers would take ops first come, first served.

    None if microbatches that hold slots would wait for each other for ever.
    """
    arrays = fixed(problem)
    here = state(problem, worker_of, path)
    fit(arrays, here)
    begin_s = np.zeros((problem.num_microbatches, len(problem.ops)))
    is_ordered = order_first_come(arrays, here, begin_s, np.zeros(problem.num_microbatches))
    return routing(problem, here) if is_ordered else None
