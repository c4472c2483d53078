"""Metrics of arrays of trials."""

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from coordinator.telling.metrics import MAX_JOBS, CoordinatorMetrics
from skein.protocol.log.records import JobSubmitted, Record, StepCommitted
from skein.protocol.messages.array_rounds import REASONS, ArrayRound, PassKind
from skein.sim.shapes import shape_of
from skein.types import JobId
from tests.support.hands import record
from tests.support.reports import row_numbers

JOB = JobId("sweep-1-a1")


def submitted(job: JobId = JOB) -> JobSubmitted:
    spec = shape_of("line 1x1 array 3").job(steps=40).canonical_json()
    return JobSubmitted(job=job, key=str(job), spec=spec, wall_s=1.0)


def committed(step: int, *retired: str, pass_kind: PassKind = PassKind.FUSED) -> StepCommitted:
    rows = tuple(row_numbers(step, retired=reason) for reason in retired)
    array = ArrayRound(rows=rows, num_local_steps=16, pass_kind=pass_kind, speedup=2.5)
    return StepCommitted(job=JOB, record=replace(record(step), array=array), wall_s=2.0 + step)


def numbers(metrics: CoordinatorMetrics) -> dict[str, float]:
    """Values of series about arrays, by name and by reason."""
    found = text_string_to_metric_families(metrics.render().decode())
    return {
        x.labels.get("reason") or x.name.removeprefix("skein_array_"): x.value
        for family in found
        for x in family.samples
        if x.name.startswith("skein_array") and x.labels.get("job", JOB) == JOB
    }


def test_numbers_of_arrays_follow_from_records_at_replay_too() -> None:
    log: list[Record] = [
        submitted(),
        committed(0, "", "", REASONS[0]),
        committed(1, "", "whatever a liar says", REASONS[0], pass_kind=PassKind.LOOPED),
    ]
    live, replayed = CoordinatorMetrics(), CoordinatorMetrics()
    for entry in log:
        live.appended([entry], 0.001)
    replayed.recorded(log)
    assert numbers(live) == numbers(replayed)
    assert numbers(live) == {
        "rows": 3,
        "alive_rows": 1,
        "round_steps": 16,
        "together": 0,
        "speedup_ratio": 2.5,
        REASONS[0]: 1,
        **dict.fromkeys(REASONS[1:], 0),
        "other": 1,
    }


def test_arrays_long_past_have_no_series() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded([submitted(), committed(0, "", "", "")])
    assert numbers(metrics)["rows"] == 3
    metrics.recorded([submitted(JobId(f"later-{i}")) for i in range(MAX_JOBS)])
    assert numbers(metrics) == dict.fromkeys((*REASONS, "other"), 0)
