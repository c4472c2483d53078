"""Copies in the simulator: several donors, their deaths, following commits, and what a chunk is built from."""

from collections.abc import Callable

import pytest

from skein.protocol.log.records import JobSubmitted, StepCommitted
from skein.protocol.messages.directives import Directive, Follow, Member, Prefetch, Snapshot
from skein.protocol.worker.keeping.snapshots import NUM_SNAPSHOTS
from skein.protocol.worker.worker_io import (
    CopyKind,
    DirectiveArrived,
    PrefetchEnded,
    PrefetchFailed,
    WorkerEvent,
)
from skein.sim.processes.worker import SimWorker
from skein.sim.scenario import FLOPS_PER_S, make_world
from skein.types import Epoch, StageSpec, Step, WorkerId
from tests.support.jobs import small_job
from tests.support.worlds import fleet_of, of_kind, plan_of, run_until, version_of, worker

NEWCOMER = WorkerId("w9999")
SPEC = small_job(steps=30)


class Scene:
    """Four workers in training, two to a stage, and a newcomer whom only the test directs."""

    def __init__(self, *, at: int = 1) -> None:
        self.world = make_world(SPEC, fleet_of(4), seed=0)
        run_until(self.world, lambda world: version_of(world) >= at)
        plan = plan_of(self.world)
        self.stage = plan.stages[0]
        self.holders = sorted(x.chunk.worker for x in plan.chunks if x.chunk.stage == self.stage.index)
        [self.job] = [record.job for record in of_kind(self.world.log, JobSubmitted)]
        site = self.world.workers[worker(0)].machine.identity.site
        self.world.add_worker(NEWCOMER, site, flops_per_s=FLOPS_PER_S, memory_bytes=2**40)
        # The coordinator must not hear of it, or it would plan with it.
        self.world.mute_worker(NEWCOMER, 1e6)
        self.newcomer: SimWorker = self.world.workers[NEWCOMER]
        self.ended: list[PrefetchEnded | PrefetchFailed] = []
        self._listen()

    def _listen(self) -> None:
        handle = self.newcomer.machine.handle

        def heard(event: WorkerEvent, *, now: float):  # type: ignore[no-untyped-def]
            if isinstance(event, PrefetchEnded | PrefetchFailed):
                self.ended.append(event)
            return handle(event, now=now)

        self.newcomer.machine.handle = heard  # type: ignore[method-assign]

    def tell(self, name: WorkerId, directive: Directive) -> None:
        self.world.give(name, DirectiveArrived(directive=directive))

    def snapshot(self, version: int, *, names: list[WorkerId] | None = None) -> None:
        for name in self.holders if names is None else names:
            machine = self.world.workers[name].machine
            asked = Snapshot(
                epoch=machine.epoch,
                generation=machine.generation,
                version=Step(version),
                stages=(self.stage.index,),
                keeps_results=True,
            )
            self.tell(name, asked)

    def prefetch(self, version: int, *, is_backup: bool = False, is_told: bool = True) -> None:
        named = (
            Member(worker=name, incarnation=self.world.workers[name].machine.identity.incarnation, address="")
            for name in self.holders
        )
        assert self.world.coordinator is not None
        outbox = self.world.coordinator._outbox
        donors = tuple(
            outbox.as_donor(donor, outbox.history.generation) if is_told else donor for donor in named
        )
        asked = Prefetch(
            epoch=Epoch(1),
            job=self.job,
            job_spec="{}",
            stage=self.stage,
            version=Step(version),
            donors=donors,
            is_backup=is_backup,
            drops_before=Step(0),
        )
        self.tell(NEWCOMER, asked)

    def tell_commits(self) -> None:
        """Have the newcomer hear of every commit from now on."""

        def told(num_records: int) -> None:
            record = self.world.log[num_records - 1]
            if isinstance(record, StepCommitted):
                self.tell(NEWCOMER, Follow(epoch=Epoch(1), job=record.job, record=record.record))

        self.world.after_append = told

    def run_until_ended(self, count: int) -> list[int]:
        run_until(self.world, lambda _: len(self.ended) >= count)
        return [event.version for event in self.ended]

    def truth(self, stage: StageSpec, version: int) -> str:
        """Lineage of a holder's chunk, once it is at `version`."""
        chunks = self.world.workers[self.holders[-1]].executor
        run_until(self.world, lambda _: chunks.state_of(stage, Step(version)) is not None)
        found = chunks.state_of(stage, Step(version))
        assert found is not None
        return found


