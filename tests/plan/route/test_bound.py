"""Bounds against exact optima, against plans that searches find, and against figures by hand."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from skein.plan.ops import WEIGHT_SHARE
from skein.plan.plan import Infeasible
from skein.plan.route.bounds.bound import Effort, lower_bound, reduce_least_s
from skein.plan.route.bounds.lots import Tariff, alone_s, cheapest_lots
from skein.plan.route.bounds.trips import stages_at, trips_of
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem
from skein.plan.route.schedules.named import NAMED_ORDERS
from skein.plan.route.search import Search
from skein.types import Layout
from tests.plan.route.problems import drawn, group_s
from tests.plan.schedules.builders import share, uniform
from tests.support.exact import stage_walks
from tests.support.extent import part
from tests.support.routing_rules import violations
from tests.support.tiny_problems import CHUNKED_SEEDS, SEEDS, feasible, solved_chunked, tiny

BOTH = (Layout.LOOP, Layout.LINE)


def test_no_bound_is_above_the_optimum_and_more_effort_never_proves_less() -> None:
    compared = feasible()
    assert len(compared) >= len(SEEDS) / 2
    ratios = []
    for problem, best in compared:
        proven = [lower_bound(problem, effort=effort).makespan_s for effort in Effort]
        assert proven[-1] <= best.makespan_s, problem.name
        assert all(less <= more for less, more in pairwise(proven)), problem.name
        ratios.append(best.makespan_s / proven[-1])
    # A few are far off, where stages are few and equal use binds; on the whole the bounds are close.
    assert np.median(ratios) < 1.05
    assert sum(ratio < 1.001 for ratio in ratios) > len(ratios) / 4


def test_no_bound_is_above_the_optimum_of_several_chunks_and_split_backwards() -> None:
    compared = [(problem, best) for problem, best in solved_chunked() if best is not None]
    assert len(compared) >= len(CHUNKED_SEEDS) * 20 // 21
    ratios = []
    for problem, best in compared:
        assert violations(problem, best.routing) == (), problem.name
        assert timeline(problem, best.routing).makespan_s == pytest.approx(best.makespan_s), problem.name
        bound = lower_bound(problem)
        assert bound.makespan_s <= best.makespan_s, (problem.name, bound.parts)
        ratios.append(best.makespan_s / bound.makespan_s)
    # Steps of two or three microbatches over far links are mostly trips, of which no more than the shortest counts.
    assert np.median(ratios) < 1.3


@pytest.mark.parametrize("num_workers", [4, 8])
@pytest.mark.parametrize("num_chunks", [2, 4])
@pytest.mark.parametrize(
    ("is_split", "names"), [(False, ["interleaved"]), (True, ["interleaved_zb", "zb_v"])]
)
def test_named_orders_of_equal_workers_in_a_site_are_close_to_the_bound(
    num_workers: int, num_chunks: int, names: list[str], *, is_split: bool
) -> None:
    each = share(1.0, 2 * (1 - WEIGHT_SHARE), 2 * WEIGHT_SHARE)
    takes_s = min(
        uniform(name, num_workers, 8, num_chunks, each=each).makespan_s
        for name in names
        if NAMED_ORDERS[name].num_chunks in (None, num_chunks)
    )
    stages = (num_workers, num_workers * num_chunks)
    problem = Problem(
        name="in a site",
        layout=Layout.LINE,
        stage_sizes=(1,) * stages[1],
        path_len=stages[1],
        num_by_origin=(8,),
        max_swaps=0,
        max_jump=1,
        forward_s=np.full(stages, 1.0 / num_chunks),
        backward_s=np.full(stages, 2.0 / num_chunks),
        loss_s=np.full(num_workers, 3.0 / num_chunks),
        transfer_s=np.zeros((num_workers, num_workers)),
        wire_s=np.zeros((num_workers, num_workers)),
        slots=np.full(stages, 8),
        is_split=is_split,
    )
    assert 1.0 <= takes_s / lower_bound(problem).makespan_s < 1.15


def test_a_known_plan_ends_the_looking_and_not_the_truth() -> None:
    for problem, best in feasible():
        for known in (best.makespan_s, 0.5 * best.makespan_s):
            assert lower_bound(problem, cutoff_s=known).makespan_s <= best.makespan_s, problem.name


def test_equal_problems_have_equal_bounds() -> None:
    assert lower_bound(drawn(3)) == lower_bound(drawn(3))


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("chunks_per_worker", [None, 2])
@pytest.mark.parametrize("is_split", [False, True])
def test_no_plan_of_any_kind_is_better_than_its_bound(
    layout: Layout, chunks_per_worker: int | None, *, is_split: bool
) -> None:
    num_found, seeds = 0, part(range(24), every=4)
    for seed in seeds:
        problem = drawn(seed, layout=layout, has_wires=seed % 2 == 0, has_reduction=seed % 3 > 0)
        problem = replace(problem, is_split=is_split)
        if chunks_per_worker is not None:
            num_workers = (problem.num_workers + 1) // 2 + 1
            problem = first_workers(replace(problem, chunks_per_worker=chunks_per_worker), num_workers)
        found = Search(problem, seed=seed).improve(3_000)
        if isinstance(found, Infeasible):
            continue
        num_found += 1
        bound = lower_bound(problem)
        here = timeline(problem, found.routing)
        assert bound.makespan_s <= here.makespan_s, (seed, bound.parts)
        assert bound.seconds <= here.step_s, (seed, bound.parts)
    assert num_found >= len(seeds) / 3


def first_workers(problem: Problem, num_workers: int) -> Problem:
    """The same problem for the first workers only."""
    few, square = slice(num_workers), np.s_[:num_workers, :num_workers]
    reduction = problem.reduction
    if reduction is not None:
        latency_s, bytes_per_s = reduction.latency_s[square], reduction.bytes_per_s[square]
        reduction = replace(reduction, latency_s=latency_s, bytes_per_s=bytes_per_s)
    return replace(
        problem,
        forward_s=problem.forward_s[few],
        backward_s=problem.backward_s[few],
        loss_s=problem.loss_s[few],
        transfer_s=problem.transfer_s[square],
        wire_s=problem.wire_s[square],
        slots=problem.slots[few],
        reduction=reduction,
    )


def test_no_group_reduces_faster_than_said() -> None:
    for seed in range(30):
        problem = drawn(seed, has_reduction=True)
        reduction = problem.reduction
        assert reduction is not None
        for stage, holders in enumerate(problem.stage_sizes):
            groups = combinations(range(problem.num_workers), holders)
            num_bytes = float(reduction.num_bytes[stage])
            least_s = min(group_s(reduction, group, num_bytes) for group in groups)
            assert reduce_least_s(problem, reduction, stage) <= least_s * (1 + 1e-12), (seed, stage)


def test_slots_are_used_one_after_the_other_by_hand() -> None:
    # f 1, b 2, trips of 10 on two slots: starts 0, 1, then turns at 10 and, f + b later, 13; ends 20 and 23.
    trips = trips_of(pair(forward_s=1.0, backward_s=2.0, slots=2))
    assert alone_s(trips, np.array([10.0, 10.0]), 4).tolist() == [23.0, 23.0]
    # As many slots as microbatches: the first to end, at 10, has the backwards of three behind it.
    trips = trips_of(pair(forward_s=1.0, backward_s=2.0, slots=4))
    assert alone_s(trips, np.array([10.0, 10.0]), 4).tolist() == [16.0, 16.0]


def test_one_slot_takes_one_trip_after_the_other() -> None:
    bound = lower_bound(pair(forward_s=1.0, backward_s=2.0, slots=1))
    # Two forwards, two backwards, four links and the loss, four times.
    assert bound.makespan_s == pytest.approx(4 * (6.0 + 4 * 0.25 + 0.5), rel=1e-6)
    assert bound.binding == "origin's slots"


def pair(*, forward_s: float, backward_s: float, slots: int) -> Problem:
    """Two workers, two stages, four microbatches of one origin."""
    ones = np.ones((2, 2))
    return Problem(
        name="pair",
        layout=Layout.LOOP,
        stage_sizes=(1, 1),
        path_len=2,
        num_by_origin=(4,),
        max_swaps=0,
        max_jump=1,
        forward_s=forward_s * ones,
        backward_s=backward_s * ones,
        loss_s=np.full(2, 0.5),
        transfer_s=0.25 * (ones - np.eye(2)),
        wire_s=np.zeros((2, 2)),
        slots=np.full((2, 2), slots),
    )


def test_stages_of_each_hop_are_those_of_all_legal_walks() -> None:
    for seed in range(60):
        for layout in BOTH:
            problem = replace(drawn(seed, layout=layout), max_jump=1 + seed % 3)
            walks = [walk[: problem.num_hops] for walk in stage_walks(problem)]
            expected = tuple(tuple(sorted({walk[hop] for walk in walks})) for hop in range(problem.num_hops))
            assert stages_at(problem) == expected, (seed, layout)


def test_no_lot_of_a_plan_is_cheaper_than_the_cheapest() -> None:
    """At any falling convex price of a microbatch's time from its first start to its end."""
    luck = np.random.default_rng(2)
    for problem, best in feasible():
        trips, here = trips_of(problem), timeline(problem, best.routing)
        times_s = here.end_s - here.begin_s[:, 0]
        for _ in range(4):
            tariff = random_tariff(luck, problem.num_workers, best.makespan_s)
            for origin, count in enumerate(problem.num_by_origin):
                worker = best.routing.worker_of[origin : origin + 1]
                mine = best.routing.path[:, 0] == origin
                grid_s = tariff.step_s * np.arange(tariff.price.shape[1])
                paid = np.interp(times_s[mine], grid_s, tariff.price[worker[0]]).sum()
                least = cheapest_lots(trips, tariff, worker, count, best.makespan_s).price[0]
                assert least <= paid + 1e-9, (problem.name, origin)


