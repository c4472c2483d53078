"""A plan before machine code is loaded, which takes longer than making one does."""

from collections.abc import Callable
from typing import cast

import numpy as np

from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import sequence_of
from skein.plan.route.kernels.arrays import COST, HOP, op_array
from skein.plan.route.kernels.simulate import NEVER, simulate
from skein.plan.route.problem import Problem, Routing
from skein.plan.route.start import first_paths

_MAX_OPS = 20_000
"""Python runs about 100,000 in a second; beyond this machine code is loaded sooner."""


def first_plan(problem: Problem) -> tuple[Routing, float] | None:
    """Workers in order on chunks in order, first come, first served, and the makespan.

    None where that has no plan or takes long; the search knows more ways.
    """
    paths = first_paths(problem)
    if isinstance(paths, Infeasible) or problem.num_ops > _MAX_OPS:
        return None
    workers = np.resize(np.arange(problem.num_workers), problem.num_chunks).astype(np.int64)
    stages = problem.stage_of
    ops = op_array(problem.ops)
    begin_s = np.zeros((problem.num_microbatches, len(problem.ops)))
    makespan_s = _interpreted()(
        paths[:, ops[:, HOP]],
        workers,
        ops,
        problem.op_s[ops[:, COST]][:, workers, stages],
        problem.transfer_s,
        problem.wire_s,
        problem.slots[workers, stages],
        NEVER,
        begin_s,
        np.zeros(problem.num_microbatches),
    )
    if makespan_s == NEVER:
        return None
    return Routing(worker_of=workers, path=paths, sequence=sequence_of(begin_s)), makespan_s


def _interpreted() -> "Callable[..., float]":
    """`simulate` as it is written, not as it is compiled."""
    return cast("Callable[..., float]", getattr(simulate, "py_func", simulate))
