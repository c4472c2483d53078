"""Checkpoints exist when their manifest does, and nothing but what was sent ever gets a name."""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import save

from coordinator.checkpoints import MANIFEST, CheckpointStore, DamagedError
from skein.config.location import SCHEMES
from skein.errors import RemoteError, UserError
from skein.protocol.log.records import checkpoint_folder
from skein.protocol.messages.directives import CheckpointFile
from skein.storage import outside
from skein.storage.outside import NoRoomError, Outside
from skein.storage.places import ANYWHERE
from skein.types import Generation, JobId, StageIndex, Step
from tests.coordinator.builders import checkpointed, job_spec
from worker.chunks.checkpoint import UrlArchive, file_names

JOB = JobId("digits-1")
DATA = save({"embed": np.arange(240, dtype=np.uint8), "head": np.arange(10_000, dtype=np.uint16)})
NAME = "stage-000.model.safetensors"
PLACES = replace(ANYWHERE, schemes=(*SCHEMES, "memory", "locked"))
STAGE, GENERATION = StageIndex(3), Generation(7)


def file_of(data: bytes = DATA, name: str = NAME) -> CheckpointFile:
    sha256 = hashlib.sha256(data).hexdigest()
    return CheckpointFile(name=name, num_bytes=len(data), sha256=sha256, tensors=("embed", "head"))


def put(store: CheckpointStore, version: int, data: bytes = DATA, name: str = NAME) -> None:
    with store.upload(JOB, Step(version), name, len(data)) as upload:
        upload.write(data[:100])
        upload.write(data[100:])
        upload.finish(replaces=True)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    places = PLACES
    return CheckpointStore(tmp_path / "checkpoints", places=places, reserved_bytes=0)


