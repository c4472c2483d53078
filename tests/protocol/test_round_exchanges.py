"""Rounds that end with an exchange: first every chunk's own sums, then what the rule asks for, then the decision."""

from math import sqrt

import pytest

from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, OneBitAdam
from skein.config.rule import Reach
from skein.plan.agreeing.exchange import Neighbours
from skein.plan.agreeing.rounds import local_group, step_groups
from skein.plan.plan import Plan
from skein.protocol.messages.directives import Decision, Prepare, StepRecord
from skein.protocol.rounds.round import (
    LedgerHeard,
    Outvoted,
    Round,
    RoundCommand,
    RoundFailed,
    StepTerms,
    VoteHeard,
)
from skein.types import Epoch, Exchanged, Generation, Step
from tests.support.plans import chunk, grid_plan, path, plan_of
from tests.support.reports import ledger, stage_done, vote

INT8 = AllReduce(wire="int8")
ONE_BIT = OneBitAdam(rule="one_bit_adam", warmup_steps=2)
DILOCO = DiLoCo(rule="diloco", local_steps=1, wire="fp32")
RING = Gossip(rule="gossip", method="dsgd", graph="ring")
WORKERS = ("a", "b", "c")


def three() -> Plan:
    """One stage, three holders, a microbatch each."""
    return plan_of([chunk(0, name) for name in WORKERS], [path(chunk(0, name)) for name in WORKERS])


def round_of(plan: Plan, rule: AggregationSpec, *, step: int = 5, clip_norm: float | None = None) -> Round:
    groups = step_groups(
        plan,
        rule,
        step,
        num_steps=100,
        seed=0,
        num_tokens=(),
        leaders=None,
        tree=lambda _, leader: (leader,),
    )
    return Round(
        StepTerms(step=Step(step), num_steps=100, learning_rate=0.1, clip_norm=clip_norm, batch_samples=4),
        groups,
        [path.end for path in plan.paths],
        expected=plan.microbatches_by_chunk(),
        epoch=Epoch(1),
        generation=Generation(1),
    )


def compute(machine: Round, plan: Plan, *, tokens: tuple[int, ...], step: int = 5) -> list[Prepare]:
    """All ledgers of a plan of one stage; what was asked for then."""
    asked: list[Prepare] = []
    for index, (at, ids) in enumerate(plan.microbatches_by_chunk().items()):
        done = stage_done(ledger(0, at.worker, *ids), step=step, loss_sum=1.0, tokens=(tokens[index],))
        for command in machine.handle(LedgerHeard(worker=at.worker, done=done), now=0.0):
            assert isinstance(command, Prepare)
            asked.append(command)
    return asked


def vote_alone(
    machine: Round, plan: Plan, *, norms: tuple[float, ...] = (1.0, 1.0, 1.0), spoilt: tuple[int, ...] = ()
) -> list[RoundCommand]:
    """Every chunk's vote on its own sums."""
    commands: list[RoundCommand] = []
    for index, member in enumerate(plan.groups[0].members):
        cast = vote(
            local_group(member).group,
            squared_norm=norms[index],
            digest=member.worker,
            is_finite=index not in spoilt,
            step=5,
        )
        commands += machine.handle(VoteHeard(worker=member.worker, vote=cast), now=0.0)
    return commands


def vote_exchange(
    machine: Round,
    *,
    digests: tuple[str, ...] = ("same",),
    number: int = 0,
    squared_norm: float = 1.0,
    is_finite: bool = True,
) -> list[RoundCommand]:
    commands: list[RoundCommand] = []
    for index, worker in enumerate(WORKERS):
        cast = vote(
            "x0",
            number=number,
            squared_norm=squared_norm,
            digest=digests[index % len(digests)],
            is_finite=is_finite,
            step=5,
        )
        commands += machine.handle(VoteHeard(worker=chunk(0, worker).worker, vote=cast), now=0.0)
    return commands


def asked_for(commands: list[RoundCommand]) -> Prepare:
    [command] = commands
    assert isinstance(command, Prepare)
    return command


def decided(commands: list[RoundCommand]) -> StepRecord:
    [command] = commands
    assert isinstance(command, StepRecord)
    return command


def test_every_chunk_reduces_alone_before_the_exchange_is_asked_for() -> None:
    plan = three()
    machine = round_of(plan, INT8)
    alone = compute(machine, plan, tokens=(2, 2, 2))
    assert [str(x.group.group) for x in alone] == ["s0@a", "s0@b", "s0@c"]
    assert all(x.exchange is None and len(x.parts) == 1 for x in alone)
    exchange = asked_for(vote_alone(machine, plan))
    assert str(exchange.group.group) == "x0"
    assert [part.worker for part in exchange.parts] == list(WORKERS)


