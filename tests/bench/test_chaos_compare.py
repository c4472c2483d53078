"""What the contestants of the comparison tell, and the replica that Skein's rivals train."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.chaos_compare import curve_of_log, loss_at
from bench.comparing.replica import Replica
from bench.comparing.replica_file import Part
from bench.comparing.told import NUM_SMOOTHED, Applied, Curve, Kind, Told, curve_of, read_told, tell
from bench.reference import run_reference
from skein.config.job import JobSpec
from skein.protocol.records import Record
from skein.types import JobId
from tests.bench.test_chaos_judge import JOB, committed, incident, went_back
from tests.e2e.jobs import text_job, write_text


def line(kind: Kind, replica: int, step: int, at_s: float, *, is_counted: bool = True) -> Told:
    """Ten samples with a loss of 2 nats for each of 100 tokens."""
    return Told(
        kind=kind,
        replica=replica,
        step=step,
        at_s=at_s,
        num_samples=10,
        loss_sum=200.0,
        num_tokens=100,
        is_counted=is_counted,
    )


def made(replica: int, step: int, at_s: float, *, is_counted: bool = True) -> list[Told]:
    return [
        line(Kind.BEGUN, replica, step, at_s - 0.5),
        line(Kind.APPLIED, replica, step, at_s, is_counted=is_counted),
    ]


def falling(losses: list[float]) -> Curve:
    """A step each second."""
    applied = tuple(
        Applied(step=step, at_s=100.0 + step, num_samples=20, loss=loss) for step, loss in enumerate(losses)
    )
    return Curve(applied=applied, num_computed=20 * len(losses))


# --- curves ---


def test_a_step_is_what_all_its_replicas_did() -> None:
    other = replace(line(Kind.APPLIED, 1, 0, 1.25), loss_sum=100.0)
    curve = curve_of([*made(0, 0, 1.0), line(Kind.BEGUN, 1, 0, 0.5), other])
    assert curve.applied == (Applied(step=0, at_s=1.0, num_samples=20, loss=1.5),)
    assert (curve.num_lost(20), curve.num_repeated) == (0, 0)


def test_a_step_that_was_dropped_is_computed_in_vain_and_not_lost() -> None:
    dropped = [line(Kind.BEGUN, 0, 1, 2.0), line(Kind.DROPPED, 0, 1, 2.5)]
    curve = curve_of([*made(0, 0, 1.0), *dropped, *made(0, 1, 3.0)])
    assert (curve.num_lost(10), curve.num_repeated) == (0, 10)


def test_what_a_dead_replica_had_begun_is_computed_in_vain() -> None:
    curve = curve_of([*made(0, 0, 1.0), line(Kind.BEGUN, 1, 0, 0.5)])
    assert curve.num_repeated == 10


def test_what_a_dead_replica_would_have_done_is_lost() -> None:
    curve = curve_of([*made(0, 0, 1.0), *made(1, 0, 1.0), *made(0, 1, 2.0), *made(0, 2, 3.0)])
    assert curve.num_lost(20) == 20
    assert curve.num_repeated == 0


def test_steps_before_all_were_there_are_not_lost() -> None:
    curve = curve_of([*made(0, 0, 1.0), *made(0, 1, 2.0), *made(1, 1, 2.0)])
    assert curve.num_lost(20) == 0


def test_a_replica_that_takes_part_without_being_counted_loses_its_samples() -> None:
    curve = curve_of(
        [*made(0, 0, 1.0), *made(1, 0, 1.0), *made(0, 1, 2.0), *made(1, 1, 2.0, is_counted=False)]
    )
    assert (curve.num_lost(20), curve.num_repeated) == (10, 10)


def test_steps_made_again_after_a_checkpoint_count_once_and_late() -> None:
    again = [*made(0, 0, 1.0), *made(0, 1, 2.0), *made(0, 1, 9.0), *made(0, 2, 10.0)]
    curve = curve_of(again)
    assert [(step.step, step.at_s) for step in curve.applied] == [(0, 1.0), (1, 9.0), (2, 10.0)]
    assert (curve.num_lost(10), curve.num_repeated) == (0, 10)


def test_a_loss_is_reached_when_the_mean_of_the_last_steps_is_there() -> None:
    curve = falling([3.0] * NUM_SMOOTHED + [1.0] * NUM_SMOOTHED)
    assert curve.reaches_s(2.0) == NUM_SMOOTHED - 1 + NUM_SMOOTHED / 2
    assert curve.reaches_s(0.5) is None


def test_the_loss_to_reach_is_that_after_a_share_of_the_steps_and_bears_rounding() -> None:
    curve = falling([5.0 - step / 10 for step in range(40)])
    # After 32 steps, the mean of steps 22 to 31.
    assert loss_at(curve, 0.8) == pytest.approx(2.35, abs=2e-3)
    assert curve.reaches_s(loss_at(curve, 0.8)) == 31.0
    farther = Curve(
        applied=tuple(replace(step, loss=step.loss * (1 + 1e-6)) for step in curve.applied), num_computed=800
    )
    assert farther.reaches_s(loss_at(curve, 0.8)) == 31.0


def test_one_low_step_reaches_nothing() -> None:
    assert falling([3.0] * 30 + [0.0] + [3.0] * 30).reaches_s(2.0) is None


def test_lines_are_read_as_told_and_from_where_the_last_reading_ended(tmp_path: Path) -> None:
    path, lines = tmp_path / "told.jsonl", made(0, 0, 1.0)
    with path.open("ab") as out:
        tell(lines[0], out)
        out.write(b'{"kind":"appl')
    found, end = read_told(path)
    assert found == (lines[0],)
    assert read_told(path, begin=end) == ((), end)
    with path.open("ab") as out:  # the next process does not know that its forerunner was cut off
        tell(lines[0], out)
        tell(lines[1], out)
    assert read_told(path, begin=end)[0] == (lines[1],)


def test_what_nobody_has_told_yet_is_nothing(tmp_path: Path) -> None:
    assert read_told(tmp_path / "none") == ((), 0)


def test_the_log_tells_what_was_rolled_back_and_what_incidents_repeated() -> None:
    repeated = replace(incident("w3", 1010.0), num_samples_repeated=3)
    log: list[Record] = [committed(step) for step in range(4)]
    log = [*log, repeated, went_back(4, 2), committed(2), committed(3), committed(4, job=JobId("another"))]
    curve = curve_of_log(log, JOB)
    assert [step.step for step in curve.applied] == [0, 1, 2, 3]
    assert curve.num_used == 4 * 16
    assert curve.num_repeated == 3 + 2 * 16
    assert curve.num_lost(16) == 0


# --- the replica ---


@pytest.fixture(name="job")
def a_job(tmp_path: Path) -> JobSpec:
    return text_job("compared", write_text(tmp_path / "text"), steps=3)


def replicas(job: JobSpec, folder: Path) -> list[Replica]:
    return [
        Replica(
            Part(
                job=job,
                replica=index,
                num_replicas=2,
                meeting="127.0.0.1:1",
                told=folder / f"{index}.jsonl",
                checkpoint=folder / "checkpoint.safetensors",
                checkpoint_every_steps=2,
            )
        )
        for index in range(2)
    ]


def step_together(both: list[Replica], step: int) -> float:
    """What a reduction between them would make of a step; its mean loss."""
    found = [replica.compute(step) for replica in both]
    num_tokens = sum(tokens for _, tokens in found)
    mean = sum((replica.gradients() for replica in both), torch.tensor(0.0)) / num_tokens
    for replica in both:
        replica.apply(step, mean)
    return sum(loss for loss, _ in found) / num_tokens


def test_two_replicas_make_the_steps_of_one_plain_process(job: JobSpec, tmp_path: Path) -> None:
    both = replicas(job, tmp_path)
    losses = [step_together(both, step) for step in range(3)]
    # Float32 sums in another order.
    assert losses == pytest.approx([step.loss for step in run_reference(job, 3)], rel=1e-5)
    told = [read_told(tmp_path / f"{index}.jsonl")[0] for index in range(2)]
    assert [[(t.kind, t.step) for t in lines] for lines in told] == [
        [(Kind.BEGUN, step) for step in range(3)] for _ in range(2)
    ]


def test_a_replica_goes_on_from_anothers_state_as_that_one_does(job: JobSpec, tmp_path: Path) -> None:
    both = replicas(job, tmp_path)
    losses = [step_together(both, step) for step in range(2)]
    state = {name: tensor.clone() for name, tensor in both[0].state().items()}
    losses.append(step_together(both, 2))
    fresh = replicas(job, tmp_path)
    for replica in fresh:
        replica.load(state)
    assert step_together(fresh, 2) == losses[2]
