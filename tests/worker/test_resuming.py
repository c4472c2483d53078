"""Gradients of a step that was stopped and went on, against those of the step that nobody disturbed."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path as FilePath

import pytest
import torch
from torch import Tensor

from skein.plan.ops import OpKind
from skein.plan.order import PlacedOp
from skein.plan.paths import split_at
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.resuming import resume
from skein.protocol.messages.directives import Resumption
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.keeping.desk import operand_keys
from skein.protocol.worker.ops import COMPUTE_OPS, HopKey, Loss, TensorKey, VisitOp, hop_key
from skein.types import ChunkRef, Layout, Precision, Step, WorkerId
from tests.support.extent import part
from tests.support.halfway import Halfway, num_ops, slots_of, visits
from tests.support.plans import plan_of
from tests.support.resent import op_of
from tests.worker.lab import GENERATION, Lab, tiny_job
from worker.boundary import BoundaryLog
from worker.compute.payload import Payload, pack

START = Step(0)
Sums = dict[ChunkRef, dict[str, Tensor]]


class Stoppable:
    """A lab whose workers keep a boundary log, and take their operands from it as a worker's driver does."""

    def __init__(self, lab: Lab, *, is_split: bool = False) -> None:
        self.lab = lab
        arrangement = lab.arrangement
        stages = [x.index for x in arrangement.stages if is_split]
        paths = split_at(arrangement.paths, stages)
        drawn = plan_of(arrangement.chunks, paths, layout=lab.job.parallel.layout)
        self.plan = replace(drawn, stages=arrangement.stages, groups=arrangement.groups)

    def begin(self, luck: random.Random) -> None:
        """A step from its beginning, whatever was before."""
        self._present = self.plan
        self.halfway = Halfway(slots_of(self.plan), luck)
        self.logs = {worker: BoundaryLog() for worker in self.lab.benches}
        self.losses: dict[int, Loss] = {}
        self._hold({})

    def _hold(self, resumptions: dict[WorkerId, Resumption]) -> None:
        for worker, bench in self.lab.benches.items():
            bench.desk.forget()
            bench.hold(resumptions.get(worker))

    def run(self, most: int | None = None) -> None:
        """So many ops of the plan's own schedules, or all."""
        self.halfway.run(self.plan.paths, self.plan.schedules, slots_of(self.plan), most=most)
        for placed in self.halfway.ran:
            self._compute(placed, self.plan)

    def go_on(self, most: int | None = None) -> None:
        """What is left after a stop, by what the survivors tell; so many ops of it, or all."""
        found = resume(self._present, self.halfway.acks(self.plan), version=START)
        assert found is not None
        self._hold(dict(found.resumptions))
        for worker, told in found.resumptions.items():
            for kept in told.chunks:
                at = ChunkRef(stage=kept.stage, worker=worker)
                assert kept.ledger in ((), tuple(self.halfway.chunks[at].ledger))
                self.halfway.chunks[at].ledger = list(kept.ledger)
        self.halfway.keep(
            {
                (m, chunk.stage, kept)
                for told in found.resumptions.values()
                for chunk in told.chunks
                for kept, m in chunk.held
            }
        )
        repeats = [(worker, header) for worker, told in found.resumptions.items() for header in told.repeats]
        for worker, header in repeats:
            self._send_again(worker, header)
        num_ran = len(self.halfway.ran)
        stuck = self.halfway.run(
            found.plan.paths,
            [told.schedule for told in found.resumptions.values()],
            slots_of(found.plan),
            given=[op_of(header) for _, header in repeats],
            most=most,
        )
        assert most is not None or not stuck
        self._present = found.plan
        for placed in self.halfway.ran[num_ran:]:
            self._compute(placed, found.plan)
        assert most is not None or self.halfway.ledger().keys() == visits(self.plan)

    def _send_again(self, worker: WorkerId, header: HopTensor) -> None:
        bundle = self.logs[worker].get(hop_key(header))
        assert bundle is not None
        to = header.path.hops[header.hop].worker
        if to != worker:
            self.lab.benches[to].desk.file(GENERATION, hop_key(header), bundle)

    def _compute(self, placed: PlacedOp, plan: Plan) -> None:
        bench, path = self.lab.benches[placed.chunk.worker], plan.paths[placed.op.microbatch]
        op = compute_op(placed, plan)
        operands: dict[TensorKey, Payload] = {}
        for key in operand_keys(op):
            assert isinstance(key, HopKey)
            found = bench.desk.drop(GENERATION, key)
            payload = self.logs[bench.worker].get(key) if found is None else found
            assert payload is not None, f"{bench.worker} lacks {key}"
            operands[key] = payload
        done = bench.compute.run(op, operands)
        if isinstance(done.outcome, Loss):
            self.losses[placed.op.microbatch] = done.outcome
        for key, made in done.outputs.items():
            assert isinstance(key, HopKey)
            bundle = made if isinstance(made, tuple) else pack(made)
            self.logs[bench.worker].put(key, bundle)
            to = path.hops[key.hop].worker
            self.lab.benches[to].desk.file(GENERATION, key, made if to == bench.worker else bundle)
        for key, more in done.added.items():
            self.logs[bench.worker].add(key, more)

    def sums(self) -> Sums:
        """Copies of what each living chunk has accumulated."""
        found: Sums = {}
        for at in self.halfway.chunks:
            chunk = self.lab.benches[at.worker].holding.chunks[at.stage]
            found[at] = {name: grad_of(parameter).clone() for name, parameter in chunk.params.items()}
        return found

    def ledgers(self) -> dict[ChunkRef, list[int]]:
        return {at: list(x.ledger) for at, x in self.halfway.chunks.items()}


