"""An array of trials as a job: real workers over gRPC and the real Coordinator machine, beside each trial's own job."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from skein.config.job import ArrayJob, BatchSpec, JobSpec
from skein.config.schedule import learning_rate
from skein.config.sweep.rows import RowOrigin
from skein.model.families.mlp import MlpModel
from skein.protocol.log.records import (
    CheckpointCommitted,
    Evaluated,
    PlanAdopted,
    RolledBack,
    StepCommitted,
    walker_prefix,
)
from skein.protocol.messages.array_rounds import RowNumbers
from skein.protocol.messages.directives import Decision
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import ApplyOp
from skein.types import JobState, Step
from tests.worker.cluster import Cluster, Disk, cluster
from tests.worker.lab import Lab, decide
from tests.worker.sweep.trials import NUM_STEPS, array_of, trial
from worker.compute.state import STEP


def alone(job: JobSpec, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    """Parameters of a trial's own job after so many steps, by the code of any job."""
    lab = Lab(job)
    paths, (group,) = lab.arrangement.paths, lab.arrangement.groups
    for step in map(Step, range(num_steps)):
        losses = [lab.microbatch(step, m, path, Phase.TRAIN) for m, path in enumerate(paths)]
        joined = {group.group: lab.reduce(step, group)}
        record = decide(job, step, losses, joined, lab.arrangement, Decision.APPLY)
        rate = learning_rate(job.optimizer, step, NUM_STEPS)
        lab.run(paths[0].hops[0].worker, ApplyOp(record=replace(record, learning_rate=rate)))
    params = {name: x.clone() for name, x in lab.chunk(0).walker.params.items()}
    lab.close()
    return params


def saved(disk: Disk, checkpoint: CheckpointCommitted, row: int) -> dict[str, Tensor]:
    """Tensors of a row in a checkpoint, under their own names."""
    prefix = walker_prefix(row)
    found: dict[str, Tensor] = {}
    for stage in checkpoint.stages:
        for file in stage.files:
            tensors = load(disk.files[checkpoint.job, checkpoint.version, file.name])
            found |= {
                x.removeprefix(prefix): t
                for x, t in tensors.items()
                if (x.startswith(prefix) if prefix else not x.startswith("walker"))
            }
    return found


async def run(disk: Disk, job: ArrayJob, *, deaths: int = 0) -> Cluster:
    """The job to its end; a worker dies after each of the first rounds, so many in all."""
    async with cluster(disk) as here:
        here.submit(job)
        for death in range(deaths):
            async with here.workers(f"w{death}"):
                await here.first(StepCommitted, death + 1)
        async with here.workers("last"):
            assert await here.finished() is JobState.FINISHED
    return here


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        # Batches of several products may sum in another order than one.
        assert torch.allclose(found[name].cpu(), tensor.cpu(), rtol=1e-12, atol=1e-12), name


async def test_rows_smooth_labels_as_each_trials_own_job_does() -> None:
    models = [MlpModel(family="mlp", widths=(16,), label_smoothing=share) for share in (0.0, 0.2)]
    rows, disk = array_of(0, 1), Disk()
    smoothed = [
        x.model_copy(update={"label_smoothing": y.smoothing}) for x, y in zip(rows.rows, models, strict=True)
    ]
    here = await run(
        disk, rows.model_copy(update={"array": rows.array.model_copy(update={"rows": tuple(smoothed)})})
    )
    newest = here.all(CheckpointCommitted)[-1]
    for row, model in enumerate(models):
        assert_near(saved(disk, newest, row), alone(trial(row).model_copy(update={"model": model})))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fuse", ["always", "never"])
async def test_rows_drop_what_each_trials_own_job_drops_though_a_worker_dies(fuse: str) -> None:
    changes: dict[str, object] = {"model": MlpModel(family="mlp", widths=(16, 12), dropout=0.4)}
    rows, disk = array_of(0, 1, 2).model_copy(update=changes), Disk()
    here = await run(
        disk, rows.model_copy(update={"array": rows.array.model_copy(update={"fuse": fuse})}), deaths=1
    )
    newest = here.all(CheckpointCommitted)[-1]
    # Samples draw for themselves, whatever microbatches they go in.
    changes |= {"batch": BatchSpec(samples=16, microbatch_samples=4)}
    for row in range(3):
        assert_near(saved(disk, newest, row), alone(trial(row).model_copy(update=changes)))


def last_numbers(here: Cluster) -> tuple[RowNumbers, ...]:
    return here.steps[-1].rows


@pytest.mark.usefixtures("impatient")
async def test_rows_of_an_array_train_as_each_trials_own_job_though_workers_die() -> None:
    disk = Disk()
    here = await run(disk, array_of(0, 1, 2, 3), deaths=1)
    assert len(here.steps) == 5
    assert [row.num_updates for row in last_numbers(here)] == [NUM_STEPS] * 4
    assert [x.num_updates for record in here.steps for x in record.rows[:1]] == [4, 8, 12, 16, 20]
    newest = here.all(CheckpointCommitted)[-1]
    for row in range(4):
        found = saved(disk, newest, row)
        assert int(found[STEP]) == NUM_STEPS
        assert_near(found, alone(trial(row)))
    scored = here.all(Evaluated)[-1]
    assert len(scored.rows) == 4
    assert len({score.mean for score in scored.rows}) == 4


async def test_rows_go_on_in_other_packings_and_alone() -> None:
    disk = Disk()
    async with cluster(disk) as here:
        here.submit(array_of(0, 1, 2, 3, last_step=8))
        async with here.workers("w0"):
            await here.finished()
    version = here.all(CheckpointCommitted)[-1].version
    (job,) = {record.job for record in here.all(CheckpointCommitted)}
    origins = {row: RowOrigin(job=job, version=version, row=row) for row in range(4)}
    for number, rows in enumerate([(0, 1), (2, 3), (3, 0, 1), (2,)]):
        async with cluster(disk) as here:
            here.submit(array_of(*rows, first_step=8, origins=origins), key=f"part {number}")
            async with here.workers("w1"):
                assert await here.finished() is JobState.FINISHED
        newest = here.all(CheckpointCommitted)[-1]
        for place, row in enumerate(rows):
            assert_near(saved(disk, newest, place), alone(trial(row)))


async def test_rows_move_to_another_worker_with_all_that_they_are() -> None:
    disk = Disk()
    async with cluster(disk) as here:
        here.submit(array_of(0, 1, 2))
        async with here.workers("w0", "w1"):
            await here.first(StepCommitted)
            (first,) = here.all(PlanAdopted)
            here.drain(*first.plan.workers)
            assert await here.finished() is JobState.FINISHED
    plans = here.all(PlanAdopted)
    assert len({plan.plan.workers for plan in plans}) == 2
    assert here.all(RolledBack) == []
    newest = here.all(CheckpointCommitted)[-1]
    for row in range(3):
        assert_near(saved(disk, newest, row), alone(trial(row)))
