"""A round of many walkers closes without the late ones, once it has its quorum and their grace is over."""

import pytest

from skein.config.aggregation import DiLoCo
from skein.config.rule import Reach
from skein.plan.agreeing.quorum import NUM_PROVEN, Quorum
from skein.plan.agreeing.rounds import local_group, step_groups
from skein.plan.plan import Plan
from skein.protocol.deadline import TimePassed
from skein.protocol.messages.directives import Decision, Prepare, StepRecord
from skein.protocol.rounds.round import LedgerHeard, Patience, Round, RoundCommand, StepTerms, VoteHeard
from skein.types import ChunkRef, Epoch, Generation, Step
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import ledger, stage_done, vote

RULE = DiLoCo(rule="diloco", local_steps=2, wire="fp32", quorum=0.5, grace=2.0)
PAST = [(1.0, 1.0, 2.0, 2.0)] * NUM_PROVEN
"""Two came together, two a second later: the usual wait is a second."""
WALKERS = ("a", "b", "c", "d")


def four_walkers() -> Plan:
    return plan_of([chunk(0, name) for name in WALKERS], [path(chunk(0, name)) for name in WALKERS])


def round_at(step: int, *, patience: Patience | None) -> Round:
    plan = four_walkers()
    groups = step_groups(
        plan,
        RULE,
        step,
        num_steps=9,
        seed=0,
        num_tokens=(10, 10, 10, 10),
        leaders=None,
        tree=lambda _, leader: (leader,),
    )
    return Round(
        StepTerms(step=Step(step), num_steps=100, learning_rate=0.1, clip_norm=1.0, batch_samples=4),
        groups,
        [path.end for path in plan.paths],
        expected=plan.microbatches_by_chunk(),
        epoch=Epoch(1),
        generation=Generation(1),
        patience=patience,
    )


def patient(begun_at: float = 100.0) -> Patience:
    return Patience(quorum=Quorum(share=RULE.quorum, grace=RULE.grace), begun_at=begun_at, past=PAST)


def arrive(machine: Round, index: int, *, step: int, now: float) -> list[RoundCommand]:
    """A walker is done with its microbatch, and votes on its own sums."""
    name = WALKERS[index]
    done = stage_done(ledger(0, name, index), step=step, loss_sum=4.0, tokens=(2,))
    (asked,) = machine.handle(LedgerHeard(worker=chunk(0, name).worker, done=done), now=now)
    assert isinstance(asked, Prepare)
    heard = vote(asked.group.group, step=step, squared_norm=4.0)
    return machine.handle(VoteHeard(worker=chunk(0, name).worker, vote=heard), now=now)


def decided(commands: list[RoundCommand]) -> StepRecord:
    (command,) = commands
    assert isinstance(command, StepRecord)
    return command


def test_all_are_waited_for_where_nobody_knows_what_is_usual() -> None:
    machine = round_at(0, patience=None)
    for index in range(3):
        assert arrive(machine, index, step=0, now=101.0) == []
    assert machine.deadline() is None
    assert machine.handle(TimePassed(), now=1e6) == []


def test_a_late_walker_makes_no_step_and_the_others_do() -> None:
    machine = round_at(0, patience=patient())
    for index in range(3):
        assert arrive(machine, index, step=0, now=101.0 + index) == []
    # The quorum of two was there after 2 s; twice the usual wait of 1 s is granted after that.
    assert machine.deadline() == pytest.approx(104.0)
    assert machine.handle(TimePassed(), now=103.9) == []
    record = decided(machine.handle(TimePassed(), now=104.0))
    assert record.decision is Decision.APPLY
    assert machine.late == (3,)
    assert {result.group for result in record.results} == {
        local_group(ChunkRef(stage=chunk(0, name).stage, worker=chunk(0, name).worker)).group
        for name in WALKERS[:3]
    }
    assert record.num_tokens == 6
    assert record.loss == pytest.approx(2.0)


def test_a_late_walker_takes_what_the_exchange_gives_and_has_no_say_in_it() -> None:
    machine = round_at(1, patience=patient())
    for index in range(3):
        arrive(machine, index, step=1, now=101.0)
    (asked,) = machine.handle(TimePassed(), now=110.0)
    assert isinstance(asked, Prepare)
    assert len(asked.group.members) == 4, "everybody gets the result"
    assert {row.members for row in asked.group.weights} == {(0, 1, 2)}
    assert [part.worker for part in asked.parts] == [chunk(0, name).worker for name in WALKERS[:3]]
    assert asked.exchange is not None
    assert asked.exchange.reach is Reach.ALL
    assert asked.exchange.scales[3] == 0.0
    commands: list[RoundCommand] = []
    for name in WALKERS:
        heard = vote(asked.group.group, step=1)
        commands = machine.handle(VoteHeard(worker=chunk(0, name).worker, vote=heard), now=111.0)
    assert asked.group.group in {result.group for result in decided(commands).results}


def test_who_comes_in_time_after_all_is_not_late() -> None:
    machine = round_at(0, patience=patient())
    for index in range(3):
        arrive(machine, index, step=0, now=101.0)
    record = decided(arrive(machine, 3, step=0, now=102.5))
    assert machine.late == ()
    assert len(record.results) == 4
