"""Paths when nobody chooses: skipped stages rotate, and chains lead from place to place or holders take turns.

The pattern of visits is a balanced word (P ones among L letters, spread evenly) that moves on by one letter from
microbatch to microbatch. In any window of microbatches two stages are then visited equally often to within one, and
no other equal use of all stages gets by with shorter jumps.
"""

from collections.abc import Sequence

import numpy as np

from skein.plan.plan import Infeasible
from skein.plan.route.problem import I64, Problem


def rotating_stages(problem: Problem, turn: int) -> tuple[int, ...]:
    """Stages, ascending, of the microbatch whose turn it is; LINE ends with the last one."""
    letters = problem.skippable
    num_letters = len(letters)
    num_visited = problem.path_len - (problem.num_stages - num_letters)
    body = (
        stage
        for at, stage in enumerate(letters, turn % max(1, num_letters))
        if (at + 1) * num_visited // num_letters > at * num_visited // num_letters
    )
    end = (problem.num_stages - 1,) if not problem.layout.comes_back else ()
    return (0, *body, *end)


def jump_refusal(problem: Problem) -> Infeasible | None:
    """Why rotating stages would break the limit on jumps; None if they keep it."""
    patterns = (rotating_stages(problem, turn) for turn in range(len(problem.skippable)))
    longest = max((max(np.diff(stages), default=0) for stages in patterns), default=0)
    if longest <= problem.max_jump:
        return None
    which = f"{problem.path_len} of {problem.num_stages} stages, all used equally"
    return Infeasible(reason=f"{which}, need jumps of {longest}, allowed are {problem.max_jump}")


def origins_in_turn(problem: Problem) -> list[int]:
    """Origin of each microbatch: the first of every origin, then the second, and so on."""
    numbered = [
        (number, origin) for origin, count in enumerate(problem.num_by_origin) for number in range(count)
    ]
    return [origin for _, origin in sorted(numbered)]


def num_chains(problem: Problem) -> int:
    """Chains lead through the stages after the first, as many as the largest of them has holders."""
    return max(problem.stage_sizes[1:], default=1)


def own_chains(problem: Problem) -> list[int]:
    """Chain of each microbatch: origin p's go along chain p while it has room, the others where fewest go."""
    origins = origins_in_turn(problem)
    load = [0] * num_chains(problem)
    room = -(-len(origins) // len(load))
    chosen = [-1] * len(origins)
    for m, origin in enumerate(origins):
        if origin < len(load) and load[origin] < room:
            chosen[m] = origin
            load[origin] += 1
    for m, chain in enumerate(chosen):
        if chain < 0:
            chosen[m] = load.index(min(load))
            load[chosen[m]] += 1
    return chosen


def chain_paths(problem: Problem, chain_by_microbatch: Sequence[int]) -> I64:
    """(num_microbatches, num_hops + 1) paths along chains, which lie side by side over the places of each stage.

    Each chain's microbatches have consecutive turns, so its workers are used equally too.
    """
    counts = np.bincount(chain_by_microbatch, minlength=num_chains(problem))
    next_turn = np.concatenate([[0], np.cumsum(counts)[:-1]])
    rows = []
    for origin, chain in zip(origins_in_turn(problem), chain_by_microbatch, strict=True):
        stages = rotating_stages(problem, int(next_turn[chain]))
        next_turn[chain] += 1
        places = [chain * problem.stage_sizes[stage] // len(counts) for stage in stages[1:]]
        rows.append(_row(problem, stages, [origin, *places]))
    return np.array(rows, np.int64)


def turning_paths(problem: Problem) -> I64:
    """(num_microbatches, num_hops + 1) paths whose hops go to each stage's holders in turn."""
    next_place = [0] * problem.num_stages
    rows = []
    for turn, origin in enumerate(origins_in_turn(problem)):
        stages = rotating_stages(problem, turn)
        places = [origin]
        for stage in stages[1:]:
            places.append(next_place[stage] % problem.stage_sizes[stage])
            next_place[stage] += 1
        rows.append(_row(problem, stages, places))
    return np.array(rows, np.int64)


def _row(problem: Problem, stages: Sequence[int], places: Sequence[int]) -> list[int]:
    chunks = [int(problem.first_chunk[stage]) + place for stage, place in zip(stages, places, strict=True)]
    return chunks if not problem.layout.comes_back else [*chunks, chunks[0]]
