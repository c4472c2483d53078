"""A real worker dies, and everybody who looks sees the same incident: SDK, events, status, metrics and log."""

import urllib.request
from pathlib import Path

from bench.cluster import running
from skein.protocol.log.incident import told
from skein.protocol.log.records import IncidentKind
from skein.types import JobState
from skein.wire.views import IncidentEnded, StepFinished
from tests.e2e.jobs import text_job, write_text
from tests.e2e.test_recovery import wait_for_step

NUM_STEPS = 18


def test_a_killed_worker_is_one_incident_for_all_who_look(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    with running(tmp_path / "cluster", 4) as cluster, cluster.client() as client:
        job = client.submit(text_job("one-dies", text, steps=NUM_STEPS))
        wait_for_step(job, 8)
        cluster.kill_worker("w3")
        status = job.wait()
        [incident] = client.incidents(job.id)
        events = job.history()
        page = urllib.request.urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics").read().decode()
        log = cluster.log_of("coordinator")
    assert status.state is JobState.FINISHED, status.reason
    assert (incident.kind, incident.workers) == (IncidentKind.WORKER_LOST, ("w3",))
    assert 8 <= incident.step < NUM_STEPS
    assert incident.num_steps_lost == 0
    assert 0 < incident.fenced_s <= incident.seconds
    assert (status.num_incidents, status.num_steps_lost) == (1, 0)
    seen = [event.body.incident for event in events if isinstance(event.body, IncidentEnded)]
    assert seen == [incident]
    # Told where work goes on: after the step before the one that it interrupted, and before that one is committed.
    finished = [event.body.record.step for event in events if isinstance(event.body, StepFinished)]
    assert finished == list(range(NUM_STEPS))
    place = next(at for at, event in enumerate(events) if isinstance(event.body, IncidentEnded))
    assert sum(isinstance(event.body, StepFinished) for event in events[:place]) == incident.step
    assert f'skein_incidents_total{{kind="worker_lost",remedy="{incident.remedy}"}} 1.0\n' in page
    assert f"skein_hops_rerouted_total {float(incident.num_rerouted)}\n" in page
    assert log.count(told(incident)) == 1
