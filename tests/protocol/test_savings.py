"""Checkpoints in the making: who saves what, and what is durable."""

from collections.abc import Mapping, Sequence

import pytest

from skein.config.aggregation import AggregationSpec, AllReduce, Gossip, Lsgd
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import Outbox, Send
from skein.protocol.coordinator.runs.checkpoints.savings import Savings
from skein.protocol.coordinator.runs.part import Adoption
from skein.protocol.coordinator.runs.placing.sources import assignments
from skein.protocol.coordinator.runs.placing.walking import walker_sources
from skein.protocol.coordinator.runs.steps.leading import Leading
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import JobSubmitted, StageFiles, num_walkers
from skein.protocol.membership.membership import LeaveHeard, Membership
from skein.protocol.messages.directives import CheckpointFile, Save, SourceKind
from skein.protocol.messages.reports import CheckpointWritten, EvaluationDone
from skein.protocol.messages.tensors import Phase
from skein.types import Generation, JobId, StageIndex, Step, WorkerId
from tests.support.desk import checkpoint
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of
from tests.support.reports import hello

GOSSIP = Gossip(rule="gossip", graph="ring")
LSGD = Lsgd(rule="lsgd", local_every_steps=2, global_every_steps=2)
LED = grid_plan(stages=2, replicas=3, num_microbatches=3)


def written(version: int, stage: int, *names: str, generation: int = 1, walker: int = 0) -> CheckpointWritten:
    files = tuple(CheckpointFile(name=name, num_bytes=1, sha256="", tensors=()) for name in names)
    return CheckpointWritten(
        generation=Generation(generation),
        version=Step(version),
        stage=StageIndex(stage),
        files=files,
        walker=walker,
    )


def savings(*versions: int) -> Savings:
    found = savings_of(job_of())
    for version in versions:
        found.expect(Generation(1), Step(version), (StageIndex(0), StageIndex(1)))
    return found


def savings_of(job: JobHistory) -> Savings:
    return Savings(Members(job, {}, Outbox(History())))


def job_of(*, version: int = 0, save_every: int = 4, steps: int = 20, saved: int = 0) -> JobHistory:
    spec = small_job(save_every=save_every, steps=steps)
    spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"url": "s3://b"})})
    job = JobHistory(job=JobId("j"), key="k", spec=spec, submitted_wall_s=0.0, version=Step(version))
    if saved:
        job.checkpoints.append(checkpoint(job.job, saved))
    return job


def test_a_checkpoint_is_complete_with_its_last_stage() -> None:
    found = savings(4)
    assert found.written(written(4, 1, "b"), wall_s=1.0) is None
    done = found.written(written(4, 0, "a"), wall_s=2.0)
    assert done is not None
    assert (done.job, done.version, done.url, done.wall_s) == ("j", 4, "s3://b", 2.0)
    assert [(s.stage, [f.name for f in s.files]) for s in done.stages] == [(0, ["a"]), (1, ["b"])]


def test_what_was_not_asked_for_or_came_before_is_ignored() -> None:
    found = savings(4)
    found.written(written(4, 0), wall_s=1.0)
    for report in (written(4, 0), written(4, 7), written(5, 1)):
        assert found.written(report, wall_s=1.0) is None


def test_several_checkpoints_may_be_in_the_making() -> None:
    found = savings(4, 6)
    found.written(written(4, 0), wall_s=1.0)
    found.written(written(6, 0), wall_s=1.0)
    done = found.written(written(6, 1), wall_s=1.0)
    assert done is not None
    assert done.version == 6
    late = found.written(written(4, 1), wall_s=1.0)
    assert late is not None
    assert late.version == 4


def test_no_checkpoint_has_stages_that_two_generations_asked_for() -> None:
    found = savings(4)
    found.written(written(4, 0, "old"), wall_s=1.0)
    found.expect(Generation(2), Step(4), (StageIndex(0), StageIndex(1)))
    assert found.written(written(4, 1, generation=2), wall_s=1.0) is None
    assert found.written(written(4, 0, generation=3), wall_s=1.0) is None
    done = found.written(written(4, 0, "new", generation=2), wall_s=1.0)
    assert done is not None
    assert [file.name for file in done.stages[0].files] == ["new"]


