"""An array as a chunk: rounds on a copy, rows that diverge, and what is saved of them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from skein.config.data.coreset import CoresetSpec
from skein.config.job import ArrayJob, BatchSpec
from skein.config.optimizer import AdamWSpec
from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArraySpec
from skein.errors import LocalError, UnfitError
from skein.numeric.compress.compressors import compressor_of
from skein.numeric.gradients import digest, flatten
from skein.plan.plan import Group, Path, Schedule
from skein.protocol.log.records import walker_prefix
from skein.protocol.messages.array_rounds import PARAMETERS_NOT_FINITE, ArrayRound, PassKind
from skein.protocol.messages.directives import GroupResult, Resumption
from skein.protocol.messages.progress import ResumedChunk
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import ApplyOp, Joined, JoinOp, Loss, LossOp
from skein.types import ChunkRef, JobId, MicrobatchId, Own, Precision, StageIndex, StageSpec, Step, WorkerId
from tests.support.device import DEVICE
from tests.support.hands import record
from tests.worker.lab import ATTEMPT
from tests.worker.sweep.trials import NUM_STEPS, array_of, trial
from worker.compute.batches import BatchReader
from worker.compute.holding import Holding
from worker.compute.ops import Compute
from worker.compute.state import FATE, STEP
from worker.data.dataset import open_dataset
from worker.data.labelled import LabelledSamples
from worker.selection.traits import Traits
from worker.sweep.chunk import ArrayChunk

STAGE = StageSpec(index=StageIndex(0), first=0, stop=2)
PATH = Path(hops=(ChunkRef(stage=STAGE.index, worker=WorkerId("w")),))
GROUP = Own(STAGE.index)
WILD = 1e200


class Held:
    """An array at a worker, and what its rounds came to."""

    def __init__(self, job: ArrayJob) -> None:
        self.job = job
        self.chunk = ArrayChunk.drawn_rows(job, STAGE, version=Step(0), device=DEVICE)
        self.batches = BatchReader(
            open_dataset(job.data, job.model, seed=job.seed),
            job,
            [MicrobatchId(m) for m in range(job.batch.num_microbatches)],
        )

    def local_steps(self, *microbatches: int) -> ArrayRound:
        """Local steps of the round in progress; their numbers."""
        parts = []
        for m in microbatches:
            op = LossOp(
                phase=Phase.TRAIN, step=self.chunk.version, microbatch=MicrobatchId(m), hop=0, path=PATH
            )
            array = self.chunk.own_loss(op, self.batches, Traits()).array
            assert array is not None, "a local step tells of rows"
            parts.append(array)
        whole = ArrayRound.together(parts)
        assert whole is not None
        return whole

    def round(self) -> ArrayRound:
        """A round from its beginning to its record."""
        made = self.local_steps(*range(self.job.batch.num_microbatches))
        self.chunk.apply(record(self.chunk.version), {})
        return made


def wild(
    row: int,
    *,
    round_steps: int = 4,
    precision: Precision = Precision.FP64,
    on_divergence: Literal["retire", "rewind"] = "retire",
    rate: float = WILD,
) -> ArrayJob:
    """Four rows of which one has a rate that no job file can have."""
    job = array_of(0, 1, 2, 3)
    spec = AdamWSpec(clip_norm=1.0, warmup_steps=0).model_copy(update={"learning_rate": rate})
    rows = tuple(
        x.model_copy(update={"optimizer": spec}) if at == row else x for at, x in enumerate(job.rows)
    )
    array = ArraySpec.model_construct(**{**dict(job.array), "rows": rows, "on_divergence": on_divergence})
    alone = trial(0).model_copy(update={"precision": precision})
    return array_job(alone, array, round_steps=round_steps)


@pytest.mark.parametrize("precision", Precision)
def test_a_row_that_diverges_is_retired_where_its_round_began_and_no_other_hears_of_it(
    precision: Precision,
) -> None:
    calm, disturbed = (Held(wild(2, precision=precision, rate=rate)) for rate in (1e-2, WILD))
    rounding = 1e-12 if precision is Precision.FP64 else 1e-3
    for _ in range(3):
        one, other = calm.round(), disturbed.round()
        for row in (0, 1, 3):
            # A batch of three products may sum in another order than one of four.
            assert other.rows[row].loss == pytest.approx(one.rows[row].loss, rel=rounding)
            assert other.rows[row].num_tokens == one.rows[row].num_tokens
        assert "not finite" in other.rows[2].retired
        assert other.rows[2].num_updates == 0
    assert calm.chunk.held.buffer.num_updates == [12, 12, 12, 12]
    # The device has no room for who left.
    assert (disturbed.chunk.held.places, disturbed.chunk.held.buffer.num_updates) == ([0, 1, 3], [12, 12, 12])
    assert int(disturbed.chunk.held.state_of(2)[STEP]) == 0
    assert all(torch.isfinite(x).all() for x in disturbed.chunk.state().values())
    if precision is Precision.FP64:
        kept = [0, 1, 3]
        difference = disturbed.chunk.held.buffer.params - calm.chunk.held.buffer.params[kept]
        assert float(difference.abs().max()) < 1e-12


def test_changes_of_rows_are_rounded_to_int8_as_those_of_a_lone_row() -> None:
    int8 = compressor_of("int8")

    def rounded(job: ArrayJob, row: int) -> Tensor:
        """A row's change over three rounds, as it would travel in the blocks of a vector of its own."""
        held = Held(job)
        before = flatten(held.chunk.held.params_of(row))
        for _ in range(3):
            held.round()
        change = flatten(held.chunk.held.params_of(row)) - before
        return int8.decode(int8.encode(change), change.numel(), change.dtype)

    for row in (0, 1, 3):
        told, alone = rounded(wild(2), row), rounded(array_of(row), 0)
        assert told.abs().max() > 1e-3
        assert float((told - alone).abs().max()) <= 1e-12
    assert not rounded(wild(2), 2).any()


