"""The Round machine: from finished ledgers to the numbers of a decision."""

from collections.abc import Mapping
from dataclasses import replace
from math import fsum, sqrt

import pytest

from skein.plan.agreeing.rounds import plain_groups
from skein.plan.plan import Plan
from skein.protocol.messages.directives import Decision, Ledger, Prepare, StepRecord, TakeSketch
from skein.protocol.messages.reports import SketchTaken
from skein.protocol.rounds.round import (
    LedgerHeard,
    Outvoted,
    Round,
    RoundCommand,
    RoundFailed,
    SeedOf,
    SketchHeard,
    StepTerms,
    VoteHeard,
    unchecked,
)
from skein.types import Epoch, Generation, Step, WorkerId
from tests.support.plans import chunk, grid_plan, path, plan_of
from tests.support.reports import ledger, spread, stage_done, vote

TERMS = StepTerms(step=Step(0), num_steps=100, learning_rate=0.01, clip_norm=1.0, batch_samples=8)


def round_of(plan: Plan, terms: StepTerms = TERMS, seed_of: SeedOf = unchecked) -> Round:
    return Round(
        terms,
        plain_groups(plan),
        [path.end for path in plan.paths],
        expected=plan.microbatches_by_chunk(),
        epoch=Epoch(1),
        generation=Generation(1),
        seed_of=seed_of,
    )


def hear_ledgers(
    machine: Round,
    plan: Plan,
    *,
    loss_sum: float = 2.0,
    num_tokens: int = 5,
    told: Mapping[str, float] | None = None,
) -> list[RoundCommand]:
    """Every chunk's complete ledger; chunks of the last stage know a loss, some tell another."""
    commands: list[RoundCommand] = []
    for at, microbatches in plan.microbatches_by_chunk().items():
        is_last = at.stage == len(plan.stages) - 1
        done = stage_done(
            Ledger(stage=at.stage, worker=at.worker, microbatches=microbatches),
            loss_sum=(told or {}).get(at.worker, loss_sum) if is_last else 0.0,
            tokens=spread(num_tokens, len(microbatches)) if is_last else (),
        )
        commands += machine.handle(LedgerHeard(worker=at.worker, done=done), now=0.0)
    return commands


def hear_votes(
    machine: Round,
    plan: Plan,
    *,
    number: int = 0,
    squared_norm: float = 4.0,
    is_finite: bool = True,
    digests: tuple[str, ...] = ("same",),
    groups: tuple[str, ...] = (),
) -> list[RoundCommand]:
    """Every holder's vote on every group; `digests` go round the holders."""
    commands: list[RoundCommand] = []
    for group in plan.groups:
        for i, worker in enumerate(group.workers):
            cast = vote(
                group.group,
                number=number,
                squared_norm=squared_norm,
                is_finite=is_finite,
                digest=digests[i % len(digests)],
            )
            if not groups or str(group.group) in groups:
                commands += machine.handle(VoteHeard(worker=worker, vote=cast), now=0.0)
    return commands


def decided(commands: list[RoundCommand]) -> StepRecord:
    [command] = commands
    assert isinstance(command, StepRecord)
    return command


def test_a_group_is_reduced_as_soon_as_its_ledgers_are_complete() -> None:
    plan = grid_plan()
    machine = round_of(plan)
    first = stage_done(ledger(1, "w1a", 1, 3), tokens=(1, 1))
    second = stage_done(ledger(1, "w1b", 0, 2), tokens=(1, 1))
    assert machine.handle(LedgerHeard(worker=WorkerId("w1a"), done=first), now=0.0) == []
    [asked] = machine.handle(LedgerHeard(worker=WorkerId("w1b"), done=second), now=0.0)
    assert isinstance(asked, Prepare)
    assert str(asked.group.group) == "s1"
    assert asked.parts == (first.ledger, second.ledger)
    assert (asked.attempt.epoch, asked.attempt.generation, asked.attempt.number) == (1, 1, 0)


def test_a_tied_group_waits_for_both_ends() -> None:
    plan = grid_plan(stages=3, replicas=1, num_microbatches=2, is_tied=True)
    machine = round_of(plan)
    asked = []
    for stage in (0, 1, 2):
        done = stage_done(ledger(stage, f"w{stage}a", 0, 1), tokens=(1, 1) if stage == 2 else ())
        asked.append(machine.handle(LedgerHeard(worker=WorkerId(f"w{stage}a"), done=done), now=0.0))
    names = [[str(c.group.group) for c in commands if isinstance(c, Prepare)] for commands in asked]
    assert names == [["s0"], ["s1"], ["s2", "tied"]]


