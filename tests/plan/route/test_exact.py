"""The exact search against an integer program, the rules, and anything that a heuristic finds."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem, Routing
from skein.plan.route.rounds import slices
from skein.plan.route.search import Search
from skein.types import Layout
from tests.plan.route.problems import ops_of
from tests.support.exact import TooLongError, optimum
from tests.support.routing_rules import violations
from tests.support.tiny_problems import SEEDS, feasible, tiny

SUMS = 1e-9
"""Relative; sums of a few dozen seconds in another order."""
SOLVER = 1e-4
"""Relative; HiGHS stops when bound and solution are this close."""


def least_makespan_s(problem: Problem, routing: Routing) -> float:
    """By HiGHS: starts of all ops, a yes or no for each pair that shares a worker, and one for each pair that shares a
    chunk's slots (whether one is over before the other begins); no order of ops is given."""
    ops = [
        (m, op, chunk, worker, seconds)
        for m in range(problem.num_microbatches)
        for op, (chunk, worker, seconds) in enumerate(ops_of(problem, routing, m))
    ]
    at = {(m, op): i for i, (m, op, *_) in enumerate(ops)}
    pairs = [
        (a, b)
        for a, b in itertools.combinations(range(len(ops)), 2)
        if ops[a][3] == ops[b][3] and ops[a][0] != ops[b][0]
    ]
    stays = [
        (m, hop, int(routing.path[m, hop]))
        for m in range(problem.num_microbatches)
        for hop in range(problem.num_hops)
    ]
    after = [(x, y) for x in stays for y in stays if x[2] == y[2] and x[0] != y[0]]
    end = len(ops)
    size = end + 1 + len(pairs) + len(after)
    long_s = sum(seconds for *_, seconds in ops) + len(ops) * float(problem.transfer_s.max())
    rows: list[dict[int, float]] = []
    least: list[float] = []

    def need(row: dict[int, float], low: float) -> None:
        rows.append(row)
        least.append(low)

    for i, (m, op, _, worker, seconds) in enumerate(ops):
        if op == 2 * problem.num_hops:
            need({end: 1.0, i: -1.0}, seconds)
        else:
            to = at[m, op + 1]
            need({to: 1.0, i: -1.0}, seconds + float(problem.transfer_s[worker, ops[to][3]]))
    for number, (a, b) in enumerate(pairs, end + 1):
        need({b: 1.0, a: -1.0, number: long_s}, ops[a][4])
        need({a: 1.0, b: -1.0, number: -long_s}, ops[b][4] - long_s)
    first = end + 1 + len(pairs)
    for number, (x, y) in enumerate(after, first):
        # 1 only if x has left when y comes.
        leaves = at[x[0], 2 * problem.num_hops - x[1]]
        need({at[y[0], y[1]]: 1.0, leaves: -1.0, number: -long_s}, ops[leaves][4] - long_s)
    for y in stays:
        # Take all that share the chunk with y: those not gone, and not yet to come, when y comes are in its slots.
        others = [x for x in stays if x[2] == y[2] and x[0] != y[0]]
        slots = int(problem.slots[routing.worker_of[y[2]], problem.stage_of[y[2]]])
        for chosen in itertools.combinations(others, slots):
            row: dict[int, float] = {}
            for u, v in itertools.permutations([y, *chosen], 2):
                row[first + after.index((u, v))] = 1.0
            need(row, 1.0)
    matrix = np.zeros((len(rows), size))
    for i, row in enumerate(rows):
        for column, value in row.items():
            matrix[i, column] = value
    aim = np.zeros(size)
    aim[end] = 1.0
    is_choice = np.arange(size) > end
    solved = milp(
        aim,
        constraints=LinearConstraint(matrix, np.array(least), np.inf),
        integrality=is_choice.astype(int),
        bounds=Bounds(0.0, np.where(is_choice, 1.0, np.inf)),
    )
    assert solved.status == 0
    return float(solved.fun)


def test_orders_are_as_good_as_those_of_an_integer_program() -> None:
    small = [(problem, best) for problem, best in feasible() if best.routing.sequence.size <= 14]
    assert len(small) >= len(SEEDS) / 8
    for problem, best in small:
        assert best.makespan_s == pytest.approx(least_makespan_s(problem, best.routing), rel=SOLVER), (
            problem.name
        )


def test_the_best_routing_is_legal_and_takes_what_it_says() -> None:
    for problem, best in feasible():
        assert violations(problem, best.routing) == (), problem.name
        assert timeline(problem, best.routing).makespan_s == pytest.approx(best.makespan_s, rel=SUMS), (
            problem.name
        )


def test_nothing_that_a_search_finds_is_better() -> None:
    for problem, best in feasible():
        search = Search(problem, seed=1)
        found = search.improve(3_000)
        assert not isinstance(found, Infeasible), problem.name
        assert violations(problem, found.routing) == (), problem.name
        assert found.step_s >= best.makespan_s * (1 - SUMS), problem.name


def test_a_search_finds_the_optimum_of_every_tiny_problem() -> None:
    problems = feasible()
    assert len(problems) >= len(SEEDS) / 2
    for problem, best in problems:
        search = Search(problem, seed=0)
        for slice_ in slices(1_500_000, search.problem.num_ops):
            search.run(slice_)
            assert search.best is not None
            if search.best.step_s <= best.makespan_s * (1 + SUMS):
                break
        assert search.best is not None
        assert search.best.step_s == pytest.approx(best.makespan_s, rel=SUMS), problem.name


def test_two_microbatches_on_two_workers_by_hand() -> None:
    # 0: F F at 0-2; 1: F at 2-3, loss op of a LINE takes 2: 2-4, 4-6; back at 0 at 5 and 7, each 1 s.
    links_s = np.array([[0.0, 1.0], [1.0, 0.0]])
    ones = np.ones((2, 2))
    problem = Problem(
        name="by hand",
        layout=Layout.LINE,
        stage_sizes=(1, 1),
        path_len=2,
        num_by_origin=(2,),
        max_swaps=0,
        max_jump=1,
        forward_s=ones,
        backward_s=ones,
        loss_s=np.full(2, 2.0),
        transfer_s=links_s,
        wire_s=np.zeros((2, 2)),
        slots=np.full((2, 2), 2),
    )
    best = optimum(problem)
    assert best is not None
    assert best.makespan_s == 8.0
    one_slot = optimum(replace(problem, slots=np.ones((2, 2), np.int64)))
    assert one_slot is not None
    assert one_slot.makespan_s == 12.0


def test_a_problem_without_a_plan_has_no_optimum() -> None:
    problem = tiny(0)
    assert optimum(replace(problem, max_jump=0)) is None


def test_what_is_not_searched_is_refused() -> None:
    problem = tiny(0)
    with pytest.raises(ValueError, match="links that can be busy"):
        optimum(replace(problem, wire_s=problem.transfer_s))
    with pytest.raises(TooLongError, match="steps do not suffice"):
        optimum(tiny(6), most_steps=10)