def random_tariff(luck: np.random.Generator, num_workers: int, end_s: float) -> Tariff:
    """Convex, falling, to the step's end."""
    drops = np.sort(luck.exponential(1.0, (num_workers, 199)) ** 3, axis=1)[:, ::-1]
    price = np.hstack([np.zeros((num_workers, 1)), -np.cumsum(drops, axis=1)])
    return Tariff(step_s=end_s / 199, price=price)


def test_lots_prove_more_than_trips_where_workers_are_shared() -> None:
    """Nine workers in a plane: not all microbatches can stay near their origin."""
    at = np.random.default_rng(1).uniform(0, 3, (9, 2))
    links_s = 0.4 + np.linalg.norm(at[:, None] - at[None], axis=2)
    np.fill_diagonal(links_s, 0.0)
    even = np.full((9, 4), 2.0)
    problem = Problem(
        name="nine in a plane",
        layout=Layout.LOOP,
        stage_sizes=(3, 2, 2, 2),
        path_len=3,
        num_by_origin=(6,) * 3,
        max_swaps=2,
        max_jump=4,
        forward_s=even,
        backward_s=1.5 * even,
        loss_s=np.full(9, 0.5),
        transfer_s=links_s,
        wire_s=np.zeros((9, 9)),
        slots=np.full((9, 4), 3),
    )
    proven = [lower_bound(problem, effort=effort).makespan_s for effort in Effort]
    found = Search(problem, seed=0).improve(20_000)
    assert not isinstance(found, Infeasible)
    assert proven[0] * 1.02 < proven[1] <= proven[2] <= found.step_s


def test_a_problem_without_a_plan_has_a_bound() -> None:
    assert lower_bound(replace(tiny(0), max_jump=0)).makespan_s > 0.0
