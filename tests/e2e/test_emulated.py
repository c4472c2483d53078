"""Emulated op times and links change when things happen, and nothing else."""

from pathlib import Path

import pytest

from bench.emulated.cluster import EmulatedCluster, free_addresses
from bench.emulated.fleet import op_times, ten_cities
from bench.emulated.job import ACTIVATION_BYTES, make_job, write_tokens
from bench.reference import run_reference
from skein.types import JobState
from skein.wire.views import StepFinished

NUM_STEPS = 2


def test_emulated_workers_train_to_the_loss_of_one_torch_process(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    job = make_job(
        "emulated",
        tokens,
        method="balanced",
        num_workers=2,
        stages=2,
        microbatches=4,
        skip_ratio=0.0,
        budget_s=1.0,
        steps=NUM_STEPS,
    )
    links = ten_cities(free_addresses(2), scale=1 / 100, activation_bytes=ACTIVATION_BYTES)
    speed = 1e9
    with EmulatedCluster(tmp_path / "cluster", links) as cluster:
        cluster.start_fleet([op_times(job, speed)] * 2, flops_per_s=speed, memory_bytes=1 << 30)
        with cluster.client() as client:
            submitted = client.submit(job)
            steps = [event.body for event in submitted.events() if isinstance(event.body, StepFinished)]
            assert submitted.status().state is JobState.FINISHED
            profiles = {worker.profile.device_name for worker in client.workers()}
            num_links = len(client.links())
    losses = [step.record.loss for step in steps]
    # fp32: sums of a few thousand terms in another order.
    assert losses == pytest.approx([step.loss for step in run_reference(job, NUM_STEPS)], rel=1e-5)
    assert losses[1] < losses[0]
    assert (profiles, num_links) == ({"emulated"}, 2)
