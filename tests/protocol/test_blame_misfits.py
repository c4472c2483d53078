"""Workers without the data of a job lose their place, never the job; a job that is wrong fails when two say so."""

import re

from skein.plan.plan import Infeasible
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.protocol.coordinator.runs.gathering import PARDON_S
from skein.protocol.coordinator.runs.phase import GatherPhase, StepPhase
from skein.protocol.log.records import GenerationOpened, JobEnded
from skein.protocol.messages.directives import Commit, NewGeneration, OpenData
from skein.protocol.messages.reports import Beat, DataOpened, Leaving, Trouble
from skein.types import JobId, JobState
from tests.protocol.test_replanning import OTHER, make_steps, running
from tests.protocol.test_replanning import PLAN as PRESENT
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.plans import grid_plan
from tests.support.runs import PAIRS, PAIRS_SPEC, began, ended, phase, stepping

ABSENT = "data.sources[0].path: '/corpus': no such file or folder on this worker"
WRONG = "data.sources[0].dtype: 'uint32': 7 bytes are not a whole number"


def job_of(desk: Desk) -> JobId:
    run = desk.machine.run
    assert run is not None
    return run.job.job


def lacks_data(desk: Desk, worker: str, reason: str = ABSENT) -> None:
    desk.report(worker, Trouble(generation=desk.generation, is_fatal=False, reason=reason, is_unfit=True))


def says_wrong(desk: Desk, worker: str, reason: str = WRONG) -> None:
    desk.report(worker, Trouble(generation=desk.generation, is_fatal=True, reason=reason))


def asked_of(desk: Desk) -> set[str]:
    """Workers that the plan that is asked for may give work."""
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    return {str(worker.worker) for worker in asked.fleet.workers}


def wait(desk: Desk, seconds: float) -> None:
    for _ in range(int(seconds)):
        desk.wait(1.0)
        for worker in desk.live:
            desk.report(worker, Beat(progress=0, running_s=0.0, statistics=()))


def test_one_worker_without_the_data_does_not_fail_a_job_at_its_start() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.settle(PAIRS)
    lacks_data(desk, "w0b")
    assert any(f"excluded=w0b for now: {ABSENT}" in line for line in desk.lines())
    assert asked_of(desk) == {"w0a", "w1a", "w1b"}


def test_who_lacks_the_data_stays_aside_while_steps_go_on() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    lacks_data(desk, "w0b")
    desk.settle(PAIRS)
    desk.step(PAIRS)
    assert not any("pardoned" in line for line in desk.lines())


def test_a_job_whose_data_nobody_has_waits_with_the_reason_and_asks_again() -> None:
    desk = Desk()
    desk.join("w0a")
    plan = grid_plan(stages=1, replicas=1)
    desk.submit(small_job(stages=1, replicas=1))
    desk.acknowledge(desk.live)
    desk.plan(plan)
    lacks_data(desk, "w0a")
    assert phase(desk) is GatherPhase
    run = desk.machine.run
    assert run is not None
    assert run.reason == f"nobody can use what the job names: w0a: {ABSENT}"
    assert not desk.recorded(JobEnded)
    before = desk.generation
    wait(desk, PARDON_S - 2)
    assert desk.generation == before
    wait(desk, 4)
    assert desk.generation == before + 1
    desk.settle(plan)
    assert phase(desk) is StepPhase


def test_a_worker_that_is_started_again_is_asked_again() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.settle(PAIRS)
    lacks_data(desk, "w0b")
    desk.join("w0b", incarnation=2)
    assert "w0b" in asked_of(desk)


def test_a_run_that_cannot_do_without_waits_and_asks_again() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.settle(PAIRS)
    lacks_data(desk, "w0b")
    desk.acknowledge(desk.live)
    desk.plan(Infeasible(reason="too small"))
    before = desk.generation
    wait(desk, PARDON_S + 1)
    assert desk.generation == before + 1
    assert "w0b" in asked_of(desk)


