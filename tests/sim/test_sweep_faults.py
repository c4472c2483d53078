"""Sweeps under drawn faults; and what judges find where a trial is lost, made twice, or goes on as another."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import pytest

from skein.config.job import ArrayJob, read_spec
from skein.protocol.log.history import History
from skein.protocol.log.records import JobEnded, JobSubmitted, Record, StepCommitted
from skein.sim.judging.invariants import Invariants, Violated
from skein.sim.judging.trials import check_trials
from skein.sim.scenario import make_world, run_to_end, small_fleet, undisturbed_trials, with_arrays
from skein.sim.shapes import SWEEPS, SimShape, shape_of
from skein.sim.world import World
from skein.types import JobId
from tests.sim.test_many_faults import judged
from tests.support.extent import part

HALVING = shape_of("line 1x1 sweep 8 rungs 2 on 3")
SWEEP, LATER = JobId("sim-1"), JobId("sim-1-a4")
"""A sweep, and the first array of its second rung: trial 1 alone, which was row 1 of the first array."""


@cache
def calm() -> tuple[Record, ...]:
    world = make_world(HALVING.job(steps=8), small_fleet(HALVING), seed=0, new_world=with_arrays(World))
    run_to_end(world, limit_s=900.0)
    return tuple(world.log)


@pytest.mark.parametrize("shape", SWEEPS, ids=lambda shape: shape.text)
def test_faults_change_neither_steps_nor_survivors(shape: SimShape) -> None:
    for seed in part(range(24), every=8, start=SWEEPS.index(shape)):
        judged(shape, seed, kinds=None)


def test_those_with_the_lowest_losses_at_a_rung_go_on() -> None:
    losses: dict[int, dict[int, float]] = {}
    history = History()
    for record in calm():
        history.apply(record)
        if isinstance(record, StepCommitted):
            for trial, row in zip(history.jobs[record.job].trials, record.record.rows, strict=True):
                losses.setdefault(row.num_updates, {})[trial] = row.loss
    outcomes = undisturbed_trials(HALVING, 8)
    for num_steps, num_next in ((32, 4), (64, 2)):
        best = sorted(losses[num_steps], key=losses[num_steps].__getitem__)[:num_next]
        assert {at for at, x in enumerate(outcomes) if x.num_steps > num_steps} == set(best)
    assert [x.ended for x in outcomes if x.num_steps == 0] == ["loss not finite"] * 2


def test_checkpoints_that_no_trial_was_last_in_are_no_more() -> None:
    history = History()
    for record in calm():
        history.apply(record)
    arrays = [history.jobs[job] for job in history.jobs[SWEEP].arrays]
    last = {trial: array.job for array in arrays for trial in array.trials}
    for array in arrays:
        is_last = array.job in last.values()
        assert [x.version for x in array.checkpoints] == ([array.version] if is_last else [])
    assert {array.job for array in arrays if not array.checkpoints} == {LATER}


def begun_with(**changes: object) -> None:
    """Judge the beginning of a later array some of whose settings, or of its row's, are others."""
    invariants = Invariants()
    for record in calm():
        if isinstance(record, JobSubmitted) and record.job == LATER:
            invariants.recorded(replace(record, spec=_changed(record.spec, changes)))
            return
        invariants.recorded(record)
    raise AssertionError("no such array")


def _changed(text: str, changes: Mapping[str, object]) -> str:
    spec = read_spec(text)
    assert isinstance(spec, ArrayJob)
    (row,) = spec.array.rows
    assert row.origin is not None
    of_row = {key: x for key, x in changes.items() if key in row.model_fields_set}
    of_origin = {key: x for key, x in changes.items() if key in row.origin.model_fields_set}
    of_array = {key: x for key, x in changes.items() if key not in of_row | of_origin}
    if of_origin:
        of_row["origin"] = row.origin.model_copy(update=of_origin)
    array = spec.array.model_copy(update={"rows": (row.model_copy(update=of_row),), **of_array})
    return spec.model_copy(update={"array": array}).canonical_json()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"version": 1}, "goes on from"),
        ({"row": 0}, "goes on from"),
        ({"job": "sim-1-a2"}, "goes on from"),
        ({"origin": None}, "goes on from"),
        ({"trial": 2}, "goes on from"),
        ({"first_step": 24}, "rows begin after 24 steps"),
    ],
)
def test_a_trial_that_goes_on_from_elsewhere_is_a_violation(
    changes: Mapping[str, object], fault: str
) -> None:
    begun_with()
    with pytest.raises(Violated, match=fault):
        begun_with(**changes)


def test_a_trial_that_is_in_two_arrays_at_once_is_a_violation() -> None:
    with pytest.raises(Violated, match="trial 1 is in sim-1-a1 still"):
        judge_all(record for record in calm() if not isinstance(record, JobEnded))


def judge_all(records: Iterable[Record]) -> None:
    invariants = Invariants()
    for record in records:
        invariants.recorded(record)


def test_a_trial_that_ended_otherwise_is_a_violation() -> None:
    history = History()
    for record in calm():
        history.apply(record)
    wanted = list(undisturbed_trials(HALVING, 8))
    check_trials(history, SWEEP, wanted)
    wanted[3] = replace(wanted[3], ended="")
    with pytest.raises(Violated, match="trial 3 of sim-1 came to"):
        check_trials(history, SWEEP, wanted)
