"""Chains of a full pipeline over given holders, matched as well as assignments can instead of place by place."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from bench.studies.methods.method import MayGoOn
from bench.studies.methods.rotation import chain_paths, num_chains, origins_in_turn
from skein.plan.route.evaluate import ordered, timeline
from skein.plan.route.problem import F64, I64, Problem

POWERS = (1, 2, 4, 8)
"""Of a hop's seconds: 1 makes the sum over all hops least, a high one the longest hop."""
MOST_SWEEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """Who holds what, (num_chunks,), and the chain of each microbatch, (num_microbatches,)."""

    worker_of: I64
    chain_of: I64


def matched(problem: Problem, worker_of: I64, power: int) -> Chains:
    """The same holders of each stage in another order, and chains for the microbatches.

    Chains lie side by side over places, so the order of a stage's holders decides who sends to whom. Stage after stage
    is assigned anew, its neighbours given, until nothing changes: no single stage could then be assigned better.

    Args:
        problem: with full paths.
        worker_of: (num_chunks,) holders to begin with.
        power: one of `POWERS`.
    """
    found, chains = worker_of.copy(), num_chains(problem)
    origins = np.array(origins_in_turn(problem))
    # A chain takes as many microbatches as it has columns.
    columns = np.arange(len(origins)) % chains
    around_s = (problem.transfer_s + problem.transfer_s.T) ** power
    chain_of = columns
    for _ in range(MOST_SWEEPS):
        before = (found.copy(), chain_of)
        chain_of = columns[_assigned(_to_origins(problem, found, around_s)[np.ix_(origins, columns)])]
        flows = np.zeros((problem.stage_sizes[0], chains))
        np.add.at(flows, (origins, chain_of), 1.0)
        for stage in range(1, problem.num_stages):
            _reassign(problem, found, stage, around_s, flows)
        if np.array_equal(found, before[0]) and np.array_equal(chain_of, before[1]):
            break
    return Chains(worker_of=found, chain_of=chain_of)


def exchanged(problem: Problem, chains: Chains, may_go_on: MayGoOn) -> Chains:
    """`chains` after all exchanges of two holders of a stage, or of two microbatches, that make the step shorter."""
    best, best_s = chains, chains_s(problem, chains)
    is_better = True
    while is_better:
        is_better = False
        for other in _exchanges(problem, best):
            if not may_go_on():
                return best
            other_s = chains_s(problem, other)
            if other_s < best_s * (1 - 1e-9):
                best, best_s, is_better = other, other_s, True
                break
    return best


def _exchanges(problem: Problem, chains: Chains) -> Iterator[Chains]:
    first = problem.first_chunk.tolist()
    for stage in range(1, problem.num_stages):
        for a, b in combinations(range(first[stage], first[stage + 1]), 2):
            yield replace(chains, worker_of=_swapped(chains.worker_of, a, b))
    origins = origins_in_turn(problem)
    for a, b in combinations(range(len(origins)), 2):
        if origins[a] != origins[b] and chains.chain_of[a] != chains.chain_of[b]:
            yield replace(chains, chain_of=_swapped(chains.chain_of, a, b))


def _swapped(values: I64, a: int, b: int) -> I64:
    copy = values.copy()
    copy[[a, b]] = values[[b, a]]
    return copy


def chains_s(problem: Problem, chains: Chains) -> float:
    """Seconds of a step along `chains`, workers taking what is ready."""
    path = chain_paths(problem, chains.chain_of.tolist())
    routing = ordered(problem, chains.worker_of, path)
    return float("inf") if routing is None else timeline(problem, routing).step_s


def _places(problem: Problem, stage: int) -> I64:
    """(chains,) place of each chain in a stage after the first."""
    chains = num_chains(problem)
    return np.arange(chains) * problem.stage_sizes[stage] // chains


def _ends(problem: Problem) -> list[int]:
    """Stages that origins exchange tensors with."""
    last = problem.num_stages - 1
    return sorted({1, last} if problem.layout.comes_back else {1}) if last else []


def _to_origins(problem: Problem, worker_of: I64, around_s: F64) -> F64:
    """(origins, chains) what a microbatch of an origin costs between it and a chain."""
    total = np.zeros((problem.stage_sizes[0], num_chains(problem)))
    for stage in _ends(problem):
        holders = worker_of[problem.first_chunk[stage] + _places(problem, stage)]
        total += around_s[np.ix_(worker_of[: len(total)], holders)]
    return total


def _reassign(problem: Problem, worker_of: I64, stage: int, around_s: F64, flows: F64) -> None:
    """Gives the holders of one stage their places anew; `flows` (origins, chains) are microbatches."""
    first, stop = int(problem.first_chunk[stage]), int(problem.first_chunk[stage + 1])
    holders, places = worker_of[first:stop].copy(), _places(problem, stage)
    work_s = (problem.forward_s + problem.backward_s)[holders, stage]
    cost = np.zeros((len(holders), len(holders)))
    by_chain = np.zeros((len(holders), flows.shape[1]))
    for other in (stage - 1, stage + 1):
        if 0 < other < problem.num_stages:
            neighbours = worker_of[problem.first_chunk[other] + _places(problem, other)]
            by_chain += around_s[np.ix_(holders, neighbours)] * flows.sum(axis=0)
    for _ in range(_ends(problem).count(stage)):
        by_chain += around_s[np.ix_(holders, worker_of[: len(flows)])] @ flows
    by_chain += work_s[:, None] * flows.sum(axis=0)
    np.add.at(cost.T, places, by_chain.T)
    worker_of[first + _assigned(cost)] = holders


def _assigned(cost: F64) -> I64:
    """(rows,) column of each row, at least total cost; as many columns as rows."""
    # SciPy takes a second to import, which not every command should pay.
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(cost)
    assigned: I64 = columns.astype(np.int64)
    return assigned