def test_a_repeated_ledger_asks_nothing_twice() -> None:
    plan = grid_plan(stages=1, replicas=1)
    machine = round_of(plan)
    heard = LedgerHeard(
        worker=WorkerId("w0a"), done=stage_done(ledger(0, "w0a", 0, 1, 2, 3), tokens=(1,) * 4)
    )
    assert len(machine.handle(heard, now=0.0)) == 1
    assert machine.handle(heard, now=0.0) == []


def test_a_ledger_of_another_step_or_of_no_chunk_of_the_plan_is_ignored() -> None:
    machine = round_of(grid_plan())
    of_another_step = stage_done(ledger(0, "w0a", 0, 2), step=1)
    assert machine.handle(LedgerHeard(worker=WorkerId("w0a"), done=of_another_step), now=0.0) == []
    foreign = stage_done(ledger(0, "w9", 0, 2))
    assert machine.handle(LedgerHeard(worker=WorkerId("w9"), done=foreign), now=0.0) == []


@pytest.mark.parametrize(
    "reported",
    [ledger(0, "w0a", 0), ledger(0, "w0a", 0, 1, 2), ledger(0, "w0b", 0, 2), ledger(0, "w0a", 0, 0, 2)],
)
def test_a_ledger_that_is_not_what_was_assigned_fails_the_round_and_blames_its_worker(
    reported: Ledger,
) -> None:
    machine = round_of(grid_plan())
    [failed] = machine.handle(LedgerHeard(worker=WorkerId("w0a"), done=stage_done(reported)), now=0.0)
    assert isinstance(failed, RoundFailed)
    assert failed.blamed == ("w0a",)
    assert "not what was assigned" in failed.reason


@pytest.mark.parametrize(("stage", "tokens"), [(0, (1, 1)), (1, ()), (1, (1,))])
def test_tokens_that_are_missing_or_from_where_no_loss_is_fail_the_round(
    stage: int, tokens: tuple[int, ...]
) -> None:
    plan = grid_plan()
    [at] = [x for x in plan.microbatches_by_chunk() if x.stage == stage and x.worker.endswith("a")]
    done = stage_done(
        Ledger(stage=at.stage, worker=at.worker, microbatches=plan.microbatches_by_chunk()[at]), tokens=tokens
    )
    [failed] = round_of(plan).handle(LedgerHeard(worker=at.worker, done=done), now=0.0)
    assert isinstance(failed, RoundFailed)
    assert failed.blamed == (at.worker,)


# --- stages that not all microbatches visit ---


def skipping_plan() -> Plan:
    """Four stages in a line, one worker each: microbatch 0 leaves out stage 2, 1 leaves out 1, 2 leaves out both."""
    s0, s1, s2, s3 = (chunk(s, f"w{s}") for s in range(4))
    return plan_of([s0, s1, s2, s3], [path(s0, s1, s3), path(s0, s2, s3), path(s0, s3)], is_tied=True)


def decide_skipping(plan: Plan, tokens: tuple[int, ...], squared_norms: dict[str, float]) -> StepRecord:
    machine = round_of(plan)
    commands: list[RoundCommand] = []
    for at, microbatches in plan.microbatches_by_chunk().items():
        told = tokens if at.stage == 3 else ()
        done = stage_done(Ledger(stage=at.stage, worker=at.worker, microbatches=microbatches), tokens=told)
        machine.handle(LedgerHeard(worker=at.worker, done=done), now=0.0)
    for group in plan.groups:
        for worker in group.workers:
            cast = vote(group.group, squared_norm=squared_norms[str(group.group)])
            commands = machine.handle(VoteHeard(worker=worker, vote=cast), now=0.0)
    return decided(commands)


def test_each_stage_counts_per_token_of_those_who_visited_it() -> None:
    norms = {"s0": 4.0, "s1": 9.0, "s2": 16.0, "s3": 25.0, "tied": 36.0}
    record = decide_skipping(skipping_plan(), (5, 3, 2), norms)
    weights = {str(result.group): result.weight for result in record.results}
    assert weights == {"s0": 1 / 10, "s1": 1 / 5, "s2": 1 / 3, "s3": 1 / 10, "tied": 1 / 10}
    assert (record.num_tokens, record.weight) == (10, 1 / 10)
    by_hand = sqrt((4 + 25 + 36) / 100 + 9 / 25 + 16 / 9)
    # Two roundings of sums of five terms.
    assert record.gradient_norm == pytest.approx(by_hand, rel=1e-15)


