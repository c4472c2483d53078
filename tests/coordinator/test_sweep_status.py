"""Status of sweeps: alike in a list and alone, and never more than a message takes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from pydantic import JsonValue

from coordinator.records.journal import Journal
from coordinator.telling.status import brief_status, job_status
from skein.config.data.sources import TextSource
from skein.config.sweep.rows import RowOrigin
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.sweeping import totals
from skein.protocol.coordinator.sweeping.standing import TrialStand, stands_of
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import JobEnded, JobResumed, JobSubmitted
from skein.sim.scenario import make_world, with_arrays
from skein.sim.world import World
from skein.types import JobId, JobState, Step
from skein.wire import codec
from skein.wire.channel import MAX_MESSAGE_BYTES
from skein.wire.views import SavedRow
from tests.coordinator.test_times import nothing_kept
from tests.protocol.test_sweep_course import SPEC, begin, end
from tests.support.desk import checkpoint
from tests.support.incidents import incident
from tests.support.jobs import small_job
from tests.support.worlds import finish, fleet_of

SWEEP = JobId("small-1")


def with_space(space: Mapping[str, ValuesSpec]) -> Coordinator:
    """A coordinator with a sweep that waits for workers."""
    spec = small_job(stages=1, replicas=1).model_copy(update={"sweep": SweepSpec(space=space)})
    coordinator = Coordinator()
    coordinator.replay([JobSubmitted(job=SWEEP, key="k", spec=spec.canonical_json(), wall_s=0.0)])
    return coordinator


def test_the_status_of_many_trials_with_long_settings_is_one_message() -> None:
    sources: tuple[JsonValue, ...] = tuple(
        [TextSource(path=f"/{letter * 28_000}").model_dump(mode="json")] for letter in "ab"
    )
    space = {
        "data.sources": ValuesSpec(values=sources),
        "seed": ValuesSpec(values=tuple(range(256))),
    }
    status = job_status(with_space(space).view, Journal(nothing_kept), SWEEP)
    assert len(status.trials) == 512
    assert codec.JOB_STATUS.encode(status).ByteSize() < MAX_MESSAGE_BYTES
    assert status.trials[257].settings == '{"data.sources": "(28068 characters)", "seed": 1}'


def test_totals_of_a_sweep_at_rest_are_gone_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = with_space({"seed": ValuesSpec(values=(1, 2, 3))})
    history, known, asked = coordinator.history, totals.KnownTotals(), []

    def counted(sweep: JobHistory, within: History) -> tuple[TrialStand, ...]:
        asked.append(sweep.job)
        return stands_of(sweep, within)

    monkeypatch.setattr(totals, "stands_of", counted)

    def look() -> int:
        assert known.of(history.jobs[SWEEP], history).total_steps == 3 * 4
        return len(asked)

    assert (look(), look()) == (1, 2)
    history.apply(JobEnded(job=SWEEP, state=JobState.CANCELLED, reason="enough", wall_s=1.0))
    assert (look(), look()) == (3, 3)
    history.apply(JobResumed(job=SWEEP, steps=None, wall_s=2.0))
    assert look() == 4
    history.apply(JobEnded(job=SWEEP, state=JobState.CANCELLED, reason="enough", wall_s=3.0))
    assert (look(), look()) == (5, 5)


def test_a_trial_in_an_array_that_has_no_checkpoint_is_saved_where_it_came_from() -> None:
    coordinator = Coordinator()
    history = coordinator.history
    history.apply(JobSubmitted(job=SWEEP, key="k", spec=SPEC.canonical_json(), wall_s=0.0))
    first = begin(history, (0, 1), 1)
    history.apply(checkpoint(first, 1, num_stages=1))
    end(history, first, {0: 0.1, 1: 0.2}, 1)
    saved = SavedRow(array=first, version=Step(1), row=1, num_steps=1)

    second = begin(history, (1,), 2, {1: RowOrigin(job=first, version=1, row=1)})
    found = job_status(coordinator.view, Journal(nothing_kept), SWEEP).trials
    assert (found[1].array, found[1].row, found[1].saved) == (second, 0, saved)
    assert (found[2].array, found[2].saved) == (None, None)

    history.apply(checkpoint(second, 1, num_stages=1))
    found = job_status(coordinator.view, Journal(nothing_kept), SWEEP).trials
    assert found[1].saved == replace(saved, array=second, row=0)


def test_incidents_of_a_sweep_are_those_of_its_arrays_as_they_were_recorded() -> None:
    coordinator = with_space({"seed": ValuesSpec(values=(1, 2))})
    alone = small_job(stages=1, replicas=1).canonical_json()
    history = coordinator.history
    for number in range(2):
        job = JobId(f"{SWEEP}-a{number + 1}")
        history.apply(JobSubmitted(job=job, key=job, spec=alone, wall_s=0.0, sweep=SWEEP, trials=(number,)))
    # Whoever has read one page goes on after it, whatever a clock says of those that follow.
    told = [incident(f"{SWEEP}-a{1 + n % 2}", wall_s=float(n)) for n in (1, 0, 2, 3)]
    for one in told:
        history.apply(one)
    assert history.jobs[SWEEP].incidents == told
    assert history.jobs[JobId(f"{SWEEP}-a1")].incidents == [told[1], told[2]]
    status = job_status(coordinator.view, Journal(nothing_kept), SWEEP)
    assert status.num_incidents == len(told)


def test_a_list_tells_of_a_sweep_what_its_status_does_but_for_its_trials() -> None:
    alone = small_job(stages=1, replicas=1, microbatches=2, steps=4)
    space = {"optimizer.learning_rate": ValuesSpec(values=(0.1, 0.2, 0.3))}
    spec = alone.model_copy(update={"sweep": SweepSpec(space=space, round_steps=2)})
    world = make_world(spec, fleet_of(2), seed=0, new_world=with_arrays(World))
    finish(world, about="calm")
    assert world.coordinator is not None
    view, journal = world.coordinator.view, Journal(nothing_kept)
    whole, listed = job_status(view, journal, SWEEP), brief_status(view, journal, SWEEP)
    assert (listed.step, listed.total_steps, listed.trials) == (12, 12, ())
    for field in ("step", "total_steps", "loss", "evaluation_loss", "num_tokens", "num_workers", "reason"):
        assert getattr(listed, field) == getattr(whole, field), field
