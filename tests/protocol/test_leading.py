"""Elections on a shared probe: who leads, who checks that, and what becomes of whoever claims what is not true."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from skein.config.aggregation import Lsgd
from skein.plan.agreeing.exchange import Broadcast
from skein.plan.agreeing.rounds import Leaders
from skein.plan.plan import Group
from skein.protocol.coordinator.coordinator_io import Outbox
from skein.protocol.coordinator.runs.steps.leading import Leading
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.messages.reports import EvaluationDone, Vote
from skein.protocol.messages.tensors import Phase
from skein.types import Generation, JobId, Layout, MicrobatchId, SiteId, Step, WorkerId, parse_group
from tests.support.jobs import small_job
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import attempt

NAMES = ("a", "b", "c", "d")
PLAN = plan_of([chunk(0, name) for name in NAMES], [path(chunk(0, name)) for name in NAMES])
SITES = {WorkerId(name): SiteId("east" if name in "ab" else "west") for name in NAMES}
STEP = Step(3)


def leading(*, recheck_ratio: float = 0.0, layout: Layout = Layout.LINE) -> Leading:
    rule = Lsgd(rule="lsgd", local_every_steps=2, global_every_steps=4, recheck_ratio=recheck_ratio)
    job = small_job(stages=1, replicas=4, layout=layout).model_copy(update={"aggregation": rule})
    history = JobHistory(job=JobId("j"), key="k", spec=job, submitted_wall_s=0.0, version=STEP)
    outbox = Outbox(History())
    return Leading(Members(history, {}, outbox))


def score(machine: Leading, losses: Mapping[str, float]) -> Leaders | None:
    """All walkers say what they score; gives who leads."""
    is_complete = False
    for index, (name, loss) in enumerate(losses.items()):
        is_complete = machine.is_complete(
            WorkerId(name),
            EvaluationDone(
                generation=Generation(1),
                version=STEP,
                microbatches=(MicrobatchId(index), MicrobatchId(index + len(losses))),
                loss_sum=loss * 10,
                num_tokens=10,
                phase=Phase.PROBE,
                digest=f"parameters of {name}",
            ),
            PLAN,
        )
    assert is_complete
    return machine.leaders(PLAN, SITES)


def led_by(index: int) -> Group:
    members = tuple(chunk(0, name) for name in NAMES)
    pattern = Broadcast(leader=index, parents=(index,) * len(members))
    return Group(group=parse_group("x0.all"), members=members, num_shards=1, pattern=pattern)


def says(digest: str, *, probe_loss: float | None = None) -> Vote:
    return Vote(
        generation=Generation(1),
        step=STEP,
        group=parse_group("x0.all"),
        attempt=attempt(),
        digest=digest,
        squared_norm=1.0,
        is_finite=True,
        probe_loss=probe_loss,
    )


def test_the_lowest_loss_leads_all_and_its_site() -> None:
    assert score(leading(), {"a": 2.0, "b": 1.5, "c": 1.0, "d": 3.0}) == Leaders(
        of_all=2, of_group=(1, 1, 2, 2)
    )


def test_nobody_scores_for_another() -> None:
    machine = leading()
    forged = EvaluationDone(
        generation=Generation(1), version=STEP, microbatches=(), loss_sum=0.0, num_tokens=1, phase=Phase.PROBE
    )
    for index in range(4):
        claim = replace(forged, microbatches=(MicrobatchId(index),))
        assert not machine.is_complete(WorkerId(NAMES[index - 1]), claim, PLAN)
    assert machine.leaders(PLAN, SITES) is None


def test_nobody_leads_who_is_not_finite() -> None:
    inf = float("inf")
    assert score(leading(), {"a": inf, "b": inf, "c": inf, "d": inf}) is None
    assert score(leading(), {"a": float("nan"), "b": inf, "c": 5.0, "d": inf}) == Leaders(
        of_all=2, of_group=(0, 1, 2, 2)
    )


def test_parameters_other_than_claimed_convict_a_leader_once_most_followers_have_received_them() -> None:
    machine = leading()
    score(machine, {"a": 2.0, "b": 1.5, "c": 1.0, "d": 3.0})
    assert machine.doubts(WorkerId("c"), says("others"), led_by(2)) is None, "of itself it says nothing"
    assert machine.doubts(WorkerId("a"), says("others"), led_by(2)) is None
    assert machine.doubts(WorkerId("b"), says("others"), led_by(2)) == "c"
    assert machine.leaders(PLAN, SITES) == Leaders(of_all=1, of_group=(1, 1, 3, 3)), "a liar leads no more"


def test_one_accuser_makes_all_check_and_convicts_nobody() -> None:
    machine = leading(recheck_ratio=0.01)
    score(machine, {"a": 2.0, "b": 1.5, "c": 1.0, "d": 3.0})
    (checker,) = machine.checkers(led_by(2))
    honest = "parameters of c"
    assert machine.doubts(checker, says(honest, probe_loss=4.0), led_by(2)) is None
    assert set(machine.checkers(led_by(2))) == set(NAMES) - {"c"}
    for name in "abd":
        assert machine.doubts(WorkerId(name), says(honest, probe_loss=1.0), led_by(2)) is None


@pytest.mark.parametrize("probe_loss", [1.0, 1.0005])
def test_who_computes_the_same_to_rounding_accuses_nobody(probe_loss: float) -> None:
    machine = leading(recheck_ratio=1.0)
    score(machine, {"a": 2.0, "b": 1.5, "c": 1.0, "d": 3.0})
    assert len(machine.checkers(led_by(2))) == 3
    for name in "abd":
        vote = says("parameters of c", probe_loss=probe_loss)
        assert machine.doubts(WorkerId(name), vote, led_by(2)) is None
    assert machine.leaders(PLAN, SITES) == Leaders(of_all=2, of_group=(1, 1, 2, 2))


def test_nobody_checks_a_leader_whose_head_is_a_stage_of_its_own() -> None:
    machine = leading(recheck_ratio=1.0, layout=Layout.LOOP)
    score(machine, {"a": 2.0, "b": 1.5, "c": 1.0, "d": 3.0})
    assert machine.checkers(led_by(2)) == ()
