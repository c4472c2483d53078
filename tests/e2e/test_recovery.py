"""Real processes killed in the middle of a job: what must go on, with which numbers, and who is told of it."""

import urllib.request
from pathlib import Path

import pytest

from bench.cluster import Cluster
from client.api import Job
from skein.protocol.log.incident import incident_line
from skein.protocol.log.records import IncidentKind
from skein.types import JobState, StageIndex
from skein.wire.views import IncidentEnded, LineLogged, StepFinished, WentBack
from tests.e2e.jobs import NUM_STEPS, losses_of, text_job, wait_for_step


def samples(cluster: Cluster) -> dict[str, float]:
    """What Prometheus would read."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics").read().decode()
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_a_killed_worker_costs_no_step_and_is_one_incident_for_all_who_look(
    cluster: Cluster, text: Path, undisturbed: dict[int, float]
) -> None:
    before = samples(cluster)
    with cluster.client() as client:
        job = client.submit(text_job("one-dies", text, steps=NUM_STEPS))
        wait_for_step(job, 8)
        cluster.kill_worker("w3")
        status = job.wait()
        [incident] = client.incidents(job.id)
        events = job.history()
        after = samples(cluster)
    assert status.state is JobState.FINISHED, status.reason
    assert status.generation >= 2
    assert not [e for e in events if isinstance(e.body, WentBack)]
    steps = [e.body.record.step for e in events if isinstance(e.body, StepFinished)]
    assert steps == list(range(NUM_STEPS))
    # Another plan sums in another order: float32 rounding, grown over the steps.
    assert losses_of(events) == pytest.approx(undisturbed, rel=1e-5)

    assert (incident.kind, incident.workers) == (IncidentKind.WORKER_LOST, ("w3",))
    assert 8 <= incident.step < NUM_STEPS
    assert incident.num_steps_lost == 0
    assert 0 < incident.fenced_s <= incident.seconds
    assert (status.num_incidents, status.num_steps_lost) == (1, 0)
    assert [event.body.incident for event in events if isinstance(event.body, IncidentEnded)] == [incident]
    # Told where work goes on: after the step before the one that it interrupted, and before that one is committed.
    place = next(at for at, event in enumerate(events) if isinstance(event.body, IncidentEnded))
    assert sum(isinstance(event.body, StepFinished) for event in events[:place]) == incident.step
    counted = f'skein_incidents_total{{kind="worker_lost",remedy="{incident.remedy}"}}'
    # A busy machine may have had one before.
    assert after[counted] - before.get(counted, 0.0) == 1.0
    rerouted = "skein_hops_rerouted_total"
    assert after[rerouted] - before.get(rerouted, 0.0) == incident.num_rerouted
    assert cluster.log_of("coordinator").count(incident_line(incident)) == 1


def wait_for_line(job: Job, part: str) -> None:
    for event in job.events():
        if isinstance(event.body, LineLogged) and part in event.body.line.text:
            return
    raise AssertionError(f"{job.id} ended without a word of {part!r}: {job.status()}")


def test_holders_of_a_stage_that_stand_still_together_cost_no_step(
    cluster: Cluster, text: Path, undisturbed: dict[int, float]
) -> None:
    with cluster.client() as client:
        job = client.submit(text_job("both-freeze", text, steps=NUM_STEPS))
        wait_for_step(job, 8)
        names = [worker.worker for worker in client.workers() if StageIndex(1) in worker.stages]
        for name in names:
            cluster.freeze_worker(name)
        wait_for_line(job, f"waiting for {names[0]}, {names[1]} until")
        for name in names:
            cluster.thaw_worker(name)
        status = job.wait()
        events = job.history()
    assert status.state is JobState.FINISHED, status.reason
    assert not [e for e in events if isinstance(e.body, WentBack)]
    steps = [e.body.record.step for e in events if isinstance(e.body, StepFinished)]
    assert steps == list(range(NUM_STEPS))
    assert losses_of(events) == pytest.approx(undisturbed, rel=1e-5)  # as above


def test_a_drained_worker_leaves_cleanly_and_costs_no_step(
    cluster: Cluster, text: Path, undisturbed: dict[int, float]
) -> None:
    with cluster.client() as client:
        job = client.submit(text_job("one-leaves", text, steps=NUM_STEPS))
        wait_for_step(job, 8)
        assert cluster.stop_worker("w2") == 0
        status = job.wait()
        events = job.history()
    assert status.state is JobState.FINISHED, status.reason
    steps = [e.body.record.step for e in events if isinstance(e.body, StepFinished)]
    assert steps == list(range(NUM_STEPS))
    assert losses_of(events) == pytest.approx(undisturbed, rel=1e-5)  # as above


def test_a_killed_coordinator_costs_no_step(
    cluster: Cluster, text: Path, undisturbed: dict[int, float]
) -> None:
    with cluster.client() as client:
        job = client.submit(text_job("nobody-leads", text, steps=NUM_STEPS))
        wait_for_step(job, 8)
        cluster.kill_coordinator()
        cluster.start_coordinator()
        status = job.wait()
        events = job.history()
    assert status.state is JobState.FINISHED, status.reason
    steps = [e.body.record.step for e in events if isinstance(e.body, StepFinished)]
    assert steps == list(range(NUM_STEPS))
    assert losses_of(events) == pytest.approx(undisturbed, rel=1e-5)


def test_after_the_end_of_all_processes_the_curve_goes_on_from_the_newest_whole_checkpoint(
    cluster: Cluster, text: Path, undisturbed: dict[int, float]
) -> None:
    names = list(cluster.workers)
    with cluster.client() as client:
        job = client.submit(text_job("power-cut", text, steps=NUM_STEPS, checkpoint_every=5))
        wait_for_step(job, 11)
        kept = [checkpoint.version for checkpoint in client.checkpoints(job.id)]
    cluster.kill_everything()
    for folder in (cluster.state / "checkpoints" / job.id).iterdir():
        if int(folder.name[1:]) >= kept[-1]:
            flip_a_byte(folder)
    cluster.start_all(names)
    with cluster.client() as client:
        job = client.job(job.id)
        status = job.wait()
        events = job.history()
        assert all(client.verify(job.id, view.version).reason == "" for view in client.checkpoints(job.id))
    assert status.state is JobState.FINISHED, status.reason
    back = [e.body for e in events if isinstance(e.body, WentBack)]
    assert [body.to_version for body in back] == [kept[-2]], "damaged ones are found before going back"
    made = [e.body.record for e in events if isinstance(e.body, StepFinished)]
    again = back[0].from_version
    # The same data, the same sums in the same order, from the very state that was saved.
    before = {record.step: record.loss for record in made[:again]}
    after = {record.step: record.loss for record in made[again:]}
    assert sorted(after) == list(range(kept[-2], NUM_STEPS))
    assert {step: after[step] for step in after if step in before} == {
        step: before[step] for step in before if step in after
    }
    assert losses_of(events) == pytest.approx(undisturbed, rel=1e-5)  # as above


def flip_a_byte(checkpoint: Path) -> None:
    """In one of its files."""
    for file in sorted(checkpoint.glob("*.model.safetensors"))[:1]:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