@pytest.mark.parametrize("packing", [((0, 1), (2, 3)), ((3, 0, 1), (2,))], ids=str)
def test_rows_whose_round_is_lost_in_its_midst_go_on_in_any_packing(
    packing: tuple[tuple[int, ...], ...],
) -> None:
    calm, killed = Held(array_of(0, 1, 2, 3)), Held(array_of(0, 1, 2, 3))
    killed.round()
    saved = {row: killed.chunk.held.state_of(row) for row in range(4)}
    saved = {row: {name: x.clone() for name, x in state.items()} for row, state in saved.items()}
    killed.local_steps(0, 1)
    del killed
    for _ in range(5):
        calm.round()
    for rows in packing:
        part = Held(array_of(*rows, first_step=4))
        for place, row in enumerate(rows):
            part.chunk.load_row(place, saved[row])
        for _ in range(4):
            made = part.round()
        assert [x.num_updates for x in made.rows] == [NUM_STEPS] * len(rows)
        for place, row in enumerate(rows):
            for name, tensor in calm.chunk.held.state_of(row).items():
                # A batch of one product may sum in another order than a batch of several.
                found = part.chunk.held.state_of(place)[name]
                assert torch.allclose(found, tensor, rtol=1e-12, atol=1e-12), (row, name)


def test_what_the_last_update_of_a_round_spoils_is_never_a_row() -> None:
    held = Held(wild(1, round_steps=1, precision=Precision.FP32))
    made = held.round()
    assert made.rows[1].retired == PARAMETERS_NOT_FINITE
    assert (made.num_alive, made.rows[1].num_updates) == (3, 0)
    assert all(torch.isfinite(x).all() for x in held.chunk.state().values())


def test_a_row_goes_back_once_to_where_its_round_began_and_on_at_half_its_rate() -> None:
    held = Held(wild(2, on_divergence="rewind"))
    before = {name: x.clone() for name, x in held.chunk.held.params_of(2).items()}
    first = held.local_steps(0, 1)
    assert (first.rows[2].num_rewinds, first.rows[2].retired, first.rows[2].num_updates) == (1, "", 0)
    third = held.local_steps(2)
    assert third.rows[2].learning_rate == WILD / 2
    last = held.local_steps(3)
    assert last.rows[2].num_rewinds == 1
    assert "not finite" in last.rows[2].retired
    held.chunk.apply(record(0), {})
    assert all(torch.equal(x, before[name]) for name, x in held.chunk.held.params_of(2).items())
    assert held.chunk.held.state_of(2)[FATE].tolist()[0] == 1


def test_a_round_that_is_begun_anew_comes_to_the_same_to_the_bit() -> None:
    calm, fenced = Held(array_of(0, 1)), Held(array_of(0, 1))
    calm.local_steps(0, 1, 2, 3)
    fenced.local_steps(0, 1, 2)
    fenced.chunk.lay_out((), WorkerId("w"))
    assert torch.equal(fenced.chunk.accumulator(GROUP), Held(array_of(0, 1)).chunk.accumulator(GROUP))
    fenced.local_steps(0, 1)
    assert fenced.chunk.held.buffer.num_updates == [0, 0]
    fenced.local_steps(2, 3)
    assert torch.equal(fenced.chunk.accumulator(GROUP), calm.chunk.accumulator(GROUP))


