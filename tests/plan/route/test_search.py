"""The compiled loops against the model written a second time, and what a search may and must do."""

from dataclasses import replace

import numpy as np
import pytest

from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import jittered, ordered, timeline
from skein.plan.route.kernels.anneal import refit
from skein.plan.route.kernels.arrays import fixed, routing, state
from skein.plan.route.kernels.cost import NEVER, fit, fitted, run_sequence, scratch_for
from skein.plan.route.kernels.moves import (
    NOTHING,
    PATHS,
    SEATS,
    change_paths,
    dice,
    exchange_seats,
    take_back,
    undo_space,
)
from skein.plan.route.problem import Problem, Routing
from skein.plan.route.search import Search
from skein.plan.route.start import first_paths
from skein.types import Layout
from tests.plan.route.problems import drawn, in_sequence, served_first_come
from tests.support.extent import part
from tests.support.routing_rules import in_turn, violations

SEEDS = part(range(40), every=4)
BOTH = (Layout.LOOP, Layout.LINE)


def begun(problem: Problem, seed: int = 0) -> Routing | None:
    found = Search(problem, seed=seed).begin()
    return None if isinstance(found, Infeasible) else found.routing


@pytest.mark.parametrize("layout", BOTH)
def test_workers_serve_first_come_as_the_plain_model_does(layout: Layout) -> None:
    num_halts = 0
    for seed in SEEDS:
        problem = drawn(seed, layout=layout)
        paths = first_paths(problem)
        if isinstance(paths, Infeasible):
            continue
        worker_of = np.random.default_rng(seed).permutation(problem.num_workers)[: problem.num_chunks]
        made = ordered(problem, worker_of, paths)
        bare = Routing(worker_of=worker_of, path=paths, sequence=np.zeros(0, np.int64))
        began = served_first_come(problem, bare)
        num_halts += began is None
        assert (made is None) == (began is None), seed
        if made is not None and began is not None:
            here = timeline(problem, made)
            expected = [[began[m, op] for op in range(here.begin_s.shape[1])] for m in range(len(paths))]
            np.testing.assert_allclose(here.begin_s, expected, rtol=1e-12, err_msg=str(seed))
    assert num_halts < len(SEEDS) / 2


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("has_wires", [False, True])
def test_a_sequence_takes_what_the_plain_model_says(layout: Layout, has_wires: bool) -> None:
    for seed in SEEDS:
        problem = drawn(seed, layout=layout, has_wires=has_wires, has_reduction=seed % 2 == 0)
        if (made := begun(problem)) is not None:
            assert timeline(problem, made).step_s == pytest.approx(in_sequence(problem, made), rel=1e-12), (
                seed
            )


@pytest.mark.parametrize("layout", BOTH)
def test_moves_keep_every_rule_and_can_be_undone(layout: Layout) -> None:
    shares = np.cumsum([0.25, 0.2, 0.2, 0.15, 0.1, 0.1])
    num_kept = {SEATS: 0, PATHS: 0}
    for seed in SEEDS:
        problem = drawn(seed, layout=layout, has_reduction=True)
        made = begun(problem)
        if made is None:
            continue
        arrays, here, random = fixed(problem), state(problem, made.worker_of, made.path), dice(seed + 1)
        fit(arrays, here)
        undo = undo_space(here)
        for number in range(60):
            before = [part.copy() for part in here]
            is_seat = number % 3 == 0
            changed = (
                exchange_seats(arrays, here, undo, random)
                if is_seat
                else change_paths(arrays, here, undo, shares, random)
            )
            if changed == NOTHING:
                assert all((a == b).all() for a, b in zip(here, before, strict=True))
                continue
            refit(arrays, here, undo, changed)
            assert [
                x
                for x in violations(problem, routing(problem, here))
                if "sequence" not in x and "op" not in x
            ] == []
            derived = [part.copy() for part in here]
            fit(arrays, here)
            assert all(np.allclose(a, b, rtol=1e-12) for a, b in zip(here, derived, strict=True)), (
                "refit is enough"
            )
            if number % 2:
                take_back(here, undo, changed)
                refit(arrays, here, undo, changed)
                assert all(np.allclose(a, b, rtol=1e-12) for a, b in zip(here, before, strict=True))
            else:
                num_kept[changed] += 1
    assert min(num_kept.values()) > len(SEEDS)


