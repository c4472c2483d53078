"""Jobs with every optimizer, on the worker's own chunks: they learn, as one process would, and their state survives."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.reference import batch_of, run_reference, whole_model
from skein.config.job import JobSpec
from skein.config.optimizer import AdadeltaSpec, AdamSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.walker import Walker
from skein.protocol.log.records import StageFiles
from skein.protocol.worker.ops import SaveOp, SnapshotOp
from skein.types import Generation, JobId, StageIndex, Step, WorkerId, parse_group
from tests.support.extent import part
from tests.worker.lab import GENERATION, Lab, tiny_job
from worker.bundle import to_torch
from worker.chunks.checkpoint import UrlArchive, read_state, write_stage
from worker.compute.snapshots import bring_forward
from worker.compute.state import saved_names, state_names, state_sizes
from worker.data.dataset import open_dataset

JOB = JobId("j1")
"""As the lab calls its job."""
STEPS = 6
PLACES = (0, 0), (0, 1), (1, 0), (1, 1)
"""Stage and replica of every chunk."""
# The lab's record keeps to one learning rate.
SPECS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(learning_rate=3e-3, schedule="constant", warmup_steps=0),
    "adam": AdamSpec(name="adam", learning_rate=3e-3, schedule="constant", warmup_steps=0),
    "adadelta": AdadeltaSpec(
        name="adadelta", learning_rate=1.0, schedule="constant", warmup_steps=0, eps=1e-4
    ),
    "sgd": SgdSpec(name="sgd", learning_rate=0.2, schedule="constant", warmup_steps=0, momentum=0.0),
    "sgd with momentum": SgdSpec(name="sgd", learning_rate=0.05, schedule="constant", warmup_steps=0),
    "sgd with Nesterov's": SgdSpec(
        name="sgd", learning_rate=0.05, schedule="constant", warmup_steps=0, nesterov=True
    ),
    "lamb": LambSpec(name="lamb", learning_rate=0.02, schedule="constant", warmup_steps=0),
}
KEPT = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "adam": {"exp_avg", "exp_avg_sq"},
    "adadelta": {"square_avg", "acc_delta"},
    "sgd": set(),
    "sgd with momentum": {"momentum"},
    "sgd with Nesterov's": {"momentum"},
    "lamb": {"exp_avg", "exp_avg_sq"},
}


def job_with(text: Path, name: str) -> JobSpec:
    drawn = tiny_job(text, stages=2, replicas=2, is_tied=True)
    return drawn.model_copy(update={"optimizer": SPECS[name]})


def in_one_process(job: JobSpec, num_steps: int) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses and final parameters of the whole model under the job's optimizer, a batch at once."""
    model, optimizer = whole_model(job), optimizer_of(job.optimizer)
    params = {name: param.detach() for name, param in model.named_parameters()}
    walker = Walker(params=params, state=optimizer.init(params))
    dataset = open_dataset(job.data, job.model, seed=job.seed)
    losses = []
    for step in range(num_steps):
        model.zero_grad()
        inputs, labels = batch_of(job, dataset, step, 0, job.batch.num_microbatches)
        loss, num_tokens = model.loss(inputs, labels)
        torch.autograd.backward(loss / num_tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip_norm or float("inf"))
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        optimizer.update(walker, grads, learning_rate=job.optimizer.learning_rate, gradient_scale=1.0)
        losses.append(loss.item() / num_tokens)
    return losses, params


@pytest.fixture(params=part(list(SPECS), every=2))
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def lab(name: str, text: Path, labs: list[Lab]) -> Lab:
    made = Lab(job_with(text, name))
    labs.append(made)
    return made


def copies(lab: Lab) -> list[dict[str, Tensor]]:
    return [lab.chunk(stage, replica).copy_state() for stage, replica in PLACES]


def holder(lab: Lab, stage: int) -> WorkerId:
    return next(ref.worker for ref in lab.arrangement.chunks if ref.stage == stage)


