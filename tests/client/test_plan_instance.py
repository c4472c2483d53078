"""Instance files: what they become, and what is refused in which words."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from client.planning.files.instance import locations_of, problem_of, remarks
from skein.errors import UserError
from tests.support.instances import Instance, instance, matrix


def test_factors_become_seconds_of_every_worker_and_stage() -> None:
    problem = problem_of(instance() | {"fwd_s": [1.0, 2.0, 4.0, 1.0, 1.0, 1.0]})
    assert problem.forward_s[:, 0].tolist() == [1.0, 2.0, 4.0, 1.0, 1.0, 1.0]
    assert problem.backward_s[2].tolist() == [6.0, 6.0, 6.0]
    assert problem.loss_s.tolist() == [0.25, 0.5, 1.0, 0.25, 0.25, 0.25]


def test_seconds_of_its_own_come_before_factors() -> None:
    problem = problem_of(instance() | {"bwd_s": [3.0] * 6, "loss_s": [0.5] * 6})
    assert problem.backward_s.min() == problem.backward_s.max() == 3.0
    assert problem.loss_s.tolist() == [0.5] * 6


def test_null_counts_as_not_given() -> None:
    assert problem_of(instance() | {"bwd_s": None, "max_jump": None}).max_jump == 4


def test_every_origin_sends_waves_times_memory_microbatches() -> None:
    problem = problem_of(instance(memory=3, waves=2))
    assert (problem.num_by_origin, problem.num_microbatches) == ((6, 6), 12)
    assert problem.slots.tolist() == [[3, 3, 3]] * 6


def test_links_may_differ_by_direction() -> None:
    comm_s = matrix(6, 0.25, 2.0)
    comm_s[1][4] = 7.0
    problem = problem_of(instance() | {"comm_s": comm_s})
    assert (problem.transfer_s[1, 4], problem.transfer_s[4, 1]) == (7.0, 2.0)


def test_limits_on_swaps_and_jumps_are_the_references_unless_given() -> None:
    assert (problem_of(instance()).max_swaps, problem_of(instance()).max_jump) == (2, 4)
    problem = problem_of(instance() | {"max_swaps": 0, "max_jump": 3})
    assert (problem.max_swaps, problem.max_jump) == (0, 3)


def test_aggregation_needs_bytes_latencies_and_bandwidths() -> None:
    reduction = problem_of(instance(has_reduction=True)).reduction
    assert reduction is not None
    assert reduction.num_bytes.tolist() == [2.0**20] * 3
    assert reduction.latency_s[0, 1] == 0.1
    assert reduction.bytes_per_s[0, 1] == 2.0**20
    assert np.isinf(reduction.bytes_per_s.diagonal()).all()
    partial = instance(has_reduction=True) | {"latency_ms": None}
    assert problem_of(partial).reduction is None
    assert remarks(partial) == ("aggregation is left out: there is no latency_ms",)


def test_keys_that_nobody_reads_are_told_with_what_may_have_been_meant() -> None:
    assert remarks(instance(has_reduction=True) | {"max_swap": 0, "note": "x"}) == (
        "max_swap is not read; did you mean max_swaps?",
    )


def test_locations_are_one_for_each_worker() -> None:
    assert locations_of(instance()) == ("Ayr", "Bonn") * 3
    assert locations_of(instance() | {"locations": None}) is None
    with pytest.raises(UserError, match="locations: 1 names: give one for each of 6 workers"):
        locations_of(instance() | {"locations": ["Ayr"]})


def without(key: str) -> Callable[[], Instance]:
    return lambda: {name: value for name, value in instance().items() if name != key}


def with_entry(key: str, row: int, column: int, value: object) -> Callable[[], Instance]:
    def changed() -> Instance:
        rows: list[list[object]] = [list(entries) for entries in matrix(6, 1.0, 2.0)]
        rows[row][column] = value
        return instance(has_reduction=True) | {key: rows}

    return changed


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (without("n_nodes"), "n_nodes: missing: an instance needs n_nodes"),
        (without("comm_s"), "comm_s: missing: an instance needs comm_s"),
        (without("bwd_factor"), "bwd_factor: missing: give bwd_s, seconds for each worker, or bwd_factor"),
        (lambda: instance() | {"n_nodes": True}, "n_nodes: true: give a whole number of at least 1"),
        (lambda: instance() | {"n_nodes": 7}, "stage_sizes: [2, 2, 2]: they sum to 6; give sizes"),
        (lambda: instance() | {"n_stages": 4}, "n_stages: 4: stage_sizes has 3 stages"),
        (lambda: instance() | {"stage_sizes": [6, 0]}, "stage_sizes: [6, 0]: give a list of whole numbers"),
        (lambda: instance() | {"path_len": 4}, "path_len: 4: give a whole number from 1 to 3"),
        (lambda: instance() | {"memory": 0}, "memory: 0: give a whole number of at least 1"),
        (lambda: instance() | {"waves": "two"}, "waves: 'two': give a whole number of at least 1"),
        (lambda: instance() | {"max_swaps": -1}, "max_swaps: -1: give a whole number of at least 0"),
        (lambda: instance() | {"max_jump": 1}, "max_jump: 1: in 2 hops the last of 3 stages is not reached: give"),
        (lambda: instance() | {"fwd_s": [1.0] * 5}, "fwd_s: 5 numbers: give a list of 6 numbers, one for each worker"),
        (lambda: instance() | {"fwd_s": [1.0] * 5 + [-1.0]}, "fwd_s[5]: -1.0: give a number from 0 to 1e+100"),
        (lambda: instance() | {"bwd_factor": float("nan")}, "bwd_factor: nan: give a number from 0 to 1e+100"),
        (lambda: instance() | {"comm_s": [[0.0] * 6] * 5}, "comm_s: 5 rows: give a square matrix: 6 rows of 6 numbers"),
        (lambda: instance() | {"comm_s": [[0.0] * 5] * 6}, "comm_s[0]: 5 numbers: give a list of 6 numbers"),
        (with_entry("comm_s", 2, 3, float("inf")), "comm_s[2][3]: inf: give a number from 0 to 1e+100"),
        (with_entry("comm_s", 2, 3, 10**400), "comm_s[2][3]: a huge number: give a number from 0 to 1e+100"),
        (with_entry("comm_s", 0, 5, "fast"), "comm_s[0][5]: 'fast': give a number from 0 to 1e+100"),
        (with_entry("bandwidth_gib_s", 4, 1, 0), "bandwidth_gib_s[4][1]: 0: give a number above 0 and at most 1e+100"),
        (with_entry("latency_ms", 4, 1, None), "latency_ms[4][1]: null: give a number from 0 to 1e+100"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_field_value_and_cure(
    made: Callable[[], Instance], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        problem_of(made())
    assert str(caught.value).startswith(message)


def test_a_jump_limit_matters_only_where_the_last_stage_must_be_visited() -> None:
    few = instance(sizes=(1, 1, 1), path_len=2, memory=1) | {"max_jump": 1}
    assert problem_of(few).visits_by_stage == (1, 1, 0)


def test_an_instance_as_json_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(instance(has_reduction=True)))
    again = problem_of(json.loads(path.read_text()))
    assert np.array_equal(again.transfer_s, problem_of(instance()).transfer_s)
