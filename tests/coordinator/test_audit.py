"""The audit log: what is in it, and that nobody changes it unnoticed."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from grpc import StatusCode, aio

from client.cli import run
from coordinator.records import audit
from coordinator.records.audit import AuditLog
from coordinator.service.audited import QUIET, Audited
from skein.storage.chain import (
    FOLDER,
    HEAD_FILE,
    AuditEntry,
    ChainPosition,
    chain_files,
    entries,
    verify_chain,
)
from skein.wire.context import Context
from skein.wire.identity.roles import ROLES
from skein.wire.v1 import identity_pb2, identity_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import hello
from tests.coordinator.serving import ScriptedWorker, connected, coordinator, status_of, submit
from tests.coordinator.test_identities import cluster


def entry(number: int) -> AuditEntry:
    return AuditEntry(
        wall_s=float(number),
        who="admin ada",
        namespace="default",
        host="10.0.0.1",
        did="Cancel",
        what=f"job=digits-{number}",
        outcome="done",
    )


def written(folder: Path, *numbers: int) -> None:
    """A chain with these entries, or so many more."""
    log = AuditLog(folder)
    for number in numbers:
        log.append(entry(number))


def change(folder: Path, edit: Callable[[list[bytes]], object]) -> None:
    """Edit the lines of a chain's one file."""
    [path] = chain_files(folder)
    lines = path.read_bytes().splitlines(keepends=True)
    edit(lines)
    path.write_bytes(b"".join(lines))


def faults(folder: Path) -> tuple[str, ...]:
    return verify_chain(folder).faults


def test_entries_are_read_as_they_were_written_and_are_whole(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    written(tmp_path, 3)
    assert list(entries(tmp_path)) == [(number, entry(number)) for number in (1, 2, 3)]
    assert verify_chain(tmp_path).end.number == 3
    assert faults(tmp_path) == ()
    assert chain_files(tmp_path)[0].stat().st_mode & 0o077 == 0


def forge(index: int) -> Callable[[list[bytes]], object]:
    def edit(lines: list[bytes]) -> None:
        lines[index] = lines[index].replace(b"ada", b"bob")

    return edit


FILE = "audit-000000000000000001.jsonl"


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (forge(0), f"{FILE} line 2: entry 1, before it, was changed"),
        (forge(1), f"{FILE} line 3: entry 2, before it, was changed"),
        (forge(3), "entry 4 was changed"),
        (lambda lines: lines.pop(0), f"{FILE} line 1: entry 1 is missing before it"),
        (
            lambda lines: lines.__delitem__(slice(1, 3)),
            f"{FILE} line 2: entries 2 to 3 are missing before it",
        ),
        (lambda lines: lines.pop(), "entry 4 is missing at the end"),
        (lambda lines: lines.append(lines.pop()[:-9]), f"{FILE} line 4: entry 4 cannot be read"),
        (lambda lines: lines.insert(1, lines[0]), f"{FILE} line 2: entry 1 stands after entry 1"),
        (lambda lines: lines.insert(1, b"{}\n"), f"{FILE} line 2: entry 2 cannot be read"),
    ],
)
def test_what_was_changed_taken_out_or_cut_off_is_named(
    tmp_path: Path, edit: Callable[[list[bytes]], object], fault: str
) -> None:
    written(tmp_path, 1, 2, 3, 4)
    change(tmp_path, edit)
    assert faults(tmp_path)[0] == fault
    # The coordinator goes on, and its next entry hides nothing.
    written(tmp_path, 5)
    assert faults(tmp_path) != ()
    assert [number for number, _ in entries(tmp_path)][-1] == 5


def test_a_chain_that_was_made_up_anew_shows_against_a_position_kept_elsewhere(tmp_path: Path) -> None:
    written(tmp_path / "true", 1, 2, 3)
    written(tmp_path / "false", 1, 7, 3, 4)
    known = verify_chain(tmp_path / "true").end
    assert faults(tmp_path / "false") == ()
    assert verify_chain(tmp_path / "false", known).faults == ("entry 3 was changed",)
    ahead = ChainPosition(number=6, digest="0" * 64)
    assert verify_chain(tmp_path / "false", ahead).faults == ("entries 5 to 6 are missing at the end",)


