"""Memory that a job is planned with: what each rule says of itself, what it holds, and which jobs are refused."""

import pytest
import torch

from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam, OneBitLamb
from skein.config.job import JobSpec
from skein.config.optimizer import AdadeltaSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.config.robust import CentredClip, Krum, NormClip
from skein.numeric.aggregate.rules import rule_of
from skein.plan.balanced import make_balanced_plan
from skein.plan.check import violations
from skein.plan.load import stage_loads
from skein.plan.plan import Infeasible, Plan
from skein.types import StageIndex, StageSpec
from tests.plan.builders import fleet, job

ADAM, LAMB = AdamWSpec(), LambSpec(name="lamb")
SGD, PLAIN_SGD = SgdSpec(name="sgd"), SgdSpec(name="sgd", momentum=0.0)
REPLICAS = 4
RULES: tuple[tuple[AggregationSpec, OptimizerSpec, float], ...] = (
    (AllReduce(), ADAM, 0),
    (AllReduce(), AdadeltaSpec(name="adadelta"), 0),
    (AllReduce(), SGD, 0),
    (AllReduce(), PLAIN_SGD, 0),
    (AllReduce(wire="bf16"), LAMB, 1),
    (AllReduce(wire="int8"), ADAM, 1),
    (AllReduce(robust=NormClip(kind="median_norm_clip")), ADAM, 0),
    (OneBitAdam(rule="one_bit_adam"), ADAM, 1),
    (OneBitLamb(rule="one_bit_lamb"), LAMB, 1),
    (Lsgd(rule="lsgd"), ADAM, 0),
    (Gossip(rule="gossip"), SGD, 0),
    (Gossip(rule="gossip", method="dsgd"), PLAIN_SGD, 0),
    (Gossip(rule="gossip"), ADAM, 0),
    (Gossip(rule="gossip", method="da_dmsgd"), LAMB, 0),
    (DiLoCo(rule="diloco"), ADAM, 1),
    (DiLoCo(rule="diloco", wire="fp32"), ADAM, 0),
    (DiLoCo(rule="diloco", error_feedback=False), ADAM, 0),
    (DiLoCo(rule="diloco", robust=CentredClip(kind="centred_clip")), SGD, 1),
)


def job_by(rule: AggregationSpec, optimizer: OptimizerSpec = ADAM, *, replicas: int = REPLICAS) -> JobSpec:
    """A job by a rule, which is not asked whether it suits the job."""
    spec = job(stages=1, replicas=replicas)
    return spec.model_copy(update={"aggregation": rule, "optimizer": optimizer})


def bytes_of(spec: JobSpec) -> int:
    """Memory of the whole model with one microbatch."""
    stage = StageSpec(index=StageIndex(0), first=0, stop=len(spec.layers))
    (load,) = stage_loads(spec, [stage])
    return load.memory_bytes(1)


@pytest.mark.parametrize(
    ("rule", "optimizer", "num_owned"), RULES, ids=lambda x: getattr(x, "rule", getattr(x, "name", None))
)
def test_a_rule_says_what_its_walkers_keep(
    rule: AggregationSpec, optimizer: OptimizerSpec, num_owned: float
) -> None:
    """What owners of shards keep comes with the first exchange: the walker's length, shared among all members."""
    params = {"w": torch.zeros(64, 32), "b": torch.zeros(32)}
    state = rule_of(rule, optimizer).init(params)
    num_elements = sum(x.numel() for x in params.values())
    kept = sum(x.numel() for tensors in state.values() for x in tensors.values() if x.ndim) / num_elements
    assert rule.held(job_by(rule, optimizer)).state == pytest.approx(kept + num_owned / REPLICAS)


def test_an_exchange_takes_a_copy_of_all_that_a_walker_has() -> None:
    plain, rounded = (job_by(AllReduce(wire=wire)) for wire in ("fp32", "bf16"))
    held = rounded.aggregation.held(rounded)
    assert held.exchange > 1 + held.state
    assert plain.aggregation.held(plain).exchange < held.exchange


def test_an_owner_that_must_see_whole_vectors_holds_one_of_each_member() -> None:
    krum = AllReduce(robust=Krum(kind="krum"))
    few, many = (krum.held(job_by(krum, replicas=replicas)).exchange for replicas in (5, 9))
    assert many - few == 4


@pytest.mark.parametrize(
    "rule", [AllReduce(wire="bf16"), OneBitAdam(rule="one_bit_adam"), DiLoCo(rule="diloco")]
)
def test_a_job_whose_exchange_does_not_fit_is_refused(rule: AggregationSpec) -> None:
    plain, other = job_by(AllReduce(), replicas=2), job_by(rule, replicas=2)
    between = (bytes_of(plain) + bytes_of(other)) // 2
    assert bytes_of(plain) < between < bytes_of(other)
    on = fleet([1e10] * 2, memory_bytes=between)
    plan = make_balanced_plan(plain, on, None, 0)
    assert isinstance(plan, Plan)
    assert violations(plan, plain, on) == ()
    refused = make_balanced_plan(other, on, None, 0)
    assert isinstance(refused, Infeasible)
    assert "of memory and" in refused.reason
    assert any(fault.startswith("w0 needs ") for fault in violations(plan, other, on))
