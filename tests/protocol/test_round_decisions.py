"""The Round machine's decisions: from votes to the numbers of a step, and who is outvoted or to blame."""

from dataclasses import replace
from math import inf, isfinite, nan, sqrt

import pytest

from skein.protocol.messages.directives import Decision, Ledger, Prepare, StepRecord
from skein.protocol.messages.reports import Balance, Vote
from skein.protocol.rounds.round import LedgerHeard, Outvoted, RoundCommand, RoundFailed, StepTerms, VoteHeard
from skein.types import Step, WorkerId
from tests.protocol.test_round import decided, hear_ledgers, hear_votes, round_of
from tests.support.plans import chunk, grid_plan, path, plan_of
from tests.support.reports import ledger, stage_done, vote


def test_the_step_is_decided_by_the_last_vote_of_the_last_group() -> None:
    plan = grid_plan()
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    assert hear_votes(machine, plan, groups=("s0",)) == []
    assert decided(hear_votes(machine, plan, groups=("s1",))).step == 0


def test_all_numbers_come_from_the_reports() -> None:
    plan = grid_plan(is_tied=True)
    machine = round_of(plan)
    hear_ledgers(machine, plan, loss_sum=3.0, num_tokens=5)
    record = decided(hear_votes(machine, plan, squared_norm=4.0))
    assert record.num_tokens == 10  # two holders of the last stage
    assert record.weight == 1 / 10
    assert record.loss == 6.0 * (1 / 10)
    # Three groups of squared norm 4 each, weighted once.
    assert record.gradient_norm == 1 / 10 * sqrt(12.0)
    assert record.clip == 1.0
    assert (record.decision, record.reason) == (Decision.APPLY, "")
    assert (record.learning_rate, record.samples_after) == (0.01, 8)
    assert [str(result.group) for result in record.results] == ["s0", "s1", "tied"]


def test_the_balance_of_experts_is_the_mean_over_what_all_chunks_tell() -> None:
    plan = grid_plan(stages=3, replicas=1, num_microbatches=2)
    told = {
        0: Balance(loss_sum=11.0, num_tokens=10, num_choices=30, num_dropped=2),
        1: Balance(loss_sum=9.0, num_tokens=5, num_choices=10, num_dropped=3),
        2: None,
    }
    machine = round_of(plan)
    for at, microbatches in plan.microbatches_by_chunk().items():
        done = stage_done(
            Ledger(stage=at.stage, worker=at.worker, microbatches=microbatches),
            tokens=(2, 3) if at.stage == 2 else (),
        )
        machine.handle(LedgerHeard(worker=at.worker, done=replace(done, balance=told[at.stage])), now=0.0)
    [record] = hear_votes(machine, plan)
    assert isinstance(record, StepRecord)
    assert record.balance_loss == 20 / 15
    assert record.drop_ratio == 5 / 40


def test_a_norm_above_the_limit_is_clipped_to_it() -> None:
    plan = grid_plan(stages=1, replicas=1)
    machine = round_of(plan)
    hear_ledgers(machine, plan, num_tokens=1)
    record = decided(hear_votes(machine, plan, squared_norm=16.0))
    assert record.gradient_norm == 4.0
    assert record.clip == 1.0 / (4.0 + 1e-6)


def test_without_a_limit_nothing_is_clipped() -> None:
    plan = grid_plan(stages=1, replicas=1)
    machine = round_of(
        plan, StepTerms(step=Step(0), num_steps=100, learning_rate=0.1, clip_norm=None, batch_samples=8)
    )
    hear_ledgers(machine, plan, num_tokens=1)
    assert decided(hear_votes(machine, plan, squared_norm=1e9)).clip == 1.0


def test_a_later_step_counts_its_samples_from_the_first() -> None:
    plan = grid_plan(stages=1, replicas=1, num_microbatches=1)
    machine = round_of(
        plan, StepTerms(step=Step(6), num_steps=100, learning_rate=0.1, clip_norm=None, batch_samples=8)
    )
    done = stage_done(ledger(0, "w0a", 0), step=6, tokens=(1,))
    machine.handle(LedgerHeard(worker=WorkerId("w0a"), done=done), now=0.0)
    cast = vote("s0", step=6)
    assert decided(machine.handle(VoteHeard(worker=WorkerId("w0a"), vote=cast), now=0.0)).samples_after == 56