def test_without_its_head_a_chain_is_not_called_whole(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    (tmp_path / HEAD_FILE).unlink()
    assert "whether the end was cut off cannot be told" in faults(tmp_path)[0]


def test_the_piece_of_a_line_that_a_crash_left_is_no_fault_and_goes(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    change(tmp_path, lambda lines: lines.append(b'{"number": 3, "wa'))
    assert faults(tmp_path) == ()
    written(tmp_path, 3)
    assert [number for number, _ in entries(tmp_path)] == [1, 2, 3]
    assert faults(tmp_path) == ()


def test_a_line_that_was_written_just_before_its_head_is_gone_on_from(tmp_path: Path) -> None:
    written(tmp_path, 1)
    before = (tmp_path / HEAD_FILE).read_text()
    written(tmp_path, 2)
    (tmp_path / HEAD_FILE).write_text(before)
    written(tmp_path, 3)
    assert (faults(tmp_path), verify_chain(tmp_path).end.number) == ((), 3)


def test_a_chain_goes_on_in_another_file_and_a_file_that_is_taken_away_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES", 700)
    written(tmp_path, *range(1, 8))
    files = chain_files(tmp_path)
    assert len(files) > 2
    assert faults(tmp_path) == ()
    files[1].unlink()
    assert "missing before it" in faults(tmp_path)[0]


def test_coordinators_that_share_a_directory_share_the_chain(tmp_path: Path) -> None:
    one, other = AuditLog(tmp_path), AuditLog(tmp_path)
    for number in range(1, 7):
        (one if number % 2 else other).append(entry(number))
    assert (faults(tmp_path), verify_chain(tmp_path).end.number) == ((), 6)


async def test_of_many_refusals_a_host_gets_a_few_lines_and_then_their_number(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    taken = [host for host in ["a"] * 1000 + ["b"] if log.has_room(host)]
    assert taken == ["a"] * audit.MAX_FREE + ["b"]
    await log.close()
    [(_, left_out)] = entries(tmp_path)
    assert (left_out.what, left_out.outcome) == ("a", f"{1000 - audit.MAX_FREE} more were left out")


def told(state_dir: Path) -> list[tuple[str, str, str, str]]:
    """Who did what to what, and what came of it."""
    return [(x.who, x.did, x.what, x.outcome) for _, x in entries(state_dir / FOLDER)]


async def test_a_job_and_a_worker_leave_their_lines_before_anybody_is_answered(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        job = (await submit(channel)).job
        assert told(tmp_path) == [("admin (local)", "Submit", f"key=k job={job}", "done")]
        jobs = jobs_pb2_grpc.JobsStub(channel)
        await jobs.List(jobs_pb2.ListJobsRequest())
        assert await status_of(jobs.Cancel(jobs_pb2.CancelRequest(job="none"))) is StatusCode.NOT_FOUND
        await jobs.Cancel(jobs_pb2.CancelRequest(job=job))
        worker = ScriptedWorker(channel)
        await worker.say(hello("w-1"))
        await worker.hear()
        worker.call.cancel()
    lines = told(tmp_path)
    assert lines[1][:3] == ("admin (local)", "Cancel", "job=none")
    assert lines[1][3].startswith("refused: job: 'none'")
    assert lines[2] == ("admin (local)", "Cancel", f"job={job} name=digits namespace=default", "done")
    assert ("coordinator", "Decide", "worker=w-1", "joined") in lines
    assert verify_chain(tmp_path / FOLDER).faults == ()


async def test_identities_are_named_in_what_they_do_and_in_what_they_may_not(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        viewer = await known.passport("eve", "viewer")
        async with known.channel(viewer) as channel:
            refused = jobs_pb2_grpc.JobsStub(channel).Drain(jobs_pb2.DrainRequest(worker="w"))
            assert await status_of(refused) is StatusCode.PERMISSION_DENIED
        await known.revoke("eve", "viewer")
        with pytest.raises(aio.AioRpcError, match="was revoked"):
            await known.version(viewer)
    lines = told(tmp_path)
    assert [line[:2] for line in lines] == [
        ("admin admin", "CreateToken"),
        ("nobody", "Enrol"),
        ("viewer eve", "Drain"),
        ("admin admin", "Revoke"),
        ("viewer eve", "Version"),
    ]
    role, token = lines[0][2].split()
    assert (role, lines[1][2]) == ("role=viewer", f"name=eve {token}")
    assert lines[2][2:] == ("worker=w", "refused: viewer eve may not call Drain, which is for: admin")
    assert lines[3][2:] == ("role=viewer name=eve namespace=default", "done")
    assert "was revoked" in lines[4][3]


async def test_workers_that_ask_again_and_again_whom_to_refuse_leave_no_entry(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known, known.channel(await known.passport("w-1")) as channel:
        before = told(tmp_path)
        ask = identity_pb2_grpc.IdentitiesStub(channel).ListRevoked
        assert not (await ask(identity_pb2.ListRevokedRequest())).identities
        assert told(tmp_path) == before


async def test_a_caller_hears_when_what_was_done_could_not_be_noted(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        (tmp_path / FOLDER).write_text("in the way")
        with pytest.raises(aio.AioRpcError, match="done, but the audit log cannot be written"):
            await submit(channel)
        (tmp_path / FOLDER).unlink()
        assert not (await submit(channel)).is_new


class Hasty:
    """The context of a call whose caller has no certificate."""

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"transport_security_type": [b"ssl"]}


async def test_of_many_calls_that_are_broken_off_a_host_gets_a_few_lines_and_then_their_number(
    tmp_path: Path,
) -> None:
    log, context = AuditLog(tmp_path), cast(Context, Hasty())
    all_there = asyncio.Barrier(101)

    async def stay(_request: object, _context: Context) -> None:
        await all_there.wait()
        await asyncio.Event().wait()

    enrol = Audited(log).around("/skein.wire.v1.Enrol/Enrol", stay)
    calls = [asyncio.ensure_future(enrol(identity_pb2.EnrolRequest(name="eve"), context)) for _ in range(100)]
    await all_there.wait()
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await log.close()
    *broken, (_, left_out) = entries(tmp_path)
    assert {(x.who, x.outcome) for _, x in broken} == {("nobody", "broken off: it may have been done")}
    assert (len(broken), left_out.outcome) == (audit.MAX_FREE, f"{100 - audit.MAX_FREE} more were left out")


def test_only_methods_that_are_there_are_left_out() -> None:
    assert set(ROLES) > QUIET


def test_the_command_shows_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--state-dir", str(tmp_path)]
    assert run(["audit", "verify", *place]) == 2
    assert "no audit log is there" in capsys.readouterr().err
    written(tmp_path / FOLDER, 1, 2, 3)
    assert run(["audit", "show", *place, "--tail", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["what"] == "job=digits-3"
    assert run(["audit", "verify", *place]) == 0
    end = capsys.readouterr().out.partition(" to ")[2].strip()
    assert run(["audit", "verify", *place, "--known", end]) == 0
    assert run(["audit", "verify", *place, "--known", "3"]) == 2
    change(tmp_path / FOLDER, lambda lines: lines.pop())
    capsys.readouterr()
    assert run(["audit", "verify", *place]) == 1
    assert capsys.readouterr().out.startswith("entry 3 is missing at the end\nnot whole, to 2:")


async def test_entries_stand_in_the_order_in_which_they_were_noted(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    await asyncio.gather(*(log.note("admin ada", "Cancel", str(number), "done") for number in range(9)))
    await log.close()
    assert [x.what for _, x in entries(tmp_path)] == [str(number) for number in range(9)]
