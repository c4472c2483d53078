"""Problems so small that all routings can be tried: up to six workers and six microbatches, of every kind."""

import math
from collections.abc import Iterable
from functools import cache

import numpy as np

from skein.plan.route.problem import Problem
from skein.types import Layout
from tests.support.exact import Optimum, TooLongError, optimum, stage_walks
from tests.support.extent import part

SEEDS = part(range(80), every=16)
_MOST_CASES = 2_000
_MOST_STEPS = 2_000_000


def tiny(seed: int) -> Problem:
    """A drawn problem: both layouts, unequal or equal workers, links to and fro unequal or equal, few slots, idlers."""
    luck = np.random.default_rng(seed)
    layout = (Layout.LOOP, Layout.LOOP, Layout.LINE)[int(luck.integers(3))]
    num_stages = int(luck.integers(2, 5))
    sizes = [int(size) for size in luck.integers(1, 3, num_stages)]
    while sum(sizes) > 6:
        sizes[int(luck.integers(num_stages))] = 1
    num_workers = min(6, sum(sizes) + int(luck.integers(2)))
    counts = luck.integers(1, 4, 2) if sizes[0] == 2 else luck.integers(2, 7, 1)
    if luck.random() < 0.7:
        counts[:] = counts[0]
    forward_s = luck.choice([0.5, 1.0, 1.5, 2.0], (num_workers, num_stages))
    likeness = luck.random()
    if likeness < 0.5:
        forward_s[:] = forward_s[:, :1]
    if likeness < 0.2:
        forward_s[:] = 1.0
    links_s = np.round(luck.random((num_workers, num_workers)) * luck.choice([0.2, 1.0, 3.0]), 2)
    if luck.random() < 0.5:
        links_s = (links_s + links_s.T) / 2
    np.fill_diagonal(links_s, 0.0)
    backward_s = forward_s * luck.choice([1.0, 1.5, 2.0])
    is_small = luck.random() < 0.5
    slots = luck.integers(1, 4, (num_workers, num_stages))
    if luck.random() < 0.5:
        slots[:] = slots[0, 0]
    return Problem(
        name=f"tiny {seed}",
        layout=layout,
        stage_sizes=tuple(sizes),
        path_len=int(luck.integers(2, num_stages + 1)),
        num_by_origin=tuple(int(count) for count in counts),
        max_swaps=int(luck.integers(3)),
        max_jump=int(luck.integers(2, 5)),
        forward_s=forward_s,
        backward_s=backward_s,
        loss_s=np.full(num_workers, 0.25) if is_small else forward_s[:, -1] + backward_s[:, -1],
        transfer_s=links_s,
        wire_s=np.zeros_like(links_s),
        slots=slots,
    )


CHUNKED_SEEDS = part(range(210), every=7)
"""Of them 200 are solved, or more."""


def chunked(seed: int) -> Problem:
    """A drawn problem of two or three workers with up to two chunks each, without skips; every other one is split."""
    luck = np.random.default_rng([seed, 2])
    layout = (Layout.LOOP, Layout.LINE)[int(luck.integers(2))]
    num_workers = int(luck.integers(2, 4))
    num_stages = int(luck.integers(num_workers, 5))
    forward_s = np.ones((num_workers, num_stages))
    if luck.random() < 0.5:
        forward_s = luck.choice([0.5, 1.0, 2.0], (num_workers, 1)) * luck.choice([1.0, 1.5], num_stages)
    backward_s = forward_s * luck.choice([1.0, 2.0])
    links_s = np.round(luck.random((num_workers, num_workers)) * luck.choice([0.0, 0.0, 0.3, 1.0]), 2)
    np.fill_diagonal(links_s, 0.0)
    return Problem(
        name=f"chunked {seed}",
        layout=layout,
        stage_sizes=(1,) * num_stages,
        path_len=num_stages,
        num_by_origin=(int(luck.integers(2, 5)),),
        max_swaps=0,
        max_jump=1,
        forward_s=forward_s,
        backward_s=backward_s,
        loss_s=forward_s[:, -1] + backward_s[:, -1],
        transfer_s=links_s,
        wire_s=np.zeros_like(links_s),
        slots=np.full((num_workers, num_stages), int(luck.choice([1, 2, 4]))),
        chunks_per_worker=2,
        is_split=seed % 2 == 1,
        weight_s=backward_s * luck.choice([0.1, 0.3, 0.5]),
    )


@cache
def solved() -> tuple[tuple[Problem, Optimum | None], ...]:
    """Tiny problems with their optima: all of `SEEDS` but those that would take more than a fifth of a second each."""
    return _solved(problem for problem in map(tiny, SEEDS) if _num_cases(problem) <= _MOST_CASES)


@cache
def solved_chunked() -> tuple[tuple[Problem, Optimum | None], ...]:
    """Those of several chunks with their optima, but for the same."""
    return _solved(map(chunked, CHUNKED_SEEDS))


def _solved(problems: Iterable[Problem]) -> tuple[tuple[Problem, Optimum | None], ...]:
    found: list[tuple[Problem, Optimum | None]] = []
    for problem in problems:
        try:
            found.append((problem, optimum(problem, most_steps=_MOST_STEPS)))
        except TooLongError:
            continue
    return tuple(found)


def feasible() -> list[tuple[Problem, Optimum]]:
    """Those of `solved` that have a plan."""
    return [(problem, best) for problem, best in solved() if best is not None]


def _num_cases(problem: Problem) -> int:
    """Placements times sets of paths, roughly."""
    sizes = problem.stage_sizes
    num_ways = sum(math.prod(sizes[stage] for stage in walk[1:]) for walk in stage_walks(problem))
    num_paths = math.prod(math.comb(num_ways + count - 1, count) for count in problem.num_by_origin)
    return num_paths * math.perm(problem.num_workers, sum(sizes)) // math.prod(map(math.factorial, sizes))
