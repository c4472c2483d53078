"""Tensors of exchanges by a rule are looked at before an op has them: what does not fit is its sender's fault."""

from dataclasses import replace

import pytest
import torch

from skein.config.aggregation import AggregationSpec, DiLoCo, OneBitAdam
from skein.config.job import JobSpec, ParallelSpec
from skein.config.rule import Reach
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.rows import VocabularySpec, VocabularySplit
from skein.plan.agreeing.exchange import Row
from skein.plan.cut import cut_job
from skein.plan.plan import Group, Path
from skein.protocol.messages.directives import ExchangeTerms
from skein.protocol.messages.tensors import Phase, ShardKind, ShardTensor
from skein.protocol.worker.ops import JoinOp, LossOp, PackOp, SumOp
from skein.types import ChunkRef, MicrobatchId, StageIndex, StageSpec, Step, WorkerId, parse_group
from tests.support.device import DEVICE
from tests.support.jobs import small_job
from tests.support.reports import attempt
from worker.bundle import Bundle, WireTensor
from worker.compute.chunk import Chunk
from worker.compute.exchanging import Exchanging
from worker.compute.operands import OperandError, check_operands
from worker.compute.payload import choices_name, pack
from worker.compute.visits.left import Left
from worker.telling.aggregating import Gauges

STAGE = StageIndex(0)
STEP = Step(2)
"""After the warm-up."""
ME, PEER = (ChunkRef(stage=STAGE, worker=WorkerId(name)) for name in ("me", "peer"))
RULES: dict[str, AggregationSpec] = {
    "diloco": DiLoCo(rule="diloco", local_steps=1, wire="int4"),
    "one_bit_adam": OneBitAdam(rule="one_bit_adam", warmup_steps=2),
}


def group(rule: AggregationSpec) -> Group:
    name = "x0.f0" if isinstance(rule, DiLoCo) else "x0"
    both = Row(members=(0, 1), weights=(0.5, 0.5))
    return Group(group=parse_group(name), members=(ME, PEER), num_shards=1, weights=(both,))


def key(kind: ShardKind, rule: AggregationSpec) -> ShardTensor:
    """Of what the peer sends."""
    return ShardTensor(kind=kind, step=STEP, group=group(rule).group, attempt=attempt(), shard=0, member=PEER)


class Member:
    """A worker that has packed its own part of an exchange of two."""

    def __init__(self, rule: AggregationSpec) -> None:
        self.rule = rule
        self.terms = ExchangeTerms(
            reach=Reach.ALL, learning_rate=0.1, scales=(1.0, 1.0), due_step=STEP, num_steps=9
        )
        job: JobSpec = small_job(stages=1).model_copy(update={"aggregation": rule})
        stage = StageSpec(index=STAGE, first=0, stop=len(job.layers))
        self.chunk = Chunk.drawn(job, stage, version=STEP, device=DEVICE)
        self.chunk.lay_out((), ME.worker)
        self.exchanging = Exchanging(job, ME.worker, Gauges())
        op = PackOp(
            step=STEP,
            group=group(rule),
            attempt=attempt(),
            stages=(STAGE,),
            parcels=(),
            exchange=self.terms,
        )
        self.sent = self.exchanging.pack(op, self.chunk)[0]
        self.part = pack(self.sent)

    def look_at(self, kind: ShardKind, bundle: Bundle) -> None:
        of_peer = key(kind, self.rule)
        about = {"step": STEP, "group": group(self.rule), "attempt": attempt(), "exchange": self.terms}
        total = replace(of_peer, kind=ShardKind.RESULT, member=ME)
        op = (
            SumOp(**about, parts=(of_peer,), shard=0, total=total, to=(PEER.worker,))  # type: ignore[arg-type]
            if kind is ShardKind.PART
            else JoinOp(**about, results=(of_peer,))  # type: ignore[arg-type]
        )
        check_operands(op, {of_peer: bundle}, {STAGE: self.chunk}, {}, self.exchanging)

    def result(self) -> Bundle:
        """What an honest owner makes of two equal parts."""
        op = SumOp(
            step=STEP,
            group=group(self.rule),
            attempt=attempt(),
            shard=0,
            parts=(),
            total=replace(key(ShardKind.RESULT, self.rule), member=ME),
            to=(PEER.worker,),
            exchange=self.terms,
        )
        return pack(self.exchanging.combine(op, self.chunk, [self.sent, self.sent]))


