"""The conflict-based search against enumeration on tiny waves, and its order of giving way."""

from itertools import combinations, product

import numpy as np
import pytest

from skein.plan.methods.conflicts import (
    Entry,
    Trips,
    avoid_collisions,
    spread_over_stages,
    spread_over_workers,
)
from skein.plan.methods.skippipe import skippipe
from skein.plan.methods.wave import true_costs, unit_costs, wave_of
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem
from tests.plan.methods.builders import always, drawn_problem, never
from tests.plan.methods.test_wave import all_ways, finish_s


def trips(problem: Problem) -> Trips:
    return Trips(wave_of(problem, true_costs(problem, np.arange(problem.num_chunks))), always)


def sorted_finish_s(entry: Entry) -> float:
    """A judge: the plan is as good as its last trip."""
    return entry.finish_s


def least_finish_s(problem: Problem) -> float:
    """The least last finish over all ways in which a wave of one slot uses every worker once."""
    ways = [
        [(finish_s(problem, way, 0.0, ()), way) for way in all_ways(problem, origin)]
        for origin in range(problem.stage_sizes[0])
    ]
    return min(
        max(end_s for end_s, _ in choice)
        for choice in product(*ways)
        if len({chunk for _, way in choice for chunk in way}) == problem.num_chunks
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("sizes", "path_len"), [((2, 1, 1), 2), ((3, 1, 1, 1), 2), ((2, 1, 1, 1, 1), 3)])
def test_on_a_tiny_wave_the_last_trip_ends_as_early_as_it_can(
    sizes: tuple[int, ...], path_len: int, seed: int
) -> None:
    # With one worker in each stage and three microbatches all ways to relieve a stage are tried.
    problem = drawn_problem(sizes=sizes, path_len=path_len, num_slots=1, num_waves=1, seed=seed)
    finder = trips(problem)
    entry = spread_over_workers(finder, spread_over_stages(finder))
    assert entry is not None
    assert entry.finish_s == pytest.approx(least_finish_s(problem), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_no_stage_and_no_worker_is_used_too_often(seed: int) -> None:
    problem = drawn_problem(sizes=(3, 2, 2, 2), path_len=3, num_slots=3, seed=seed)
    finder = trips(problem)
    candidates = spread_over_stages(finder)
    for candidate in candidates:
        visits = np.bincount([finder.wave.stage_of[x] for trip in candidate.trips for x in trip.chunks])
        assert visits.tolist() == [9, 6, 6, 6]
    entry = spread_over_workers(finder, candidates)
    assert entry is not None
    assert np.bincount([x for trip in entry.trips for x in trip.chunks]).tolist() == [3] * 9


def collisions(entry: Entry) -> int:
    """Pairs of ops of two microbatches that meet at a worker, two backwards left out."""
    return sum(
        a.chunk == b.chunk and a.begin_s < b.end_s and b.begin_s < a.end_s and (a.is_forward or b.is_forward)
        for one, other in combinations(entry.trips, 2)
        for a in one.visits
        for b in other.visits
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_that_is_kept_is_the_best_judged(seed: int) -> None:
    problem = drawn_problem(sizes=(2, 2), path_len=2, num_slots=2, seed=seed)
    finder = trips(problem)
    judged: list[tuple[float, Entry]] = []

    def judge(entry: Entry) -> float:
        # The fewer collisions the better, so that the search goes all the way.
        judged.append((100.0 + collisions(entry), entry))
        return judged[-1][0]

    best = avoid_collisions(finder, spread_over_stages(finder), judge)
    assert best is min(judged, key=lambda x: x[0])[1]
    assert collisions(judged[0][1]) > 0
    assert collisions(best) == 0


def test_giving_way_is_waiting() -> None:
    # One worker for two microbatches that arrive together: the faster to be over waits for the slower.
    problem = drawn_problem(sizes=(2, 1, 1), path_len=2, num_slots=2, num_waves=1)
    finder = Trips(wave_of(problem, unit_costs(problem)), always)
    candidates = spread_over_stages(finder)
    first = spread_over_workers(finder, candidates)
    best = avoid_collisions(finder, candidates, lambda entry: 100.0 + collisions(entry))
    assert first is not None
    assert best is not None
    assert collisions(first) > collisions(best) == 0
    assert best.finish_s > first.finish_s
    for trip, windows in zip(best.trips, best.windows, strict=True):
        for visit in trip.visits:
            assert all(
                visit.chunk != chunk or visit.begin_s >= end_s or visit.end_s <= begin_s
                for chunk, begin_s, end_s in windows
            )


def test_without_time_there_is_no_plan() -> None:
    problem = drawn_problem(sizes=(2, 1, 1), path_len=2, num_slots=1)
    finder = Trips(wave_of(problem, unit_costs(problem)), never)
    assert spread_over_stages(finder) == []
    assert spread_over_workers(finder, []) is None
    assert avoid_collisions(finder, [], sorted_finish_s) is None


@pytest.mark.parametrize("seed", range(6))
def test_more_time_makes_no_worse_plan(seed: int) -> None:
    problem = drawn_problem(sizes=(3, 2, 2, 2), path_len=3, num_slots=3, seed=seed)
    spans_s: list[float] = []
    # Enough for the placement and all trips of a first plan, or for all there is to do.
    for num_answers in (3_000, 1_000_000):
        answers = iter(range(num_answers))
        found = skippipe(problem, seed=0, may_go_on=lambda answers=answers: next(answers, None) is not None)  # type: ignore[misc]
        assert isinstance(found, tuple)
        spans_s.append(timeline(*found).makespan_s)
    assert spans_s[1] <= spans_s[0]


@pytest.mark.parametrize(
    ("made_late", "window", "waits", "until"),
    [
        pytest.param(1, (2, 3.0, 6.0), 1, (2, 5.25, 6.75), id="a forward that begins after a backward"),
        pytest.param(1, (2, 3.0, 5.0), 0, (2, 5.0, 6.0), id="a backward that begins after a forward"),
        pytest.param(0, (2, 2.0, 2.5), 0, (2, 3.0, 4.0), id="of two forwards that of the faster microbatch"),
    ],
)
def test_of_two_that_meet_one_waits(
    made_late: int, window: tuple[int, float, float], waits: int, until: tuple[int, float, float]
) -> None:
    # Microbatches 0 and 1 share an origin and worker 2, where left alone they are at 2 to 3 and 5.25 to 6.75, and a
    # second later; 2 and 3 are elsewhere. Worker 2 is closed to one of them for a while, so that they meet.
    problem = drawn_problem(sizes=(2, 1, 1), path_len=2, num_slots=2, num_waves=1)
    finder = Trips(wave_of(problem, unit_costs(problem)), always)
    first = finder.first()
    assert first is not None
    apart = finder.without(first, {0: 1 << 3, 1: 1 << 3, 2: 1 << 2, 3: 1 << 2})
    assert apart is not None
    meeting = finder.after(apart, made_late, window)
    assert meeting is not None
    judged: list[Entry] = []

    def judge(entry: Entry) -> float:
        judged.append(entry)
        return 1.0

    avoid_collisions(finder, [meeting], judge)
    assert judged[0] is meeting
    before = list(meeting.windows)
    before[waits] = (*before[waits], until)
    assert judged[1].windows == tuple(before)
