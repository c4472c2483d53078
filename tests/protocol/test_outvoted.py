"""Who votes otherwise than most is struck, the step goes on without it; three such votes, and the job does too."""

from dataclasses import replace

from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES
from skein.protocol.log.records import GenerationOpened, JobEnded, StepCommitted
from skein.protocol.messages.directives import Commit, Decision, NewGeneration
from skein.protocol.messages.reports import Vote
from skein.types import JobState, WorkerId
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.plans import grid_plan
from tests.support.reports import attempt, vote
from tests.support.runs import stepping

TRIPLE = grid_plan(stages=1, replicas=3, num_microbatches=3)
SPEC = small_job(stages=1, replicas=3, microbatches=3, steps=9, evaluate_every=0)
PAIR = grid_plan(stages=1, replicas=2, num_microbatches=4)
PAIR_SPEC = small_job(stages=1, replicas=2, microbatches=4, steps=9, evaluate_every=0)
LIAR = WorkerId("w0a")


def cast(desk: Desk, worker: WorkerId, *, number: int = 0, is_finite: bool = True) -> None:
    run = desk.machine.run
    assert run is not None
    asked = attempt(number, generation=desk.generation, epoch=desk.machine.history.epoch)
    said: Vote = vote("s0", step=run.job.version, is_finite=is_finite)
    desk.report(worker, replace(said, generation=desk.generation, attempt=asked))


def test_a_minoritys_vote_skips_no_step_and_the_third_ends_its_part_in_the_job() -> None:
    desk = stepping(SPEC, TRIPLE)
    for turn in range(MAX_STRIKES):
        desk.ledgers(TRIPLE)
        cast(desk, LIAR, is_finite=False)
        for worker in TRIPLE.workers[1:]:
            cast(desk, worker)
        [committed] = desk.recorded(StepCommitted)
        assert committed.record.decision is Decision.APPLY
        assert any(f"worker={LIAR} struck: outvoted on s0 at step {turn}" in line for line in desk.lines())
        assert desk.told(Commit)["w0b"].goes_on is (turn < MAX_STRIKES - 1)
    assert any(f"excluded={LIAR}" in line for line in desk.lines())
    [opened] = desk.recorded(GenerationOpened)
    assert opened.reason.startswith(f"without {LIAR}: outvoted on s0")


def test_two_holders_that_disagree_are_asked_again_then_both_are_struck_and_never_believed() -> None:
    desk = stepping(PAIR_SPEC, PAIR)
    for turn in range(MAX_STRIKES):
        desk.ledgers(PAIR)
        for number in (0, 1):
            cast(desk, LIAR, number=number, is_finite=False)
            cast(desk, PAIR.workers[1], number=number)
        assert not desk.recorded(StepCommitted)
        for worker in PAIR.workers:
            assert any(
                f"worker={worker} struck: holders of s0 disagree twice" in line for line in desk.lines()
            )
        if turn < MAX_STRIKES - 1:
            assert desk.told(NewGeneration)
            desk.settle(PAIR)
    [record] = desk.recorded(JobEnded)
    assert record.state is JobState.FAILED
    assert "w0a has same of squared norm 1, not finite, w0b has same of squared norm 1" in record.reason
