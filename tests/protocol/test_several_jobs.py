"""Several jobs beside each other at one coordinator, each with its own crew."""

from dataclasses import replace

from skein.config.resources import ResourcesSpec, parse_labels
from skein.protocol.coordinator.coordinator_io import CancelAsked, Send
from skein.protocol.coordinator.runs.gathering import GATHER_S
from skein.protocol.coordinator.scheduling.scheduler import LATE_S, LOOK_S
from skein.protocol.coordinator.scheduling.sharing import KEEP_S
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import GenerationOpened, Quarantined
from skein.protocol.messages.directives import Dismiss, NewGeneration, Save
from skein.protocol.messages.reports import Trouble
from skein.types import JobId, JobState, Step, WorkerId
from tests.support.desk import Desk
from tests.support.plans import grid_plan
from tests.support.reports import hello, profile
from tests.support.runs import PAIRS, PAIRS_SPEC, PLAN, SPEC, later, stepping

FIRST, SECOND = JobId("small-1"), JobId("small-2")


def crews(desk: Desk) -> dict[str, tuple[str, ...]]:
    return {job: run.crew for job, run in desk.machine.view.runs.items()}


def test_a_second_job_begins_on_workers_that_the_first_does_not_use() -> None:
    desk = stepping()
    desk.join("x", "y")
    desk.submit(SPEC, key="b")
    assert crews(desk) == {FIRST: ("w0a", "w1a"), SECOND: ("x", "y")}
    assert {fence.job for fence in desk.told(NewGeneration).values()} == {SECOND}
    assert desk.machine.view.state_of(FIRST) is JobState.RUNNING


def test_a_second_job_gets_its_share_at_the_end_of_a_step() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.submit(PAIRS_SPEC, key="b")
    assert desk.machine.view.state_of(SECOND) is JobState.PENDING
    assert desk.machine.view.reason_of(SECOND) == "waiting for w0b, w1b to end a step of another job"
    assert not desk.told(NewGeneration)
    desk.step(PAIRS)
    [opened] = desk.recorded(GenerationOpened)
    assert opened.reason == "w0b, w1b leaving"


def test_a_crew_that_is_moved_is_free_of_the_first_job_before_the_second_begins() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.submit(PAIRS_SPEC, key="b")
    desk.step(PAIRS)
    desk.acknowledge(desk.live, {w: [(PAIRS.stages[int(w[1])], 1)] for w in desk.live})
    small = grid_plan(stages=2, replicas=1, num_microbatches=4)
    desk.plan(small)
    commands = desk.ready(small.workers)
    later(desk, GATHER_S)
    told = [
        (c.worker, type(c.directive), c.directive.job)
        for c in [*commands, *desk.commands]
        if isinstance(c, Send) and isinstance(c.directive, Dismiss | NewGeneration)
    ]
    mine = [(kind, job) for worker, kind, job in told if worker == "w0b"]
    assert mine.index((Dismiss, FIRST)) < mine.index((NewGeneration, SECOND))
    assert crews(desk) == {FIRST: ("w0a", "w1a"), SECOND: ("w0b", "w1b")}
    assert desk.machine.view.state_of(FIRST) is JobState.RUNNING
    # What they held of the first job nobody looks for any more.
    holders = desk.machine.history.jobs[FIRST].may_hold
    assert {member.worker for member in holders} == {"w0a", "w1a"}


def test_a_job_that_waits_is_begun_without_workers_in_its_quarantine() -> None:
    desk = stepping()
    desk.join("x")
    desk.submit(SPEC, key="b")
    x = WorkerId("x")
    found = Quarantined(job=SECOND, worker=x, step=Step(1), reason="lied", wall_s=0.0)
    desk.machine.history.apply(found)
    desk.join("y")
    assert crews(desk).get(SECOND, ()) == ()
    desk.join("z")
    assert crews(desk)[SECOND] == ("y", "z")


def test_each_job_has_a_generation_of_its_own_and_a_loss_in_one_changes_nothing_of_the_other() -> None:
    desk = stepping()
    desk.join("x", "y")
    desk.submit(SPEC, key="b")
    first, second = (desk.machine.history.jobs[job] for job in (FIRST, SECOND))
    assert first.generation < second.generation
    desk.break_stream("y")
    assert [x.job for x in desk.recorded(GenerationOpened)] == [SECOND]
    desk.step(PLAN)
    assert first.version == 1


def test_when_a_job_ends_its_workers_go_to_who_is_left() -> None:
    desk = stepping()
    desk.join("x", "y")
    desk.submit(SPEC, key="b")
    desk.give(CancelAsked(job=SECOND, discards=True))
    assert crews(desk) == {FIRST: ("w0a", "w1a", "x", "y")}


def test_a_worker_that_its_job_cannot_use_goes_to_another_although_somebody_was_lost_just_now() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.join("z")
    desk.break_stream("w1b")
    desk.submit(SPEC, key="b")
    assert not any("is to go" in line for line in desk.lines())
    desk.report("w0b", Trouble(generation=desk.generation, is_fatal=False, reason="no data", is_unfit=True))
    later(desk, LOOK_S)
    assert [line for line in desk.lines() if "is to go" in line] == [
        f"job={FIRST} worker=w0b is to go to {SECOND}"
    ]


def test_after_a_restart_everybody_goes_back_to_the_job_that_had_it() -> None:
    desk = stepping()
    desk.join("x", "y")
    desk.submit(SPEC, key="b")
    again = Desk(desk.log)
    again.give(TimePassed())
    assert set(again.machine.view.runs) == {FIRST, SECOND}
    again.join("y", "w1a", "x", "w0a")
    assert crews(again) == {FIRST: ("w0a", "w1a"), SECOND: ("x", "y")}