def test_asking_again_forgets_what_was_written_before() -> None:
    found = savings(4)
    found.written(written(4, 0), wall_s=1.0)
    found.expect(Generation(1), Step(4), (StageIndex(0), StageIndex(1)))
    assert found.written(written(4, 1), wall_s=1.0) is None


def test_what_is_older_than_the_newest_checkpoint_is_of_no_use() -> None:
    found = savings_of(job_of(version=8, saved=6))
    found.expect(Generation(1), Step(4), (StageIndex(0),))
    assert found.written(written(4, 0), wall_s=1.0) is None


def test_a_roll_back_forgets_what_was_being_written() -> None:
    found = savings(4)
    found.written(written(4, 0), wall_s=1.0)
    found.adopted(Adoption(plan=LED, num_steps_lost=1), now=0.0)
    assert found.written(written(4, 1), wall_s=1.0) is None


@pytest.mark.parametrize(
    ("job", "is_due"),
    [
        (job_of(version=3), False),
        (job_of(version=4), True),
        (job_of(version=5), True),
        (job_of(version=5, saved=4), False),
        (job_of(version=9, saved=4), True),
        (job_of(version=20), False),
        (job_of(version=4, save_every=0), False),
    ],
)
def test_a_checkpoint_is_due_when_the_newest_is_older_than_it_should_be(
    job: JobHistory, is_due: bool
) -> None:
    assert savings_of(job).is_due(now=0.0) is is_due


def test_what_was_asked_for_is_not_due_until_a_fence() -> None:
    found = savings_of(job_of(version=5))
    found.expect(Generation(1), Step(5), (StageIndex(0),))
    assert not found.is_due(now=0.0)
    found.fenced(now=0.0)
    assert found.is_due(now=0.0)


def test_workers_may_hold_what_no_checkpoint_has() -> None:
    assert savings_of(job_of(version=5, saved=4)).is_behind()
    assert not savings_of(job_of(version=4, saved=4)).is_behind()
    assert not savings_of(job_of()).is_behind()


# --- many walkers ---


def asked(rule: AggregationSpec, plan: Plan, *, main: int, leaving: Sequence[str] = ()) -> dict[str, Save]:
    """What the workers of `plan` are told when a job under this rule is saved."""
    outbox = Outbox(History())
    spec = small_job(steps=60, microbatches=8, replicas=4).model_copy(update={"aggregation": rule})
    outbox.record(JobSubmitted(job=JobId("j"), key="k", spec=spec.canonical_json(), wall_s=0.0))
    job, membership = outbox.history.jobs[JobId("j")], Membership()
    for worker in plan.workers:
        membership.handle(hello(worker), now=0.0)
    for name in leaving:
        membership.handle(LeaveHeard(worker=WorkerId(name)), now=0.0)
    members = Members(job, membership.live, outbox)
    members.open_generation("here", now=0.0)
    outbox.commands.clear()
    Savings(members).ask(plan, main=main)
    return {
        x.worker: x.directive
        for x in outbox.commands
        if isinstance(x, Send) and isinstance(x.directive, Save)
    }


def parts_of(told: Mapping[str, Save]) -> dict[str, list[tuple[int, int]]]:
    return {worker: list(zip(save.stages, save.walkers, strict=True)) for worker, save in told.items()}


def test_every_walker_saves_its_own_chunks_and_the_main_one_has_number_0() -> None:
    told = asked(GOSSIP, grid_plan(stages=2, replicas=3), main=1)
    assert parts_of(told) == {
        "w0b": [(0, 0)],
        "w1b": [(1, 0)],
        "w0a": [(0, 1)],
        "w1a": [(1, 1)],
        "w0c": [(0, 2)],
        "w1c": [(1, 2)],
    }


def test_who_holds_chunks_of_two_walkers_saves_each_under_its_own_number() -> None:
    crossed = plan_of(
        [chunk(0, "a"), chunk(0, "b"), chunk(1, "b"), chunk(1, "c")],
        [path(chunk(0, "a"), chunk(1, "b")), path(chunk(0, "b"), chunk(1, "c"))],
    )
    assert parts_of(asked(GOSSIP, crossed, main=0)) == {
        "a": [(0, 0)],
        "b": [(1, 0), (0, 1)],
        "c": [(1, 1)],
    }


