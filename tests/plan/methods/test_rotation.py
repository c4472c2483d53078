"""Rotating stages and chains: everything is used equally, in any window."""

import numpy as np
import pytest

from skein.plan.methods.rotation import (
    chain_paths,
    jump_refusal,
    num_chains,
    own_chains,
    rotating_stages,
    turning_paths,
)
from skein.types import Layout
from tests.plan.methods.builders import drawn_problem


@pytest.mark.parametrize(("num_stages", "path_len"), [(4, 3), (6, 4), (6, 2), (8, 6), (9, 4), (5, 5), (1, 1)])
@pytest.mark.parametrize("layout", list(Layout))
def test_in_any_window_stages_are_visited_equally(num_stages: int, path_len: int, layout: Layout) -> None:
    if layout is Layout.LINE and path_len < 2:
        num_stages, path_len = 2, 2
    problem = drawn_problem(sizes=(1,) * num_stages, path_len=path_len, layout=layout)
    patterns = [rotating_stages(problem, turn) for turn in range(3 * num_stages)]
    assert {len(stages) for stages in patterns} == {path_len}
    for first in range(num_stages):
        for stop in range(first, len(patterns)):
            visits = np.bincount([x for stages in patterns[first:stop] for x in stages], minlength=num_stages)
            assert np.ptp(visits[list(problem.skippable)] if problem.skippable else [0]) <= 1


def test_jumps_are_as_short_as_equal_use_allows() -> None:
    # The last of seven stages is two hops away: four and three stages further.
    assert jump_refusal(drawn_problem(sizes=(1,) * 8, path_len=3, max_jump=4)) is None
    refused = jump_refusal(drawn_problem(sizes=(1,) * 8, path_len=3, max_jump=3))
    assert refused is not None
    assert refused.reason == "3 of 8 stages, all used equally, need jumps of 4, allowed are 3"


def test_chains_are_used_equally_and_origins_keep_their_own() -> None:
    problem = drawn_problem(sizes=(5, 3, 3, 3), path_len=3, num_slots=3)
    chains = own_chains(problem)
    assert np.bincount(chains).tolist() == [10] * num_chains(problem)
    path = chain_paths(problem, chains)
    own = {(int(origin), chain) for origin, chain in zip(path[:, 0], chains, strict=True) if origin < 3}
    assert own == {(0, 0), (1, 1), (2, 2)}


def test_workers_of_a_chain_are_used_equally() -> None:
    problem = drawn_problem(sizes=(3, 3, 3, 3), path_len=3, num_slots=3)
    path = chain_paths(problem, own_chains(problem))
    assert np.bincount(path[:, :-1].ravel()).tolist() == [6] * 3 + [4] * 9


def test_holders_take_turns() -> None:
    problem = drawn_problem(sizes=(2, 3, 2), path_len=2, num_slots=3)
    path = turning_paths(problem)
    assert path[:, 1].tolist() == [5, 2, 6, 3, 5, 4, 6, 2, 5, 3, 6, 4]
