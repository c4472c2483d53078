"""Paths that go on over other chunks: those of the dead for living ones of the same stage, and what evens them out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from skein.plan.paths import shares
from skein.plan.replan.before import Before, Seats, worker_of
from skein.plan.replan.needs import Needs
from skein.plan.route.problem import F64, I64, Problem

_NOBODY = -1


def posed(problem: Problem, before: Before, seats: Seats, needs: Needs | None) -> Problem:
    """`problem` with these seats.

    An origin has as many microbatches as before where origins are the same, else what it can serve, none without.
    """
    if seats[0] == before.seats[0]:
        parts = tuple(int(x) for x in np.bincount(before.path[:, 0], minlength=len(seats[0])))
    else:
        parts = shares(len(before.path), _weights(seats[0], 0, needs))
    return replace(problem, stage_sizes=tuple(len(held) for held in seats), num_by_origin=parts)


def repaired(problem: Problem, before: Before, seats: Seats, needs: Needs | None) -> I64:
    """The paths before, over chunks of `problem`, which has these seats. Stages and their order stay.

    In a stage whose holders changed each serves its share. Who has more gives some away; that, and what was on the
    chunks of the dead, goes to whoever of the others is least out of the way, in the order of the step before.
    """
    path = _renamed(problem, before, seats)
    around_s = problem.transfer_s + problem.transfer_s.T
    turn = _in_turn(before)
    for stage, held in enumerate(seats):
        if held != before.seats[stage]:
            hop_of = _hops(problem, before, stage)
            weights = _weights(held, stage, needs)
            parts = problem.num_by_origin if stage == 0 else shares(len(hop_of), weights)
            visitors = [m for m in turn if m in hop_of]
            _even_out(problem, path, seats, stage, [(m, hop_of[m]) for m in visitors], parts, around_s)
    return path


def _even_out(
    problem: Problem,
    path: I64,
    seats: Seats,
    stage: int,
    visits: Sequence[tuple[int, int]],
    parts: Sequence[int],
    around_s: F64,
) -> None:
    """Give each chunk of `stage` its part of the visits, (microbatch, hop)."""
    first, room = int(problem.first_chunk[stage]), np.array(parts)
    holders = worker_of(seats)
    held = np.array(seats[stage])
    homeless = []
    for m, hop in visits:
        chunk = int(path[m, hop]) - first
        if path[m, hop] != _NOBODY and room[chunk] > 0:
            room[chunk] -= 1
        else:
            homeless.append((m, hop))
    # After all that can stay, so that nothing is moved for the sake of what moves anyway.
    for m, hop in homeless:
        beside = [x for x in _beside(problem, hop) if path[m, x] != _NOBODY]
        detour_s = around_s[held][:, holders[path[m, beside]]].sum(axis=1)
        chosen = int(np.where(room > 0, detour_s, np.inf).argmin())
        room[chosen] -= 1
        path[m, hop] = first + chosen
        if hop == 0 and problem.layout.comes_back:
            path[m, -1] = path[m, 0]


def _beside(problem: Problem, hop: int) -> list[int]:
    """The hops before and after; a loop's first comes after its last."""
    if problem.layout.comes_back and hop == 0:
        return [1, problem.num_hops - 1] if problem.num_hops > 1 else []
    return [x for x in (hop - 1, hop + 1) if 0 <= x <= problem.num_hops]


def _renamed(problem: Problem, before: Before, seats: Seats) -> I64:
    """Paths over the chunks that are still there; `_NOBODY` where none is."""
    names: list[int] = []
    for stage, was in enumerate(before.seats):
        chunk_of = {worker: int(problem.first_chunk[stage]) + i for i, worker in enumerate(seats[stage])}
        names.extend(chunk_of.get(worker, _NOBODY) for worker in was)
    path: I64 = np.array(names, np.int64)[before.path]
    return path


def _in_turn(before: Before) -> list[int]:
    """Microbatches as they began."""
    num_ops = len(before.sequence) // len(before.path)
    _, first = np.unique(before.sequence // num_ops, return_index=True)
    return [int(m) for m in np.argsort(first, kind="stable")]


def _hops(problem: Problem, before: Before, stage: int) -> dict[int, int]:
    """At which hop each microbatch visits `stage`."""
    stage_of = np.repeat(np.arange(len(before.stage_sizes)), before.stage_sizes)
    stop = before.path.shape[1] - problem.layout.num_head_stages
    rows, hops = np.nonzero(stage_of[before.path[:, :stop]] == stage)
    return {int(m): int(hop) for m, hop in zip(rows, hops, strict=True)}


def _weights(held: tuple[int, ...], stage: int, needs: Needs | None) -> list[float]:
    return [1.0 if needs is None else float(needs.per_s[worker, stage]) for worker in held]
