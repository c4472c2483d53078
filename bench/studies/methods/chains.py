"""Methods without a search for paths: chains over a genetic placement, and plain round robin."""

from dataclasses import replace

import numpy as np

from bench.studies.methods.genetic import dt_fm_scoring, place
from bench.studies.methods.matching import POWERS, Chains, chains_s, exchanged, matched
from bench.studies.methods.method import MayGoOn
from bench.studies.methods.rotation import chain_paths, jump_refusal, own_chains, turning_paths
from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import ordered
from skein.plan.route.problem import I64, Problem, Routing


def full(problem: Problem, *, seed: int, may_go_on: MayGoOn) -> tuple[Problem, Routing] | Infeasible:
    """The full pipeline: every microbatch visits every stage in order, from place p to place p of DT-FM's placement.

    Microbatches of origins that have no place of their own number further down go along the chains with fewest.
    """
    return dt_fm(_whole(problem), seed=seed, may_go_on=may_go_on)


def full_matched(problem: Problem, *, seed: int, may_go_on: MayGoOn) -> tuple[Problem, Routing] | Infeasible:
    """The full pipeline over the same holders of each stage, chains and their origins matched and exchanged."""
    whole = _whole(problem)
    worker_of = place(whole, dt_fm_scoring(whole), seed=seed, may_go_on=may_go_on)
    if isinstance(worker_of, Infeasible):
        return worker_of
    best = Chains(worker_of=worker_of, chain_of=np.array(own_chains(whole)))
    best_s = chains_s(whole, best)
    for power in POWERS:
        chains = matched(whole, worker_of, power)
        if (seconds := chains_s(whole, chains)) < best_s:
            best, best_s = chains, seconds
    best = exchanged(whole, best, may_go_on)
    return _routed(whole, best.worker_of, chain_paths(whole, best.chain_of.tolist()))


def dt_fm(problem: Problem, *, seed: int, may_go_on: MayGoOn) -> tuple[Problem, Routing] | Infeasible:
    """DT-FM's placement, aggregation counted by its true bytes, and chains over it whose skipped stages rotate."""
    refused = jump_refusal(problem)
    if refused is not None:
        return refused
    worker_of = place(problem, dt_fm_scoring(problem), seed=seed, may_go_on=may_go_on)
    if isinstance(worker_of, Infeasible):
        return worker_of
    return _routed(problem, worker_of, chain_paths(problem, own_chains(problem)))


def round_robin(
    problem: Problem,
    *,
    seed: int,  # noqa: ARG001 - every method takes one
    may_go_on: MayGoOn,  # noqa: ARG001 - it is done at once
) -> tuple[Problem, Routing] | Infeasible:
    """No thought at all: workers fill places in their own order, stages and holders take turns."""
    refused = jump_refusal(problem)
    if refused is not None:
        return refused
    if max(problem.stage_sizes) > problem.num_workers:
        return Infeasible(
            reason=f"a stage of {max(problem.stage_sizes)} holders for {problem.num_workers} workers"
        )
    worker_of = np.arange(problem.num_chunks, dtype=np.int64) % problem.num_workers
    return _routed(problem, worker_of, turning_paths(problem))


def _whole(problem: Problem) -> Problem:
    """`problem` with nothing skipped."""
    return replace(problem, path_len=problem.num_stages)


def _routed(problem: Problem, worker_of: I64, path: I64) -> tuple[Problem, Routing] | Infeasible:
    routing = ordered(problem, worker_of, path)
    if routing is None:
        return Infeasible(reason="its paths wait for slots for ever")
    return problem, routing
