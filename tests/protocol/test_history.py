"""The hard state, record by record."""

from dataclasses import replace

import pytest

from skein.config.aggregation import Gossip
from skein.config.optimizer import SgdSpec
from skein.plan.agreeing.rounds import local_group
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import (
    Averaged,
    Drained,
    EpochOpened,
    Evaluated,
    GenerationMember,
    GenerationOpened,
    JobEnded,
    JobHeld,
    JobResumed,
    JobSubmitted,
    PlanAdopted,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.protocol.log.usage import HALF_LIFE_S
from skein.protocol.messages.directives import GroupResult
from skein.types import (
    DEFAULT_NAMESPACE,
    Attempt,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    JobState,
    Step,
    WorkerId,
)
from tests.support.desk import checkpoint
from tests.support.hands import record
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, path, plan_of, stage_spec

JOB = JobId("small-1")
SPEC = small_job(keep=2)
SUBMITTED = JobSubmitted(job=JOB, key="k", spec=SPEC.canonical_json(), wall_s=1.0)


def opened(generation: int, *incarnations: str) -> GenerationOpened:
    members = tuple(
        GenerationMember(worker=WorkerId(name.partition("-")[0]), incarnation=Incarnation(name))
        for name in incarnations
    )
    return GenerationOpened(
        job=JOB, generation=Generation(generation), members=members, reason="test", wall_s=2.0
    )


def committed(step: int) -> StepCommitted:
    return StepCommitted(job=JOB, record=record(step), wall_s=3.0)


def adopted(generation: int, *workers: str) -> PlanAdopted:
    plan = plan_of([chunk(0, worker) for worker in workers], [path(chunk(0, worker)) for worker in workers])
    return PlanAdopted(job=JOB, generation=Generation(generation), plan=plan)


def rolled_back(from_version: int, to_version: int) -> RolledBack:
    return RolledBack(
        job=JOB, from_version=Step(from_version), to_version=Step(to_version), reason="test", wall_s=4.0
    )


def history_of(*records: Record) -> History:
    history = History()
    for entry in (EpochOpened(epoch=Epoch(1), wall_s=0.0), SUBMITTED, *records):
        history.apply(entry)
    return history


def job_after(*records: Record) -> JobHistory:
    return history_of(*records).jobs[JOB]


def test_a_submitted_job_is_found_by_its_key_and_pends() -> None:
    history = history_of()
    assert history.job_by_key == {(DEFAULT_NAMESPACE, "k"): JOB}
    assert [job.job for job in history.pending()] == [JOB]
    assert history.jobs[JOB].spec == SPEC
    assert history.state_of(JOB) is None


def test_epochs_and_generations_only_grow() -> None:
    history = history_of(opened(1, "a-1"))
    assert (history.epoch, history.generation) == (1, 1)
    with pytest.raises(AssertionError):
        history.apply(EpochOpened(epoch=Epoch(1), wall_s=0.0))
    with pytest.raises(AssertionError):
        history.apply(opened(1, "a-1"))


def test_a_generation_and_a_plan_are_remembered() -> None:
    plan = PlanAdopted(job=JOB, generation=Generation(1), plan=grid_plan())
    job = job_after(opened(1, "a-1", "b-1"), plan)
    assert [member.worker for member in job.members] == ["a", "b"]
    assert job.plan == plan


def test_commits_count_steps_and_tokens() -> None:
    job = job_after(committed(0), committed(1))
    assert (job.version, job.num_tokens) == (2, 2)
    assert job.last_commit == record(1)


def test_a_step_is_committed_at_its_version_only() -> None:
    with pytest.raises(AssertionError):
        history_of(committed(1))
    with pytest.raises(AssertionError):
        history_of(committed(0), committed(0))


def test_the_newest_checkpoints_are_kept() -> None:
    versions = [committed(step) for step in range(4)]
    job = job_after(*versions, *(checkpoint(JOB, version) for version in (1, 2, 3)))
    assert [kept.version for kept in job.checkpoints] == [2, 3]
    assert job.newest_checkpoint == checkpoint(JOB, 3)


def test_a_checkpoint_of_a_version_that_was_saved_before_replaces_it() -> None:
    again = replace(checkpoint(JOB, 1), wall_s=9.0)
    job = job_after(committed(0), checkpoint(JOB, 1), again)
    assert job.checkpoints == [again]


def test_a_job_without_a_checkpoint_has_no_newest_one() -> None:
    assert job_after().newest_checkpoint is None


def test_a_roll_back_takes_steps_and_their_commit_away() -> None:
    job = job_after(committed(0), checkpoint(JOB, 1), committed(1), committed(2), rolled_back(3, 1))
    assert (job.version, job.last_commit) == (1, None)
    assert [kept.version for kept in job.checkpoints] == [1]
    assert job.rollbacks == [rolled_back(3, 1)]


def test_a_roll_back_begins_where_the_job_is() -> None:
    with pytest.raises(AssertionError):
        history_of(committed(0), rolled_back(2, 0))
    with pytest.raises(AssertionError):
        history_of(committed(0), rolled_back(1, 2))


def test_after_a_roll_back_followers_are_outdated_until_they_take_part_in_a_commit() -> None:
    before = (opened(1, "a-1", "b-1"), committed(0), opened(2, "a-1", "c-1"), rolled_back(1, 0))
    assert job_after(*before).outdated == {"a-1", "b-1", "c-1"}
    assert job_after(*before, adopted(2, "a", "c"), committed(0)).outdated == {"b-1"}
    assert job_after(*before, opened(3, "b-1"), adopted(3, "b"), committed(0)).outdated == {"a-1", "c-1"}


def test_a_member_without_a_place_stays_outdated_for_it_may_not_have_heard_that_it_is_free() -> None:
    before = (opened(1, "a-1", "b-1"), committed(0), opened(2, "a-1", "b-1"), rolled_back(1, 0))
    assert job_after(*before, adopted(2, "a"), committed(0)).outdated == {"b-1"}


def test_after_an_average_only_those_are_outdated_who_were_not_there() -> None:
    stage = stage_spec(1)
    averaged = Averaged(job=JOB, version=Step(1), stages=(stage,), wall_s=4.0)
    before = (opened(1, "a-1", "b-1"), committed(0), opened(2, "a-1", "c-1"), averaged)
    job = job_after(*before)
    assert (job.version, job.last_commit, job.averaged) == (1, record(0), {stage: 1})
    assert job.outdated == {"b-1"}
    with pytest.raises(AssertionError):
        job_after(committed(0), committed(1), averaged)
    assert job_after(*before, committed(1), rolled_back(2, 1)).averaged == {stage: 1}
    assert job_after(*before, rolled_back(1, 0)).averaged == {}


def test_a_drain_is_of_a_process_and_of_no_job() -> None:
    drained = Drained(worker=WorkerId("a"), incarnation=Incarnation("a-1"), wall_s=7.0)
    assert history_of(drained).drained == {"a-1"}


def test_a_roll_back_takes_the_evaluations_after_it_away() -> None:
    evaluations = [
        Evaluated(job=JOB, version=Step(version), loss=5.5, num_tokens=8, wall_s=5.0) for version in (1, 2)
    ]
    steps = (committed(0), evaluations[0], committed(1))
    assert job_after(*steps, rolled_back(2, 1)).last_evaluation == evaluations[0]
    assert job_after(*steps, evaluations[1], rolled_back(2, 1)).last_evaluation is None


def test_an_evaluation_is_remembered_and_an_end_is_final() -> None:
    evaluated = Evaluated(job=JOB, version=Step(0), loss=5.5, num_tokens=8, wall_s=5.0)
    end = JobEnded(job=JOB, state=JobState.FAILED, reason="no such file", wall_s=6.0)
    history = history_of(evaluated, end)
    assert history.jobs[JOB].last_evaluation == evaluated
    assert history.state_of(JOB) is JobState.FAILED
    assert history.pending() == []


def test_jobs_pend_in_the_order_in_which_they_were_submitted_also_when_they_were_held() -> None:
    names = [JobId(f"j-{number}") for number in range(3)]
    others = [replace(SUBMITTED, job=job, key=job) for job in names]
    held = JobHeld(job=JOB, reason="lunch", wall_s=1.0)
    ended = JobEnded(job=names[1], state=JobState.CANCELLED, reason="", wall_s=1.0)
    assert [x.job for x in history_of(*others, held, ended).pending()] == [names[0], names[2]]
    resumed = [JobResumed(job=job, steps=None, wall_s=2.0) for job in (names[1], JOB)]
    history = history_of(*others, held, ended, *resumed)
    assert [x.job for x in history.pending()] == [JOB, *names]


def test_usage_of_a_namespace_outlives_its_jobs_and_fades() -> None:
    steps = (opened(1, "a-1", "b-1"), adopted(1, "a", "b"), committed(0), committed(1))
    history = history_of(*steps, JobEnded(job=JOB, state=JobState.FINISHED, reason="", wall_s=9.0))
    assert history.used_s(DEFAULT_NAMESPACE, now=3.0) == 2.0
    assert history.used_s(DEFAULT_NAMESPACE, now=3.0 + HALF_LIFE_S) == 1.0
    assert history.used_s("another", now=3.0) == 0.0


# --- many walkers ---


def job_of_walkers(*records: Record) -> JobHistory:
    """A job whose walkers are the holders of its only stage."""
    history = History()
    spec = SPEC.model_copy(
        update={
            "aggregation": Gossip(rule="gossip", method="dmsgd", graph="ring"),
            "optimizer": SgdSpec(name="sgd"),
        }
    )
    submitted = replace(SUBMITTED, spec=spec.canonical_json())
    for entry in (EpochOpened(epoch=Epoch(1), wall_s=0.0), submitted, *records):
        history.apply(entry)
    return history.jobs[JOB]


def step_of(*workers: str) -> StepCommitted:
    """A step that each walker has made on its own."""
    results = tuple(
        GroupResult(
            group=local_group(chunk(0, worker)).group,
            attempt=Attempt(epoch=Epoch(1), generation=Generation(1), number=0),
            digest="",
            squared_norm=1.0,
            weight=1.0,
            num_tokens=2,
        )
        for worker in workers
    )
    return replace(committed(0), record=replace(record(0), results=results))


BEGUN = (opened(1, "a-1", "b-1", "c-1"), adopted(1, "a", "b", "c"), step_of("a", "b", "c"))


def standing(*records: Record) -> list[str]:
    return [chunk.worker for (chunk,) in job_of_walkers(*BEGUN, *records).standing]


def test_all_walkers_of_a_step_stand() -> None:
    assert standing() == ["a", "b", "c"]


def test_a_walker_that_another_plan_lacks_stands_no_more() -> None:
    assert standing(opened(2, "a-1", "b-1", "c-1"), adopted(2, "a", "c")) == ["a", "c"]
    again = (opened(3, "a-1", "b-1", "c-1"), adopted(3, "a", "b", "c"))
    assert standing(opened(2, "a-1", "b-1", "c-1"), adopted(2, "a", "c"), *again) == ["a", "c"]


def test_a_walker_of_a_new_process_stands_no_more() -> None:
    assert standing(opened(2, "a-1", "b-2", "c-1"), adopted(2, "a", "b", "c")) == ["a", "c"]


def test_nobody_stands_after_a_roll_back() -> None:
    assert standing(rolled_back(1, 0)) == []


def test_of_one_walker_none_is_counted() -> None:
    assert job_after(opened(1, "a-1"), adopted(1, "a"), committed(0)).standing == ()


def learned(*records: Record) -> tuple[int, ...]:
    return job_of_walkers(*BEGUN, *records).learned


def test_what_walkers_have_learned_outlives_another_plan_in_its_order() -> None:
    assert learned() == (2, 2, 2)
    assert learned(adopted(2, "a", "d", "c")) == (2, 2, 0), "members are in the order a, c, d"
    assert learned(opened(2, "a-1", "b-2", "c-1"), adopted(2, "a", "b", "c")) == (2, 0, 2), "b begins anew"


def test_what_walkers_have_learned_ends_with_a_roll_back() -> None:
    assert learned(rolled_back(1, 0), adopted(2, "a", "b", "c")) == ()
