"""Whole jobs: a real coordinator and real workers over gRPC, against plain torch."""

from pathlib import Path

import pytest

from skein.config.aggregation import AllReduce
from skein.config.job import BudgetSpec, CheckpointSpec, JobSpec
from skein.config.rule import PatternName
from skein.protocol.log.records import CheckpointCommitted, Evaluated, GenerationOpened, StepCommitted
from skein.protocol.messages.directives import StepRecord
from skein.protocol.worker.worker_io import StopRequested
from skein.types import JobState, Layout
from tests.support.extent import part
from tests.worker.cluster import Disk, cluster
from tests.worker.lab import Lab, tiny_job, write_text

NUM_STEPS = 8


def job_of(text: Path, *, layout: Layout = Layout.LINE, replicas: int = 1, every_steps: int = 0) -> JobSpec:
    job = tiny_job(text, layout=layout, replicas=replicas)
    return job.model_copy(
        update={
            "budget": BudgetSpec(steps=NUM_STEPS),
            "checkpoint": CheckpointSpec(every_steps=every_steps),
            # Equal steps whatever the schedule of learning rates: the lab has a constant one.
            "optimizer": job.optimizer.model_copy(
                update={"warmup_steps": 0, "final_learning_rate_ratio": 1.0}
            ),
        }
    )


def undisturbed(job: JobSpec) -> tuple[list[StepRecord], float]:
    """Steps and final validation loss of one worker that is asked op by op."""
    lab = Lab(
        job.model_copy(
            update={
                "parallel": job.parallel.model_copy(
                    update={"stages": 1, "replicas": 1, "layout": Layout.LINE}
                )
            }
        )
    )
    try:
        steps = [lab.step(step) for step in range(NUM_STEPS)]
        num_evaluation = -(-job.evaluation.samples // job.batch.microbatch_samples)
        return steps, lab.evaluate(NUM_STEPS, num_evaluation)
    finally:
        lab.close()


def assert_same_curve(found: list[StepRecord], expected: list[StepRecord]) -> None:
    """Float64 sums in another order, over so few steps: rounding stays far below this."""
    assert [record.step for record in found] == list(range(NUM_STEPS))
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-9)
        assert one.num_tokens == other.num_tokens


async def test_a_job_over_the_network_gives_the_curve_of_one_process(tmp_path: Path) -> None:
    job = job_of(write_text(tmp_path), layout=Layout.LOOP)
    steps, validation = undisturbed(job)
    async with cluster(Disk()) as here, here.workers("w0", "w1") as workers:
        here.submit(job)
        assert await here.finished() == JobState.FINISHED
        assert_same_curve(here.steps, steps)
        evaluated = here.all(Evaluated)[-1]
        assert evaluated.loss == pytest.approx(validation, rel=1e-10)
        assert here.all(CheckpointCommitted)[-1].version == NUM_STEPS
        for worker in workers:
            worker.inbox.post(StopRequested(reason="done"))
        assert all([(await worker.end()).is_clean for worker in workers])


@pytest.mark.parametrize("pattern", part(["tree", "ring"], every=2))
async def test_sums_that_are_made_on_the_way_give_the_same_curve_and_bear_a_death(
    tmp_path: Path, pattern: PatternName
) -> None:
    one_stage = tiny_job(write_text(tmp_path), stages=1, replicas=4)
    job = job_of(tmp_path / "text.txt", replicas=4).model_copy(
        update={"parallel": one_stage.parallel, "aggregation": AllReduce(pattern=pattern)}
    )
    steps, _ = undisturbed(job)
    async with cluster(Disk()) as here, here.workers("w0", "w1", "w2"):
        async with here.workers("w3"):
            here.submit(job)
            await here.first(StepCommitted, 3)
        assert await here.finished() == JobState.FINISHED
        assert len(here.all(GenerationOpened)) > 1
        assert_same_curve(here.steps, steps)
