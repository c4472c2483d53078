"""The best trip of one microbatch against all its trips, timed by a calculation of their own."""

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np
import pytest

from skein.plan.methods.wave import Trip, Wave, Window, find_trip, lay_trip, true_costs, unit_costs, wave_of
from skein.plan.route.problem import Problem
from tests.plan.methods.builders import always, drawn_problem


def wave(problem: Problem) -> Wave:
    return wave_of(problem, true_costs(problem, np.arange(problem.num_chunks)))


def keeps_rules(problem: Problem, stages: tuple[int, ...]) -> bool:
    """Of stages after the first: within the limits on swaps and jumps."""
    swaps = [max(0, *stages[:i]) - stage for i, stage in enumerate(stages) if i and stage < max(stages[:i])]
    fronts = [0, *(max(stages[: i + 1]) for i in range(len(stages)))]
    jumps = [stage - front for stage, front in zip(stages, fronts, strict=False)]
    return all(x == 1 for x in swaps) and len(swaps) <= problem.max_swaps and max(jumps) <= problem.max_jump


def all_ways(problem: Problem, origin: int) -> Iterator[tuple[int, ...]]:
    """Chunks of every trip that the rules allow."""
    first = problem.first_chunk.tolist()
    for stages in permutations(range(1, problem.num_stages), problem.path_len - 1):
        if keeps_rules(problem, stages):
            for rest in product(*(range(first[stage], first[stage + 1]) for stage in stages)):
                yield (origin, *rest)


def finish_s(problem: Problem, way: tuple[int, ...], release_s: float, windows: tuple[Window, ...]) -> float:
    """When a trip along `way` is over; worker w fills chunk w."""
    stage_of = problem.stage_of
    ops = [(chunk, problem.forward_s[chunk, stage_of[chunk]]) for chunk in way]
    ops += [(way[0], problem.loss_s[way[0]])]
    ops += [(chunk, problem.backward_s[chunk, stage_of[chunk]]) for chunk in way[::-1]]
    now, at = release_s, way[0]
    for chunk, takes_s in ops:
        now, at = now + problem.transfer_s[at, chunk], chunk
        # The earliest start that is the arrival or a window's end and meets no window.
        starts = sorted({now, *(end_s for where, _, end_s in windows if where == chunk and end_s > now)})
        now = takes_s + next(
            start
            for start in starts
            if all(where != chunk or start >= e or start + takes_s <= b for where, b, e in windows)
        )
    return float(now)


@pytest.mark.parametrize("seed", range(25))
def test_the_best_trip_is_the_first_of_all_to_be_over(seed: int) -> None:
    rng = np.random.default_rng(seed)
    max_swaps, max_jump = (int(x) for x in rng.integers([0, 2], [3, 5]))
    problem = drawn_problem(
        sizes=(3, 2, 2, 2, 2), path_len=4, max_swaps=max_swaps, max_jump=max_jump, seed=seed
    )
    here = wave(problem)
    microbatch = int(rng.integers(here.num_microbatches))
    origin = here.origin(microbatch)
    closed = {int(x) for x in rng.integers(3, problem.num_chunks, 3)}
    windows: tuple[Window, ...] = tuple(
        (int(rng.integers(problem.num_chunks)), float(begin_s), float(begin_s + rng.uniform(1, 4)))
        for begin_s in rng.uniform(0, 15, 8)
    )
    is_open = sum(1 << chunk for chunk in range(problem.num_chunks) if chunk not in closed)
    release_s = microbatch % here.num_slots * problem.forward_s[origin, 0]
    ends = [
        finish_s(problem, way, release_s, windows)
        for way in all_ways(problem, origin)
        if not closed & set(way)
    ]
    trip = find_trip(here, microbatch, is_open, windows, always)
    if trip is None:
        assert ends == []
    else:
        assert trip.chunks in set(all_ways(problem, origin))
        assert trip.finish_s == pytest.approx(min(ends), rel=1e-12)


def test_a_trip_is_laid_as_calculated_by_hand() -> None:
    problem = drawn_problem(sizes=(1, 1), path_len=2, num_slots=1, num_waves=1)
    here = wave_of(problem, unit_costs(problem))
    trip = lay_trip(here, (0, 1), 0.5, ((1, 2.0, 4.0),))
    assert [(x.chunk, x.begin_s, x.end_s, x.is_forward) for x in trip.visits] == [
        (0, 0.5, 1.5, True),
        (1, 4.0, 5.0, True),
        (0, 6.0, 6.25, False),
        (1, 7.25, 8.75, False),
        (0, 9.75, 11.25, False),
    ]
    assert trip.finish_s == 11.25


def test_of_equal_trips_the_first_by_chunk_numbers_is_taken() -> None:
    problem = drawn_problem(sizes=(3, 2, 2, 2), path_len=3)
    here = wave_of(problem, unit_costs(problem))
    trip = find_trip(here, 0, (1 << problem.num_chunks) - 1, (), always)
    assert isinstance(trip, Trip)
    assert trip.chunks == (0, 3, 5)


def test_no_trip_is_found_where_a_stage_too_many_is_closed() -> None:
    problem = drawn_problem(sizes=(1, 1, 1), path_len=3)
    assert find_trip(wave(problem), 0, 0b011, (), always) is None