def test_a_commit_of_a_round_that_was_given_up_is_refused() -> None:
    held = Held(array_of(0, 1))
    held.local_steps(0, 1, 2, 3)
    held.chunk.lay_out((), WorkerId("w"))
    with pytest.raises(LocalError, match="round 0 is committed, and nothing of it is here"):
        held.chunk.apply(record(0), {})
    assert (held.chunk.version, held.chunk.held.buffer.num_updates) == (0, [0, 0])


class Files(LabelledSamples):
    """Samples whose files may be out of reach."""

    is_lost = False

    def read_many(self, samples: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if Files.is_lost:
            raise UnfitError("data", "files", "lost")
        return LabelledSamples.read_many(self, samples)


def test_an_op_that_fails_midway_leaves_nothing_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five steps an op, and two in each block of samples that is read, the next one ahead: of the second op a step or
    # two are made when the files are found lost.
    array = array_of(0, 1, 2, last_step=20).array
    whole = trial(0).model_copy(update={"batch": BatchSpec(samples=512, microbatch_samples=512)})
    job = array_job(whole, array, round_steps=40)
    assert job.array.op_steps == 5
    calm, held = Held(job), Held(job)
    held.chunk.choices = calm.chunk.choices
    (source,) = held.batches.dataset.sources
    assert isinstance(source, LabelledSamples)
    files = Files(samples=source.samples, labels=source.labels, digest=source.digest)
    held.batches.dataset = replace(held.batches.dataset, sources=(files,))
    held.local_steps(0)
    with monkeypatch.context() as patched:
        patched.setattr(Files, "is_lost", True)
        with pytest.raises(UnfitError, match="lost"):
            held.local_steps(1)
    first, second = calm.local_steps(0), held.local_steps(1)
    assert second.rows == calm.local_steps(1).rows != first.rows
    assert [row.num_tokens for row in second.rows] == [5 * 512] * 3
    assert held.local_steps(2, 3).rows == calm.local_steps(2, 3).rows
    assert torch.equal(held.chunk.accumulator(GROUP), calm.chunk.accumulator(GROUP))


def test_rows_with_their_fates_go_on_from_what_was_saved() -> None:
    held, other = Held(wild(2)), Held(wild(2))
    held.round()
    params, rest = held.chunk.copy_for_checkpoint()
    for row in range(4):
        prefix, all_tensors = walker_prefix(row), {**params, **rest}
        own = {name: all_tensors[f"{prefix}{name}"] for name in held.chunk.held.state_of(row)}
        other.chunk.load_row(row, own)
    assert other.chunk.held.going() == [0, 1, 3]
    moved = Held(wild(2))
    moved.chunk.load_state(held.chunk.copy_state(), version=Step(1))
    for found in (other, moved):
        found.chunk.version = Step(1)
        assert held.chunk.held.buffer.num_updates == found.chunk.held.buffer.num_updates
        assert found.round().rows[2].retired == held.chunk.held.numbers[2].retired
    held.round()
    assert torch.equal(held.chunk.accumulator(GROUP), moved.chunk.accumulator(GROUP))
    back = Held(wild(2)).chunk.copy_state()
    moved.chunk.load_state(back, version=Step(0))
    assert moved.chunk.held.going() == [0, 1, 2, 3]
    assert all(torch.equal(x.cpu(), back[name].cpu()) for name, x in moved.chunk.state().items())
    lacking = {name: x for name, x in held.chunk.held.state_of(0).items() if name != STEP}
    with pytest.raises(LocalError, match=f"row 0: {STEP} should be"):
        other.chunk.load_row(0, lacking)


def test_rows_make_no_step_beyond_their_last() -> None:
    held = Held(array_of(0, 1, last_step=6))
    counts = [held.round().rows[0].num_updates for _ in range(3)]
    assert counts == [4, 6, 6]
    assert replace(held.chunk.held.numbers[0], num_tokens=0).num_updates == 6


def test_rows_come_to_the_same_in_rounds_of_any_length() -> None:
    many, few = Held(array_of(0, 1, round_steps=1)), Held(array_of(0, 1, round_steps=16))
    assert few.job.array.op_steps == 2
    for _ in range(20):
        many.round()
    rounds = [few.round() for _ in range(2)]
    assert [x.num_local_steps for x in rounds] == [16, 4]
    assert [x.rows[1].num_updates for x in rounds] == [16, 20]
    assert rounds[0].rows[0].num_tokens == 16 * few.job.step_batch.samples
    assert torch.equal(many.chunk.accumulator(GROUP), few.chunk.accumulator(GROUP))


@pytest.mark.parametrize("num_rows", [1, 2])
def test_rows_that_diverge_are_not_at_fault_where_their_samples_are_not_finite(num_rows: int) -> None:
    held = Held(array_of(*range(num_rows)))
    (source,) = held.batches.dataset.sources
    assert isinstance(source, LabelledSamples)
    spoilt = replace(source, samples=source.samples * math.nan)
    held.batches.dataset = replace(held.batches.dataset, sources=(spoilt,))
    with pytest.raises(UnfitError, match="samples that are not finite"):
        held.local_steps(0)


def test_rows_that_all_diverge_of_themselves_are_retired() -> None:
    job = wild(0)
    rows = tuple(x.model_copy(update={"optimizer": job.rows[0].optimizer}) for x in job.rows)
    held = Held(job.model_copy(update={"array": job.array.model_copy(update={"rows": rows})}))
    assert held.round().num_alive == 0


@pytest.mark.parametrize("kind", [PassKind.FUSED, PassKind.LOOPED])
def test_rows_of_a_coreset_weigh_their_samples_as_a_trials_own_job(kind: PassKind) -> None:
    job = array_of(0, 1)
    coreset = CoresetSpec(method="random", fraction=0.2)
    data = job.data.model_copy(update={"coreset": coreset})
    fuse = "never" if kind is PassKind.LOOPED else "always"
    held = Held(job.model_copy(update={"data": data, "array": job.array.model_copy(update={"fuse": fuse})}))
    first = held.local_steps(0).rows[0]
    alone = trial(0).model_copy(update={"data": data})
    batch = open_dataset(alone.data, alone.model, seed=alone.seed, batch=alone.batch).train_batch(range(16))
    assert batch.weights is not None
    module = Held(array_of(0)).chunk.module
    samples = (torch.from_numpy(x).to(DEVICE) for x in (batch.inputs, batch.labels, batch.weights))
    loss, num_valid = module.loss(*samples)
    assert first.loss == pytest.approx(loss.item() / num_valid, rel=1e-12)


@pytest.mark.parametrize("ledger", [(0, 1), ()], ids=["goes on", "begins anew"])
def test_a_worker_that_is_fenced_goes_on_in_the_midst_of_a_round(ledger: tuple[int, ...]) -> None:
    calm, held = Held(array_of(0, 1)), Held(array_of(0, 1))
    calm.local_steps(0, 1, 2, 3)
    compute = Compute(DEVICE)
    holding = Holding(
        job_id=JobId("j1"),
        job=held.job,
        worker=WorkerId("w"),
        chunks={STAGE.index: held.chunk},
        groups=(Group(group=GROUP, members=PATH.hops, num_shards=1),),
        batches=held.batches,
        resumption=None,
    )
    compute.hold(holding)
    done = [compute.run(_op(m), {}).outcome for m in (0, 1)]
    kept = ResumedChunk(stage=STAGE.index, ledger=tuple(MicrobatchId(m) for m in ledger), forwards=())
    resumption = Resumption(
        step=Step(0), schedule=Schedule(worker=WorkerId("w"), ops=()), chunks=(kept,), origins=(), repeats=()
    )
    compute.hold(replace(holding, resumption=resumption))
    done += [compute.run(_op(m), {}).outcome for m in range(len(ledger), 4)]
    group = holding.groups[0]
    joined = compute.run(JoinOp(step=Step(0), group=group, attempt=ATTEMPT), {}).outcome
    assert isinstance(joined, Joined)
    assert joined.digest == digest(calm.chunk.accumulator(GROUP))
    assert all(isinstance(x, Loss) for x in done)
    result = GroupResult(
        group=GROUP, attempt=ATTEMPT, digest=joined.digest, squared_norm=0.0, weight=1.0, num_tokens=1
    )
    compute.run(ApplyOp(record=replace(record(0), results=(result,))), {})
    assert held.chunk.held.buffer.num_updates == [4, 4]
    compute.forget()


def _op(m: int) -> LossOp:
    return LossOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(m), hop=0, path=PATH)