def write(lab: Lab, stage: int, archive: UrlArchive) -> StageFiles:
    op = SaveOp(generation=GENERATION, version=Step(1), stage=StageIndex(stage), url=None)
    saved = lab.benches[holder(lab, stage)].run(op).saved
    assert saved is not None
    files = write_stage(op.stage, GENERATION, archive, params=saved.params, state=saved.state)
    return StageFiles(stage=op.stage, files=files)


def assert_equal(states: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for state, wanted in zip(states, expected, strict=True):
        assert state.keys() == wanted.keys()
        assert [key for key in state if not torch.equal(state[key], wanted[key])] == []


def test_a_job_learns_as_in_one_process(lab: Lab, name: str) -> None:
    records = [lab.step(step) for step in range(STEPS)]
    losses, params = in_one_process(lab.job, STEPS)
    # Sums of 96 tokens in float64, in another order; roots of small second moments magnify that a hundredfold.
    assert [record.loss for record in records] == pytest.approx(losses, rel=1e-10)
    for state in copies(lab):
        for key in state.keys() & params.keys():
            torch.testing.assert_close(state[key], params[key], rtol=1e-9, atol=1e-12)
    assert losses[-1] < losses[0] - 0.1, "it should have learnt something"
    if isinstance(lab.job.optimizer, LambSpec):
        return
    by_torch = run_reference(lab.job, STEPS)
    assert [record.loss for record in records] == pytest.approx([x.loss for x in by_torch], rel=1e-10)


def test_state_is_what_the_slots_say(lab: Lab, name: str) -> None:
    for stage in (0, 1):
        chunk = lab.chunk(stage)
        state = chunk.state()
        expected = {*chunk.params, "step"}
        expected |= {f"{slot}.{param}" for slot in KEPT[name] for param in chunk.params}
        assert state.keys() == expected == state_names(lab.job, chunk.stage)
        assert state_sizes(lab.job, chunk.stage) == {key: tensor.nbytes for key, tensor in state.items()}


def test_a_copy_that_is_loaded_goes_on_to_the_same_bits(lab: Lab, text: Path, labs: list[Lab]) -> None:
    for step in range(2):
        lab.step(step)
    resumed = Lab(lab.job)
    labs.append(resumed)
    for state, place in zip(copies(lab), PLACES, strict=True):
        resumed.chunk(*place).load_state(state, version=Step(2))
    for step in range(2, 4):
        lab.step(step)
        resumed.step(step)
    assert_equal(copies(resumed), copies(lab))


def test_a_checkpoint_goes_on_to_the_same_bits(lab: Lab, tmp_path: Path, labs: list[Lab]) -> None:
    lab.step(0)
    archive = UrlArchive(str(tmp_path), JOB, Step(1))
    files = [write(lab, stage, archive) for stage in (0, 1)]
    resumed = Lab(lab.job)
    labs.append(resumed)
    for stage, replica in PLACES:
        chunk = resumed.chunk(stage, replica)
        names = saved_names(lab.job, [chunk.stage])
        chunk.load_state(read_state(files, names, archive), version=Step(1))
    lab.step(1)
    resumed.step(1)
    assert_equal(copies(resumed), copies(lab))


def test_what_was_applied_brings_a_snapshot_to_the_very_bits(lab: Lab) -> None:
    lab.step(0)
    for ref in lab.arrangement.chunks:
        op = SnapshotOp(generation=Generation(1), version=Step(1), stage=ref.stage, keeps_results=True)
        lab.run(ref.worker, op)
    records = [lab.step(step) for step in (1, 2)]
    for stage in (0, 1):
        kept = lab.benches[holder(lab, stage)].compute.snapshots
        snapshot = kept.state_of(JOB, StageIndex(stage), Step(1))
        assert snapshot is not None
        state = {key: to_torch(tensor).clone() for key, tensor in snapshot.items()}
        for record in records:
            result = kept.result_of(JOB, StageIndex(stage), record.step)
            assert result is not None
            bring_forward(
                state,
                record,
                {parse_group(group): to_torch(tensor) for group, tensor in result.items()},
                stage=StageIndex(stage),
                model=lab.job.model,
                rule=rule_of(lab.job.aggregation, lab.job.optimizer),
            )
        assert_equal([state], [lab.chunk(stage).copy_state()])