def grad_of(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def compute_op(placed: PlacedOp, plan: Plan) -> VisitOp:
    microbatch, path = placed.op.microbatch, plan.paths[placed.op.microbatch]
    return COMPUTE_OPS[placed.op.kind](
        phase=Phase.TRAIN, step=START, microbatch=microbatch, hop=placed.hop, path=path
    )


Built = Callable[..., Stoppable]
CASES = part([*product(Layout, (Precision.FP64, Precision.FP32))], every=3)
"""Each layout and each precision once, or all."""


@pytest.fixture
def built(text: FilePath, labs: list[Lab]) -> Built:
    """Makes stoppable labs of tiny jobs."""

    def make(
        *,
        layout: Layout = Layout.LINE,
        precision: Precision = Precision.FP64,
        replicas: int = 1,
        stages: int = 2,
        is_split: bool = False,
    ) -> Stoppable:
        job = tiny_job(text, stages=stages, replicas=replicas, layout=layout, precision=precision)
        labs.append(Lab(job))
        return Stoppable(labs[-1], is_split=is_split)

    return make


def undisturbed(stoppable: Stoppable) -> tuple[Sums, dict[int, Loss]]:
    stoppable.begin(random.Random(0))
    stoppable.run()
    return stoppable.sums(), stoppable.losses


def assert_same_bits(found: Sums, wanted: Sums, about: str) -> None:
    assert found.keys() == wanted.keys()
    for at, sums in wanted.items():
        for name, tensor in sums.items():
            assert torch.equal(found[at][name], tensor), f"{about}: {at} {name}"


def assert_near(found: Sums, wanted: Sums, precision: Precision, about: str) -> None:
    """Sums over all holders of a stage: four microbatches in another order, each term rounded once more at most."""
    # A few units in the last place of the largest element, whatever the cancellation in a small one.
    margin = {Precision.FP64: 1e-14, Precision.FP32: 1e-5}[precision]
    for stage in sorted({at.stage for at in wanted}):
        there = [sums for at, sums in wanted.items() if at.stage == stage]
        here = [sums for at, sums in found.items() if at.stage == stage]
        for name in there[0]:
            expected = sum((sums[name] for sums in there), torch.zeros(()))
            total = sum((sums[name] for sums in here), torch.zeros(()))
            difference = (total - expected).abs().max().item()
            assert difference <= margin * expected.abs().max().item(), f"{about}: stage {stage} {name}"


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_a_step_that_is_stopped_after_any_op_and_goes_on_has_the_same_sums_to_the_bit(
    built: Built, layout: Layout, precision: Precision
) -> None:
    stoppable = built(layout=layout, precision=precision)
    wanted, losses = undisturbed(stoppable)
    ledgers = stoppable.ledgers()
    for most in part(range(num_ops(stoppable.plan) + 1), every=3):
        stoppable.begin(random.Random(most))
        stoppable.run(most)
        stoppable.go_on()
        assert stoppable.ledgers() == ledgers, "the order of summation is another"
        assert_same_bits(stoppable.sums(), wanted, f"stopped after {most} ops")
        assert stoppable.losses == losses


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_whoever_dies_after_any_op_the_sums_of_each_stage_stay_equal_to_rounding(
    built: Built, layout: Layout, precision: Precision
) -> None:
    stoppable = built(layout=layout, precision=precision, replicas=2)
    wanted, losses = undisturbed(stoppable)
    workers = stoppable.plan.workers
    for most in part(range(num_ops(stoppable.plan) + 1), every=3):
        dead = workers[most % len(workers)]
        stoppable.begin(random.Random(most))
        stoppable.run(most)
        stoppable.halfway.lose([dead])
        stoppable.go_on()
        assert_near(stoppable.sums(), wanted, precision, f"{dead} died after {most} ops")
        # Each loss is computed on equal inputs, wherever that is.
        assert stoppable.losses == losses


@pytest.mark.parametrize(
    ("layout", "stage"),
    part([(Layout.LOOP, 0), (Layout.LINE, 0), (Layout.LINE, 1), (Layout.LOOP, 2)], every=2),
)
def test_a_chunk_whose_ledger_is_dropped_starts_at_zero_and_ends_at_the_same_bits(
    built: Built, layout: Layout, stage: int
) -> None:
    """Where the head of a loop is spoilt, the labels of paths that began here are read again."""
    stoppable = built(layout=layout, precision=Precision.FP32)
    wanted, losses = undisturbed(stoppable)
    ledgers = stoppable.ledgers()
    num_spoilt = 0
    for most in part(range(num_ops(stoppable.plan) + 1), every=3):
        stoppable.begin(random.Random(most))
        stoppable.run(most)
        [spoilt] = [at for at in stoppable.halfway.chunks if at.stage == stage]
        num_spoilt += bool(stoppable.halfway.chunks[spoilt].ledger)
        stoppable.halfway.chunks[spoilt].ledger.clear()
        for parameter in stoppable.lab.chunk(stage).params.values():
            grad_of(parameter).fill_(torch.nan)
        stoppable.go_on()
        if stoppable.ledgers() == ledgers:
            assert_same_bits(stoppable.sums(), wanted, f"spoilt after {most} ops")
        else:
            assert_near(stoppable.sums(), wanted, Precision.FP32, f"spoilt after {most} ops")
        assert stoppable.losses == losses
    assert num_spoilt > 3


@pytest.mark.parametrize(("layout", "precision"), CASES)
def test_split_backwards_have_the_sums_of_whole_ones_wherever_they_are_stopped(
    built: Built, layout: Layout, precision: Precision
) -> None:
    """To the bit where they are added in the same order: what is put aside is added before what is to come again."""
    whole = built(layout=layout, precision=precision, stages=4)
    wanted, losses = undisturbed(whole)
    stoppable = built(layout=layout, precision=precision, stages=4, is_split=True)
    kinds = {op.kind for schedule in stoppable.plan.schedules for op in schedule.ops}
    assert kinds >= {OpKind.INPUT, OpKind.WEIGHT}
    num_between, num_same = 0, 0
    for most in part(range(num_ops(stoppable.plan) + 1), every=6):
        stoppable.begin(random.Random(most))
        stoppable.run(most)
        num_between += any(x.pending for x in stoppable.halfway.chunks.values())
        stoppable.go_on()
        about = f"stopped after {most} ops"
        if stoppable.ledgers() == whole.ledgers():
            num_same += 1
            assert_same_bits(stoppable.sums(), wanted, about)
        assert_near(stoppable.sums(), wanted, precision, about)
        assert stoppable.losses == losses
    assert num_between > 1
    assert num_same > 1


def test_whoever_dies_between_the_ops_of_a_split_backward_nothing_counts_twice_or_by_half(
    built: Built,
) -> None:
    stoppable = built(precision=Precision.FP64, replicas=2, stages=3, is_split=True)
    wanted, losses = undisturbed(stoppable)
    num_lost = 0
    for most in part(range(num_ops(stoppable.plan) + 1), every=4):
        stoppable.begin(random.Random(most))
        stoppable.run(most)
        holding = [at.worker for at, x in stoppable.halfway.chunks.items() if x.pending]
        num_lost += bool(holding)
        dead = (holding or stoppable.plan.workers)[0]
        stoppable.halfway.lose([dead])
        stoppable.go_on()
        assert_near(stoppable.sums(), wanted, Precision.FP64, f"{dead} died after {most} ops")
        assert stoppable.losses == losses
    assert num_lost > 1


def test_a_step_that_is_stopped_again_and_again_has_the_same_sums(built: Built) -> None:
    stoppable = built(replicas=2, layout=Layout.LOOP)
    wanted, losses = undisturbed(stoppable)
    for seed in part(range(10), every=2):
        luck = random.Random(seed)
        stoppable.begin(luck)
        stoppable.run(luck.randint(1, num_ops(stoppable.plan)))
        stoppable.halfway.lose([luck.choice(stoppable.plan.workers)])
        for _ in range(3):
            stoppable.go_on(luck.randint(0, 8))
        stoppable.go_on()
        assert_near(stoppable.sums(), wanted, Precision.FP64, f"seed {seed}")
        assert stoppable.losses == losses


def test_what_no_generation_keeps_is_gone(built: Built) -> None:
    stoppable = built()
    stoppable.begin(random.Random(0))
    stoppable.run(9)
    assert any(tensor.any() for sums in stoppable.sums().values() for tensor in sums.values())
    stoppable.begin(random.Random(0))
    assert not any(tensor.any() for sums in stoppable.sums().values() for tensor in sums.values())
