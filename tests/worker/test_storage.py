"""Real workers whose checkpoints are damaged, find no room, or lie where nothing answers: the job ends well."""

import threading
from functools import partial
from pathlib import Path

import pytest

from skein.config.job import CheckpointSpec, JobSpec
from skein.protocol.log.records import (
    CheckpointChecked,
    CheckpointCommitted,
    GenerationOpened,
    RolledBack,
    StepCommitted,
)
from skein.storage import outside
from skein.storage.folders import RootedFolder
from skein.storage.outside import NoRoomError, Outside
from skein.types import JobState
from tests.worker.cluster import Disk, cluster
from tests.worker.lab import write_text
from tests.worker.test_run import NUM_STEPS, assert_same_curve, job_of, undisturbed


def at_url(job: JobSpec, url: str) -> JobSpec:
    return job.model_copy(
        update={"checkpoint": CheckpointSpec(every_steps=job.checkpoint.every_steps, url=url)}
    )


async def until_saved_twice(disk: Disk, job: JobSpec) -> None:
    """Two checkpoints are there and steps after them, and then everybody dies."""
    async with cluster(disk) as here, here.workers("w0", "w1"):
        here.submit(job)
        newest = await here.first(CheckpointCommitted, 2)
        await here.first(StepCommitted, newest.version + 1)


async def test_a_newest_checkpoint_that_lacks_a_file_is_set_aside_and_the_older_one_gone_on_from(
    tmp_path: Path,
) -> None:
    job = job_of(write_text(tmp_path), every_steps=2)
    steps, _ = undisturbed(job)
    disk = Disk()
    await until_saved_twice(disk, job)
    kept = sorted({key[1] for key in disk.files})[-2:]
    name = min(key for key in disk.files if key[1] == kept[1])
    del disk.files[name]
    before = [r.record for r in disk.records if isinstance(r, StepCommitted)]
    async with cluster(disk) as here, here.workers("w0", "w1"):
        assert await here.finished() == JobState.FINISHED
        assert [back.to_version for back in here.all(RolledBack)][-1] == kept[0]
        [checked] = [record for record in here.all(CheckpointChecked) if not record.is_whole]
        assert checked.version == kept[1]
        made = {record.step: record for record in [*before, *here.steps]}
    assert_same_curve([made[step] for step in sorted(made)], steps)


async def test_a_finished_model_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[int] = []
    really = outside.require_room

    def require_room(folder: Path, num_bytes: int) -> None:
        if folder.is_relative_to(tmp_path / "saved") and len(refusals) < 5:
            refusals.append(num_bytes)
            raise NoRoomError(num_bytes, str(folder), 0)
        really(folder, num_bytes)

    monkeypatch.setattr("skein.storage.folders.require_room", require_room)
    monkeypatch.setattr("worker.chunks.saving._PAUSES_S", (0.02, 0.02, 0.02))
    monkeypatch.setattr("skein.protocol.coordinator.runs.checkpoints.savings.AGAIN_S", 0.02)
    job = at_url(job_of(write_text(tmp_path)), f"file://{tmp_path}/saved")
    async with cluster(Disk()) as here, here.workers("w0", "w1"):
        here.submit(job)
        assert await here.finished() == JobState.FINISHED
        assert [saved.version for saved in here.all(CheckpointCommitted)] == [NUM_STEPS]
        assert len(here.all(GenerationOpened)) == 1
    assert len(refusals) == 5


async def test_a_place_that_does_not_answer_is_waited_for_and_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = at_url(job_of(write_text(tmp_path), every_steps=2), f"file://{tmp_path}/saved")
    disk = Disk()
    await until_saved_twice(disk, job)
    stuck, hung = threading.Event(), list[str]()
    really = RootedFolder.path_of

    def path_of(folder: RootedFolder, name: str) -> Path:
        if len(hung) < 3:
            hung.append(name)
            stuck.wait()
        return really(folder, name)

    monkeypatch.setattr(RootedFolder, "path_of", path_of)
    monkeypatch.setattr("worker.process.Outside", partial(Outside, silent_s=0.1))
    monkeypatch.setattr("skein.protocol.coordinator.runs.gathering.PARDON_S", 0.05)
    try:
        async with cluster(disk) as here, here.workers("w0", "w1"):
            assert await here.finished() == JobState.FINISHED
            assert len(here.all(GenerationOpened)) > 2
            assert here.all(CheckpointCommitted)[-1].version == NUM_STEPS
    finally:
        stuck.set()
    assert len(hung) == 3
