"""Choices of an array's rows: which row draws by which, what is kept and carried over, and how far rows go by them."""

from dataclasses import replace

import pytest

from skein.config.sweep.rows import RowOrigin
from skein.protocol.log.choosing import choice_due_at, is_choice_due
from skein.protocol.log.history import KEPT_CHOICES
from skein.protocol.log.records import RolledBack
from skein.protocol.log.row_choices import choices_in_force, newest_choices
from skein.protocol.messages.coresets import DrawingRow
from skein.types import Step
from tests.support.desk import checkpoint
from tests.support.row_choices import RowsBench, array

PASS = 8
"""Steps in which 30 of 120 rows are drawn, 4 in each."""


@pytest.fixture
def bench() -> RowsBench:
    return RowsBench()


def test_a_choice_of_each_row_is_recorded_once_all_are_picked_for(bench: RowsBench) -> None:
    bench.begin()
    bench.pick(0, 2)
    assert bench.asked() is None
    bench.pick(1)
    assert bench.answer() == 3
    assert [x.rows for x in bench.job.chosen] == [
        (DrawingRow(row=row, since=Step(0), until=Step(PASS)),) for row in range(3)
    ]
    assert len({x.digest for x in bench.job.chosen}) == 3
    assert all(x.seconds == 1.0 for x in bench.job.chosen)  # a third each
    assert not is_choice_due(bench.job)


def test_a_worker_that_dies_before_it_has_picked_for_all_rows_costs_none_its_choice(bench: RowsBench) -> None:
    bench.begin()
    bench.pick(0, 1)
    bench.selecting.fenced(now=2.0)
    bench.begin()
    assert bench.asked() is None
    bench.pick(0, 1, 2)
    bench.answer()
    assert [x.num_faults for x in bench.job.chosen] == [0, 0, 0]


def test_rows_are_asked_at_their_own_steps(bench: RowsBench) -> None:
    bench.choose(0, 1, 2)
    bench.round(PASS, PASS, 3)
    found = bench.choose(0, 1)
    assert [x.rows[0] for x in found] == [
        DrawingRow(row=row, since=Step(PASS), until=Step(2 * PASS)) for row in (0, 1)
    ]
    assert choice_due_at(bench.job) == 2  # the last row is at step 3 of 8, in rounds of 16
    bench.round(2 * PASS, 2 * PASS, PASS)
    assert [x.rows[0].row for x in bench.choose(0, 1, 2)] == [0, 1, 2]
    in_force = choices_in_force(bench.job.chosen)
    assert [row for x in in_force for row in x.rows] == [
        DrawingRow(row=row, since=Step(at), until=Step(at + PASS))
        for row, at in ((0, 2 * PASS), (1, 2 * PASS), (2, PASS))
    ]


def test_one_choice_for_all_is_of_the_first_row_that_is_left() -> None:
    bench = RowsBench(array("array 3 chosen shared"))
    (first,) = bench.choose(0)
    assert [x.row for x in first.rows] == [0, 1, 2]
    bench.round(0, PASS, PASS, retired=[0])
    (second,) = bench.choose(1)
    assert [x.row for x in second.rows] == [1, 2]
    assert second.digest != first.digest


def test_an_array_has_as_many_rounds_as_its_choices_make_of_it(bench: RowsBench) -> None:
    last_step = array().array.last_step
    assert last_step == 63
    assert bench.job.total_steps == 8  # a round for each 8 steps, though rounds may have 16
    while bench.job.version < bench.job.total_steps:
        bench.choose(0, 1, 2)
        count = min(last_step, bench.job.places[0].count + PASS)
        bench.round(count, count, count)
    assert (bench.job.version, bench.job.places[0].count) == (8, last_step)
    assert not is_choice_due(bench.job)


def test_rows_that_go_on_elsewhere_take_their_choices_along(bench: RowsBench) -> None:
    bench.choose(0, 1, 2)
    bench.round(4, 4, 4)
    spec = array("array 2 chosen")
    origins = [RowOrigin(job="j", version=1, row=row) for row in (2, 0)]
    rows = tuple(row.model_copy(update={"origin": x}) for row, x in zip(spec.rows, origins, strict=True))
    going_on = spec.array.model_copy(update={"rows": rows, "first_step": 4})
    other = bench.begin_array("k", spec.model_copy(update={"array": going_on}))
    before = bench.job.chosen
    assert [(x.job, x.version, x.digest, x.rows[0].row) for x in other.chosen] == [
        ("k", 0, before[2].digest, 0),
        ("k", 0, before[0].digest, 1),
    ]
    assert not is_choice_due(other)
    assert [place.due for place in other.places] == [PASS, PASS]


def test_an_array_that_goes_back_draws_as_it_did_there(bench: RowsBench) -> None:
    first = bench.choose(0, 1, 2)
    bench.round(PASS, PASS, 5)
    bench.choose(0, 1)
    bench.round(2 * PASS, 2 * PASS, PASS)
    bench.outbox.history.apply(
        RolledBack(job=bench.job.job, from_version=Step(2), to_version=Step(0), reason="lost", wall_s=2.0)
    )
    assert bench.job.chosen == first
    assert [place.count for place in bench.job.places] == [0, 0, 0]
    assert not is_choice_due(bench.job)


def test_so_many_choices_of_each_row_are_kept(bench: RowsBench) -> None:
    bench.choose(0, 1, 2)
    old, *others = bench.job.chosen
    made = [replace(others[0], seconds=float(number)) for number in range(KEPT_CHOICES + 2)]
    assert newest_choices([old, *others, *made], KEPT_CHOICES) == [old, others[1], *made[2:]]


def test_what_came_between_an_old_checkpoint_and_the_newest_is_forgotten(bench: RowsBench) -> None:
    for version in range(1, 5):
        bench.round(version, version, version)
        if version in (1, 3):
            bench.outbox.history.apply(checkpoint(bench.job.job, version, num_stages=1))
    assert sorted(bench.job.rounds) == [1, 3, 4]


def test_what_rows_that_make_no_more_steps_drew_by_is_not_told(bench: RowsBench) -> None:
    bench.choose(0, 1, 2)
    bench.round(PASS, PASS, 3, retired=[1])
    told = choices_in_force(bench.job.chosen, bench.job.places)
    assert [row.row for x in told for row in x.rows] == [0, 2]
