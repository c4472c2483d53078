"""Workers that die, or stand still for a while, at the places where a protocol like this one breaks."""

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.chaosing.watch import watched
from bench.recovering.fate import Orders
from client.api import Client, Job
from skein.config.job import BackupSpec, JobSpec
from skein.model.rows import VocabularySpec, VocabularySplit
from skein.protocol.log.records import Incident, Remedy
from skein.types import JobState
from skein.wire.views import IncidentEnded, StepFinished, WentBack
from tests.e2e.jobs import NUM_STEPS, losses_of, text_job, wait_for_step
from tests.e2e.shared import SharedCluster
from tests.support.extent import ENTIRE

FIRST, LAST = 0, 1
SHARD, LAST_SHARD, LAST_OF_BOTH = 2, 3, 5
"""Stages of a job whose output is cut into shards, or the input too."""
_POLL_S = 0.05
RESUMED = "after DirectiveArrived Assign resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where a holder of `stage` ends (None: the spare, when it gets a place), and who has to die before that.

    `companion`: a holder of this stage is killed first, with its share of the step nearly done. `is_split`: in a job
    whose backwards are. `shards`: in a job whose vocabulary is cut.
    """

    name: str
    at: tuple[str, ...]
    stage: int | None
    nth: int = 1
    turns: int = 0
    companion: int | None = None
    replicas: int = 2
    is_split: bool = False
    shards: VocabularySplit = VocabularySplit.OFF

    def orders(self, *, freezes: bool) -> Orders:
        return Orders(at=self.at, nth=self.nth, turns=self.turns, how="freeze" if freezes else "kill")


POINTS = (
    Point(name="x-received", at=("after TensorArrived forward",), stage=LAST, nth=2),
    Point(name="inside-forward", at=("inside Forward",), stage=FIRST, nth=2),
    Point(name="forward-done", at=("before SendTensor forward",), stage=FIRST, nth=2),
    Point(name="x-leaving", at=("after SendTensor forward",), stage=FIRST, nth=2, turns=2),
    Point(name="inside-last-hop", at=("inside Loss",), stage=LAST, nth=2),
    Point(name="inside-backward", at=("inside Backward",), stage=FIRST, nth=2),
    Point(name="accumulated", at=("ended Loss",), stage=LAST, nth=2),
    Point(name="dy-leaving", at=("after SendTensor backward",), stage=LAST, nth=2, turns=2),
    Point(name="input-done", at=("ended Input",), stage=FIRST, nth=2, is_split=True),
    Point(name="loss-put-aside", at=("ended LossInput",), stage=LAST, nth=2, is_split=True),
    Point(name="before-weight", at=("after OpEnded Input",), stage=FIRST, nth=2, is_split=True),
    Point(name="scored", at=("ended Forward",), stage=SHARD, nth=4, shards=VocabularySplit.OUTPUT),
    Point(
        name="scores-leaving",
        at=("after SendTensor forward",),
        stage=SHARD,
        nth=4,
        turns=2,
        shards=VocabularySplit.OUTPUT,
    ),
    Point(name="scores-merged", at=("ended Loss",), stage=LAST_SHARD, nth=2, shards=VocabularySplit.OUTPUT),
    Point(
        name="errors-leaving",
        at=("after SendTensor backward",),
        stage=LAST_SHARD,
        nth=2,
        turns=2,
        shards=VocabularySplit.OUTPUT,
    ),
    Point(
        name="rows-put-aside",
        at=("ended LossInput",),
        stage=LAST_OF_BOTH,
        nth=2,
        is_split=True,
        shards=VocabularySplit.BOTH,
    ),
    Point(name="before-done", at=("before SendReport StageDone",), stage=LAST),
    Point(name="adopted", at=("before SendReport Ack",), stage=FIRST, companion=LAST),
    Point(name="acknowledged", at=("after SendReport Ack",), stage=LAST, turns=3, companion=FIRST),
    Point(name="assigned-again", at=(RESUMED,), stage=FIRST, companion=LAST),
    Point(name="serving-x", at=(RESUMED, "before SendTensor forward"), stage=FIRST, companion=LAST),
    Point(name="serving-dy", at=(RESUMED, "before SendTensor backward"), stage=LAST, companion=FIRST),
    Point(name="first-replayed", at=(RESUMED, "ended op"), stage=FIRST, companion=FIRST, replicas=3),
    Point(
        name="replayed",
        at=(RESUMED, "before SendReport StageDone"),
        stage=FIRST,
        companion=FIRST,
        replicas=3,
    ),
    Point(name="prepared", at=("after DirectiveArrived Prepare",), stage=FIRST),
    Point(name="parts-leaving", at=("after SendTensor part",), stage=LAST, turns=2),
    Point(name="result-leaving", at=("after SendTensor result",), stage=FIRST, turns=2),
    Point(name="before-vote", at=("before SendReport Vote",), stage=LAST),
    Point(name="voted", at=("after SendReport Vote",), stage=FIRST, turns=3),
    Point(name="commit-known", at=("after DirectiveArrived Commit",), stage=LAST),
    Point(name="inside-apply", at=("inside Apply",), stage=FIRST),
    Point(name="applied", at=("after OpEnded Apply",), stage=LAST),
    Point(name="donor", at=("before Give state",), stage=FIRST),
    Point(name="silent-asked", at=("before StartPrefetch followed",), stage=None, companion=FIRST),
    Point(name="silent-current", at=("after PrefetchEnded followed",), stage=None, companion=LAST),
    Point(name="silent-following", at=("before FollowCommit",), stage=None, companion=FIRST),
    Point(name="let-in", at=("before Build",), stage=None, companion=LAST),
)
FROZEN = tuple(p for p in POINTS if p.name in ("inside-backward", "adopted", "before-vote", "inside-apply"))
BRIEF = ("serving-x", "silent-current")
"""What `make test` tries: while the work of one who died before is taken over, and beside the step."""
COVERING = (
    "inside-backward",
    "input-done",
    "loss-put-aside",
    "scores-merged",
    *BRIEF,
    "first-replayed",
    "result-leaving",
    "inside-apply",
)
"""What is tried before a change is taken: within a step, after a death, at its end, beside it. `make matrix`: all."""
TRIED = tuple(
    pytest.param(p, id=p.name, marks=() if p.name in BRIEF else pytest.mark.long)
    for p in POINTS
    if ENTIRE or p.name in COVERING
)
TRIED_FROZEN = tuple(
    pytest.param(p, id=p.name, marks=() if p.name == "before-vote" else pytest.mark.long)
    for p in FROZEN
    if ENTIRE or p.name == "before-vote"
)


@pytest.fixture
def cluster(shared: SharedCluster, undisturbed: dict[int, float]) -> SharedCluster:
    """Four hold two stages twice, and one is spare, who was not there in the undisturbed job."""
    shared.gather(5)
    return shared


def wait_for_end(cluster: SharedCluster, name: str, is_over: threading.Event) -> bool:
    """Until it has carried out its orders, which must be before the job is over; whether it is dead, not frozen."""
    while (is_dead := cluster.has_ended(name)) is None:
        if is_over.wait(_POLL_S):
            raise AssertionError(f"{name} did not come there: {cluster.log_of('coordinator')[-2000:]}")
    return is_dead


def job_of(
    name: str,
    text: Path,
    *,
    replicas: int = 2,
    is_split: bool = False,
    shards: VocabularySplit = VocabularySplit.OFF,
) -> JobSpec:
    job = text_job(name, text, steps=NUM_STEPS, replicas=replicas)
    backward = "split" if is_split else job.plan.backward
    plan = job.plan.model_copy(update={"backward": backward})
    parallel = job.parallel.model_copy(update={"vocabulary": VocabularySpec(split=shards)})
    changed = {"backup": BackupSpec(every_steps=4), "plan": plan, "parallel": parallel}
    return JobSpec.model_validate(job.model_copy(update=changed).model_dump(mode="json"))


def holders(client: Client, stage: int | None) -> list[str]:
    """Who holds a stage; who holds none."""
    return [w.worker for w in client.workers() if (stage in w.stages if stage is not None else not w.stages)]


def wait_for_incident(job: Job, *, names: str) -> Incident:
    for event in job.events():
        if isinstance(event.body, IncidentEnded) and names in event.body.incident.workers:
            return event.body.incident
    raise AssertionError(f"{job.id} ended, and nothing told of {names}")


def assert_exact(job: Job, undisturbed: dict[int, float]) -> None:
    """Every step once, with the losses of the undisturbed job, and nothing done twice but what was lost."""
    status, events = job.wait(), job.history()
    assert status.state is JobState.FINISHED, status.reason
    incidents = [e.body.incident for e in events if isinstance(e.body, IncidentEnded)]
    assert incidents
    assert {incident.remedy for incident in incidents} <= {Remedy.RESUMED, Remedy.UNTOUCHED}, incidents
    assert not [e for e in events if isinstance(e.body, WentBack)]
    steps = [e.body.record.step for e in events if isinstance(e.body, StepFinished)]
    assert steps == list(range(NUM_STEPS))
    # Another plan sums in another order: float32 rounding, grown over the steps.
    assert losses_of(events) == pytest.approx(undisturbed, rel=1e-5)


def doom(cluster: SharedCluster, client: Client, point: Point, *, freezes: bool) -> tuple[str, str | None]:
    """Give the orders; who is to end, and who before."""
    placed = {stage: holders(client, stage) for stage in {None, FIRST, LAST, point.stage}}
    stage = point.stage
    if point.replicas > 2:  # the spare makes one of the stages have three holders: that one
        stage = max((FIRST, LAST), key=lambda s: len(placed[s]))
    victim = placed[stage][0]
    companion = None
    if point.companion is not None:
        companion = placed[stage if point.replicas > 2 else point.companion][-1]
        cluster.order(companion, Orders(at=("before SendReport StageDone",)))
    cluster.order(victim, point.orders(freezes=freezes))
    return victim, companion


@pytest.mark.parametrize("point", TRIED)
def test_a_worker_that_dies_costs_no_step_wherever_it_was(
    cluster: SharedCluster, text: Path, undisturbed: dict[int, float], point: Point
) -> None:
    with cluster.client() as client:
        spec = job_of(
            f"dies-{point.name}",
            text,
            replicas=point.replicas,
            is_split=point.is_split,
            shards=point.shards,
        )
        job = client.submit(spec)
        wait_for_step(job, 1)
        with watched(job) as is_over:
            doomed = doom(cluster, client, point, freezes=False)
            for name in filter(None, reversed(doomed)):
                assert wait_for_end(cluster, name, is_over)
                cluster.restart(name)
        assert_exact(job, undisturbed)


@pytest.mark.parametrize("point", TRIED_FROZEN)
def test_a_worker_that_stands_still_and_comes_back_costs_no_step(
    cluster: SharedCluster, text: Path, undisturbed: dict[int, float], point: Point
) -> None:
    with cluster.client() as client:
        job = client.submit(job_of(f"freezes-{point.name}", text, replicas=point.replicas))
        wait_for_step(job, 1)
        with watched(job) as is_over:
            victim, companion = doom(cluster, client, point, freezes=True)
            if companion is not None:
                assert wait_for_end(cluster, companion, is_over)
                cluster.restart(companion)
            assert not wait_for_end(cluster, victim, is_over)
        wait_for_incident(job, names=victim)
        cluster.thaw_worker(victim)
        assert_exact(job, undisturbed)
