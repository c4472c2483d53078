"""An exchange that a walker comes late to: whoever is left out of the step takes part in what ends it."""

from skein.config.aggregation import DiLoCo
from skein.plan.agreeing.quorum import NUM_PROVEN
from skein.plan.agreeing.rounds import local_group
from skein.protocol.messages.directives import Commit, Prepare
from skein.protocol.messages.reports import StageDone, Vote
from skein.types import ChunkRef, GroupId
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import attempt, ledger

NAMES = ("a", "b", "c")
CHUNKS = [chunk(0, name) for name in NAMES]
PLAN = plan_of(CHUNKS, [path(at) for at in CHUNKS])
RULE = DiLoCo(rule="diloco", local_steps=NUM_PROVEN + 1, wire="fp32", quorum=0.5, grace=2.0)


def started() -> Desk:
    """Three walkers have begun the first step."""
    desk = Desk()
    job = small_job(stages=1, replicas=3, microbatches=3, steps=2 * NUM_PROVEN)
    desk.submit(job.model_copy(update={"aggregation": RULE}))
    desk.join(*NAMES)
    desk.settle(PLAN)
    return desk


def vote(desk: Desk, at: ChunkRef, group: GroupId) -> None:
    run = desk.machine.run
    assert run is not None
    generation = desk.generation
    desk.report(
        at.worker,
        Vote(
            generation=generation,
            step=run.job.version,
            group=group,
            attempt=attempt(generation=generation, epoch=desk.machine.history.epoch),
            digest="same",
            squared_norm=1.0,
            is_finite=True,
        ),
    )


def arrive(desk: Desk, at: ChunkRef) -> None:
    """A walker is done with its microbatch, and votes on its own sums."""
    run = desk.machine.run
    assert run is not None
    done = StageDone(
        generation=desk.generation,
        step=run.job.version,
        ledger=ledger(0, at.worker, CHUNKS.index(at)),
        loss_sum=1.0,
        tokens=(1,),
    )
    desk.report(at.worker, done)
    vote(desk, at, local_group(at).group)


def late_to_the_exchange() -> Desk:
    """Some rounds say what is usual; then the last walker does not come to the step that ends with an exchange."""
    desk = started()
    for _ in range(NUM_PROVEN):
        for at in CHUNKS[:2]:
            arrive(desk, at)
        desk.wait(0.1)
        arrive(desk, CHUNKS[2])
    for at in CHUNKS[:2]:
        arrive(desk, at)
    desk.wait(0.3)
    return desk


def test_who_is_late_is_asked_to_take_part_for_all_wait_for_its_vote() -> None:
    desk = late_to_the_exchange()
    asked = desk.told(Prepare)
    assert sorted(asked) == sorted(NAMES)
    (group,) = {prepare.group.group for prepare in asked.values()}
    for at in CHUNKS:
        vote(desk, at, group)
    assert sorted(desk.told(Commit)) == sorted(NAMES)


def test_what_a_late_walker_tells_after_all_is_no_part_of_the_step() -> None:
    desk = late_to_the_exchange()
    (group,) = {prepare.group.group for prepare in desk.told(Prepare).values()}
    arrive(desk, CHUNKS[2])
    for at in CHUNKS:
        vote(desk, at, group)
    (told, *_) = desk.told(Commit).values()
    assert local_group(CHUNKS[2]).group not in {result.group for result in told.record.results}
