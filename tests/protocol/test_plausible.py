"""Reports whose numbers could be, and that nobody can have seen all the same."""

from dataclasses import replace

import pytest

from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec
from skein.numeric.sketch import SKETCH_LENGTH
from skein.protocol.coordinator.coordinator import MAX_REFUSED
from skein.protocol.coordinator.runs.workers.plausible import implausible, most_tokens
from skein.protocol.messages.array_rounds import ArrayRound, PassKind, RowScore
from skein.protocol.messages.directives import Refused
from skein.protocol.messages.reports import EvaluationDone, LinksMeasured, Report, SketchTaken, StageDone
from skein.topology.fleet import Link
from skein.types import Generation, MicrobatchId, Own, StageIndex, Step, WorkerId
from tests.support.reports import ledger, row_numbers, stage_done, vote
from tests.support.runs import PLAN, SPEC, stepping

ME, OTHER = WorkerId("w1a"), WorkerId("w0a")
MOST = most_tokens(SPEC)
ROW = RowScore(loss_sum=1.0, num_tokens=1)


def evaluated(*microbatches: int, num_tokens: int) -> EvaluationDone:
    return EvaluationDone(
        generation=Generation(1),
        version=Step(0),
        microbatches=tuple(MicrobatchId(m) for m in microbatches),
        loss_sum=1.0,
        num_tokens=num_tokens,
    )


def sketched(*values: float) -> SketchTaken:
    group = Own(StageIndex(0))
    return SketchTaken(
        generation=Generation(1), step=Step(0), group=group, attempt=vote(group).attempt, values=values
    )


def link(sender: str, receiver: str) -> LinksMeasured:
    one = Link(sender=WorkerId(sender), receiver=WorkerId(receiver), latency_s=0.1, bytes_per_s=1e6)
    return LinksMeasured(links=(one,))


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (stage_done(ledger(1, ME, 0), tokens=(MOST + 1,)), "StageDone.tokens"),
        (stage_done(ledger(1, OTHER, 0), tokens=(1,)), "StageDone.ledger"),
        (evaluated(0, 1, num_tokens=2 * MOST + 1), "EvaluationDone.num_tokens"),
        (evaluated(0, 0, num_tokens=MOST + 1), "EvaluationDone.num_tokens"),
        (replace(evaluated(0, num_tokens=1), rows=(ROW,)), "EvaluationDone.rows"),
        (link("w0a", "w0b"), "LinksMeasured"),
        (sketched(1.0), "SketchTaken.values"),
    ],
)
def test_what_nobody_can_have_seen_is_told_by_field_and_value(report: Report, field: str) -> None:
    found = implausible(ME, report, SPEC)
    assert found is not None
    assert found.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "report",
    [
        stage_done(ledger(1, ME, 0, 1), tokens=(MOST, 0)),
        evaluated(0, 1, num_tokens=2 * MOST),
        evaluated(num_tokens=9),
        link("w1a", "w0a"),
        link("w0a", "w1a"),
        sketched(*[1.0] * SKETCH_LENGTH),
    ],
)
def test_what_may_be_is_left_to_whom_it_concerns(report: Report) -> None:
    assert implausible(ME, report, SPEC) is None


def rounded(*, num_updates: int, num_tokens: int) -> StageDone:
    row = row_numbers(num_updates, num_tokens=num_tokens)
    array = ArrayRound(rows=(row, row), num_local_steps=1, pass_kind=PassKind.LOOPED, speedup=1.0)
    return replace(stage_done(ledger(1, ME, 0, 1), tokens=(3, 3)), array=array)


def test_rows_that_nobody_can_have_trained_are_told_of() -> None:
    row = ArrayRow(trial=0, optimizer=SPEC.optimizer, seed=0)
    array = ArraySpec(rows=(row, row.model_copy(update={"trial": 1})), last_step=4, schedule_steps=9)
    spec = array_job(SPEC, array, round_steps=2)
    assert implausible(ME, rounded(num_updates=4, num_tokens=3), spec) is None
    found = implausible(ME, rounded(num_updates=2**60, num_tokens=3), spec)
    assert found == f"StageDone.array: a row of {2**60} updates: give at most 4"
    found = implausible(ME, rounded(num_updates=4, num_tokens=2**62), spec)
    assert found == f"StageDone.array: {2**63}: give at most 6, which is all of it"


def test_who_tells_such_things_again_and_again_is_turned_away() -> None:
    desk = stepping()
    for turn in range(MAX_REFUSED):
        assert ME in desk.machine.membership.live, turn
        desk.report(ME, link("w8", "w9"))
        if turn < MAX_REFUSED - 1:
            desk.settle(PLAN)
    assert "a link w8 -> w9 of others" in desk.told(Refused)[ME].reason
