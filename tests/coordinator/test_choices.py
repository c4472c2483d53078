"""Metrics and status of rows that are chosen along a run."""

from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from client.cli.show import choice_text
from coordinator.telling.choices import choice_of_row, choice_status
from coordinator.telling.metrics import MAX_JOBS, CoordinatorMetrics
from skein.numeric.coreset.choice import Choice
from skein.protocol.log.history import History
from skein.protocol.log.records import CoresetChosen, DataCounted, JobSubmitted, Record
from skein.protocol.messages.coresets import ToldChoice
from skein.sim.shapes import shape_of
from skein.types import JobId, Step
from skein.wire.views import ChoiceStatus
from tests.support.row_choices import RowsBench

JOB = JobId("j-1")
NUM_ROWS = 10


def submitted(job: JobId = JOB) -> JobSubmitted:
    spec = shape_of("line 1x2 chosen").job(steps=40).canonical_json()
    return JobSubmitted(job=job, key=str(job), spec=spec, wall_s=1.0)


def chosen(*ids: int, version: int = 0, seconds: float = 2.0, overhead: float | None = None) -> CoresetChosen:
    sizes = np.full(len(ids), (NUM_ROWS - 1) / len(ids), np.float32)
    sizes[0] += 1
    sizes[-1] -= 1
    choice = Choice(ids=np.array(ids), sizes=sizes, error=float("nan"), num_set_aside=1)
    told = ToldChoice.of(choice, Step(version))
    return CoresetChosen(
        job=JOB,
        version=Step(version),
        ids=told.ids,
        sizes=told.sizes,
        digest=choice.digest,
        farness=7.5,
        num_rows=NUM_ROWS,
        num_set_aside=1,
        num_by_chance=5,
        num_faults=1,
        passes=2,
        seconds=seconds,
        overhead=overhead,
        wall_s=2.0,
    )


def numbers(metrics: CoordinatorMetrics) -> dict[str, float]:
    """Values of this job's series about choices."""
    found = text_string_to_metric_families(metrics.render().decode())
    return {
        x.name.removeprefix("skein_choice").lstrip("_"): x.value
        for family in found
        for x in family.samples
        if x.name.startswith("skein_choice") and x.labels.get("job") == JOB
    }


def test_numbers_of_choices_follow_from_records_at_replay_too() -> None:
    log: list[Record] = [submitted(), chosen(0, 1, 2), chosen(2, 3, 4, version=1, seconds=3.0, overhead=0.25)]
    live, replayed = CoordinatorMetrics(), CoordinatorMetrics()
    for record in log:
        live.appended([record], 0.001)
    replayed.recorded(log)
    assert numbers(live) == numbers(replayed)
    assert numbers(live) == {
        "s_total": 2,
        "seconds_total": 5.0,
        "overhead_ratio": 0.25,
        "farness": 7.5,
        "weight_max": pytest.approx(4 / 3),
        "seen_ratio": 0.5,
        "set_aside_rows": 1,
        "faults_total": 2,
        "chance_rows_total": 10,
    }


def test_in_a_warm_up_all_rows_are_seen() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded([submitted(), chosen(0, 1, version=3)])
    assert numbers(metrics)["seen_ratio"] == 1.0


def test_jobs_that_choose_nothing_or_are_long_past_have_no_series() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded([submitted()])
    assert numbers(metrics) == {}
    metrics.recorded([chosen(0, 1)])
    metrics.recorded([submitted(JobId(f"later-{i}")) for i in range(MAX_JOBS)])
    assert numbers(metrics) == {}


def test_status_tells_of_the_newest_choice() -> None:
    history = History()
    history.apply(submitted())
    job = history.jobs[JOB]
    assert choice_status(job) is None
    history.apply(DataCounted(job=JOB, num_train_samples=NUM_ROWS, num_steps=None, wall_s=1.0))
    history.apply(chosen(0, 1, 2, 3))
    status = choice_status(job)
    assert status is not None
    assert (status.num_picks, status.next_version) == (4, 1)
    text = choice_text(status)
    assert text.startswith("4 of 10 rows since step 0, weights up to 1.44, chosen in 2 s; the next at step 1")
    assert text.endswith(
        "; what stands for 5 rows was drawn by chance; 1 rows set aside, whose features are not finite"
    )


def test_status_tells_of_the_choices_of_an_arrays_rows() -> None:
    bench = RowsBench()
    assert choice_of_row(bench.job, 0) is None
    bench.choose(0, 1, 2)
    bench.round(8, 8, 3)
    bench.choose(0, 1)
    whole, first, last = choice_status(bench.job), choice_of_row(bench.job, 0), choice_of_row(bench.job, 2)
    assert whole is not None
    assert first is not None
    assert last is not None
    assert (whole.version, whole.next_version) == (1, 2)
    assert whole.seconds == pytest.approx(2 * first.seconds)
    assert (first.version, first.next_version) == (8, 16)
    assert (last.version, last.next_version) == (0, 8)


def test_a_choice_that_stays_and_went_as_asked_says_no_more() -> None:
    status = ChoiceStatus(
        version=Step(120),
        num_picks=259,
        num_rows=1297,
        num_set_aside=0,
        num_by_chance=0,
        largest_weight=3.21,
        seconds=0.314,
        overhead=0.0213,
        next_version=None,
    )
    assert choice_text(status) == (
        "259 of 1,297 rows since step 120, weights up to 3.21, "
        "chosen in 0.314 s, 2.1% of the training before; it stays"
    )
    assert "the next at step 9" in choice_text(replace(status, next_version=Step(9)))


def test_status_tells_the_error_of_a_choice_beside_that_of_a_random_draw() -> None:
    history = History()
    history.apply(submitted())
    history.apply(DataCounted(job=JOB, num_train_samples=NUM_ROWS, num_steps=None, wall_s=1.0))
    history.apply(replace(chosen(0, 1, 2, 3), chance_farness=10.0))
    status = choice_status(history.jobs[JOB])
    assert status is not None
    assert "; distance of rows to those chosen 7.5, 0.75 of that to a random draw (10)" in choice_text(status)
