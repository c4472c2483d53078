"""Checkpoints written by one cut and read by another."""

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import safe_open

from skein.config.job import JobSpec
from skein.config.location import SCHEMES
from skein.errors import LocalError, UserError
from skein.model.rows import VocabularySplit
from skein.plan.cut import cut_job
from skein.protocol.log.records import StageFiles, checkpoint_folder
from skein.protocol.messages.directives import CheckpointFile
from skein.protocol.worker.ops import SaveOp
from skein.storage.places import ANYWHERE
from skein.types import JobId, Layout, StageIndex, Step
from tests.support.device import DEVICE
from tests.support.extent import part
from tests.worker.lab import GENERATION, Lab, tiny_job
from worker.chunks.checkpoint import UrlArchive, check_url, file_names, read_state, write_stage
from worker.compute.chunk import Chunk
from worker.compute.state import STEP, saved_names

JOB = JobId("j1")


def save(lab: Lab, url: Path, version: int) -> tuple[StageFiles, ...]:
    """Every stage, by its first holder."""
    archive = UrlArchive(str(url), JOB, Step(version))
    saved = []
    for stage in lab.arrangement.stages:
        holder = next(ref.worker for ref in lab.arrangement.chunks if ref.stage == stage.index)
        done = lab.benches[holder].run(
            SaveOp(generation=GENERATION, version=Step(version), stage=stage.index, url=str(url))
        )
        assert done.saved is not None
        files = write_stage(
            stage.index, GENERATION, archive, params=done.saved.params, state=done.saved.state
        )
        saved.append(StageFiles(stage=stage.index, files=files))
    return tuple(saved)


def restore(lab: Lab, url: Path, version: int, files: tuple[StageFiles, ...]) -> None:
    archive = UrlArchive(str(url), JOB, Step(version))
    for ref in lab.arrangement.chunks:
        holding = lab.benches[ref.worker].compute.holding
        assert holding is not None
        chunk = holding.chunks[ref.stage]
        names = saved_names(lab.job, [chunk.stage])
        chunk.load_state(read_state(files, names, archive), version=Step(version))


def test_a_chunk_that_was_given_up_can_be_saved_until_somebody_computes(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    [first, *_] = lab.arrangement.chunks
    bench = lab.benches[first.worker]
    assert bench.compute.holding is not None
    bench.compute.hold(replace(bench.compute.holding, chunks={}))
    done = bench.run(SaveOp(generation=GENERATION, version=Step(0), stage=first.stage, url=None))
    assert done.saved is not None


class Locked(MemoryFileSystem):  # type: ignore[misc]  # no stubs
    """A store that lets nobody write, and says so in its own way."""

    protocol = "locked"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        raise LookupError("no credentials")

    def put_file(self, lpath: str, rpath: str, callback: object = None) -> None:
        raise LookupError("no credentials")


def test_whatever_a_store_raises_is_one_kind_of_error(tmp_path: Path) -> None:
    fsspec.register_implementation("locked", Locked, clobber=True)
    places = replace(ANYWHERE, schemes=(*SCHEMES, "locked"))
    with pytest.raises(UserError, match="no credentials"):
        check_url("locked://bucket", places=places)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="no credentials"):
        UrlArchive("locked://bucket", JOB, Step(0), places=places).put(tmp_path / "file", "file")


CUTS = [
    (1, 1, Layout.LINE),
    (2, 2, Layout.LINE),
    (4, 1, Layout.LINE),
    (2, 1, Layout.LOOP),
    (3, 2, Layout.LOOP),
]


@pytest.mark.parametrize(
    ("stages", "replicas", "layout", "is_tied"),
    part([(*cut, is_tied) for cut in CUTS for is_tied in (True, False)], every=5),
)
def test_any_cut_goes_on_from_a_checkpoint_of_two_stages(
    text: Path, tmp_path: Path, labs: list[Lab], stages: int, replicas: int, layout: Layout, is_tied: bool
) -> None:
    writer = Lab(tiny_job(text, is_tied=is_tied))
    reader = Lab(tiny_job(text, is_tied=is_tied, stages=stages, replicas=replicas, layout=layout))
    labs += [writer, reader]
    writer.step(0)
    writer.step(1)
    restore(reader, tmp_path / "ck", 2, save(writer, tmp_path / "ck", 2))
    for step in (2, 3):
        expected, found = writer.step(step), reader.step(step)
        # Both are float64 sums of the same numbers, in another order.
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-11)