def test_a_stage_without_a_visitor_has_no_weight_and_divides_by_nothing() -> None:
    s0, s1, s2 = (chunk(s, f"w{s}") for s in range(3))
    plan = plan_of([s0, s1, s2], [path(s0, s2)] * 2)
    machine = round_of(plan)
    hear_ledgers(machine, plan, num_tokens=4)
    record = decided(hear_votes(machine, plan, squared_norm=0.0))
    assert [result.weight for result in record.results] == [1 / 4, 0.0, 1 / 4]
    assert (record.decision, record.gradient_norm) == (Decision.APPLY, 0.0)


def test_where_nothing_is_skipped_the_norm_is_the_plain_one() -> None:
    plan = grid_plan(stages=3, replicas=1, num_microbatches=3)
    machine = round_of(plan)
    hear_ledgers(machine, plan, num_tokens=7)
    record = decided(hear_votes(machine, plan, squared_norm=0.1))
    assert record.gradient_norm == 1 / 7 * sqrt(fsum([0.1] * 3))
    assert {result.weight for result in record.results} == {record.weight}


# --- sketches, in a step that is checked ---


def sketches_asked(plan: Plan) -> tuple[Round, list[TakeSketch]]:
    """A round whose votes are all there, and what it asks for then."""
    machine = round_of(plan, seed_of=lambda _votes: 7)
    hear_ledgers(machine, plan)
    asked = [command for command in hear_votes(machine, plan) if isinstance(command, TakeSketch)]
    return machine, asked


def taken(asked: TakeSketch, *values: float) -> SketchTaken:
    about = {"generation": Generation(1), "step": asked.step, "group": asked.group, "attempt": asked.attempt}
    return SketchTaken(**about, values=values)  # type: ignore[arg-type]


def test_a_checked_step_is_decided_once_all_holders_have_sketched_what_they_voted_for() -> None:
    plan = grid_plan()
    machine, asked = sketches_asked(plan)
    assert [(str(x.group), x.seed) for x in asked] == [("s0", 7), ("s1", 7)]
    commands: list[RoundCommand] = []
    for number, command in enumerate(asked):
        for worker in machine.holders(command.group):
            assert commands == []
            heard = SketchHeard(worker=worker, taken=taken(command, 1.0 + number, 2.0))
            commands = machine.handle(heard, now=0.0)
    assert decided(commands).decision is Decision.APPLY
    assert machine.sketch == (3.0, 4.0)


def test_holders_that_sketch_one_result_otherwise_are_in_dispute() -> None:
    plan = grid_plan()
    machine, asked = sketches_asked(plan)
    first, second = machine.holders(asked[0].group)
    assert machine.handle(SketchHeard(worker=first, taken=taken(asked[0], 1.0)), now=0.0) == []
    [failed] = machine.handle(SketchHeard(worker=second, taken=taken(asked[0], 1.5)), now=0.0)
    assert isinstance(failed, RoundFailed)
    assert failed.is_disputed
    assert failed.blamed == (first, second)


def test_a_sketch_of_another_step_or_by_somebody_else_counts_for_nothing() -> None:
    plan = grid_plan()
    machine, asked = sketches_asked(plan)
    holder = machine.holders(asked[0].group)[0]
    late = replace(taken(asked[0], 1.0), step=Step(5))
    for heard in (
        SketchHeard(worker=holder, taken=late),
        SketchHeard(worker=machine.holders(asked[1].group)[0], taken=taken(asked[0], 1.0)),
    ):
        assert machine.handle(heard, now=0.0) == []


def test_who_was_outvoted_is_not_asked_for_a_sketch_and_most_sketches_count() -> None:
    plan = grid_plan(stages=1, replicas=3, num_microbatches=3)
    machine = round_of(plan, seed_of=lambda _votes: 7)
    hear_ledgers(machine, plan)
    hear_votes(machine, plan, digests=("other", "same", "same"))
    [group] = plan.groups
    assert machine.holders(group.group) == group.workers[1:]
    assert machine.unsketched == group.workers[1:]


def test_a_sketch_otherwise_than_most_is_outvoted() -> None:
    plan = grid_plan(stages=1, replicas=3, num_microbatches=3)
    machine = round_of(plan, seed_of=lambda _votes: 7)
    hear_ledgers(machine, plan)
    [asked] = [x for x in hear_votes(machine, plan) if isinstance(x, TakeSketch)]
    commands: list[RoundCommand] = []
    for worker, value in zip(machine.holders(asked.group), (9.0, 1.0, 1.0), strict=True):
        assert commands == []
        commands = machine.handle(SketchHeard(worker=worker, taken=taken(asked, value)), now=0.0)
    [outvoted] = [x for x in commands if isinstance(x, Outvoted)]
    assert outvoted.blamed == machine.holders(asked.group)[:1]
    assert decided(commands[1:]).decision is Decision.APPLY
    assert machine.sketch == (1.0,)
