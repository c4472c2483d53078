"""Compiled code is never older than its sources, and warming up compiles all that searches use."""

from pathlib import Path

import numpy as np
import pytest

from skein.config.job import PlanSpec
from skein.plan.ops import path_ops
from skein.plan.route.kernels import anneal, cost, moves, simulate
from skein.plan.route.kernels.arrays import op_array
from skein.plan.route.kernels.compiled import STAMP, compiled, drop_stale
from skein.plan.route.search import Found, Search
from skein.plan.route.warm import tiny_problem, warm_up
from skein.plan.searched import make_searched_plan
from skein.types import Layout
from tests.plan.builders import fleet, job


def folders(root: Path) -> tuple[Path, Path]:
    """A cache with code in it, and the sources that it was made of."""
    cache, sources = root / "cache", root / "sources"
    sources.mkdir()
    (sources / "caller.py").write_text("@compiled\n1")
    (sources / "callee.py").write_text("@compiled\n2")
    (sources / "words.py").write_text("no code")
    assert drop_stale(cache, sources)
    (cache / "caller.1.nbc").write_bytes(b"code")
    (cache / "caller.nbi").write_bytes(b"index")
    return cache, sources


def code_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {STAMP}


def test_code_stays_while_its_sources_do(tmp_path: Path) -> None:
    cache, sources = folders(tmp_path)
    (sources / "words.py").write_text("still none")
    assert not drop_stale(cache, sources)
    assert code_in(cache) == {"caller.1.nbc", "caller.nbi"}


@pytest.mark.parametrize("change", ["content", "name", "new"])
def test_all_code_goes_when_any_of_its_sources_changes(tmp_path: Path, change: str) -> None:
    cache, sources = folders(tmp_path)
    match change:
        case "content":
            (sources / "callee.py").write_text("@compiled\n3")
        case "name":
            (sources / "callee.py").rename(sources / "other.py")
        case _:
            (sources / "third.py").write_text("class Arrays(NamedTuple): ...")
    assert drop_stale(cache, sources)
    assert code_in(cache) == set()
    assert not drop_stale(cache, sources)


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    _, sources = folders(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert drop_stale(blocked / "cache", sources)
    assert blocked.read_text() == "no folder"


def test_a_compiled_function_says_the_same() -> None:
    @compiled
    def doubled(value: float) -> float:
        return 2 * value

    assert doubled(1.5) == 3.0


def num_compiled() -> dict[str, int]:
    """How many forms of each function there are by now."""
    return {
        f"{module.__name__}.{name}": len(value.signatures)
        for module in (anneal, cost, moves, simulate)
        for name, value in sorted(vars(module).items())
        if hasattr(value, "signatures")
    }


def test_after_warming_up_a_search_compiles_nothing_more() -> None:
    warm_up()
    before = num_compiled()
    assert before["skein.plan.route.kernels.anneal.anneal"] > 0
    for layout in Layout:
        spec = job(stages=3, replicas=2, num_layers=6, layout=layout)
        make_searched_plan(
            spec.model_copy(update={"plan": PlanSpec(budget_s=0.01)}), fleet([1e9] * 6), None, 0
        )
    assert num_compiled() == before


@pytest.mark.parametrize("layout", Layout)
def test_the_tiny_problem_has_an_answer(layout: Layout) -> None:
    search = Search(tiny_problem(layout), seed=0)
    assert isinstance(search.begin(), Found)
    assert search.best is not None
    assert np.isfinite(search.best.step_s)


def test_a_way_that_takes_no_time_stays_within_the_loops_arrays() -> None:
    """Compiled code writes past the end of an array without a word, so the loop is run as it is written."""
    none = np.zeros((1, 1))
    begin_s, end_s = np.zeros((1, 5)), np.zeros(1)
    loop = getattr(simulate.simulate, "py_func", simulate.simulate)
    way, worker_of, slots = np.array([[0, 1, 0, 1, 0]]), np.zeros(2, np.int64), np.ones(2, np.int64)
    ops, op_s = op_array(path_ops(3)), np.ones((5, 2))
    assert loop(way, worker_of, ops, op_s, none, none, slots, np.inf, begin_s, end_s) == 5.0


def test_an_op_that_nobody_else_waits_for_goes_when_its_worker_is_idle() -> None:
    """The second microbatch's I goes before the first's W; with one slot, its F waits for that W."""
    ops, apart = op_array(path_ops(2, split=(0,))), np.array([[0.0, 1.0], [1.0, 0.0]])
    begin_s, end_s = np.zeros((2, 4)), np.zeros(2)
    way, op_s = np.array([[0, 1, 0, 0], [0, 1, 0, 0]]), np.ones((4, 2))
    for slots, began in ((2, [[0, 2, 4, 6], [1, 3, 5, 7]]), (1, [[0, 2, 4, 5], [6, 8, 10, 11]])):
        step_s = simulate.simulate(
            way, np.arange(2), ops, op_s, apart, 0 * apart, np.full(2, slots), np.inf, begin_s, end_s
        )
        assert begin_s.tolist() == began
        assert step_s == end_s.max() == began[1][3] + 1