@pytest.mark.parametrize("layout", BOTH)
def test_what_a_search_finds_is_legal_and_no_longer_than_its_start(layout: Layout) -> None:
    num_shorter = 0
    for seed in SEEDS:
        problem = drawn(seed, layout=layout, has_wires=seed % 2 == 0, has_reduction=seed % 3 == 0)
        search = Search(problem, seed=seed)
        first = search.begin()
        if isinstance(first, Infeasible):
            continue
        found = search.improve(2000)
        assert not isinstance(found, Infeasible)
        found = search.polish(1000)
        assert not isinstance(found, Infeasible)
        assert violations(problem, found.routing) == ()
        assert found.jittered_s <= first.jittered_s * 1.005, "plans that close are told apart by their step"
        assert found.step_s == pytest.approx(in_sequence(problem, found.routing), rel=1e-12)
        num_shorter += found.jittered_s < first.jittered_s
    assert num_shorter > len(SEEDS) / 3


def test_equal_calls_give_equal_routings() -> None:
    def searched(seed: int) -> Routing:
        search = Search(drawn(3), seed=seed)
        search.improve(3000)
        assert search.best is not None
        return search.best.routing

    one, two, other = searched(1), searched(1), searched(2)
    assert all((a == b).all() for a, b in ((one.worker_of, two.worker_of), (one.path, two.path)))
    assert (one.sequence == two.sequence).all()
    assert not (one.sequence == other.sequence).all()


def test_a_step_is_given_up_as_soon_as_it_must_be_too_long() -> None:
    problem = drawn(5)
    made = begun(problem)
    assert made is not None
    arrays = fixed(problem)
    here = fitted(problem, arrays, made)
    work = scratch_for(arrays, here)
    step_s = run_sequence(arrays, here, work, arrays.graph, NEVER)
    # The rest of a trip is a difference, so it may be off by rounding.
    assert run_sequence(arrays, here, work, arrays.graph, step_s * (1 + 1e-12)) == step_s
    assert run_sequence(arrays, here, work, arrays.graph, step_s * (1 - 1e-9)) == NEVER


@pytest.mark.parametrize("layout", BOTH)
def test_a_graph_that_is_a_line_takes_as_long_as_a_line(layout: Layout) -> None:
    for seed in range(8):
        problem = drawn(seed, layout=layout)
        made = begun(problem)
        if made is not None:
            arrays = fixed(problem)
            here = fitted(problem, arrays, made)
            asked = (arrays.graph, arrays.ops)
            line_s, graph_s = (
                run_sequence(arrays, here, scratch_for(arrays, here), graph, np.inf) for graph in asked
            )
            assert arrays.graph is None
            assert line_s == graph_s


def test_a_sequence_that_would_hold_too_much_is_refused() -> None:
    problem = replace(drawn(5), slots=np.ones_like(drawn(5).slots))
    paths = first_paths(problem)
    assert not isinstance(paths, Infeasible)
    forwards_first = np.concatenate(
        [
            np.tile(np.arange(len(paths)), problem.num_hops),
            np.repeat(np.arange(len(paths)), problem.num_hops + 1),
        ]
    )
    sequence = in_turn(forwards_first, len(problem.ops))
    greedy = Routing(worker_of=np.arange(problem.num_chunks), path=paths, sequence=sequence)
    with pytest.raises(ValueError, match="slots"):
        timeline(problem, greedy)


def test_moving_a_chunk_must_pay_for_itself() -> None:
    problem = drawn(11, has_reduction=True)
    made = begun(problem)
    assert made is not None
    move_s = np.full((problem.num_workers, problem.num_stages), 1e6)
    move_s[made.worker_of, problem.stage_of] = 0.0
    search = Search(replace(problem, move_s=move_s), seed=0, start=made)
    found = search.polish(5000, warmth=0.05)
    assert not isinstance(found, Infeasible)
    assert (move_s[found.routing.worker_of, problem.stage_of] == 0).all()


def test_jitter_is_drawn_once_for_all_routings() -> None:
    problem = drawn(2)
    one, two = (
        jittered(problem, jitter=0.03, num_draws=2, seed=4),
        jittered(problem, jitter=0.03, num_draws=2, seed=4),
    )
    assert all((a.transfer_s == b.transfer_s).all() for a, b in zip(one, two, strict=True))
    ratio = one[0].forward_s / problem.forward_s
    assert 0.97 <= ratio.min() < ratio.max() <= 1.03
    assert np.allclose(ratio, ratio[:, :1]), "one factor for a worker"


def test_no_path_is_made_where_jumps_are_too_short() -> None:
    problem = replace(drawn(1), stage_sizes=(1, 1, 1, 1), path_len=2, max_jump=1, num_by_origin=(2,))
    problem = replace(problem, forward_s=np.ones((4, 4)), backward_s=np.ones((4, 4)), loss_s=np.ones(4))
    problem = replace(
        problem, transfer_s=np.zeros((4, 4)), wire_s=np.zeros((4, 4)), slots=np.ones((4, 4), np.int64)
    )
    paths = first_paths(problem)
    assert isinstance(paths, Infeasible) or set(problem.stage_of[paths[:, 1]]) == {1}
