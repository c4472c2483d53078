"""Which stages are left out, and that training around them is what it says."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.convergence import LEFT_OUT, NUM_MICROBATCHES, NUM_STAGES, Run, carry_out
from bench.convergence import make_job as make_measured_job
from bench.curves import Kind
from bench.reference import run_reference
from bench.skipping import (
    MAX_JUMP,
    SkippingTraining,
    draw_paths,
    even_paths,
    is_legal,
)
from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    DataSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    SkipSpec,
    TextSource,
)
from skein.config.optimizer import AdamWSpec
from skein.data.cursor import positions_of
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.plan.check import violations
from skein.protocol.messages import StepRecord
from skein.rng import stream
from skein.topology.fleet import Fleet, FleetWorker, Profile
from skein.types import Layout, Precision, SiteId, StageIndex, StageSpec, WorkerId
from worker.data.dataset import open_dataset
from worker.model.stage import build_stage


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    source = Path(__file__).read_bytes()
    # Documents of different lengths: the last window of the last one has labels that do not count.
    for index in range(3):
        (folder / f"{index}.txt").write_bytes(source[index * 97 : index * 97 + 1005])
    return folder


def make_job(
    text: Path,
    *,
    stages: int,
    microbatches: int,
    left_out: int = 0,
    precision: Precision = Precision.FP64,
    is_tied: bool = False,
) -> JobSpec:
    shape = LlamaShape(
        hidden_size=16,
        # Blocks that outweigh the head, or the cut would give stage 0 none.
        intermediate_size=256,
        num_hidden_layers=stages,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
        initializer_range=0.05,
    )
    return JobSpec(
        name="skipping",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=12, validation_ratio=0.1),
        batch=BatchSpec(samples=2 * microbatches, microbatch_samples=2),
        parallel=ParallelSpec(stages=stages, layout=Layout.LOOP),
        skip=SkipSpec(ratio=left_out / stages, max_jump=MAX_JUMP),
        optimizer=AdamWSpec(learning_rate=1e-2, warmup_steps=2, clip_norm=0.5),
        budget=BudgetSpec(steps=20),
        precision=precision,
        evaluation=EvaluationSpec(samples=5),
        seed=5,
    )


SHAPES = [(NUM_STAGES, left_out, NUM_MICROBATCHES) for left_out in LEFT_OUT] + [
    (6, 2, 30),  # SkipPipe's own shape: 20 workers, 33 %
    (6, 3, 10),
    (8, 2, 14),
    (4, 1, 6),
]


@pytest.mark.parametrize(("num_stages", "left_out", "num_paths"), SHAPES)
def test_drawn_paths_are_legal_and_visit_every_stage_equally_often(
    num_stages: int, left_out: int, num_paths: int
) -> None:
    drawn = [draw_paths(num_stages, left_out, num_paths, stream(seed, "test")) for seed in range(20)]
    for paths in drawn:
        assert all(len(path) == num_stages - left_out and path[-1] < num_stages for path in paths)
        assert all(is_legal(path) for path in paths)
        visits = Counter(stage for path in paths for stage in path)
        assert visits.pop(0) == num_paths
        assert set(visits) == set(range(1, num_stages))
        assert len(set(visits.values())) == 1
    assert (len(set(drawn)) > 15) == (left_out > 0), "drawn anew every time, if there is anything to draw"


def test_every_stage_comes_to_be_left_out_together_with_every_other() -> None:
    pairs = set()
    for seed in range(200):
        for path in draw_paths(NUM_STAGES, 4, NUM_MICROBATCHES, stream(seed, "test")):
            out = sorted(set(range(NUM_STAGES)) - set(path))
            pairs |= {(one, other) for one in out for other in out if one < other}
    assert len(pairs) == 11 * 10 // 2


def test_each_stage_of_the_measured_model_holds_one_block() -> None:
    training = SkippingTraining(make_measured_job(steps=1, seed=0))
    blocks = [
        {name.split(".")[2] for name in chunk.params if ".layers." in name}
        for chunk in training.chunks.values()
    ]
    assert blocks == [*({str(stage)} for stage in range(NUM_STAGES)), set()]
    training.close()


def test_equal_streams_draw_equal_paths() -> None:
    assert draw_paths(12, 6, 11, stream(1, "a")) == draw_paths(12, 6, 11, stream(1, "a"))


def test_a_jump_of_four_is_legal_and_one_of_five_is_not() -> None:
    assert is_legal((0, MAX_JUMP))
    assert not is_legal((0, MAX_JUMP + 1))


@pytest.mark.parametrize(("num_stages", "left_out", "num_paths"), [(6, 5, 5), (12, 10, 11), (6, -1, 5)])
def test_a_ratio_without_legal_paths_is_refused(num_stages: int, left_out: int, num_paths: int) -> None:
    with pytest.raises(UserError, match="stages left out"):
        even_paths(num_stages, left_out, num_paths)


def test_a_number_of_microbatches_that_cannot_use_stages_equally_is_refused() -> None:
    with pytest.raises(UserError, match="multiple of 5"):
        even_paths(6, 2, 12)


def test_a_stage_is_weighted_by_the_tokens_that_visited_it_alone(tmp_path: Path) -> None:
    # 54 tokens make five windows of 12; one is held out. The last one has 5 labels: with it a microbatch has 12 + 5.
    (tmp_path / "one.txt").write_bytes(b"a" * 53)
    training = SkippingTraining(make_job(tmp_path, stages=3, microbatches=2, left_out=1))
    paths = training.paths_of(0)
    record = training.step(0)
    training.close()
    visited = {path[1]: index for index, path in enumerate(paths)}
    assert sorted(paths) == [(0, 1), (0, 2)]
    dataset = open_dataset(training.job.data, training.job.model, seed=training.job.seed)
    tokens = [
        int((dataset.train_batch(positions_of(0, m, training.job.batch)).labels != -100).sum())
        for m in (0, 1)
    ]
    assert sorted(tokens) == [17, 24]
    weights = {str(result.group): result.weight for result in record.results}
    assert weights == {"s0": 1 / 41, "s1": 1 / tokens[visited[1]], "s2": 1 / tokens[visited[2]], "s3": 1 / 41}


@pytest.mark.parametrize(("precision", "tolerance"), [(Precision.FP32, 1e-5), (Precision.FP64, 1e-9)])
def test_with_nothing_left_out_steps_equal_plain_torch(
    text: Path, precision: Precision, tolerance: float
) -> None:
    # Tolerances as in tests/e2e/test_parity.py: rounding of sums in another order, and no more.
    job = make_job(text, stages=4, microbatches=3, precision=precision)
    training = SkippingTraining(job)
    wanted = run_reference(job, 6)
    for step, reference in enumerate(wanted):
        found = training.step(step)
        assert found.loss == pytest.approx(reference.loss, rel=tolerance)
        assert found.gradient_norm == pytest.approx(reference.gradient_norm, rel=tolerance)
    training.close()
    assert max(step.gradient_norm for step in wanted) > 0.5, "clipping should have acted"


@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_the_check_of_all_plans_finds_nothing_wrong_with_a_step(left_out: int) -> None:
    training = SkippingTraining(make_measured_job(steps=1, seed=0, num_left_out=left_out))
    profile = Profile(device="cpu", device_name="test", flops_per_s=1e9, memory_bytes=2**40)
    fleet = Fleet(
        workers=(FleetWorker(worker=WorkerId("here"), site=SiteId("here"), profile=profile),), links=()
    )
    # A prediction is asked of every plan; nobody made one here.
    plan = replace(training.plan_of(0), predicted_step_s=1.0, lower_bound_s=1.0)
    assert violations(plan, training.job, fleet) == ()
    training.close()


def test_a_step_of_two_microbatches_equals_the_same_written_out_in_torch(text: Path) -> None:
    """Stages 1 and 2 see one microbatch each, so their gradients are divided by its tokens, stage 0's by both's."""
    job = make_job(text, stages=3, microbatches=2, left_out=1)
    training = SkippingTraining(job)
    assert sorted(training.paths_of(0)) == [(0, 1), (0, 2)]
    initial = {name: x.clone() for name, x in training.copy_state().items()}
    found = training.step(0)
    grads, loss = written_out(job, training.paths_of(0))
    norm = float(
        torch.sqrt(sum((g.square().sum() for g in grads.values()), torch.zeros((), dtype=torch.float64)))
    )
    # float64, other orders of sums.
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.gradient_norm == pytest.approx(norm, rel=1e-12)
    clip = min(1.0, 0.5 / (norm + 1e-6))
    after = training.copy_state()
    for name, grad in grads.items():
        # AdamW's first step: both bias corrections leave g / (|g| + eps).
        decay = 1 - 0.005 * 0.1 * (grad.ndim >= 2)
        wanted = initial[name] * decay - 0.005 * clip * grad / ((clip * grad).abs() + 1e-8)
        torch.testing.assert_close(after[name], wanted, rtol=1e-9, atol=1e-12)
    training.close()


def written_out(job: JobSpec, paths: tuple[tuple[int, ...], ...]) -> tuple[dict[str, Tensor], float]:
    """Weighted gradients of the first step, and the mean loss, by autograd over one whole model."""
    model = build_stage(
        job.model,
        StageSpec(index=StageIndex(0), first=0, stop=job.parallel.stages + 2),
        sequence_tokens=job.data.sequence_tokens,
        seed=job.seed,
        precision=job.precision,
        device=torch.device("cpu"),
    )
    blocks = model.get_submodule("model.layers")
    assert isinstance(blocks, torch.nn.ModuleDict)
    dataset = open_dataset(job.data, job.model, seed=job.seed)
    all_blocks = dict(blocks.items())
    sums: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    visited = dict.fromkeys(sums, 0)
    total, num_tokens = 0.0, 0
    for microbatch, path in enumerate(paths):
        batch = dataset.train_batch(positions_of(0, microbatch, job.batch))
        blocks.clear()
        blocks.update({str(stage): all_blocks[str(stage)] for stage in path})
        loss, num_valid = model.loss(torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels))
        params = dict(model.named_parameters())
        for name, grad in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
            sums[name] += grad
            visited[name] += num_valid
        total, num_tokens = total + float(loss.detach()), num_tokens + num_valid
    return {name: sums[name] / visited[name] for name in sums}, total / num_tokens


def test_evaluation_through_some_stages_is_the_loss_of_a_model_without_the_others(text: Path) -> None:
    job = make_job(text, stages=4, microbatches=3, left_out=1)
    training = SkippingTraining(job)
    training.step(0)
    losses = {training.evaluate(path) for path in [None, (0, 1, 2, 3), (0, 2, 3), (0, 1)]}
    assert len(losses) == 3, "all stages are what None means, and each choice has a loss of its own"
    training.close()


def test_training_goes_on_from_a_saved_state_as_if_never_interrupted(text: Path) -> None:
    job = make_job(text, stages=4, microbatches=3, left_out=2)
    whole, resumed = SkippingTraining(job), SkippingTraining(job)
    whole.step(0)
    resumed.load_state(whole.copy_state())
    assert resumed.step(1) == whole.step(1)
    assert len({whole.paths_of(step) for step in range(10)}) > 1
    whole.close()
    resumed.close()


def test_an_interrupted_run_goes_on_and_tells_what_the_whole_one_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.convergence.EVALUATE_EVERY", 2)
    job = make_measured_job(steps=4, seed=0, num_left_out=6).model_copy(
        update={"evaluation": EvaluationSpec(samples=4)}
    )
    whole = carry_out(Run(job=job, folder=tmp_path / "whole"))
    assert Counter(told.kind for told in whole) == {Kind.STEP: 4, Kind.VALIDATION: 3, Kind.LEFT_OUT: 33}
    run = Run(job=job, folder=tmp_path / "cut")
    with monkeypatch.context() as patched:
        patched.setattr(SkippingTraining, "step", failing_at(3, SkippingTraining.step))
        with pytest.raises(RuntimeError, match="step 3"):
            carry_out(run)
    assert set(carry_out(run)) == set(whole)


def failing_at(
    last: int, step: Callable[[SkippingTraining, int], StepRecord]
) -> Callable[[SkippingTraining, int], StepRecord]:
    def or_fail(self: SkippingTraining, at: int) -> StepRecord:
        if at == last:
            raise RuntimeError(f"step {at}")
        return step(self, at)

    return or_fail


def test_a_job_with_tied_embeddings_or_without_a_loop_is_refused(text: Path) -> None:
    with pytest.raises(UserError, match="tie_word_embeddings"):
        SkippingTraining(make_job(text, stages=4, microbatches=3, is_tied=True))
    line = make_job(text, stages=4, microbatches=3).model_copy(update={"parallel": ParallelSpec(stages=4)})
    with pytest.raises(UserError, match=r"parallel\.layout"):
        SkippingTraining(line)
