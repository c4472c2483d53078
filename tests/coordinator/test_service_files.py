"""Checkpoint files, through the coordinator's services."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import numpy as np
import pytest
from grpc import StatusCode, aio
from safetensors.numpy import save

from coordinator.checkpoints import CheckpointStore, Upload
from coordinator.service import checkpoint as checkpoint_service
from skein.errors import RemoteError
from skein.protocol.log.records import Record
from skein.protocol.messages.directives import CheckpointFile
from skein.storage.outside import Outside, Synced
from skein.types import Condition
from skein.wire import codec
from skein.wire.context import Context
from skein.wire.extra import FileData, FileEnd, GetStart, PutPart, PutStart
from skein.wire.identity.names import worker_caller
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from skein.wire.views import CheckpointView
from tests.coordinator.builders import WAIT_S, checkpointed, committed, eventually, submitted
from tests.coordinator.serving import connected, coordinator, write_log

DATA = save({"w": np.arange(2560, dtype=np.uint16)})
FILE = CheckpointFile(
    name="stage-000.model.safetensors",
    num_bytes=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    tensors=("w",),
)


async def put(
    channel: aio.Channel,
    *,
    version: int = 5,
    sha256: str = FILE.sha256,
    data: bytes = DATA,
    name: str = FILE.name,
) -> None:
    parts = (
        PutStart(
            job=submitted("digits-1").job,
            version=committed("", version, wall_s=0).record.step,
            name=name,
            num_bytes=len(DATA),
        ),
        FileData(data=data[:1000]),
        FileData(data=data[1000:]),
        FileEnd(sha256=sha256),
    )
    call = checkpoint_pb2_grpc.CheckpointStub(channel).Put(codec.PUT_PART.encode(part) for part in parts)
    reply = codec.PUT_REPLY.decode(await call)
    assert (reply.num_bytes, reply.sha256) == (len(DATA), FILE.sha256)


def log_with_steps(state_dir: Path, *more: Record) -> None:
    write_log(
        state_dir, [submitted("digits-1"), *(committed("digits-1", s, wall_s=s) for s in range(5)), *more]
    )


async def test_an_uploaded_file_lies_under_its_version(tmp_path: Path) -> None:
    log_with_steps(tmp_path)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await put(channel)
    assert (tmp_path / "checkpoints" / "digits-1" / "v00000005" / FILE.name).read_bytes() == DATA


async def test_checkpoints_are_listed_and_read_and_what_is_damaged_is_set_aside(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 3, FILE), checkpointed("digits-1", 5, FILE))
    store = tmp_path / "checkpoints" / "digits-1"
    for version in (3, 5):
        (store / f"v{version:08d}").mkdir(parents=True)
        (store / f"v{version:08d}" / FILE.name).write_bytes(DATA)
    (store / "v00000005" / FILE.name).write_bytes(DATA[:-1] + b"!")
    async with coordinator(tmp_path) as running, connected(running) as channel:
        stub = checkpoint_pb2_grpc.CheckpointStub(channel)

        async def listed() -> list[tuple[int, Condition]]:
            reply = await stub.List(checkpoint_pb2.ListCheckpointsRequest(job="digits-1"))
            views = map(codec.CHECKPOINT_VIEW.decode, reply.checkpoints)
            return [(view.version, view.condition) for view in views]

        async def verified(version: int) -> CheckpointView:
            asked = checkpoint_pb2.VerifyRequest(job="digits-1", version=version)
            return codec.CHECKPOINT_VIEW.decode(await stub.Verify(asked))

        assert await listed() == [(3, Condition.WHOLE), (5, Condition.WHOLE)]
        assert (await verified(3)).condition is Condition.WHOLE
        found = await verified(5)
        assert (found.condition, found.num_files, found.num_bytes) == (Condition.DAMAGED, 1, len(DATA))
        assert "is not what was written" in found.reason
        assert await listed() == [(3, Condition.WHOLE), (5, Condition.DAMAGED)]
        # Who exports now gets the one before it.
        newest = await stub.Manifest(checkpoint_pb2.ManifestRequest(job="digits-1"))
        assert newest.version == 3
        assert b'skein_checkpoints_damaged_total{job="digits-1"} 1.0' in running.metrics.render()
        (store / "v00000005" / FILE.name).write_bytes(DATA)
        assert (await verified(5)).condition is Condition.WHOLE
        with pytest.raises(aio.AioRpcError) as none:
            await verified(4)
        assert none.value.code() is StatusCode.NOT_FOUND
        assert await listed() == [(3, Condition.WHOLE), (5, Condition.WHOLE)]


async def test_a_checkpoints_file_that_is_gone_is_not_found(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    async with coordinator(tmp_path) as running, connected(running) as channel:
        request = checkpoint_pb2.GetRequest(job="digits-1", version=5, name=FILE.name)
        with pytest.raises(aio.AioRpcError, match="cannot be read: No such file") as gone:
            [_ async for _ in checkpoint_pb2_grpc.CheckpointStub(channel).Get(request)]
        assert gone.value.code() is StatusCode.NOT_FOUND


class Uploading:
    """The context of a worker's upload."""

    def __init__(self, name: str) -> None:
        self._shown = {
            "transport_security_type": [b"ssl"],
            "x509_subject_alternative_name": [worker_caller(name).uri.encode()],
        }

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._shown