def in_shards(text: Path, split: VocabularySplit, stages: int, *, is_tied: bool) -> JobSpec:
    """The lab's job with its vocabulary in so many shards."""
    given = tiny_job(text, is_tied=is_tied, stages=stages).model_dump(mode="json")
    return JobSpec.model_validate(given | {"parallel": {"stages": stages, "vocabulary": {"split": split}}})


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("writes", VocabularySplit)
def test_every_row_of_a_vocabulary_is_saved_once_and_found_by_any_other_cut(
    text: Path, tmp_path: Path, writes: VocabularySplit, *, is_tied: bool
) -> None:
    writer = in_shards(text, writes, 4, is_tied=is_tied)
    archive = UrlArchive(str(tmp_path), JOB, Step(3))
    saved: list[StageFiles] = []
    state: dict[str, torch.Tensor] = {}
    for stage in cut_job(writer):
        chunk = Chunk.drawn(writer, stage, version=Step(3), device=DEVICE)
        params, others = chunk.copy_for_checkpoint()
        files = write_stage(stage.index, GENERATION, archive, params=params, state=others)
        saved.append(StageFiles(stage=stage.index, files=files))
        state |= chunk.copy_state()
    listed = [name for stage in saved for file in stage.files for name in file.tensors if name != STEP]
    assert sorted(listed) == sorted(state.keys() - {STEP})
    for stages in (2, 3):
        reader = in_shards(text, writes, stages, is_tied=is_tied)
        for stage in cut_job(reader):
            found = read_state(saved, saved_names(reader, [stage]), archive)
            assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_files_hold_what_they_say_under_names_that_others_know(
    text: Path, tmp_path: Path, labs: list[Lab]
) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    lab.step(0)
    files = save(lab, tmp_path, 1)
    folder = tmp_path / JOB / checkpoint_folder(Step(1))
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        name for stage in lab.arrangement.stages for name in file_names(stage.index, GENERATION)
    )
    for file in (file for stage in files for file in stage.files):
        with safe_open(folder / file.name, framework="pt") as tensors:
            assert tuple(sorted(tensors.keys())) == file.tensors
        assert (folder / file.name).stat().st_size == file.num_bytes
    listed = [name for stage in files for file in stage.files for name in file.tensors]
    assert listed.count("model.embed_tokens.weight") == 1, "a tied tensor is saved once"
    assert listed.count("exp_avg.model.embed_tokens.weight") == 1


def test_a_changed_file_is_refused(text: Path, tmp_path: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    files = save(lab, tmp_path, 0)
    path = tmp_path / JOB / checkpoint_folder(Step(0)) / file_names(StageIndex(1), GENERATION)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(LocalError, match=r"stage-001\.g1\.model"):
        restore(lab, tmp_path, 0, files)


def test_a_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    archive = UrlArchive(str(tmp_path), JOB, Step(0))
    files = write_stage(
        StageIndex(0), GENERATION, archive, params={"a": torch.ones(2)}, state={STEP: torch.tensor(0)}
    )
    with pytest.raises(LocalError, match="lacks b"):
        read_state((StageFiles(stage=StageIndex(0), files=files),), ["a", "b"], archive)


def test_a_file_name_cannot_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    file = CheckpointFile(name="../../secret", num_bytes=1, sha256="", tensors=("a",))
    with pytest.raises(LocalError, match="secret"):
        read_state(
            (StageFiles(stage=StageIndex(0), files=(file,)),), ["a"], UrlArchive(str(tmp_path), JOB, Step(0))
        )


def test_a_failed_write_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    archive = UrlArchive(str(tmp_path / "file" / "below"), JOB, Step(0))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="file"):
        write_stage(StageIndex(0), GENERATION, archive, params={}, state={STEP: torch.tensor(0)})


@pytest.mark.parametrize(
    ("url", "part"),
    [("gopher9://x/y", "gopher9"), ("/proc/nowhere", "cannot be written")],
)
def test_a_place_that_cannot_be_written_is_known_before_training(url: str, part: str) -> None:
    with pytest.raises(UserError, match=part) as failure:
        check_url(url)
    assert failure.value.field == "checkpoint.url"


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    check_url(f"file://{tmp_path}/new")
    assert list((tmp_path / "new").iterdir()) == []