def test_the_mean_of_what_members_send_is_the_gradient_of_the_batch() -> None:
    plan = three()
    machine = round_of(plan, INT8)
    compute(machine, plan, tokens=(1, 2, 3))
    exchange = asked_for(vote_alone(machine, plan))
    assert exchange.exchange is not None
    [row] = set(exchange.group.weights)
    # Each sends its own mean, weighed by its share of the tokens, so nobody stands out for having more of them.
    assert row.weights == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert exchange.exchange.scales == pytest.approx([1, 1 / 2, 1 / 3])
    factors = [w * s for w, s in zip(row.weights, exchange.exchange.scales, strict=True)]
    assert factors == pytest.approx([1 / 6] * 3)


def test_who_has_no_token_sends_nothing_to_an_all_reduce_and_takes_the_result() -> None:
    plan = three()
    machine = round_of(plan, INT8)
    compute(machine, plan, tokens=(1, 0, 3))
    exchange = asked_for(vote_alone(machine, plan))
    assert exchange.exchange is not None
    [row] = set(exchange.group.weights)
    assert row.members == (0, 2)
    assert row.weights == pytest.approx((0.25, 0.75))
    assert exchange.exchange.scales[1] == 0.0
    assert len(exchange.group.members) == 3


def test_what_is_clipped_under_all_reduce_is_the_combined_gradient() -> None:
    plan = three()
    machine = round_of(plan, INT8, clip_norm=2.0)
    compute(machine, plan, tokens=(2, 2, 2))
    exchange = asked_for(vote_alone(machine, plan, norms=(1e6, 1e6, 1e6)))
    assert exchange.exchange is not None
    assert set(exchange.exchange.scales) == {0.5}
    record = decided(vote_exchange(machine, squared_norm=16.0))
    assert record.gradient_norm == 4.0
    assert record.clip == pytest.approx(0.5, rel=1e-6)


def test_momenta_are_clipped_before_they_travel_each_chunk_by_its_own_norm() -> None:
    plan = three()
    machine = round_of(plan, ONE_BIT, clip_norm=1.0)
    compute(machine, plan, tokens=(2, 2, 2))
    exchange = asked_for(vote_alone(machine, plan, norms=(1.0, 16.0, 1.0)))
    assert exchange.exchange is not None
    # Norms of 3/6 of the sums: 0.5, 2 and 0.5.
    assert exchange.exchange.scales == pytest.approx((0.5, 0.25, 0.5), rel=1e-5)
    assert decided(vote_exchange(machine)).clip == 1.0


def test_before_the_end_of_the_warm_up_gradients_are_reduced_among_all() -> None:
    plan = three()
    groups = round_of(plan, ONE_BIT, step=1)
    [asked] = compute(groups, plan, tokens=(2, 2, 2), step=1)
    assert str(asked.group.group) == "s0"
    assert asked.exchange is None


def test_a_walker_counts_by_the_tokens_it_has_learned_from() -> None:
    plan = three()
    machine = round_of(plan, DILOCO)
    compute(machine, plan, tokens=(1, 1, 2))
    exchange = asked_for(vote_alone(machine, plan))
    assert {row.weights for row in exchange.group.weights} == {(0.25, 0.25, 0.5)}
    assert exchange.exchange is not None
    assert exchange.exchange.scales == (1.0, 1.0, 0.5)


def test_a_walker_that_is_not_finite_makes_no_local_step() -> None:
    plan = three()
    machine = round_of(plan, DILOCO)
    compute(machine, plan, tokens=(1, 1, 1))
    exchange = asked_for(vote_alone(machine, plan, spoilt=(1,)))
    assert exchange.exchange is not None
    assert exchange.exchange.scales == (1.0, 0.0, 1.0)
    assert decided(vote_exchange(machine)).decision is Decision.APPLY


def test_neighbours_may_come_to_different_results() -> None:
    plan = three()
    machine = round_of(plan, RING)
    compute(machine, plan, tokens=(1, 1, 1))
    exchange = asked_for(vote_alone(machine, plan))
    assert exchange.group.pattern == Neighbours()
    assert exchange.exchange is not None
    assert exchange.exchange.reach is Reach.NEIGHBOURS
    record = decided(vote_exchange(machine, digests=("one", "other", "third")))
    [result] = [x for x in record.results if isinstance(x.group, Exchanged)]
    assert result.digest == ""


def test_members_that_must_agree_try_once_more_and_then_all_are_blamed() -> None:
    plan = three()
    machine = round_of(plan, DILOCO)
    compute(machine, plan, tokens=(1, 1, 1))
    first = asked_for(vote_alone(machine, plan))
    again = asked_for(vote_exchange(machine, digests=("one", "another", "third")))
    assert (first.attempt.number, again.attempt.number) == (0, 1)
    assert again.exchange == first.exchange
    [failed] = vote_exchange(machine, digests=("one", "another", "third"), number=1)
    assert isinstance(failed, RoundFailed)
    assert failed.blamed == WORKERS


