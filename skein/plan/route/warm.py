"""`python -m skein.plan.route.warm`: have everything compiled that a search needs, by searching a tiny problem.

Whoever installs runs this once, so that nobody's first plan waits for the compiler.
"""

import sys
from itertools import product

import numpy as np

from skein.plan.plan import Infeasible
from skein.plan.route.problem import Problem, Reduction
from skein.plan.route.rounds import slices
from skein.plan.route.search import Search
from skein.types import Layout

_NUM_MOVES = 200


def tiny_problem(layout: Layout, *, is_split: bool = False) -> Problem:
    """Three workers in a row of three stages, a microbatch leaving one out."""
    seconds = np.ones((3, 3))
    apart = seconds - np.eye(3)
    bytes_per_s = np.full((3, 3), 1e6)
    np.fill_diagonal(bytes_per_s, np.inf)
    return Problem(
        name="tiny",
        layout=layout,
        stage_sizes=(1, 1, 1),
        path_len=3 if not layout.comes_back else 2,
        num_by_origin=(2,),
        max_swaps=1,
        max_jump=3,
        forward_s=seconds,
        backward_s=2 * seconds,
        loss_s=np.ones(3),
        transfer_s=apart,
        wire_s=apart / 2,
        slots=np.full((3, 3), 2, np.int64),
        reduction=Reduction(num_bytes=np.ones(3), latency_s=apart / 100, bytes_per_s=bytes_per_s),
        is_split=is_split,
    )


def warm_up() -> None:
    """Search; what is compiled already is only loaded.

    Raises:
        AssertionError: the tiny problem has no answer, so something is wrong with the search.
    """
    for layout, is_split, seed in product(Layout, (False, True), range(2)):
        search = Search(tiny_problem(layout, is_split=is_split), seed=seed)
        begun = search.begin()
        assert not isinstance(begun, Infeasible), begun.reason
        for slice_ in slices(_NUM_MOVES, search.problem.num_ops):
            search.run(slice_)


if __name__ == "__main__":
    warm_up()
    sys.exit(0)