def test_what_an_epoch_is_is_told_when_the_data_are_open() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.settle(PAIRS)
    [told] = [line for line in desk.lines() if "an epoch is" in line]
    found = re.search(r"an epoch is (\d+) samples, (\d+) tokens, (\d+) steps", told)
    assert found is not None
    samples, tokens, steps = map(int, found.groups())
    assert tokens == samples * PAIRS_SPEC.data.sequence_tokens
    assert steps == -(-samples // PAIRS_SPEC.batch.samples)


# --- a job that is wrong ---


def test_a_job_that_the_only_worker_calls_wrong_fails_with_its_reason() -> None:
    desk = Desk()
    desk.join("w0a")
    desk.submit(small_job(stages=1, replicas=1))
    desk.acknowledge(desk.live)
    desk.plan(grid_plan(stages=1, replicas=1))
    says_wrong(desk, "w0a")
    assert ended(desk) == (JobState.FAILED, f"w0a: {WRONG}")


def test_a_file_that_is_damaged_on_one_worker_costs_that_worker_its_place() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.settle(PAIRS)
    says_wrong(desk, "w0b")
    assert not desk.recorded(JobEnded)
    assert asked_of(desk) == {"w0a", "w1a", "w1b"}


def test_a_job_that_two_workers_call_wrong_fails() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.settle(PAIRS)
    says_wrong(desk, "w0b")
    desk.settle(PAIRS)
    says_wrong(desk, "w0a")
    assert ended(desk) == (JobState.FAILED, f"w0a: {WRONG}")


def test_a_job_that_has_made_steps_is_not_wrong() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    for worker in ("w0b", "w0a"):
        says_wrong(desk, worker)
        assert not desk.recorded(JobEnded)
        assert desk.told(NewGeneration)
        desk.settle(PAIRS)


# --- before a plan is put in place ---


def test_who_is_to_hold_the_first_stage_opens_the_data_before_anybody_waits_for_it() -> None:
    desk = running()
    [asked] = make_steps(desk, PRESENT, seconds=2.0)
    desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0))
    [(reader, opens)] = desk.told(OpenData).items()
    assert reader in OTHER.holders(OTHER.stages[0].index)
    assert reader not in PRESENT.holders(PRESENT.stages[0].index)
    desk.prefetch_copies()
    desk.step(PRESENT)
    assert desk.told(Commit)["w0a"].goes_on, "its data are not open yet"
    desk.report(reader, DataOpened(job=opens.job, error="", is_unfit=False))
    desk.step(PRESENT)
    assert desk.recorded(GenerationOpened)


def test_who_cannot_open_the_data_keeps_the_place_that_it_has_and_steps_go_on() -> None:
    desk = running()
    [asked] = make_steps(desk, PRESENT, seconds=2.0)
    desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0))
    [(reader, opens)] = desk.told(OpenData).items()
    desk.prefetch_copies()
    desk.report(reader, DataOpened(job=opens.job, error=ABSENT, is_unfit=True))
    assert any(f"worker={reader} could not open the data: {ABSENT}" in line for line in desk.lines())
    for _ in range(3):
        desk.step(PRESENT)
        assert not desk.recorded(GenerationOpened)
        assert desk.told(Commit)["w0a"].goes_on


def test_a_newcomer_that_cannot_open_the_data_is_set_aside() -> None:
    desk = running()
    desk.join("w2a")
    make_steps(desk, PRESENT, seconds=1.0, count=1)
    desk.report("w2a", DataOpened(job=job_of(desk), error=ABSENT, is_unfit=True))
    assert any(f"excluded=w2a for now: {ABSENT}" in line for line in desk.lines())


def test_who_was_set_aside_is_asked_again_when_the_others_have_gone() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    desk.settle(PAIRS)
    for worker in ("w1a", "w1b"):
        desk.report(worker, Leaving(reason="drained"))
    lacks_data(desk, "w0a")
    desk.acknowledge(desk.live)
    lacks_data(desk, "w0b")
    assert phase(desk) is GatherPhase
    generation = desk.generation
    for worker in ("w1a", "w1b"):
        desk.break_stream(worker)
    wait(desk, PARDON_S + 1.0)
    assert desk.generation > generation
