"""By which version's parameters rows are looked at for a choice: what the log says, as long as somebody has them."""

import pytest

from skein.protocol.coordinator.runs.steps.looking import LookAhead, kept_along
from skein.protocol.log.choosing import RowLook, next_look
from skein.protocol.log.history import JobHistory
from skein.protocol.messages.directives import ChunkVersion
from skein.protocol.messages.reports import Ack
from skein.types import Generation, StageSpec, Step, WorkerId
from tests.protocol.test_choosing import choose, count, history
from tests.support.plans import chunk, path, plan_of

PLAN = plan_of(
    [chunk(0, "a"), chunk(1, "b"), chunk(1, "c")],
    [path(chunk(0, "a"), chunk(1, "b")), path(chunk(0, "a"), chunk(1, "c"))],
)
AHEAD = {"fraction": 0.2, "refresh_epochs": 8}
"""20 of 100 rows, 8 a step: a choice is seen for 20 steps."""


def job_with_a_choice(**settings: object) -> JobHistory:
    found, job = history(**AHEAD | settings)
    count(found)
    choose(found, 0, passes=8)
    return job


def stage(index: int) -> StageSpec:
    return next(x for x in PLAN.stages if x.index == index)


def acks(version: int, **kept: int | None) -> dict[WorkerId, Ack]:
    """Each worker has its chunk at `version`, and parameters of another one, if any."""
    found = {}
    for name, older in kept.items():
        here = stage(0 if name == "a" else 1)
        found[WorkerId(name)] = Ack(
            generation=Generation(1),
            chunks=(ChunkVersion(stage=here, version=Step(version)),),
            progress=(),
            backups=(),
            kept=() if older is None else (ChunkVersion(stage=here, version=Step(older)),),
        )
    return found


def test_rows_are_looked_at_a_quarter_of_the_steps_before_whatever_time_anything_takes() -> None:
    assert next_look(job_with_a_choice()) == RowLook(version=Step(15), due=Step(20))
    assert next_look(job_with_a_choice(beside=False)) == RowLook(version=Step(20), due=Step(20))


def test_the_first_choice_is_looked_at_rows_for_amid_the_warm_up() -> None:
    found, job = history(warmup_epochs=2)
    assert next_look(job) is None
    count(found)
    assert next_look(job) == RowLook(version=Step(19), due=Step(25))


def test_older_parameters_are_those_that_all_on_evaluation_paths_have_kept() -> None:
    assert kept_along(PLAN, acks(17, a=15, b=15, c=15), version=Step(17)) == {15}
    assert kept_along(PLAN, acks(17, a=15, b=15, c=None), version=Step(17)) == set()
    assert kept_along(PLAN, acks(17, a=15, b=15, c=14), version=Step(17)) == set()
    assert kept_along(PLAN, acks(17, a=15, b=15), version=Step(17)) == set()


def test_who_is_given_its_chunk_by_another_has_kept_nothing() -> None:
    told = acks(17, a=15, b=15, c=15)
    assert kept_along(PLAN, told, version=Step(16)) == set()


@pytest.mark.parametrize(("kept", "begins"), [(15, True), (14, False), (None, False)])
def test_under_another_generation_a_look_begins_anew_if_its_parameters_are_here(
    kept: int | None, begins: bool
) -> None:
    job = job_with_a_choice()
    ahead = LookAhead(job)
    assert ahead.begins() is None
    job.version = Step(15)
    look = RowLook(version=Step(15), due=Step(20))
    assert ahead.begins() == look
    job.version = Step(17)
    assert ahead.begins() is None
    ahead.adopted(PLAN, acks(17, a=kept, b=kept, c=kept))
    assert ahead.begins() == (look if begins else None)
    job.version = Step(20)
    assert ahead.begins() is None
    assert ahead.version() == (15 if begins else 20)