def test_a_newcomer_fetches_a_snapshot_and_follows_the_commits() -> None:
    scene = Scene()
    scene.snapshot(2)
    scene.prefetch(2)
    scene.tell_commits()
    assert scene.run_until_ended(4) == [2, 3, 4, 5]
    truth = scene.truth(scene.stage, 6)
    scene.run_until_ended(5)
    assert scene.world.copies.caught_up(scene.newcomer, scene.job, scene.stage, Step(6)) == truth


def test_a_copy_that_lags_is_brought_up_to_date_when_its_chunk_is_built() -> None:
    scene = Scene()
    scene.snapshot(2)
    scene.prefetch(2)
    scene.run_until_ended(1)
    scene.tell_commits()
    copies = scene.world.copies
    assert copies.lag(scene.newcomer, scene.job, scene.stage, Step(3)) is None
    truth = scene.truth(scene.stage, 3)
    assert copies.lag(scene.newcomer, scene.job, scene.stage, Step(3)) == 1
    assert copies.caught_up(scene.newcomer, scene.job, scene.stage, Step(3)) == truth


@pytest.mark.parametrize(
    "strike",
    [
        lambda scene: scene.world.kill_worker(scene.holders[0]),
        lambda scene: scene.world.freeze_worker(scene.holders[0], 1e6),
    ],
    ids=["dies", "freezes"],
)
def test_what_a_lost_donor_did_not_give_comes_from_the_other(strike: Callable[[Scene], None]) -> None:
    scene = Scene()
    scene.snapshot(1)
    run_until(scene.world, lambda world: version_of(world) >= 2)
    scene.prefetch(1, is_backup=True)
    strike(scene)
    assert scene.run_until_ended(1) == [1]
    assert scene.ended[0].kind is CopyKind.BACKUP
    assert isinstance(scene.ended[0], PrefetchEnded)


def test_donors_give_nothing_to_a_newcomer_that_was_not_told_what_to_show() -> None:
    scene = Scene()
    scene.snapshot(2)
    scene.prefetch(2, is_told=False)
    scene.run_until_ended(1)
    assert isinstance(scene.ended[0], PrefetchFailed)


def test_a_snapshot_that_never_comes_is_given_up() -> None:
    scene = Scene(at=3)
    scene.prefetch(0)
    scene.run_until_ended(1)
    assert isinstance(scene.ended[0], PrefetchFailed)


def test_two_snapshots_of_a_stage_are_kept() -> None:
    scene = Scene()
    holder = scene.world.workers[scene.holders[0]]
    for version in (1, 2, 3):
        scene.snapshot(version)
    truth = {version: scene.truth(scene.stage, version) for version in (2, 3)}
    run_until(scene.world, lambda world: version_of(world) >= 5)
    found = [scene.world.copies.fixed(holder, scene.stage, Step(version)) for version in (1, 2, 3)]
    assert found == [None, truth[2], truth[3]]
    assert NUM_SNAPSHOTS == 2


def test_a_backup_serves_others_when_its_donors_have_moved_on() -> None:
    scene = Scene()
    scene.snapshot(2)
    scene.prefetch(2, is_backup=True)
    truth = scene.truth(scene.stage, 2)
    scene.tell_commits()
    scene.run_until_ended(1)
    run_until(scene.world, lambda world: version_of(world) >= 4)
    assert scene.world.copies.fixed(scene.newcomer, scene.stage, Step(2)) == truth
    assert scene.world.copies.caught_up(scene.newcomer, scene.job, scene.stage, Step(4)) is None
