"""Which workers hold which stage, by the genetic search that DT-FM brought up and SkipPipe ported.

Rules of this file
- Groups have the sizes of the stages; the shortest tour from group 0 says which group holds which stage.
- Links are taken as symmetric, at the mean of both ways. Workers beyond the chunks are one more group, in no stage.

Sources: DT-FM (NeurIPS 2022), Section 4; SkipPipe (arXiv 2502.19913), its first phase.
"""

from dataclasses import dataclass

import numpy as np

from bench.studies.methods.kernels import bottleneck, breed, score
from bench.studies.methods.method import MayGoOn
from skein.plan.plan import Infeasible
from skein.plan.route.problem import F64, I64, Problem
from skein.rng import stream

POOL_SIZE = 200
NUM_CHILDREN = 8000
NUM_POINTS = 5
"""Of the crossover."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scoring:
    """What a grouping costs, as arguments of `bench.studies.methods.kernels.score`, and what draws workers together."""

    hop_s: F64
    share_s: F64
    split_s: F64
    adds_up: bool
    is_closed: bool
    pull_s: F64


def skippipe_scoring(problem: Problem) -> Scoring:
    """SkipPipe's own: the slowest transfer of an *activation* inside a group stands for its aggregation."""
    link_s = _symmetric(problem.transfer_s)
    forward_s = problem.forward_s.mean(axis=1)
    return Scoring(
        hop_s=link_s + (forward_s[:, None] + forward_s[None, :]) / 2,
        share_s=link_s,
        split_s=np.zeros_like(link_s),
        adds_up=False,
        is_closed=True,
        pull_s=link_s * (1 - _gradient_share(problem)),
    )


def dt_fm_scoring(problem: Problem) -> Scoring:
    """DT-FM's: every member exchanges its part of the gradient with every other, there and back; the tour is open."""
    link_s = _symmetric(problem.transfer_s)
    reduction = problem.reduction
    none = np.zeros_like(link_s)
    return Scoring(
        hop_s=link_s,
        share_s=none if reduction is None else 2 * _symmetric(reduction.latency_s),
        split_s=none
        if reduction is None
        else 2 * reduction.num_bytes.mean() * _symmetric(1 / reduction.bytes_per_s),
        adds_up=True,
        is_closed=problem.layout.comes_back,
        pull_s=link_s * (1 - _gradient_share(problem)),
    )


def _symmetric(matrix: F64) -> F64:
    both = (matrix + matrix.T) / 2
    np.fill_diagonal(both, 0.0)
    return both


def _gradient_share(problem: Problem) -> float:
    """Gradient bytes of a stage over the activation bytes that an origin sends in a step.

    A problem knows activations by their transfer times alone: their size is the slope of these over seconds per byte.
    """
    if problem.reduction is None:
        return 0.0
    off = ~np.eye(problem.num_workers, dtype=bool)
    s_per_byte = 1 / problem.reduction.bytes_per_s[off]
    wire_s = (problem.transfer_s - problem.reduction.latency_s)[off]
    spread = s_per_byte - s_per_byte.mean() if s_per_byte.size else s_per_byte
    if np.any(np.abs(spread) > 1e-9 * s_per_byte.max(initial=0.0)):
        activation_bytes = float(spread @ wire_s / (spread @ spread))
    else:
        activation_bytes = float(wire_s.sum() / max(s_per_byte.sum(), 1e-300))
    sent = activation_bytes * float(np.mean(problem.num_by_origin))
    return float(problem.reduction.num_bytes.mean()) / sent if sent > 0 else 0.0


def place(problem: Problem, scoring: Scoring, *, seed: int, may_go_on: MayGoOn) -> I64 | Infeasible:
    """(num_chunks,) worker of each chunk: the best grouping of the search, lined up place by place."""
    num_idle = problem.num_workers - problem.num_chunks
    if num_idle < 0:
        return Infeasible(
            reason=f"{problem.num_workers} workers for {problem.num_chunks} chunks: this method gives each worker one"
        )
    sizes = np.array([*problem.stage_sizes, *([num_idle] if num_idle else [])], np.int64)
    group_of, order = _search(sizes, problem.num_stages, scoring, seed, may_go_on)
    return line_up([np.flatnonzero(group_of == group) for group in order], scoring.hop_s)


def _search(sizes: I64, num_stages: int, scoring: Scoring, seed: int, may_go_on: MayGoOn) -> tuple[I64, I64]:
    """The best grouping found, (num_workers,), and its tour, (num_stages,)."""
    rng = stream(seed, "plan", "methods", "genetic")
    num_workers = int(sizes.sum())
    sorted_groups = np.repeat(np.arange(len(sizes)), sizes)
    pool = np.stack([rng.permutation(sorted_groups) for _ in range(POOL_SIZE)]).astype(np.int64)
    scores = np.full(POOL_SIZE, np.inf)
    order = np.empty(num_stages, np.int64)
    terms = (scoring.hop_s, scoring.share_s, scoring.split_s, scoring.adds_up, scoring.is_closed)
    for i in range(POOL_SIZE):
        scores[i] = score(pool[i], sizes, *terms, order)
        if not may_go_on():
            break
    # A child costs about this many steps; so a batch lasts some hundredths of a second.
    batch = max(1, 2_000_000 // (num_workers**2 * len(sizes)))
    for done in range(0, NUM_CHILDREN, batch):
        if not may_go_on():
            break
        count = min(batch, NUM_CHILDREN - done)
        parents = rng.integers(POOL_SIZE, size=(count, 2))
        points = np.argsort(rng.random((count, num_workers)), axis=1)[:, :NUM_POINTS]
        breed(pool, scores, parents, points, sizes, num_stages, scoring.pull_s, *terms)
    best = pool[int(np.argmin(scores))]
    score(best, sizes, *terms, order)
    return best, order


def line_up(groups: list[I64], hop_s: F64) -> I64:
    """(num_chunks,) workers, stage by stage, so that places of one number in neighbouring stages are near each other.

    Each stage is matched with the one before it; origins without a partner come last, others too.
    """
    lined = [groups[0]]
    for group in groups[1:]:
        before = lined[-1]
        is_wider = len(before) > len(group)
        few, many = (group, before) if is_wider else (before, group)
        match = np.empty(len(few), np.int64)
        bottleneck(hop_s[np.ix_(few, many)], match)
        if not is_wider:
            rest = np.setdiff1d(np.arange(len(many)), match)
            lined.append(group[np.concatenate([match, rest])])
            continue
        lined.append(group[np.argsort(match)])
        if len(lined) == 2:
            rest = np.setdiff1d(np.arange(len(before)), match)
            lined[0] = before[np.concatenate([np.sort(match), rest])]
    return np.concatenate(lined).astype(np.int64)