def test_a_job_of_a_higher_priority_has_the_other_saved_and_wait() -> None:
    desk = stepping()
    desk.submit(SPEC.model_copy(update={"priority": 1}), key="b")
    desk.step(PLAN)
    assert desk.told(Save)
    desk.save()
    later(desk, 2.0)
    assert crews(desk)[SECOND] == ("w0a", "w1a")
    assert desk.machine.view.state_of(FIRST) is JobState.PAUSED
    assert desk.machine.history.jobs[FIRST].newest_checkpoint is not None


def test_a_job_that_has_waited_for_long_has_workers_before_those_that_came_later() -> None:
    desk = Desk()
    for key, resources in (("a", ResourcesSpec(max_workers=2)), ("b", ResourcesSpec(min_workers=3))):
        desk.submit(SPEC.model_copy(update={"resources": resources}), key=key)
    again = Desk(desk.log)
    again.now = KEEP_S
    again.join("w0a", "w1a", "x", "y")
    third = again.submit(SPEC, key="c")
    assert crews(again) == {FIRST: ("w0a", "w1a")}
    kept = "it wants 3 of 4 workers at least, and they keep theirs; no other job starts on what comes free"
    assert again.machine.view.reason_of(SECOND) == f"waiting for {FIRST}: {kept}"
    behind = "it wants 2 of 4 workers at least, and free ones are kept for who has waited for so long"
    assert again.machine.view.reason_of(third) == f"waiting behind {SECOND}: {behind}"
    again.give(CancelAsked(job=FIRST, discards=True))
    assert len(crews(again)[SECOND]) >= 3


def test_a_job_has_workers_with_its_labels_alone() -> None:
    desk = stepping()
    desk.join("x")
    for worker, memory in (("y", "80g"), ("z", "40g")):
        labels = parse_labels(["gpu=h100", f"memory={memory}"])
        desk.report(worker, replace(hello(worker), labels=labels))
    resources = ResourcesSpec(labels={"gpu": "h100", "memory": "80g"})
    desk.submit(SPEC.model_copy(update={"resources": resources}), key="b")
    assert crews(desk)[SECOND] == ("y",)
    other = ResourcesSpec(labels={"gpu": "a100", "memory": "80g"}, sites=("here",))
    third = desk.submit(SPEC.model_copy(update={"resources": other}), key="c")
    told = "waiting for workers: it wants 1 at least at here with gpu=a100, memory=80g, and 0 are here"
    assert desk.machine.view.reason_of(third) == told


def test_a_job_says_what_workers_it_waits_for_where_as_many_as_it_takes_are_too_small() -> None:
    desk = stepping()
    labels = parse_labels(["gpu=small"])
    for worker in ("x", "y", "z"):
        desk.report(worker, replace(hello(worker), labels=labels, profile=profile(memory_bytes=2**22)))
    resources = ResourcesSpec(labels={"gpu": "small"}, max_workers=1)
    second = desk.submit(SPEC.model_copy(update={"resources": resources}), key="b")
    told = desk.machine.view.reason_of(second)
    assert told.startswith("waiting for other workers with gpu=small: ")
    assert "of memory" in told
    longer = SPEC.model_copy(update={"resources": resources.model_copy(update={"max_workers": 2})})
    third = desk.submit(longer, key="c")
    assert crews(desk)[third] == ("x", "y")


def test_a_job_begins_with_fewer_where_workers_of_its_gang_cannot_be_spared() -> None:
    desk = stepping()
    desk.join("x")
    desk.submit(SPEC.model_copy(update={"priority": 1}), key="b")
    desk.step(PLAN)
    assert desk.told(Save)
    later(desk, LATE_S - 1)
    assert SECOND not in crews(desk)
    assert desk.machine.view.reason_of(SECOND).endswith("to end a step of another job")
    later(desk, 2.0)
    assert crews(desk)[SECOND] == ("x",)


def test_a_job_that_wants_more_workers_than_are_here_says_so() -> None:
    desk = stepping()
    wanting = SPEC.model_copy(update={"resources": ResourcesSpec(min_workers=3)})
    desk.submit(wanting, key="b")
    assert desk.machine.view.reason_of(SECOND) == "waiting for workers: it wants 3 at least, and 2 are here"
    elsewhere = SPEC.model_copy(update={"resources": ResourcesSpec(sites=("moon",))})
    third = desk.submit(elsewhere, key="c")
    reason = "waiting for workers: it wants 1 at least at moon, and 0 are here"
    assert desk.machine.view.reason_of(third) == reason


def test_a_job_waits_for_a_worker_that_offers_its_data_and_starts_with_it() -> None:
    desk = stepping()
    desk.join("x", "y")
    source = SPEC.data.sources[0].model_copy(update={"path": "data://books/2024"})
    named = SPEC.model_copy(update={"data": SPEC.data.model_copy(update={"sources": (source,)})})
    second = desk.submit(named, key="b")
    later(desk, 2.0)
    assert desk.machine.view.reason_of(second) == "waiting for other workers: none offers data://books"
    has_it = replace(hello("z", "z-1"), offers=("books", "films"))
    desk.incarnations[has_it.worker] = has_it.incarnation
    desk.report("z", has_it)
    later(desk, 2.0)
    assert "z" in crews(desk)[second]
    assert len(crews(desk)[second]) == 2
