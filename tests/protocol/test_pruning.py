"""Checkpoints of arrays that have finished: which are to spare."""

from skein.protocol.coordinator.sweeping.pruning import spare_checkpoints
from skein.protocol.log.history import History
from skein.protocol.log.records import CheckpointChecked, JobSubmitted
from skein.protocol.messages.directives import Beginning
from skein.types import JobId, Step
from tests.protocol.test_sweep_course import ALONE, SWEEP, begin, begun, end
from tests.support.desk import checkpoint

LOSSES = {0: 0.1, 1: 0.2}


def finished(*versions: int) -> tuple[History, JobId]:
    """A sweep with an array at version 1, and checkpoints of these."""
    history = begun()
    array = begin(history, (0, 1), 1)
    for version in versions:
        history.apply(checkpoint(array, version, num_stages=1))
    end(history, array, LOSSES, 1)
    return history, array


def spare(history: History) -> dict[JobId, tuple[Step, ...]]:
    return {array.job: versions for array, versions in spare_checkpoints(history.jobs[SWEEP], history)}


def test_of_an_array_that_trials_were_last_in_the_newest_stays() -> None:
    history, array = finished(0, 1)
    assert spare(history) == {array: (0,)}


def test_what_the_job_of_a_client_begins_with_stays_until_it_has_its_own() -> None:
    history, array = finished(0, 1)
    begins = Beginning(job=array, version=Step(0))
    other = JobSubmitted(job=JobId("o"), key="o", spec=ALONE.canonical_json(), wall_s=2.0, begins=begins)
    history.apply(other)
    assert spare(history) == {}


def test_of_a_newest_one_that_is_damaged_the_one_before_stays_too() -> None:
    history, array = finished(0, 1)
    damaged = CheckpointChecked(job=array, version=Step(1), is_whole=False, reason="torn", wall_s=2.0)
    history.apply(damaged)
    assert spare(history) == {}


def test_of_an_array_that_ended_before_it_was_saved_what_is_saved_stays() -> None:
    assert spare(finished(0)[0]) == {}
