"""Votes on exchanges that go on beside steps cover what replicates, as it was when they were taken."""

from skein.config.aggregation import DiLoCo
from skein.config.job import JobSpec
from skein.config.rule import Reach
from skein.numeric.aggregate.diloco import MOMENTUM
from skein.plan.agreeing.exchange import Row
from skein.plan.plan import Group
from skein.protocol.messages.directives import ExchangeTerms
from skein.protocol.worker.ops import JoinOp, PackOp
from skein.types import ChunkRef, StageIndex, StageSpec, Step, WorkerId, parse_group
from tests.support.device import DEVICE
from tests.support.jobs import small_job
from tests.support.reports import attempt
from worker.compute.chunk import Chunk
from worker.compute.exchanging import Exchanging
from worker.telling.aggregating import Gauges

MEMBERS = tuple(ChunkRef(stage=StageIndex(0), worker=WorkerId(name)) for name in ("a", "b"))
GROUP = Group(
    group=parse_group("x0.f0"),
    members=MEMBERS,
    num_shards=1,
    weights=(Row(members=(0, 1), weights=(0.5, 0.5)),),
)
TERMS = ExchangeTerms(
    reach=Reach.ALL, learning_rate=0.0, scales=(), due_step=Step(3), num_steps=100, taken_at=Step(4)
)
PACK = PackOp(
    step=Step(5), group=GROUP, attempt=attempt(), stages=(StageIndex(0),), parcels=(), exchange=TERMS
)
JOIN = JoinOp(step=Step(5), group=GROUP, attempt=attempt(), exchange=TERMS)


def job() -> JobSpec:
    rule = DiLoCo(rule="diloco", local_steps=4, overlap_steps=2, wire="fp32")
    return small_job(stages=1).model_copy(update={"aggregation": rule})


def vote(*, drifts_before: bool = False, changes_after: bool = False) -> str:
    """The digest that a member votes; what replicates may have drifted before, or change while steps go on."""
    stage = StageSpec(index=StageIndex(0), first=0, stop=1)
    own = Chunk.drawn(job(), stage, version=Step(4), device=DEVICE)
    exchanging = Exchanging(job(), WorkerId("a"), Gauges())
    momentum = next(iter(own.walker.state[MOMENTUM].values()))
    if drifts_before:
        momentum.add_(1e-6)
    sent = exchanging.pack(PACK, own)
    if changes_after:
        momentum.add_(1.0)
    return exchanging.join(JOIN, own, sent)[0].digest


def test_replicas_that_have_drifted_apart_vote_otherwise() -> None:
    assert vote() == vote()
    assert vote(drifts_before=True) != vote()


def test_what_changes_by_the_steps_that_go_on_does_not_matter() -> None:
    assert vote(changes_after=True) == vote()
