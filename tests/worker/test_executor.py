"""What ops compute, against plain torch; and how long they wait for a processor."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from bench.reference import torch_optimizer
from skein.config.job import EvaluationSpec
from skein.data.cursor import positions_of
from skein.errors import UserError
from skein.model.sparse.routing import RoutingSpec
from skein.plan.agreeing.exchange import Direct, Pattern, Ring, Tree
from skein.plan.plan import Path as Hops
from skein.protocol.messages.directives import Decision
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import ForwardOp, Op, OpFailed, OpOutcome, SaveOp
from skein.types import (
    ChunkRef,
    Generation,
    Layout,
    MicrobatchId,
    Precision,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)
from tests.support.device import DEVICE
from tests.support.extent import part
from tests.support.skipping import run_skipping
from tests.worker.lab import Lab, digits_job, sparse_job, tiny_job
from worker.compute.batches import BatchReader, evaluation_positions
from worker.compute.chunk import Chunk
from worker.compute.ops import Compute, Done
from worker.data.coreset import Drawing
from worker.data.dataset import Batch, Dataset, open_dataset
from worker.executor import Executor, Ran, waited_s
from worker.model.stage import Stage, build_stage


class Standing:
    """Computes nothing, and is not done before it is told to be."""

    def __init__(self) -> None:
        self.is_running, self.may_end = threading.Event(), threading.Event()

    def run(self, *_: object) -> Done:
        self.is_running.set()
        self.may_end.wait()
        return Done(outcome=OpFailed(is_fatal=False, reason="never done"))

    def synchronize(self) -> None:
        pass


def test_what_an_op_waits_for_a_processor_is_known_until_the_next_one_is_asked_for() -> None:
    standing, waits, ran = Standing(), iter([5.0, 5.0, 12.5, 14.0, 14.0, 14.0]), Future[Ran]()
    executor = Executor(cast(Compute, standing), waited_s=lambda _: next(waits))
    executor.start()
    assert executor.waited_s == 0.0
    op = SaveOp(generation=Generation(1), version=Step(1), stage=StageIndex(0), url=None)
    executor.run(op, {}, ran.set_result)
    standing.is_running.wait()
    assert [executor.waited_s, executor.waited_s] == [0.0, 7.5]
    standing.may_end.set()
    ran.result()
    # Whoever asks may not have heard yet that the op has ended.
    assert executor.waited_s == 9.0
    again = Future[Ran]()
    executor.run(op, {}, again.set_result)
    again.result()
    assert executor.waited_s == 0.0
    executor.stop()


def test_linux_tells_what_a_thread_has_waited(tmp_path: Path) -> None:
    (tmp_path / "self" / "task" / "7").mkdir(parents=True)
    (tmp_path / "self" / "task" / "7" / "schedstat").write_text("1500000000 2500000000 42\n")
    assert waited_s(7, tmp_path) == 2.5
    assert waited_s(8, tmp_path) == 0.0


CASES = [
    pytest.param(
        stages,
        replicas,
        layout,
        is_tied,
        id=f"{stages}x{replicas}-{layout.value}-{'tied' if is_tied else 'untied'}",
    )
    for stages, replicas, layout, is_tied in product((1, 2, 4), (1, 2), Layout, (True, False))
    if (stages, replicas) != (4, 2)
]


class PlainTorch:
    """The same job as anybody would write it in torch."""

    def __init__(self, lab: Lab) -> None:
        self.job = job = lab.job
        num_layers = lab.arrangement.stages[-1].stop
        self.model: Stage = build_stage(
            job.model,
            StageSpec(index=StageIndex(0), first=0, stop=num_layers),
            sequence_tokens=job.data.sequence_tokens,
            seed=job.seed,
            precision=job.precision,
            device=torch.device("cpu"),
        )
        self.optimizer = torch_optimizer(job.optimizer, self.model.parameters())
        self.dataset = open_dataset(job.data, job.model, seed=job.seed)

    def step(self, step: int) -> tuple[float, float]:
        """Loss and gradient norm."""
        self.optimizer.zero_grad()
        batches = [
            self.dataset.train_batch(positions_of(step, m, self.job.batch))
            for m in range(self.job.batch.num_microbatches)
        ]
        num_tokens = sum(int((batch.labels != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss, _ = self.model.loss(torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels))
            (loss / num_tokens).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / num_tokens
        assert self.job.optimizer.clip_norm is not None
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.optimizer.clip_norm)
        self.optimizer.step()
        return total, norm.item()

    @torch.no_grad()
    def evaluate(self, num_microbatches: int) -> float:
        total, num_tokens = 0.0, 0
        for e in range(num_microbatches):
            num_samples = self.dataset.num_validation_samples
            positions = evaluation_positions(self.job, MicrobatchId(e), num_samples=num_samples)
            batch = self.dataset.validation_batch(positions)
            loss, num_valid = self.model.loss(torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels))
            total, num_tokens = total + loss.item(), num_tokens + num_valid
        return total / num_tokens


@pytest.mark.parametrize(("stages", "replicas", "layout", "is_tied"), part(CASES, every=5))
def test_steps_equal_those_of_plain_torch(
    text: Path, labs: list[Lab], stages: int, replicas: int, layout: Layout, is_tied: bool
) -> None:
    lab = Lab(tiny_job(text, stages=stages, replicas=replicas, layout=layout, is_tied=is_tied))
    labs.append(lab)
    plain = PlainTorch(lab)
    norms = []
    for step in range(4):
        record = lab.step(step)
        loss, norm = plain.step(step)
        norms.append(norm)
        # Sums of 96 tokens in float64, in another order: a few units in the last place per step.
        assert record.loss == pytest.approx(loss, rel=1e-12)
        assert record.gradient_norm == pytest.approx(norm, rel=1e-12)
    assert max(norms) > 0.5, "clipping should have acted"
    wanted = dict(plain.model.named_parameters())
    for stage in lab.arrangement.stages:
        for replica in range(replicas):
            for name, param in lab.chunk(stage.index, replica).params.items():
                # Adam divides by the root of a small second moment, which magnifies rounding about a hundredfold.
                torch.testing.assert_close(param.cpu(), wanted[name], rtol=1e-9, atol=1e-12)


WAYS: dict[str, tuple[Layout, list[tuple[int, ...]]]] = {
    "line, skipping": (Layout.LINE, [(0, 1, 3), (0, 2, 3)]),
    "line, swapping": (Layout.LINE, [(0, 2, 1, 3), (0, 1, 2, 3)]),
    "line, a stage unused": (Layout.LINE, [(0, 2, 3)]),
    "loop, skipping and swapping": (Layout.LOOP, [(0, 3, 2, 4), (0, 1, 3, 4), (0, 2, 1, 4)]),
}


@pytest.mark.parametrize(("way", "is_tied"), part(list(product(WAYS, (True, False))), every=3))
def test_steps_along_paths_that_skip_and_swap_equal_those_of_plain_torch(
    text: Path, labs: list[Lab], way: str, is_tied: bool
) -> None:
    layout, ways = WAYS[way]
    drawn = tiny_job(text, stages=4, replicas=2, layout=layout, is_tied=is_tied)
    # The lab's record keeps to one learning rate.
    steady = drawn.optimizer.model_copy(update={"warmup_steps": 0, "final_learning_rate_ratio": 1.0})
    job = drawn.model_copy(update={"optimizer": steady})
    lab = Lab(job, ways)
    labs.append(lab)
    body = [way[:-1] for way in ways] if layout is Layout.LOOP else ways
    wanted = run_skipping(job, 3, body, cut_at=lab.arrangement.stages)
    for step, plain in enumerate(wanted):
        record = lab.step(step)
        # Sums of 96 tokens in float64, in another order: a few units in the last place per step.
        assert record.loss == pytest.approx(plain.loss, rel=1e-12)
        assert record.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-12)


@pytest.mark.parametrize("way", ["line, skipping", "loop, skipping and swapping"])
def test_balance_losses_of_stages_that_are_left_out_count_as_in_plain_torch(
    text: Path, labs: list[Lab], way: str
) -> None:
    layout, ways = WAYS[way]
    drawn = sparse_job(text, replicas=2, layout=layout)
    steady = drawn.optimizer.model_copy(update={"warmup_steps": 0, "final_learning_rate_ratio": 1.0})
    job = drawn.model_copy(update={"optimizer": steady})
    lab = Lab(job, ways)
    labs.append(lab)
    body = [way[:-1] for way in ways] if layout is Layout.LOOP else ways
    wanted = run_skipping(job, 3, body, cut_at=lab.arrangement.stages)
    without = job.model_copy(update={"model": job.model.model_copy(update={"routing": RoutingSpec()})})
    for step, plain in enumerate(wanted):
        record = lab.step(step)
        # As above.
        assert record.loss == pytest.approx(plain.loss, rel=1e-12)
        assert record.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-12)
    assert any("valid" in names for _, _, names in lab.sent)
    unweighed = run_skipping(without, 1, body, cut_at=lab.arrangement.stages)[0]
    assert unweighed.gradient_norm != pytest.approx(wanted[0].gradient_norm, rel=1e-3), "it did not act"


@pytest.mark.parametrize("layout", Layout)
def test_a_stage_that_nobody_visits_stays_as_it_is(text: Path, labs: list[Lab], layout: Layout) -> None:
    ends = (0, 3) if layout is Layout.LINE else (0, 3, 4)
    lab = Lab(tiny_job(text, stages=4, replicas=2, layout=layout, is_tied=True), [ends])
    labs.append(lab)
    before = lab.chunk(1).copy_state()
    lab.step(0)
    after = lab.chunk(1).copy_state()
    assert lab.chunk(1).version == 1
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("layout", Layout)
def test_a_classifier_of_images_trains_in_stages_too(labs: list[Lab], layout: Layout) -> None:
    whole, cut = Lab(digits_job()), Lab(digits_job(stages=2, layout=layout))
    labs += [whole, cut]
    for step in range(3):
        expected, found = whole.step(step), cut.step(step)
        # Equal sums in float64, but for the order in which stages' norms are added.
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-12)


def test_under_bfloat16_the_loss_falls_as_it_does_in_float32(text: Path, labs: list[Lab]) -> None:
    precise, rough = (
        Lab(tiny_job(text, precision=precision)) for precision in (Precision.FP32, Precision.BF16)
    )
    labs += [precise, rough]
    losses = [(precise.step(step).loss, rough.step(step).loss) for step in range(8)]
    assert losses[-1][1] < losses[0][1]
    # bfloat16 keeps 8 bits: products differ by 2**-8 of themselves, losses by far less.
    assert all(one == pytest.approx(other, rel=2**-8) for one, other in losses)


def test_evaluation_equals_plain_torch_and_touches_nothing(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text, stages=2, layout=Layout.LOOP))
    labs.append(lab)
    plain = PlainTorch(lab)
    lab.step(0)
    plain.step(0)
    assert lab.evaluate(1, 3) == pytest.approx(
        plain.evaluate(3), rel=1e-12
    )  # rounding of sums in another order
    assert all(not chunk_sums.any() for chunk_sums in accumulators(lab))
    assert lab.step(1).loss == pytest.approx(plain.step(1)[0], rel=1e-12)


def accumulators(lab: Lab) -> Iterator[torch.Tensor]:
    for ref in lab.arrangement.chunks:
        holding = lab.benches[ref.worker].compute.holding
        assert holding is not None
        for param in holding.chunks[ref.stage].params.values():
            assert param.grad is not None
            yield param.grad


def test_a_skipped_step_moves_nothing_but_the_version(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    before = lab.chunk(0).copy_state()
    lab.step(0, decision=Decision.SKIP)
    after = lab.chunk(0).copy_state()
    assert lab.chunk(0).version == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(sums.any() for sums in accumulators(lab))


@pytest.mark.parametrize(("layout", "should_travel"), [(Layout.LINE, True), (Layout.LOOP, False)])
def test_labels_travel_only_to_a_loss_elsewhere(
    text: Path, labs: list[Lab], layout: Layout, should_travel: bool
) -> None:
    lab = Lab(tiny_job(text, layout=layout))
    labs.append(lab)
    lab.step(0)
    assert any("labels" in names for _, _, names in lab.sent) is should_travel
    assert lab.sent


def test_labels_go_along_where_a_line_comes_back_to_its_origin(text: Path, labs: list[Lab]) -> None:
    """Should the origin die, whoever computes the loss in its place has them from the hop before."""
    lab = Lab(tiny_job(text))
    labs.append(lab)
    [first, second] = lab.arrangement.paths[0].hops
    back = ChunkRef(stage=StageIndex(2), worker=first.worker)
    way = Hops(hops=(first, second, back))
    op = ForwardOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=0, path=way)
    [output] = lab.benches[first.worker].run(op).outputs.values()
    assert not isinstance(output, Mapping)
    assert {tensor.name for tensor in output} == {"x", "labels"}


PATTERNS = {"direct": Direct(), "ring": Ring(), "tree": Tree(), "given tree": Tree(parents=(1, 2, 2))}


@pytest.mark.parametrize("pattern", part(list(PATTERNS.values()), every=2))
def test_replicas_stay_equal_to_the_bit(text: Path, labs: list[Lab], pattern: Pattern) -> None:
    lab = Lab(tiny_job(text, replicas=3, is_tied=False, precision=Precision.FP32), pattern=pattern)
    labs.append(lab)
    for step in range(3):
        lab.step(step)
    for stage in lab.arrangement.stages:
        one, *others = (lab.chunk(stage.index, replica).copy_state() for replica in range(3))
        assert all(torch.equal(one[name], other[name]) for other in others for name in one)


@pytest.mark.parametrize(("layout", "pattern"), part(list(product(Layout, (Ring(), Tree()))), every=3))
def test_sums_that_are_made_on_the_way_give_the_gradient_of_plain_torch(
    text: Path, labs: list[Lab], layout: Layout, pattern: Pattern
) -> None:
    lab = Lab(tiny_job(text, stages=2, replicas=3, layout=layout, is_tied=True), pattern=pattern)
    labs.append(lab)
    plain = PlainTorch(lab)
    for step in range(2):
        # As where all parts meet: float64 sums in another order.
        record = lab.step(step)
        assert (record.loss, record.gradient_norm) == pytest.approx(plain.step(step), rel=1e-12)


def test_a_step_that_begins_anew_gives_the_same_bits(text: Path, labs: list[Lab]) -> None:
    job = tiny_job(text, precision=Precision.FP32)
    undisturbed, disturbed = Lab(job), Lab(job)
    labs.extend((undisturbed, disturbed))
    disturbed.microbatch(Step(0), 0, disturbed.arrangement.paths[0], Phase.TRAIN)
    for bench in disturbed.benches.values():
        bench.hold(None)
    assert disturbed.step(0) == undisturbed.step(0)


# --- the thread ---


def run(executor: Executor, op: Op) -> OpOutcome:
    future: Future[Ran] = Future()
    executor.run(op, {}, future.set_result)
    return future.result(timeout=120).done.outcome


def test_an_op_that_raises_is_reported_and_the_thread_works_on(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    executor = Executor(Compute(DEVICE))
    executor.start()
    path = lab.arrangement.paths[0]
    forward = ForwardOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=0, path=path)
    outcome = run(executor, forward)
    assert isinstance(outcome, OpFailed)
    assert not outcome.is_fatal
    assert "built" in outcome.reason
    executor.call(partial(executor.compute.hold, lab.benches[path.hops[0].worker].holding)).result(
        timeout=120
    )
    assert run(executor, forward) is None
    assert executor.call(lambda: 7).result(timeout=120) == 7
    executor.stop()


def test_unreadable_data_are_the_trouble_of_this_worker_alone(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    bench = lab.benches[lab.arrangement.workers[0]]
    executor = Executor(bench.compute)
    executor.start()
    text.write_text("gone")
    path = lab.arrangement.paths[0]
    forward = ForwardOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=0, path=path)
    outcome = run(executor, forward)
    assert isinstance(outcome, OpFailed)
    assert outcome.is_unfit
    assert not outcome.is_fatal
    assert "\n" not in outcome.reason
    assert str(text) in outcome.reason
    executor.stop()


def test_what_was_called_on_the_thread_raises_where_it_was_asked_for() -> None:
    executor = Executor(Compute(DEVICE))
    executor.start()

    def refuse() -> None:
        raise UserError("a", 1, "give 2")

    with pytest.raises(UserError, match="give 2"):
        executor.call(refuse).result(timeout=120)
    executor.stop()


def test_what_fails_on_the_thread_with_nobody_waiting_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    executor = Executor(Compute(DEVICE))
    executor.start()

    def refuse() -> None:
        raise MemoryError("no room for a copy")

    executor.tell(refuse)
    assert executor.call(lambda: 7).result(timeout=120) == 7
    assert "no room for a copy" in caplog.text
    executor.stop()


# --- what is held ---


def test_a_chunk_that_is_given_up_can_be_fetched_until_a_step_begins(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text, stages=1))
    labs.append(lab)
    (bench,) = lab.benches.values()
    before = bench.compute.holding
    assert before is not None
    assert before.batches is not None
    given_up = before.chunks[StageIndex(0)]
    stage = StageSpec(index=StageIndex(0), first=0, stop=3)
    chunk = Chunk.drawn(lab.job, stage, version=Step(0), device=DEVICE)
    batches = BatchReader(before.batches.dataset, lab.job, [MicrobatchId(0)])
    bench.compute.hold(replace(before, chunks={stage.index: chunk}, batches=batches))
    assert bench.compute.chunk_of(before.job_id, given_up.stage, Step(0)) is given_up
    state = bench.compute.copy_state(before.job_id, StageIndex(0), Step(0))
    assert state is not None
    assert state.keys() == given_up.copy_state().keys(), "both cuts' tensors, and the older has all"
    elsewhere = ChunkRef(stage=StageIndex(1), worker=WorkerId("w9"))
    path = Hops(hops=(ChunkRef(stage=StageIndex(0), worker=bench.worker), elsewhere))
    bench.run(ForwardOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=0, path=path))
    assert bench.compute.chunk_of(before.job_id, given_up.stage, Step(0)) is None


def test_batches_are_read_ahead_in_the_order_in_which_they_begin(text: Path, labs: list[Lab]) -> None:
    asked: list[int] = []

    class Recording(Dataset):
        def train_batch(self, positions: Sequence[int], drawing: Drawing | None = None) -> Batch:
            asked.append(positions[0])
            return super().train_batch(positions, drawing)

    lab = Lab(tiny_job(text, stages=1))
    labs.append(lab)
    opened = open_dataset(lab.job.data, lab.job.model, seed=lab.job.seed)
    dataset = Recording(sources=opened.sources, selection=opened.selection, fingerprint=opened.fingerprint)
    begin = [(0, 2), (0, 0), (1, 2)]
    batches = BatchReader(dataset, lab.job, [MicrobatchId(2), MicrobatchId(0)])
    for step, microbatch in begin:
        batches.batch(Phase.TRAIN, Step(step), MicrobatchId(microbatch))
    batches.close()
    # Each once: what was read ahead is what was asked for next. One more may have begun before the end.
    assert asked[:3] == [positions_of(step, m, lab.job.batch)[0] for step, m in begin]


def test_the_last_samples_to_evaluate_are_those_that_there_are(text: Path) -> None:
    job = tiny_job(text, stages=1)
    dataset = open_dataset(job.data, job.model, seed=job.seed)
    num_samples = dataset.num_validation_samples
    # Two microbatches, the last one short.
    batch = job.batch.model_copy(update={"microbatch_samples": num_samples // 2 + 1})
    asked = EvaluationSpec(samples=2 * num_samples)
    batches = BatchReader(dataset, job.model_copy(update={"batch": batch, "evaluation": asked}), ())
    read = [batches.batch(Phase.EVALUATE, Step(0), MicrobatchId(number)).inputs for number in range(2)]
    assert np.array_equal(np.concatenate(read), dataset.validation_batch(range(num_samples)).inputs)
    batches.close()