def test_a_walker_is_saved_by_its_holders_though_they_are_leaving() -> None:
    told = asked(GOSSIP, grid_plan(stages=1, replicas=2), main=0, leaving=["w0a"])
    assert parts_of(told) == {"w0a": [(0, 0)], "w0b": [(0, 1)]}


def test_of_one_walker_who_stays_saves_each_stage_once() -> None:
    told = asked(AllReduce(), grid_plan(stages=2, replicas=2), main=0, leaving=["w0a"])
    assert parts_of(told) == {"w0b": [(0, 0)], "w1a": [(1, 0)]}


def test_a_checkpoint_of_many_walkers_is_complete_with_the_last_stage_of_the_last() -> None:
    found = savings_of(job_of())
    found.expect(Generation(1), Step(4), (StageIndex(0), StageIndex(1)), num_walkers=2)
    for stage, walker in ((1, 1), (0, 0), (1, 0)):
        assert found.written(written(4, stage, f"s{stage}w{walker}", walker=walker), wall_s=1.0) is None
    assert found.written(written(4, 0, "other", walker=2), wall_s=1.0) is None
    assert found.written(written(4, 0, "again", walker=0), wall_s=1.0) is None
    done = found.written(written(4, 0, "s0w1", walker=1), wall_s=1.0)
    assert done is not None
    assert [[file.name for file in stage.files] for stage in done.stages] == [
        ["s0w0", "s0w1"],
        ["s1w0", "s1w1"],
    ]


def led_by(*scores: float) -> Leading:
    """After an election among as many walkers, over the plan `LED`."""
    job = job_of(version=5)
    job.spec = job.spec.model_copy(update={"aggregation": LSGD})
    leading = Leading(Members(job, {}, Outbox(History())))
    leading.begin(LED)
    for walker, score in enumerate(scores):
        report = EvaluationDone(
            generation=Generation(1),
            version=Step(5),
            microbatches=microbatches(walker),
            loss_sum=score,
            num_tokens=1,
            phase=Phase.PROBE,
        )
        leading.is_complete(LED.evaluation_paths[walker].hops[-1].worker, report, LED)
    leading.leaders(LED, {})
    return leading


def test_the_main_walker_is_the_one_that_led_last_wherever_a_plan_has_it() -> None:
    leading = led_by(3.0, 2.0, 1.0)
    assert leading.main(LED) == 2
    leading.fenced(now=0.0)
    # Heads go by their workers: without w1a, what was the third walker is the second.
    fewer = plan_of(
        [chunk(0, "w0b"), chunk(0, "w0c"), chunk(1, "w1b"), chunk(1, "w1c")],
        [path(chunk(0, "w0b"), chunk(1, "w1b")), path(chunk(0, "w0c"), chunk(1, "w1c"))],
    )
    assert leading.main(fewer) == 1


def test_without_its_leader_the_first_walker_is_the_main_one() -> None:
    assert led_by(3.0, 2.0, 1.0).main(grid_plan(stages=2, replicas=2)) == 0
    assert Leading(Members(job_of(), {}, Outbox(History()))).main(LED) == 0


def test_all_walkers_go_back_to_those_of_their_number() -> None:
    plan = grid_plan(stages=2, replicas=2)
    saved = checkpoint(JobId("j"), 4, url="s3://b")
    sources = walker_sources(plan, None, {}, version=Step(5), checkpoint=saved)
    told = assignments(
        plan,
        sources,
        job=JobId("j"),
        job_spec="{}",
        resumptions={},
    )
    assert sources.version == 4
    assert {w: [(x.source.kind, x.walker) for x in told[w].chunks] for w in plan.workers} == {
        "w0a": [(SourceKind.CHECKPOINT, 0)],
        "w0b": [(SourceKind.CHECKPOINT, 1)],
        "w1a": [(SourceKind.CHECKPOINT, 0)],
        "w1b": [(SourceKind.CHECKPOINT, 1)],
    }


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), 1),
        (("a", "s.a"), 1),
        (("walker1/a", "a"), 2),
        (("walker12/a", "walker2/b"), 13),
        (("walker/a",), 1),
    ],
)
def test_a_checkpoint_is_of_as_many_walkers_as_its_tensors_name(
    names: tuple[str, ...], expected: int
) -> None:
    file = CheckpointFile(name="f", num_bytes=1, sha256="", tensors=names)
    assert num_walkers([StageFiles(stage=StageIndex(0), files=(file,))]) == expected
