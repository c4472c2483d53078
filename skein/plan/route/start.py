"""A first routing, at once: stages in rotation, chunks in turn, workers in the order they were drawn or given."""

import numpy as np

from skein.plan.plan import Infeasible
from skein.plan.route.problem import I64, Problem


def first_paths(problem: Problem) -> I64 | Infeasible:
    """(num_microbatches, num_hops + 1) legal paths: every stage as often as it must, its chunks in turn.

    A microbatch takes the stages that most visits are left of, among those from which the rest of its path can still
    be walked, and never a swap.
    """
    reachable = _reachable(problem)
    wanted = problem.path_len - (problem.num_stages - len(problem.skippable))
    if wanted > len(problem.skippable) or not reachable[0, wanted]:
        what = f"no path of {problem.path_len} of {problem.num_stages} stages has jumps of at most {problem.max_jump}"
        return Infeasible(reason=what)
    left = np.array(problem.visits_by_stage)
    turns = [0] * problem.num_stages
    rows = []
    for origin in _in_turn(problem.num_by_origin):
        row = [origin]
        for stage in _stages(problem, left, reachable, wanted):
            left[stage] -= 1
            row.append(int(problem.first_chunk[stage]) + turns[stage] % problem.stage_sizes[stage])
            turns[stage] += 1
        if problem.num_hops < problem.path_len:
            last = problem.num_stages - 1
            row.append(int(problem.first_chunk[last]) + turns[last] % problem.stage_sizes[last])
            turns[last] += 1
        else:
            row.append(origin)
        rows.append(row)
    paths = np.array(rows, np.int64)
    # Where jumps are short, the stages with most visits left could not always be taken.
    if not _evened(problem, paths):
        return Infeasible(
            reason=f"no paths were found that visit all stages equally often: {what_limits(problem)}"
        )
    return paths


def what_limits(problem: Problem) -> str:
    """The limits that paths keep to, in words."""
    return f"{problem.path_len} of {problem.num_stages} stages, jumps of at most {problem.max_jump}"


def _evened(problem: Problem, paths: I64) -> bool:
    """Let stages with too few visits have some of those with too many; whether they are as equal as can be then.

    Visits go along a chain of stages, each of which gives one of its own to the next, on paths that stay legal.
    """
    while (unequal := _unequal(problem, paths)) is not None:
        most, least = unequal
        # By breadth: where no path can visit one for the other, the shortest chain disturbs the fewest.
        came_from: dict[int, tuple[int, int, int]] = {most: (-1, -1, -1)}
        edge = [most]
        while edge and least not in came_from:
            edge = [
                other
                for stage in edge
                for other in problem.skippable
                if other not in came_from and _give(problem, paths, stage, other, came_from)
            ]
        if least not in came_from:
            return False
        given = [came_from[least]]
        while given[-1][0] != most:
            given.append(came_from[given[-1][0]])
        stage = least
        for before, m, hop in given:
            if problem.stage_of[paths[m, hop]] != before or not _replace(problem, paths, m, hop, stage):
                return False
            stage = before
    return True


def _unequal(problem: Problem, paths: I64) -> tuple[int, int] | None:
    """The stages with most and with fewest visits, if these differ by more than one."""
    if not problem.skippable:
        return None
    visits = np.bincount(
        problem.stage_of[paths[:, 1 : problem.num_hops]].ravel(), minlength=problem.num_stages
    )
    own = {stage: int(visits[stage]) for stage in problem.skippable}
    most, least = max(own, key=lambda s: (own[s], -s)), min(own, key=lambda s: (own[s], s))
    return (most, least) if own[most] - own[least] > 1 else None


def _give(
    problem: Problem, paths: I64, stage: int, other: int, came_from: dict[int, tuple[int, int, int]]
) -> bool:
    """Whether some microbatch may visit `other` instead of `stage`; notes which one, and at which hop."""
    for m, row in enumerate(problem.stage_of[paths[:, : problem.num_hops]]):
        hops = np.flatnonzero(row[1:] == stage)
        if len(hops) and other not in row and _replace(problem, paths.copy(), m, int(hops[0]) + 1, other):
            came_from[other] = (stage, m, int(hops[0]) + 1)
            return True
    return False


def _replace(problem: Problem, paths: I64, m: int, hop: int, stage: int) -> bool:
    """Let microbatch m visit `stage` at `hop` and sort its stages; False, and nothing done, if jumps are too long."""
    row = paths[m].copy()
    row[hop] = problem.first_chunk[stage] + m % problem.stage_sizes[stage]
    row[1 : problem.num_hops] = np.sort(row[1 : problem.num_hops])
    stages = problem.stage_of[row[: problem.path_len]]
    if (np.diff(stages) < 1).any() or (np.diff(stages) > problem.max_jump).any():
        return False
    paths[m] = row
    return True


def _in_turn(num_by_origin: tuple[int, ...]) -> list[int]:
    """Origins in turn, each as often as it must."""
    turns = [(number, origin) for origin, count in enumerate(num_by_origin) for number in range(count)]
    return [origin for _, origin in sorted(turns)]


def _reachable(problem: Problem) -> np.ndarray:
    """[stage, n]: whether a path at `stage` can visit n skippable stages more, ascending, and then end legally."""
    num_stages, jump = problem.num_stages, problem.max_jump
    is_line = problem.num_hops < problem.path_len
    can = np.zeros((num_stages, problem.path_len + 1), np.bool_)
    for stage in range(num_stages - 1, -1, -1):
        can[stage, 0] = not is_line or num_stages - 1 - stage <= jump
        nexts = [s for s in range(stage + 1, stage + jump + 1) if s in problem.skippable]
        for count in range(1, problem.path_len + 1):
            can[stage, count] = any(can[s, count - 1] for s in nexts)
    return can


def _stages(problem: Problem, left: I64, reachable: np.ndarray, wanted: int) -> list[int]:
    """The skippable stages of one path, ascending: those with most visits left, as far as jumps allow."""
    chosen: list[int] = []
    for stage in sorted(problem.skippable, key=lambda s: (-left[s], s)):
        if len(chosen) < wanted and _can_hold(problem, sorted([*chosen, stage]), reachable, wanted):
            chosen.append(stage)
    return sorted(chosen)


def _can_hold(problem: Problem, must: list[int], reachable: np.ndarray, wanted: int) -> bool:
    """Whether a legal ascending path of `wanted` skippable stages visits all of `must`."""
    fronts = {(0, 0)}
    for goal in must:
        fronts = _walk(problem, fronts, goal, wanted)
    return any(count <= wanted and reachable[stage, wanted - count] for stage, count in fronts)


def _walk(problem: Problem, fronts: set[tuple[int, int]], goal: int, wanted: int) -> set[tuple[int, int]]:
    """(goal, stages visited) for all ways from `fronts` up to `goal`, with any stops between."""
    found = set(fronts)
    edge = set(fronts)
    while edge:
        edge = {
            (stage, count + 1)
            for at, count in edge
            for stage in range(at + 1, min(at + problem.max_jump, goal) + 1)
            if count < wanted and stage in problem.skippable
        } - found
        found |= edge
    return {(stage, count) for stage, count in found if stage == goal}