@pytest.mark.parametrize(
    ("squared_norm", "is_finite", "loss_sum", "reason"),
    [
        (4.0, False, 1.0, "gradient not finite in s0, s1"),
        (nan, True, 1.0, "gradient not finite in s0, s1"),
        (inf, True, 1.0, "gradient not finite in s0, s1"),
        (-1.0, True, 1.0, "gradient not finite in s0, s1"),
        (1e308, True, 1.0, "gradient norm not finite"),
    ],
)
def test_what_is_not_finite_skips_the_step_for_every_stage(
    squared_norm: float, is_finite: bool, loss_sum: float, reason: str
) -> None:
    plan = grid_plan()
    machine = round_of(plan)
    hear_ledgers(machine, plan, loss_sum=loss_sum)
    record = decided(hear_votes(machine, plan, squared_norm=squared_norm, is_finite=is_finite))
    assert (record.decision, record.reason) == (Decision.SKIP, reason)
    assert isfinite(record.gradient_norm)
    assert record.clip == 1.0
    assert record.samples_after == 8


@pytest.mark.parametrize("loss_sum", [nan, inf])
def test_a_loss_that_is_not_finite_skips_the_step_and_is_the_fault_of_one_that_tells_it_alone(
    loss_sum: float,
) -> None:
    plan = grid_plan(replicas=3, num_microbatches=6)
    machine = round_of(plan)
    hear_ledgers(machine, plan, told={"w1b": loss_sum})
    outvoted, ended = hear_votes(machine, plan)
    assert isinstance(outvoted, Outvoted)
    assert outvoted.blamed == ("w1b",)
    record = decided([ended])
    assert (record.decision, record.reason) == (Decision.SKIP, "loss not finite")


@pytest.mark.parametrize("tellers", [("w1a",), ("w1a", "w1b")])
def test_a_loss_that_is_not_finite_is_nobodys_fault_where_as_many_tell_it_as_do_not(
    tellers: tuple[str, ...],
) -> None:
    plan = grid_plan()
    machine = round_of(plan)
    hear_ledgers(machine, plan, told=dict.fromkeys(tellers, inf))
    record = decided(hear_votes(machine, plan))
    assert (record.decision, record.reason) == (Decision.SKIP, "loss not finite")


def test_a_loss_that_is_not_finite_is_nobodys_fault_where_gradients_are_not_either() -> None:
    plan = grid_plan()
    machine = round_of(plan)
    hear_ledgers(machine, plan, loss_sum=nan)
    record = decided(hear_votes(machine, plan, is_finite=False))
    assert record.reason == "loss not finite"


def test_a_batch_without_a_valid_token_is_skipped() -> None:
    plan = grid_plan()
    machine = round_of(plan)
    hear_ledgers(machine, plan, loss_sum=0.0, num_tokens=0)
    record = decided(hear_votes(machine, plan))
    assert (record.decision, record.reason) == (Decision.SKIP, "no valid token in the batch")
    assert (record.weight, record.loss) == (0.0, 0.0)


def test_holders_who_disagree_reduce_once_more() -> None:
    plan = grid_plan(stages=1)
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    [again] = hear_votes(machine, plan, digests=("this", "that"))
    assert isinstance(again, Prepare)
    assert again.attempt.number == 1
    assert decided(hear_votes(machine, plan, number=1)).results[0].attempt.number == 1


def test_votes_of_the_first_attempt_do_not_count_for_the_second() -> None:
    plan = grid_plan(stages=1)
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    hear_votes(machine, plan, digests=("this", "that"))
    assert hear_votes(machine, plan, number=0) == []


@pytest.mark.parametrize(
    "digests",
    [("this", "that"), ("a", "b", "c"), ("this", "that", "this", "that")],
)
def test_holders_of_whom_no_most_agree_twice_fail_the_round_and_all_are_blamed(
    digests: tuple[str, ...],
) -> None:
    plan = grid_plan(stages=1, replicas=len(digests), num_microbatches=len(digests))
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    [again] = hear_votes(machine, plan, digests=digests)
    assert isinstance(again, Prepare)
    [failed] = hear_votes(machine, plan, number=1, digests=digests)
    assert isinstance(failed, RoundFailed)
    assert failed.blamed == plan.groups[0].workers
    assert "w0a has this" in failed.reason or "w0a has a" in failed.reason