@pytest.fixture(params=["local", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place of each kind: a plain path, a file URL, and an object store."""
    kinds = {"local": f"{tmp_path}/jobs", "file": f"file://{tmp_path}/jobs", "memory": "memory://jobs"}
    yield kinds[request.param]
    fsspec.filesystem("memory").store.clear()


def write(url: str, version: int, data: bytes = DATA) -> None:
    """What a worker does."""
    files, root = fsspec.core.url_to_fs(url)
    folder = f"{root}/{JOB}/{checkpoint_folder(Step(version))}"
    files.makedirs(folder, exist_ok=True)
    files.pipe_file(f"{folder}/{NAME}", data)


def names(url: str, version: int) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    folder = f"{root}/{JOB}/{checkpoint_folder(Step(version))}"
    found = files.ls(folder, detail=False) if files.exists(folder) else []
    return sorted(name.rpartition("/")[2] for name in found)


def test_an_uploaded_file_comes_back_from_any_offset(store: CheckpointStore) -> None:
    put(store, 10)
    for offset in (0, 1, 5000, len(DATA)):
        assert b"".join(store.pieces(JOB, Step(10), NAME, offset, 999)) == DATA[offset:]


def test_an_upload_that_is_not_finished_leaves_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    with store.upload(JOB, Step(10), NAME, len(DATA)) as upload:
        upload.write(DATA[:100])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_more_bytes_than_announced_are_refused(store: CheckpointStore) -> None:
    with (
        pytest.raises(RemoteError, match="1 bytes more"),
        store.upload(JOB, Step(1), NAME, 10) as upload,
    ):
        upload.write(bytes(11))


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "/etc/passwd", ".hidden", "A", "a..b", "a\0", "manifest.json", "x" * 129, "a\n"]
)
def test_names_that_could_leave_the_folder_are_refused(store: CheckpointStore, name: str) -> None:
    with pytest.raises(RemoteError):
        store.upload(JOB, Step(1), name, 1)


@pytest.mark.parametrize("job", ["", "..", "a/b", "A", "a.b"])
def test_jobs_that_could_leave_the_folder_are_refused(store: CheckpointStore, job: str) -> None:
    with pytest.raises(RemoteError):
        store.upload(JobId(job), Step(1), NAME, 1)


def test_a_file_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, reserved_bytes=1 << 62)
    with pytest.raises(NoRoomError, match=f"needs 1 B at {tmp_path}, 0 B are free"):
        store.upload(JOB, Step(1), NAME, 1)


@pytest.mark.parametrize("replaces", [True, False])
def test_an_upload_that_replaces_ends_the_checkpoint_that_was_there_when_it_is_finished(
    store: CheckpointStore, tmp_path: Path, replaces: bool
) -> None:
    put(store, 10)
    store.write_manifest(checkpointed(JOB, 10, file_of()), job_spec())
    manifest = tmp_path / "checkpoints" / JOB / "v00000010" / MANIFEST
    assert manifest.exists()
    with store.upload(JOB, Step(10), NAME, 1) as upload:
        upload.write(b"x")
        assert manifest.exists()
        upload.finish(replaces=replaces)
    assert manifest.exists() is not replaces


@pytest.mark.parametrize("damage", ["a byte", "short", "a file", "a folder"])
def test_what_is_damaged_after_writing_is_found_and_named(url: str, damage: str) -> None:
    store = CheckpointStore(Path("unused"), places=PLACES)
    write(url, 10)
    whole = checkpointed(JOB, 10, file_of(), url=url)
    store.write_manifest(whole, job_spec())
    store.verify(whole)
    files, root = fsspec.core.url_to_fs(url)
    folder = f"{root}/{JOB}/{checkpoint_folder(Step(10))}"
    match damage:
        case "a byte":
            files.pipe_file(f"{folder}/{NAME}", DATA[:77] + b"!" + DATA[78:])
        case "short":
            files.pipe_file(f"{folder}/{NAME}", DATA[:77])
        case "a file":
            files.rm_file(f"{folder}/{NAME}")
        case _:
            files.rm(folder, recursive=True)
            write(url, 9)
    with pytest.raises(DamagedError, match=NAME):
        store.verify(whole)


def test_a_place_without_any_checkpoint_is_not_damaged_but_may_not_be_mounted(url: str) -> None:
    store = CheckpointStore(Path("unused"), places=PLACES)
    write(url, 10)
    whole = checkpointed(JOB, 10, file_of(), url=url)
    store.write_manifest(whole, job_spec())
    files, root = fsspec.core.url_to_fs(url)
    files.rm(f"{root}/{JOB}", recursive=True)
    with pytest.raises(UserError, match="is the place mounted"):
        store.verify(whole)
    files.makedirs(f"{root}/{JOB}/{checkpoint_folder(Step(10))}", exist_ok=True)
    with pytest.raises(UserError, match="is the place mounted"):
        store.verify(whole)


@pytest.mark.parametrize("told", [(), ("embed",), ("embed", "head", "norm")])
def test_files_whose_tensors_are_not_those_that_were_told_make_no_checkpoint(
    url: str, told: tuple[str, ...]
) -> None:
    write(url, 10)
    store = CheckpointStore(Path("unused"), places=PLACES)
    with pytest.raises(
        RemoteError, match=r"holds other tensors than its writer told.*: have all workers run"
    ):
        store.write_manifest(checkpointed(JOB, 10, replace(file_of(), tensors=told), url=url), job_spec())
    assert MANIFEST not in names(url, 10)


def headed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


_GAP = b'{"embed":{"data_offsets":[0,1]},"head":{"data_offsets":[2,3]}}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"12345",
        b"\xff" * 64,
        headed(b"[" * 9),
        headed(b"7"),
        headed(b'{"embed":null,"head":null}'),
        headed('{"embed":{}}'.encode("utf-16")),
        headed(_GAP, b"abc"),
        headed(b'{"embed":{"data_offsets":[0,36]}}'),
        headed(b"{" + b" " * (1 << 17) + b"}"),
    ],
)
def test_files_that_are_no_safetensors_make_no_checkpoint(url: str, data: bytes) -> None:
    write(url, 10, data)
    store = CheckpointStore(Path("unused"), places=PLACES)
    with pytest.raises(RemoteError, match=r"no safetensors file.*: have all workers run"):
        store.write_manifest(checkpointed(JOB, 10, file_of(data), url=url), job_spec())


def test_files_that_are_not_what_was_sent_make_no_checkpoint(url: str) -> None:
    write(url, 10, DATA[:-1] + b"!")
    store = CheckpointStore(Path("unused"), places=PLACES)
    with pytest.raises(UserError, match="not what was written"):
        store.write_manifest(checkpointed(JOB, 10, file_of(), url=url), job_spec())
    assert MANIFEST not in names(url, 10)


def test_the_manifest_says_what_there_is(store: CheckpointStore, url: str) -> None:
    write(url, 10)
    store.write_manifest(checkpointed(JOB, 10, file_of(), url=url), job_spec())
    with fsspec.open(f"{url}/{JOB}/v00000010/{MANIFEST}") as file:
        manifest = json.load(file)
    assert manifest == {
        "format": 1,
        "job": JOB,
        "version": 10,
        "spec": job_spec().canonical_json(),
        "data_fingerprint": "",
        "files": [
            {
                "name": NAME,
                "stage": 0,
                "num_bytes": len(DATA),
                "sha256": file_of().sha256,
                "tensors": ["embed", "head"],
            }
        ],
    }


def test_without_its_files_a_checkpoint_gets_no_manifest(store: CheckpointStore, url: str) -> None:
    write(url, 10)
    for data, reason in ((DATA + b"x", f"instead of {len(DATA) + 1}"), (b"", "instead of 0")):
        with pytest.raises(UserError, match=reason):
            store.write_manifest(checkpointed(JOB, 10, file_of(data), url=url), job_spec())
    with pytest.raises(UserError, match="is not there"):
        store.write_manifest(checkpointed(JOB, 11, file_of(), url=url), job_spec())
    assert names(url, 10) == [NAME]


def test_pruning_keeps_what_is_wanted_and_what_may_be_in_the_making(store: CheckpointStore, url: str) -> None:
    for version in (10, 20, 30, 40):
        write(url, version)
        store.write_manifest(checkpointed(JOB, version, file_of(), url=url), job_spec())
    store.prune(JOB, url, (Step(20), Step(30)))
    assert {v: names(url, v) for v in (10, 20, 30, 40)} == {
        10: [],
        20: [MANIFEST, NAME],
        30: [MANIFEST, NAME],
        40: [MANIFEST, NAME],
    }


def test_files_of_many_walkers_are_taken_listed_and_pruned_together(
    store: CheckpointStore, tmp_path: Path
) -> None:
    files = [file_of(name=name) for number in range(12) for name in file_names(STAGE, GENERATION, number)]
    assert len({file.name for file in files}) == 24
    for version in (10, 20):
        for file in files:
            put(store, version, name=file.name)
        store.write_manifest(checkpointed(JOB, version, *files), job_spec())
    folder = tmp_path / "checkpoints" / JOB
    listed = json.loads((folder / "v00000010" / MANIFEST).read_text())["files"]
    assert [entry["name"] for entry in listed] == [file.name for file in files]
    store.prune(JOB, None, (Step(20),))
    assert [path.name for path in folder.iterdir()] == ["v00000020"]
    (folder / "v00000020" / files[-1].name).unlink()
    with pytest.raises(UserError, match=r"stage-003\.g7\.w11\.optimizer\.safetensors is not there"):
        store.write_manifest(checkpointed(JOB, 20, *files), job_spec())


async def test_each_file_that_is_deleted_is_a_sign_of_life(store: CheckpointStore, url: str) -> None:
    for version in (10, 20, 30):
        write(url, version)
        store.write_manifest(checkpointed(JOB, version, file_of(), url=url), job_spec())
    asked = Outside()
    await asked.answer(partial(store.prune, JOB, url, (Step(30),)), url)
    # Of each the file, and its folder.
    assert asked.num_moved == 4


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_large_file_is_synced_as_it_is_written(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """A sync of all of it at the end may take longer than silence is borne."""
    monkeypatch.setattr(outside, "SYNC_BYTES", 100)
    monkeypatch.setattr(outside, "PIECE_BYTES", 100)
    asked = Outside()
    if is_local:
        await asked.answer(partial(put, store, 10), "the coordinator's checkpoints")
        assert asked.num_moved == 2
    else:
        (tmp_path / "draft").write_bytes(DATA[:1000])
        archive = UrlArchive(str(tmp_path / "there"), JOB, Step(10))
        await asked.answer(partial(archive.put, tmp_path / "draft", NAME), "checkpoint.url")
        # Of each piece, that it was written and that it was synced.
        assert asked.num_moved == 20


async def test_no_more_than_16_mib_are_written_without_a_sync(store: CheckpointStore) -> None:
    """32 uploads to a disk that takes 20 MB a second must not seem silent for 30 s."""
    asked, data = Outside(), bytes(16 << 20)
    with store.upload(JOB, Step(10), NAME, len(data)) as upload:
        await asked.answer(partial(upload.write, data), "the coordinator's checkpoints")
    assert asked.num_moved == 1


def test_pruning_where_nothing_is_changes_nothing(store: CheckpointStore, url: str) -> None:
    store.prune(JOB, url, (Step(5),))
    store.prune(JOB, url, ())


def test_a_place_that_cannot_be_written_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    url = str(tmp_path / "file" / "below")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"checkpoint\.url"):
        store.write_manifest(replace(checkpointed(JOB, 1, url=url), stages=()), job_spec())


class Locked(MemoryFileSystem):  # type: ignore[misc]  # no stubs
    """A store that lets nobody write, and says so in its own way."""

    protocol = "locked"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        raise LookupError("no credentials")


def test_a_store_with_errors_of_its_own_is_named_too(store: CheckpointStore) -> None:
    fsspec.register_implementation("locked", Locked, clobber=True)
    with pytest.raises(UserError, match="no credentials"):
        store.write_manifest(replace(checkpointed(JOB, 1, url="locked://bucket"), stages=()), job_spec())
