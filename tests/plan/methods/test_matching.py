"""Matched chains: no single stage could be assigned better, no single exchange is left."""

from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from skein.plan.methods.matching import Chains, chains_s, exchanged, matched
from skein.plan.methods.rotation import chain_paths, own_chains
from skein.plan.route.problem import I64, Problem
from tests.plan.methods.builders import always, drawn_problem, never


def whole(seed: int) -> Problem:
    return drawn_problem(sizes=(4, 3, 3, 3), path_len=4, num_slots=3, num_waves=1, seed=seed)


def seconds(problem: Problem, chains: Chains) -> float:
    """Of all hops and all work together, nobody waiting."""
    path = chain_paths(problem, chains.chain_of.tolist())
    workers, stages = chains.worker_of[path], problem.stage_of[path]
    around_s = problem.transfer_s + problem.transfer_s.T
    work_s = problem.forward_s + problem.backward_s
    hops_s = around_s[workers[:, :-1], workers[:, 1:]].sum()
    return float(hops_s + work_s[workers[:, 1:-1], stages[:, 1:-1]].sum())


@pytest.mark.parametrize("seed", range(8))
def test_no_other_order_of_a_stage_is_shorter(seed: int) -> None:
    problem = whole(seed)
    found = matched(problem, np.arange(problem.num_chunks), 1)
    least_s = seconds(problem, found)
    first = problem.first_chunk.tolist()
    for stage in range(1, problem.num_stages):
        for order in permutations(range(first[stage], first[stage + 1])):
            worker_of = found.worker_of.copy()
            worker_of[first[stage] : first[stage + 1]] = found.worker_of[list(order)]
            other_s = seconds(problem, replace(found, worker_of=worker_of))
            assert other_s >= least_s - 1e-9  # sums in another order differ in their last digits


@pytest.mark.parametrize("seed", range(4))
def test_no_exchange_of_two_makes_the_step_shorter(seed: int) -> None:
    problem = whole(seed)
    plain = Chains(worker_of=np.arange(problem.num_chunks), chain_of=np.array(own_chains(problem)))
    found = exchanged(problem, plain, always)
    found_s = chains_s(problem, found)
    assert found_s < chains_s(problem, plain)
    for a, b in combinations(range(4, problem.num_chunks), 2):
        if problem.stage_of[a] == problem.stage_of[b]:
            assert chains_s(problem, replace(found, worker_of=swapped(found.worker_of, a, b))) >= found_s * (
                1 - 1e-9
            )
    for a, b in combinations(range(problem.num_microbatches), 2):
        assert chains_s(problem, replace(found, chain_of=swapped(found.chain_of, a, b))) >= found_s * (
            1 - 1e-9
        )


def swapped(values: I64, a: int, b: int) -> I64:
    order = np.arange(len(values))
    order[[a, b]] = b, a
    return values[order]


def test_without_time_nothing_is_exchanged() -> None:
    problem = whole(0)
    plain = Chains(worker_of=np.arange(problem.num_chunks), chain_of=np.array(own_chains(problem)))
    assert exchanged(problem, plain, never) is plain