OTHER = vote("s0", squared_norm=4.0)
LIES = [
    replace(OTHER, digest="other"),
    replace(OTHER, is_finite=False),
    replace(OTHER, squared_norm=nan),
    replace(OTHER, squared_norm=1e300),
]


@pytest.mark.parametrize("lie", LIES, ids=["digest", "not finite", "no norm", "large norm"])
@pytest.mark.parametrize("liar", ["w0a", "w0b", "w0c"])
def test_who_votes_otherwise_than_most_is_outvoted_and_the_step_has_the_others_result(
    lie: Vote, liar: str
) -> None:
    plan = grid_plan(stages=1, replicas=3, num_microbatches=3)
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    commands: list[RoundCommand] = []
    for worker in plan.groups[0].workers:
        cast = lie if worker == liar else OTHER
        commands += machine.handle(VoteHeard(worker=worker, vote=cast), now=0.0)
    outvoted, ended = commands
    assert isinstance(outvoted, Outvoted)
    assert outvoted.blamed == (liar,)
    record = decided([ended])
    assert record.decision is Decision.APPLY
    assert (record.results[0].digest, record.results[0].squared_norm) == (OTHER.digest, 4.0)


@pytest.mark.parametrize("lie", LIES[1:], ids=["not finite", "no norm", "large norm"])
def test_of_two_holders_who_disagree_on_more_than_the_digest_neither_is_believed(lie: Vote) -> None:
    plan = grid_plan(stages=1)
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    machine.handle(VoteHeard(worker=WorkerId("w0a"), vote=OTHER), now=0.0)
    [again] = machine.handle(VoteHeard(worker=WorkerId("w0b"), vote=lie), now=0.0)
    assert isinstance(again, Prepare)
    assert again.attempt.number == 1


def test_a_vote_on_a_group_that_the_worker_holds_nothing_of_fails_the_round() -> None:
    plan = grid_plan()
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    [failed] = machine.handle(VoteHeard(worker=WorkerId("w1a"), vote=vote("s0")), now=0.0)
    assert isinstance(failed, RoundFailed)
    assert failed.blamed == ("w1a",)


def test_votes_on_unknown_groups_or_before_the_reduction_are_ignored() -> None:
    plan = grid_plan()
    machine = round_of(plan)
    assert machine.handle(VoteHeard(worker=WorkerId("w0a"), vote=vote("s0")), now=0.0) == []
    hear_ledgers(machine, plan)
    assert machine.handle(VoteHeard(worker=WorkerId("w0a"), vote=vote("s9")), now=0.0) == []
    assert machine.handle(VoteHeard(worker=WorkerId("w0a"), vote=vote("s0", step=3)), now=0.0) == []


def test_a_worker_that_holds_both_ends_of_a_tied_group_votes_once() -> None:
    plan = plan_of(
        [chunk(0, "w"), chunk(1, "w")], [path(chunk(0, "w"), chunk(1, "w"))], is_tied=True, num_shards=1
    )
    machine = round_of(plan)
    hear_ledgers(machine, plan, num_tokens=1)
    record = decided(hear_votes(machine, plan, squared_norm=1.0))
    assert [str(result.group) for result in record.results] == ["s0", "s1", "tied"]


def test_the_norm_of_a_group_is_the_first_holders() -> None:
    plan = grid_plan(stages=1)
    machine = round_of(plan)
    hear_ledgers(machine, plan, num_tokens=1)
    rounded = 4.0 * (1 + 1e-9)  # by another device
    machine.handle(VoteHeard(worker=WorkerId("w0b"), vote=vote("s0", squared_norm=rounded)), now=0.0)
    commands = machine.handle(VoteHeard(worker=WorkerId("w0a"), vote=vote("s0", squared_norm=4.0)), now=0.0)
    assert decided(commands).results[0].squared_norm == 4.0


def test_a_round_waits_for_no_time() -> None:
    plan = grid_plan(stages=1)
    machine = round_of(plan)
    hear_ledgers(machine, plan)
    hear_votes(machine, plan, digests=("this", "that"))
    assert machine.deadline() is None