def test_a_stage_of_a_sparse_model_looks_at_how_many_tokens_are_valid() -> None:
    shape = MixtralShape(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    job = small_job(stages=2).model_copy(update={"model": MixtralModel(shape=shape)})
    *_, last = cut_job(job)
    chunk = Chunk.drawn(job, last, version=STEP, device=DEVICE)
    hops = tuple(ChunkRef(stage=StageIndex(i), worker=WorkerId(f"w{i}")) for i in range(last.index + 1))
    training = LossOp(
        phase=Phase.TRAIN,
        step=STEP,
        microbatch=MicrobatchId(0),
        hop=last.index,
        path=Path(hops=hops),
    )
    hidden = torch.zeros(2, 4, 8)

    def look_at(op: LossOp, **tensors: torch.Tensor) -> None:
        assert op.operand is not None
        bundle = pack({"x": hidden} | tensors)
        check_operands(
            op, {op.operand: bundle}, {last.index: chunk}, {}, Exchanging(job, ME.worker, Gauges())
        )

    eight = torch.tensor(8)
    for num_valid in (0, 8):
        look_at(training, valid=torch.tensor(num_valid))
    # Of 8 tokens 2 choices each: of one block here, and of one or both before.
    chosen = torch.full((1, 8, 2), 7, dtype=torch.uint8)
    look_at(training, valid=eight, choices=torch.cat([chosen, chosen]), repeated=chosen)
    evaluating = replace(training, phase=Phase.EVALUATE)
    look_at(evaluating)
    for op, strange, told in (
        (training, {}, r"give with it 'valid' of shape \[\]"),
        (training, {"valid": torch.tensor([8])}, r"give with it 'valid' of shape \[\]"),
        (training, {"valid": torch.tensor(8.0)}, r"give with it 'valid' of shape \[\]"),
        (training, {"valid": torch.tensor(9)}, "'valid' is 9: give at most 8, which is all of it"),
        (training, {"valid": torch.tensor(-1)}, "'valid' is -1: give at most 8"),
        (evaluating, {"valid": torch.tensor(8)}, "give with it labels alone"),
        (training, {"valid": eight, "repeated": chosen + 1}, r"choices of experts: .*each at most 7"),
        (training, {"valid": eight, "choices": chosen + 1}, r"choices of experts: .*each at most 7"),
        (
            training,
            {"valid": eight, "repeated": chosen.int()},
            r"choices of experts: .*give layers of shape \[8, 2\]",
        ),
        (
            training,
            {"valid": eight, "repeated": torch.cat([chosen, chosen])},
            r"choices of experts: .*\[2, 8, 2\]",
        ),
        (training, {"valid": eight, "choices": chosen[:, :7]}, r"choices of experts: .*\[1, 7, 2\]"),
        (
            training,
            {"valid": eight, "choices": torch.cat([chosen] * 3)},
            r"choices of experts: .*\[3, 8, 2\]",
        ),
        (evaluating, {"choices": chosen}, "choices of experts: .*give none"),
    ):
        with pytest.raises(OperandError, match=told) as caught:
            look_at(op, **strange)
        assert caught.value.sender == hops[-2].worker


def without_last(tensor: WireTensor) -> WireTensor:
    """The same, one element shorter."""
    size = len(tensor.data) // tensor.shape[0]
    return replace(tensor, shape=(tensor.shape[0] - 1,), data=tensor.data[: len(tensor.data) - size])


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_what_an_honest_peer_sends_in_an_exchange_is_used(rule: AggregationSpec) -> None:
    member = Member(rule)
    member.look_at(ShardKind.PART, member.part)
    member.look_at(ShardKind.RESULT, member.result())


@pytest.mark.parametrize("kind", [ShardKind.PART, ShardKind.RESULT])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_what_does_not_fit_an_exchange_is_its_senders_fault(rule: AggregationSpec, kind: ShardKind) -> None:
    member = Member(rule)
    good = member.part if kind is ShardKind.PART else member.result()
    first, *rest = good
    floats = WireTensor(name=first.name, dtype=rest[0].dtype, shape=first.shape, data=first.data)
    for strange in (
        (),
        tuple(rest),
        (*good, first),
        (*good, replace(first, name="another")),
        (replace(first, name="another"), *rest),
        (without_last(first), *rest),
        (replace(first, shape=(1, *first.shape)), *rest),
        (floats, *rest),
    ):
        with pytest.raises(OperandError, match=r"give '(codes|bits)'") as caught:
            member.look_at(kind, strange)
        assert caught.value.sender == PEER.worker


def test_weights_that_do_not_fit_their_samples_are_refused() -> None:
    job = small_job(stages=2)
    last = cut_job(job)[-1]
    chunk = Chunk.drawn(job, last, version=STEP, device=DEVICE)
    hops = tuple(ChunkRef(stage=StageIndex(i), worker=WorkerId(f"w{i}")) for i in range(last.index + 1))
    op = LossOp(
        phase=Phase.TRAIN, step=STEP, microbatch=MicrobatchId(0), hop=last.index, path=Path(hops=hops)
    )
    (operand,) = filter(None, [op.operand])

    def look_at(weights: torch.Tensor) -> None:
        tensors = {"x": torch.zeros(3, 4, 8), "labels": torch.zeros(3, 4).long(), "weights": weights}
        check_operands(
            op, {operand: pack(tensors)}, {last.index: chunk}, {}, Exchanging(job, ME.worker, Gauges())
        )

    look_at(torch.ones(3))
    for strange in (torch.ones(2), torch.ones(3, 4), torch.ones(3).long()):
        with pytest.raises(
            OperandError, match=r"give 'weights' of shape \[3\], of floats, or none"
        ) as caught:
            look_at(strange)
        assert caught.value.sender == hops[-2].worker


def test_shards_of_a_vocabulary_look_at_what_the_shard_before_passes_on() -> None:
    parallel = ParallelSpec(stages=2, vocabulary=VocabularySpec(split=VocabularySplit.OUTPUT))
    shape = LlamaShape(
        vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    changed = small_job(stages=2).model_copy(update={"parallel": parallel, "model": LlamaModel(shape=shape)})
    job = JobSpec.model_validate(changed.model_dump(mode="json"))
    *_, last = cut_job(job)
    chunk = Chunk.drawn(job, last, version=STEP, device=DEVICE)
    hops = tuple(ChunkRef(stage=StageIndex(i), worker=WorkerId(f"w{i}")) for i in range(last.index + 1))
    op = LossOp(
        phase=Phase.TRAIN,
        step=STEP,
        microbatch=MicrobatchId(0),
        hop=last.index,
        path=Path(hops=hops),
    )
    (operand,) = filter(None, [op.operand])
    hidden, scores = torch.zeros(1, 4, 8), torch.zeros(1, 4, 2)

    def look_at(**tensors: torch.Tensor) -> None:
        check_operands(
            op, {operand: pack(tensors)}, {last.index: chunk}, {}, Exchanging(job, ME.worker, Gauges())
        )

    look_at(x=hidden, scores=scores)
    for strange in (
        {},
        {"scores": scores[:, :3]},
        {"scores": scores.long()},
        {"scores": scores, "tokens": scores},
    ):
        with pytest.raises(OperandError, match=r"give with it 'scores' of shape \[1, 4, 2\]") as caught:
            look_at(x=hidden, **strange)
        assert caught.value.sender == hops[-2].worker


def test_of_choices_that_holders_tell_what_can_be_is_noted() -> None:
    shape = MixtralShape(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    job = small_job(stages=2, microbatches=2).model_copy(update={"model": MixtralModel(shape=shape)})
    stage = cut_job(job)[0]
    form = job.model.choices_of(job.microbatch_tokens)
    assert form is not None
    chosen = torch.zeros(job.model.num_blocks_in(stage), *form.shape).to(torch.uint8)
    left = Left(Gauges())
    first, last, beyond = (choices_name(MicrobatchId(m)) for m in (0, 1, 2))
    wrong = {first: chosen[:, :1], last: torch.full_like(chosen, form.most + 1)}
    for part in (wrong, {first: chosen, beyond: chosen, "shard": torch.zeros(4)}, {first: chosen + 1}):
        left.hear_routed(STEP, stage, job, part)
    assert list(left.routed) == [(STEP, MicrobatchId(0), stage.index)]
    assert torch.equal(left.routed[STEP, MicrobatchId(0), stage.index], chosen)