def test_the_odd_member_is_outvoted_and_the_exchange_ends_with_what_most_have() -> None:
    plan = three()
    machine = round_of(plan, DILOCO)
    compute(machine, plan, tokens=(1, 1, 1))
    vote_alone(machine, plan)
    outvoted, ended = vote_exchange(machine, digests=("same", "same", "other"))
    assert isinstance(outvoted, Outvoted)
    assert outvoted.blamed == ("c",)
    [result] = [x for x in decided([ended]).results if str(x.group) == "x0"]
    assert result.digest == "same"


def test_who_alone_has_no_finite_result_of_its_own_is_to_blame_for_the_step_that_is_skipped() -> None:
    plan = three()
    machine = round_of(plan, RING)
    compute(machine, plan, tokens=(1, 1, 1))
    vote_alone(machine, plan)
    commands: list[RoundCommand] = []
    for worker in WORKERS:
        cast = vote("x0", digest=worker, is_finite=worker != "b", step=5)
        commands += machine.handle(VoteHeard(worker=chunk(0, worker).worker, vote=cast), now=0.0)
    outvoted, ended = commands
    assert isinstance(outvoted, Outvoted)
    assert outvoted.blamed == ("b",)
    assert decided([ended]).decision is Decision.SKIP


def test_votes_of_an_attempt_that_was_given_up_do_not_count() -> None:
    plan = three()
    machine = round_of(plan, DILOCO)
    compute(machine, plan, tokens=(1, 1, 1))
    vote_alone(machine, plan)
    vote_exchange(machine, digests=("one", "another", "third"))
    assert vote_exchange(machine, number=0) == []
    assert decided(vote_exchange(machine, number=1)).decision is Decision.APPLY


def test_a_result_that_is_not_finite_skips_the_step() -> None:
    plan = three()
    machine = round_of(plan, INT8)
    compute(machine, plan, tokens=(1, 1, 1))
    vote_alone(machine, plan)
    record = decided(vote_exchange(machine, is_finite=False))
    assert record.decision is Decision.SKIP
    assert record.reason == "result not finite in x0"


def test_a_skipped_step_asks_for_no_exchange() -> None:
    plan = three()
    machine = round_of(plan, INT8)
    compute(machine, plan, tokens=(1, 1, 1))
    record = decided(vote_alone(machine, plan, spoilt=(0,)))
    assert record.decision is Decision.SKIP
    assert not any(isinstance(x.group, Exchanged) for x in record.results)


def test_the_record_names_every_reduction_and_every_exchange() -> None:
    plan = three()
    machine = round_of(plan, DILOCO)
    compute(machine, plan, tokens=(1, 1, 2))
    vote_alone(machine, plan, norms=(1.0, 4.0, 9.0))
    record = decided(vote_exchange(machine))
    assert [str(x.group) for x in record.results] == ["s0@a", "s0@b", "s0@c", "x0"]
    assert [x.num_tokens for x in record.results] == [1, 1, 2, 0]
    assert [x.weight for x in record.results] == [1.0, 1.0, 0.5, 1.0]
    # Norms 1, 2 and 1.5: of several walkers the root of the mean square is told.
    assert record.gradient_norm == pytest.approx(sqrt((1 + 4 + 2.25) / 3))


def test_stages_with_unequal_numbers_of_holders_exchange_each_among_their_own() -> None:
    plan = plan_of(
        [chunk(0, "a"), chunk(0, "b"), chunk(1, "c")],
        [path(chunk(0, "a"), chunk(1, "c")), path(chunk(0, "b"), chunk(1, "c"))],
    )
    groups = step_groups(
        plan, ONE_BIT, 2, num_steps=9, seed=0, num_tokens=(), leaders=None, tree=lambda _, leader: (leader,)
    )
    assert [(str(x.group), len(x.members)) for x in groups.exchanged] == [("x0", 2), ("x1", 1)]
    assert groups.num_sharing == (2, 2, 1)


def test_an_exchange_waits_for_the_reductions_of_all_stages() -> None:
    plan = grid_plan(stages=2, replicas=2, num_microbatches=2)
    machine = round_of(plan, INT8)
    commands: list[RoundCommand] = []
    for at, ids in plan.microbatches_by_chunk().items():
        tokens = (1,) * len(ids) if at.stage == 1 else ()
        done = stage_done(ledger(at.stage, at.worker, *ids), step=5, tokens=tokens)
        commands += machine.handle(LedgerHeard(worker=at.worker, done=done), now=0.0)
    members = [member for group in plan.groups for member in group.members]
    later = []
    for member in members:
        cast = vote(local_group(member).group, step=5)
        later.append(machine.handle(VoteHeard(worker=member.worker, vote=cast), now=0.0))
    assert later[:-1] == [[], [], []]
    assert [str(x.group.group) for x in later[-1] if isinstance(x, Prepare)] == ["x0", "x1"]
