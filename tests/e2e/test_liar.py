"""A worker process that hands in gradients of another sign: found by checks, and remembered by the next coordinator."""

from pathlib import Path
from statistics import fmean

import pytest

from client.api import Job
from skein.config.checks import ChecksSpec
from skein.types import JobState
from skein.wire.views import IncidentEnded
from tests.e2e.jobs import NUM_STEPS, losses_of, text_job, wait_for_step
from tests.e2e.shared import SharedCluster

SINCE = 2
LIAR = "liar"
FOUND_WITHIN = 20


def wait_for_conviction(job: Job) -> int:
    """The step in which the liar was found out."""
    for event in job.events():
        if isinstance(event.body, IncidentEnded) and "quarantined" in event.body.incident.reason:
            assert event.body.incident.workers == (LIAR,)
            return event.body.incident.step
    raise AssertionError(f"{job.id} ended, and nobody was found out: {job.status()}")


@pytest.mark.long
def test_a_liar_is_quarantined_also_after_a_restart_of_the_coordinator(
    shared: SharedCluster, text: Path, undisturbed: dict[int, float]
) -> None:
    shared.gather(3)
    shared.run(
        LIAR, "tests.e2e.lying_worker", ["--join", shared.target, "--name", LIAR, "--since", str(SINCE)]
    )
    shared.wait_for_workers(4)
    spec = text_job("lied-to", text, steps=NUM_STEPS)
    with shared.client() as client:
        job = client.submit(spec.model_copy(update={"checks": ChecksSpec(fraction=1.0)}))
        assert wait_for_conviction(job) < SINCE + FOUND_WITHIN
        shared.kill_actor()
        wait_for_step(job, NUM_STEPS - 1)
        status = job.wait()
        assert status.state is JobState.FINISHED, status.reason
        assert status.quarantined == (LIAR,)
        assert status.num_steps_lost == 0
        losses = losses_of(job.history())
    assert sorted(losses) == list(range(NUM_STEPS))
    last, clean = (
        [curve[step] for step in range(NUM_STEPS - 5, NUM_STEPS)] for curve in (losses, undisturbed)
    )
    assert fmean(last) == pytest.approx(fmean(clean), rel=0.05)
    assert shared.stop_worker(LIAR) == 0
