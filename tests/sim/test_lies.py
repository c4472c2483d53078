"""Workers whose reports are mutated: whatever they say, a job ends, or waits and says why."""

from dataclasses import replace
from math import inf, nan

import pytest

from skein import rng
from skein.errors import OutOfRangeError
from skein.protocol.log.records import RolledBack
from skein.protocol.messages.ranges import check_numbers
from skein.protocol.messages.reports import Beat, Hello, Report, StageDone, Vote
from skein.sim.lines.lies import mutated
from skein.sim.processes.worker import SimWorker
from skein.sim.scenario import disturbed, judge, make_world
from skein.sim.shapes import SHAPES, SimShape, shape_of
from skein.types import JobState
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.reports import hello, ledger, stage_done, vote
from tests.support.worlds import finish, fleet_of, of_kind, plan_of, run_until, version_of

ENDS = (JobState.FINISHED, JobState.FAILED, JobState.PAUSED)


@pytest.mark.parametrize("shape", part(SHAPES, every=6), ids=lambda shape: shape.text)
def test_lies_bring_a_job_to_its_end_or_to_a_reason(shape: SimShape) -> None:
    world = disturbed(shape, seed=4, num_faults=4, kinds=("lie",))
    assert judge(shape, world).state in ENDS


def test_a_stage_that_no_cut_has_is_not_planned_with() -> None:
    """A liar acknowledged layers 3 to 0, and they completed what the others hold."""
    shape = shape_of("loop 4x2 tied skip 1/2")
    assert judge(shape, disturbed(shape, seed=20009728, num_faults=8)).state in ENDS


def test_a_file_that_holds_other_tensors_than_were_told_completes_no_checkpoint() -> None:
    """A liar saved a stage, and told of no tensors in its file: once it had died, nobody could read the stage."""
    shape = shape_of("line 4x2 skip 1/4")
    assert judge(shape, disturbed(shape, seed=6903, num_faults=8)).state in ENDS


def test_most_jobs_with_liars_are_finished_all_the_same() -> None:
    """A liar is made up for; but before the first step a job ends of fatal trouble or other data, with that reason."""
    states = []
    for seed in part(range(2, 14), every=3):
        shape = SHAPES[seed % len(SHAPES)]
        world = disturbed(shape, seed=seed, num_faults=3, kinds=("lie", "kill"))
        states.append(judge(shape, world).state)
    assert states.count(JobState.FINISHED) >= 0.8 * len(states)


def test_a_mutation_is_of_the_same_kind_and_now_and_then_nothing_or_the_same_twice() -> None:
    draw = rng.stream(0, "lies")
    said = stage_done(ledger(0, "w0a", 1, 2), tokens=(3, 4))
    found = [mutated(said, draw) for _ in range(400)]
    assert {len(reports) for reports in found} == {0, 1, 2}
    others = [reports[0] for reports in found if len(reports) == 1 and reports[0] != said]
    told = [report for report in others if isinstance(report, StageDone)]
    assert len(told) == len(others)
    assert any(not report.ledger.microbatches for report in told)


@pytest.mark.parametrize("value", [nan, inf, -1.0])
def test_some_mutations_are_numbers_that_the_edge_refuses(value: float) -> None:
    with pytest.raises(OutOfRangeError, match=r"Beat\.running_s"):
        check_numbers(Beat(progress=1, running_s=value, statistics=()))


def test_who_opens_a_stream_says_so_once_and_under_its_own_name() -> None:
    draw = rng.stream(1, "lies")
    said = hello("w0a")
    for _ in range(300):
        [other] = mutated(said, draw)
        assert isinstance(other, Hello)
        assert (other.worker, other.incarnation) == (said.worker, said.incarnation)


def test_every_part_of_a_vote_may_be_another() -> None:
    draw = rng.stream(2, "lies")
    said = vote("s0")
    others = {mutated(said, draw)[:1] for _ in range(2000)}
    changed = {
        name
        for reports in others
        for report in reports
        for name in ("digest", "squared_norm", "is_finite", "attempt", "group", "step", "generation")
        if isinstance(report, Vote) and getattr(report, name) != getattr(said, name)
    }
    assert len(changed) == 7


def test_a_newcomer_that_disagrees_with_a_holder_of_long_standing_goes_alone() -> None:
    job = small_job(stages=1, replicas=2, steps=20, save_every=0)
    world = make_world(job, fleet_of(3), seed=3)
    run_until(world, lambda w: version_of(w) >= 3)
    first, second = plan_of(world).workers
    world.kill_worker(first)
    run_until(world, lambda w: first not in plan_of(w).workers and len(plan_of(w).workers) == 2)
    [newcomer] = set(plan_of(world).workers) - {second}
    tell = world._send_report

    def lie(worker: SimWorker, report: Report) -> None:
        if isinstance(report, Vote) and worker.machine.identity.worker == newcomer:
            report = replace(report, digest="another")
        tell(worker, report)

    world._send_report = lie  # type: ignore[method-assign]
    run = finish(world, about="a lying newcomer")
    assert len(run.curve) == 20
    assert any(f"excluded={newcomer}: holders of s0 disagree twice" in line for line in world.lines)
    assert not any(f"excluded={second}" in line for line in world.lines)
    assert not of_kind(world.log, RolledBack)