async def test_a_worker_that_was_not_asked_to_save_uploads_nothing_and_takes_no_place(tmp_path: Path) -> None:
    log_with_steps(tmp_path)

    async def parts() -> AsyncIterator[checkpoint_pb2.PutPart]:
        job, version = submitted("digits-1").job, committed("", 3, wall_s=0).record.step
        yield codec.PUT_PART.encode(PutStart(job=job, version=version, name=FILE.name, num_bytes=len(DATA)))
        await asyncio.Event().wait()

    async with coordinator(tmp_path) as running:
        store = CheckpointStore(tmp_path / "checkpoints", reserved_bytes=0)
        service = checkpoint_service.Checkpoint(running.driver, store)
        for _ in range(2 * checkpoint_service.MAX_UPLOADS):
            with pytest.raises(RemoteError, match="outsider was not asked to save version 3"):
                await service.Put(parts(), cast(Context, Uploading("outsider")))


async def test_an_upload_that_ends_after_the_commit_replaces_nothing(tmp_path: Path) -> None:
    log_with_steps(tmp_path)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await put(channel)

        async def parts() -> AsyncIterator[checkpoint_pb2.PutPart]:
            job, version = submitted("digits-1").job, committed("", 5, wall_s=0).record.step
            other = DATA[::-1]
            yield codec.PUT_PART.encode(
                PutStart(job=job, version=version, name=FILE.name, num_bytes=len(other))
            )
            yield codec.PUT_PART.encode(FileData(data=other))
            running.driver.machine.history.apply(checkpointed("digits-1", 5, FILE))
            yield codec.PUT_PART.encode(FileEnd(sha256=hashlib.sha256(other).hexdigest()))

        with pytest.raises(aio.AioRpcError, match="exists with other content"):
            await checkpoint_pb2_grpc.CheckpointStub(channel).Put(parts())
    assert (tmp_path / "checkpoints" / "digits-1" / "v00000005" / FILE.name).read_bytes() == DATA


async def test_a_worker_that_uploads_without_end_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_with_steps(tmp_path)

    async def parts(*later: PutPart) -> AsyncIterator[checkpoint_pb2.PutPart]:
        job, version = submitted("digits-1").job, committed("", 3, wall_s=0).record.step
        yield codec.PUT_PART.encode(PutStart(job=job, version=version, name=FILE.name, num_bytes=len(DATA)))
        for part in later:
            yield codec.PUT_PART.encode(part)
        if not later:
            await asyncio.Event().wait()

    async with coordinator(tmp_path) as running:
        store = CheckpointStore(tmp_path / "checkpoints", reserved_bytes=0)
        service = checkpoint_service.Checkpoint(running.driver, store)
        monkeypatch.setattr(service, "_require_saver", lambda *_: None)

        def uploads(name: str, *later: PutPart) -> "asyncio.Task[checkpoint_pb2.PutReply]":
            return asyncio.create_task(service.Put(parts(*later), cast(Context, Uploading(name))))

        greedy = [uploads("greedy") for _ in range(2 * checkpoint_service.MAX_UPLOADS)]
        async with asyncio.timeout(WAIT_S):  # begun last
            reply = await uploads("honest", FileData(data=DATA), FileEnd(sha256=FILE.sha256))
        assert reply.num_bytes == len(DATA)
        for upload in greedy:
            upload.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_a_disk_that_does_not_answer_fails_the_upload_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_service, "Outside", partial(Outside, silent_s=0.2))
    never = threading.Event()
    monkeypatch.setattr(Upload, "write", lambda *_: never.wait())
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    async with coordinator(tmp_path) as running, connected(running) as channel:
        with pytest.raises(aio.AioRpcError, match="the coordinator's checkpoints gave no sign of life"):
            await put(channel)
        monkeypatch.setattr(CheckpointStore, "pieces", lambda *_: iter(never.wait, True))
        request = checkpoint_pb2.GetRequest(job="digits-1", version=5, name=FILE.name)
        with pytest.raises(aio.AioRpcError, match=r"cannot be read: .* gave no sign of life"):
            [_ async for _ in checkpoint_pb2_grpc.CheckpointStub(channel).Get(request)]
        assert (await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())).epoch == 2
        never.set()


