"""Rows of a step: one of any job, each of an array's; and what a round machine decides of a round of an array."""

from dataclasses import replace
from math import inf

import pytest

from skein.plan.agreeing.rounds import plain_groups
from skein.protocol.messages.array_rounds import ArrayRound, PassKind, RowNumbers
from skein.protocol.messages.directives import Decision, Prepare, StepRecord
from skein.protocol.rounds.round import LedgerHeard, Round, StepTerms, VoteHeard
from skein.protocol.rounds.weighing import weigh_array
from skein.types import Epoch, Generation, Step, WorkerId
from tests.support.hands import record as step_record
from tests.support.plans import grid_plan
from tests.support.reports import ledger, row_numbers, stage_done, vote


def row(
    loss: float, num_tokens: int, *, num_updates: int, norm: float = 1.0, retired: str = ""
) -> RowNumbers:
    return row_numbers(num_updates, loss=loss, num_tokens=num_tokens, norm=norm, retired=retired)


def array_round(*rows: RowNumbers, num_local_steps: int = 1) -> ArrayRound:
    return ArrayRound(rows=rows, num_local_steps=num_local_steps, pass_kind=PassKind.FUSED, speedup=2.0)


def test_a_job_that_is_no_array_has_one_row_with_the_steps_own_numbers() -> None:
    record = step_record(3)
    [only] = record.rows
    assert (only.loss, only.num_tokens, only.gradient_norm) == (
        record.loss,
        record.num_tokens,
        record.gradient_norm,
    )
    assert (only.clip, only.learning_rate, only.weight) == (record.clip, record.learning_rate, record.weight)


def test_parts_of_a_round_make_one_with_means_over_tokens_and_the_last_norms() -> None:
    first = array_round(row(2.0, 4, num_updates=5, norm=7.0), row(1.0, 4, num_updates=5), num_local_steps=2)
    second = array_round(
        row(1.0, 12, num_updates=8, norm=3.0), row(0.0, 0, num_updates=5, retired="loss"), num_local_steps=3
    )
    whole = ArrayRound.together([first, second])
    assert whole is not None
    assert whole.num_local_steps == 5
    assert whole.rows[0] == row(1.25, 16, num_updates=8, norm=3.0)
    assert (whole.rows[1].loss, whole.rows[1].num_tokens, whole.rows[1].retired) == (1.0, 4, "loss")
    assert (whole.num_alive, whole.num_tokens, whole.loss) == (1, 20, 1.25)
    assert ArrayRound.together([]) is None


def test_a_round_of_an_array_is_decided_by_one_vote_with_its_rows_numbers() -> None:
    plan = grid_plan(stages=1, replicas=1, num_microbatches=2)
    (worker,) = plan.workers
    terms = StepTerms(step=Step(0), num_steps=9, learning_rate=0.5, clip_norm=1.0, batch_samples=8)
    machine = Round(
        terms,
        plain_groups(plan),
        [path.end for path in plan.paths],
        expected=plan.microbatches_by_chunk(),
        epoch=Epoch(1),
        generation=Generation(1),
    )
    told = array_round(
        row(2.0, 8, num_updates=2, norm=3.0), row(5.0, 4, num_updates=1, norm=inf, retired="loss not finite")
    )
    done = replace(stage_done(ledger(0, worker, 0, 1), loss_sum=9.0, tokens=(6, 6)), array=told)
    [asked] = machine.handle(LedgerHeard(worker=WorkerId(worker), done=done), now=0.0)
    assert isinstance(asked, Prepare)
    cast = vote(asked.group.group, squared_norm=100.0)
    [record] = machine.handle(VoteHeard(worker=WorkerId(worker), vote=cast), now=0.0)
    assert isinstance(record, StepRecord)
    assert record.decision is Decision.APPLY
    assert record.rows == told.rows
    assert (record.loss, record.num_tokens, record.gradient_norm, record.clip) == (2.0, 12, 3.0, 1.0)
    assert [result.weight for result in record.results] == [1.0]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_round_whose_rows_are_all_retired_has_none_alive_and_no_loss(num_rows: int) -> None:
    told = array_round(*[row(1.0, 4, num_updates=1, retired="loss not finite")] * num_rows)
    assert (told.num_alive, told.loss) == (0, 0.0)


def test_norms_of_rows_may_be_too_large_to_be_squared() -> None:
    told = array_round(*[row(1.0, 4, num_updates=1, norm=1e200)] * 3)
    assert weigh_array(told, ()).gradient_norm == pytest.approx(1e200)