def ends_of(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[None]:
    """Gets an entry whenever an upload has been closed."""
    ends: SimpleQueue[None] = SimpleQueue()
    close = Upload.__exit__

    def told(upload: Upload, *error: object) -> None:
        close(upload, None, None, None)
        ends.put(None)

    monkeypatch.setattr(Upload, "__exit__", told)
    return ends


def files_in(state_dir: Path) -> list[Path]:
    return [path for path in (state_dir / "checkpoints").rglob("*") if path.is_file()]


async def test_an_upload_that_a_slow_disk_ended_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_service, "Outside", partial(Outside, silent_s=0.2))
    ends, slow = ends_of(monkeypatch), threading.Event()
    monkeypatch.setattr(Synced, "write", lambda *_: slow.wait())
    log_with_steps(tmp_path)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        with pytest.raises(aio.AioRpcError, match="gave no sign of life"):
            await put(channel)
        slow.set()
        await asyncio.to_thread(ends.get, timeout=WAIT_S)
    assert files_in(tmp_path) == []


async def test_an_upload_that_is_given_up_while_its_file_is_opened_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = Outside()
    monkeypatch.setattr(checkpoint_service, "Outside", lambda: outside)
    ends, began, slow = ends_of(monkeypatch), threading.Event(), threading.Event()
    enter = Upload.__enter__

    def slowly(upload: Upload) -> Upload:
        began.set()
        slow.wait()
        return enter(upload)

    monkeypatch.setattr(Upload, "__enter__", slowly)
    log_with_steps(tmp_path)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        giving_up = asyncio.ensure_future(put(channel))
        await asyncio.to_thread(began.wait, WAIT_S)
        giving_up.cancel()
        await eventually(lambda: outside.num_left == 1)
        slow.set()
        await asyncio.to_thread(ends.get, timeout=WAIT_S)
    assert files_in(tmp_path) == []


async def test_a_file_that_is_not_what_was_sent_is_refused(tmp_path: Path) -> None:
    log_with_steps(tmp_path)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        for call in (
            put(channel, sha256="0" * 64),
            put(channel, data=DATA[:-1]),
            put(channel, data=DATA + b"x"),
            put(channel, version=6),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is StatusCode.FAILED_PRECONDITION
    assert files_in(tmp_path) == []


async def test_only_files_of_checkpoints_that_exist_can_be_had(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    folder = tmp_path / "checkpoints" / "digits-1" / "v00000005"
    folder.mkdir(parents=True)
    (folder / FILE.name).write_bytes(DATA)
    (folder / "stage-001.model.safetensors").write_bytes(DATA)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        files = checkpoint_pb2_grpc.CheckpointStub(channel)
        manifest = codec.MANIFEST_REPLY.decode(
            await files.Manifest(checkpoint_pb2.ManifestRequest(job="digits-1"))
        )
        assert (manifest.version, manifest.stages[0].files) == (5, (FILE,))
        request = checkpoint_pb2.GetRequest(job="digits-1", version=5, name=FILE.name, offset=1500)
        start, data, end = [codec.GET_PART.decode(part) async for part in files.Get(request)]
        assert (start, end) == (GetStart(num_bytes=len(DATA)), FileEnd(sha256=FILE.sha256))
        assert data == FileData(data=DATA[1500:])
        for name in ("stage-001.model.safetensors", "../../../run.sqlite3", "manifest.json"):
            call = files.Get(checkpoint_pb2.GetRequest(job="digits-1", version=5, name=name))
            assert await call.code() is StatusCode.NOT_FOUND


async def test_a_late_file_of_another_generation_leaves_the_checkpoint_that_exists(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    manifest = tmp_path / "checkpoints" / "digits-1" / "v00000005" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await put(channel, name="stage-000.g1.model.safetensors")
        assert manifest.exists()


async def test_a_file_of_a_checkpoint_that_exists_cannot_be_replaced_by_another(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await put(channel)
        other = bytes(len(DATA))
        with pytest.raises(aio.AioRpcError) as caught:
            await put(channel, data=other, sha256=hashlib.sha256(other).hexdigest())
        assert "exists with other content" in str(caught.value.details())
