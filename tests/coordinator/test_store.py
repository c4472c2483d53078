"""The run log keeps what it accepted, in order, and has one owner."""

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.records.logfile import LOG_FILE, LogFull, chained, damage_explained, entry_checksum
from coordinator.records.store import LOCK_FILE, Fenced, Lookout, RunLog
from skein.errors import LocalError, SkeinError, UserError
from skein.protocol.log.records import EpochOpened, GenerationMember, GenerationOpened, JobSubmitted, Record
from skein.types import Epoch, Generation, Incarnation, JobId, WorkerId
from tests.wire.values import values

RECORDS = st.lists(values(Record), max_size=4).map(lambda records: cast("list[Record]", records))


def submitted(name: str) -> JobSubmitted:
    return JobSubmitted(job=JobId(name), key=name, spec="{}", wall_s=1.0)


def opened(epoch: int) -> EpochOpened:
    return EpochOpened(epoch=Epoch(epoch), wall_s=float(epoch))


def as_after_a_crash(directory: Path, copy: Path) -> Path:
    """The files as they are at this moment, while their owner still lives."""
    shutil.copytree(directory, copy, dirs_exist_ok=True)
    return copy


def entries_of(directory: Path, *, epoch: int) -> list[Record]:
    """What the next owner reads, without its own first entry."""
    with RunLog.open(directory, wall_s=float(epoch)) as log:
        assert log.epoch == epoch
        *records, own = log.read()
    assert own == opened(epoch)
    return records


def change(directory: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(directory / LOG_FILE)
    with connection:
        connection.execute(statement, values)
    connection.close()


def test_first_opening_is_epoch_one(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "made" / "here", wall_s=1.0) as log:
        assert log.epoch == 1
        assert log.warnings == ()
        assert list(log.read()) == [opened(1)]


def test_appended_records_outlive_a_crash_in_order(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "log", wall_s=1.0) as log:
        log.append([submitted("a"), submitted("b")])
        log.append([submitted("c")])
        crashed = as_after_a_crash(tmp_path / "log", tmp_path / "copy")
    assert entries_of(crashed, epoch=2) == [opened(1), submitted("a"), submitted("b"), submitted("c")]


@settings(max_examples=10)  # each opens a log twice, with fsyncs
@given(batches=st.lists(RECORDS, max_size=3))
def test_reopened_log_gives_the_same_records(
    batches: list[list[Record]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("log")
    with RunLog.open(directory, wall_s=1.0) as log:
        for batch in batches:
            log.append(batch)
    assert entries_of(directory, epoch=2) == [opened(1)] + [record for batch in batches for record in batch]


def test_every_opening_counts(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        with RunLog.open(tmp_path, wall_s=float(epoch)) as log:
            assert list(log.read()) == [opened(number) for number in range(1, epoch + 1)]


def test_second_owner_is_told_the_first_ones_process(tmp_path: Path) -> None:
    with (
        RunLog.open(tmp_path, wall_s=1.0),
        pytest.raises(UserError, match=rf"process id {os.getpid()} is using it"),
    ):
        RunLog.open(tmp_path, wall_s=2.0)
    assert entries_of(tmp_path, epoch=2) == [opened(1)]


def test_lock_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from coordinator.records.store import RunLog\n"
        "log = RunLog.open(Path(sys.argv[1]), wall_s=1.0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert entries_of(tmp_path, epoch=2) == [opened(1)]


def test_owner_whose_lock_was_bypassed_is_fenced(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0) as old:
        (tmp_path / LOCK_FILE).unlink()
        with RunLog.open(tmp_path, wall_s=2.0) as new:
            with pytest.raises(Fenced, match="epoch 1 is over"):
                old.append([submitted("late")])
            new.append([submitted("kept")])
            assert list(new.read()) == [opened(1), opened(2), submitted("kept")]


def test_empty_append_changes_nothing(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        log.append([])
        log.append([submitted("a")])
        assert list(log.read()) == [opened(1), submitted("a")]


def test_tail_torn_at_any_byte_is_dropped_with_a_warning(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "log", wall_s=1.0) as log:
        log.append([submitted("kept")])
        log.append([submitted("torn")])
        # What the mirror knows is not dropped in silence; it is behind, for nobody renewed the lease.
        crashed = as_after_a_crash(tmp_path / "log", tmp_path / "crashed")
    connection = sqlite3.connect(crashed / LOG_FILE)
    ((payload,),) = connection.execute("SELECT payload FROM entries WHERE number = 3").fetchall()
    connection.close()
    for length in range(len(payload)):
        torn = as_after_a_crash(crashed, tmp_path / f"torn{length}")
        change(torn, "UPDATE entries SET payload = ? WHERE number = 3", payload[:length])
        with RunLog.open(torn, wall_s=2.0) as log:
            assert "entry, 3, was damaged" in log.warnings[0]
            assert list(log.read()) == [opened(1), submitted("kept"), opened(2)]


def test_write_ahead_log_torn_anywhere_loses_the_unfinished_append_only(tmp_path: Path) -> None:
    with RunLog.open(tmp_path / "log", wall_s=1.0) as log:
        log.append([submitted("kept")])
        wal = Path(f"{tmp_path / 'log' / LOG_FILE}-wal")
        before = wal.stat().st_size
        log.append([submitted("torn")])
        after = wal.stat().st_size
        whole = as_after_a_crash(tmp_path / "log", tmp_path / "whole")
    assert before < after
    for size in (before, before + 1, before + 23, *range(before + 24, after, 509), after - 1):
        torn = as_after_a_crash(whole, tmp_path / f"torn{size}")
        (torn / f"{LOG_FILE}-shm").unlink()
        os.truncate(torn / f"{LOG_FILE}-wal", size)
        assert entries_of(torn, epoch=2) == [opened(1), submitted("kept")]


def overwritten(data: bytes, seed: int) -> bytes:
    """A log of which one run of bytes is noise: often in the first page, which holds the schema and the owner."""
    random = Random(seed)
    begin = random.randrange(100, 4096) if seed % 2 else random.randrange(len(data))
    noise = random.randbytes(min(random.randrange(1, 5000), len(data) - begin))
    return data[:begin] + noise + data[begin + len(noise) :]


def test_log_overwritten_by_noise_is_refused_or_read_as_it_was(tmp_path: Path) -> None:
    names = [f"job{number}" for number in range(40)]
    with RunLog.open(tmp_path / "whole", wall_s=1.0) as log:
        log.append([replace(submitted(name), spec=" " * 800) for name in names])
    refusals, wrong = 0, []
    for seed in range(120):
        directory = tmp_path / f"noise{seed}"
        shutil.copytree(tmp_path / "whole", directory)
        (directory / LOG_FILE).write_bytes(overwritten((tmp_path / "whole" / LOG_FILE).read_bytes(), seed))
        for read in (read_as_owner, read_as_standby):
            try:
                found = [record.job for record in read(directory) if isinstance(record, JobSubmitted)]
            except SkeinError as error:
                refusals += LOG_FILE in str(error)
            else:
                wrong += [] if found == names[: len(found)] else [(seed, read.__name__)]
    assert not wrong
    assert refusals > 100


def read_as_standby(directory: Path) -> list[Record]:
    with closing(Lookout(directory)) as lookout:
        _ = lookout.lease()
        return [record for piece in iter(lookout.news, []) for record in piece]


def read_as_owner(directory: Path) -> list[Record]:
    with RunLog.open(directory, wall_s=2.0) as log:
        return list(log.read())


def test_owner_row_of_another_kind_is_refused(tmp_path: Path) -> None:
    RunLog.open(tmp_path, wall_s=1.0).close()
    change(tmp_path, "UPDATE owner SET epoch = x'c328'")
    for read in (read_as_owner, read_as_standby):
        with pytest.raises(UserError, match="names the owner is damaged; restore"):
            read(tmp_path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET payload = x'00' WHERE number = 2",
        "UPDATE entries SET epoch = 9 WHERE number = 2",
        "DELETE FROM entries WHERE number = 2",
    ],
)
def test_damage_in_the_middle_names_file_and_entry(tmp_path: Path, statement: str) -> None:
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        log.append([submitted("a"), submitted("b")])
    change(tmp_path, statement)
    with (
        RunLog.open(tmp_path, wall_s=2.0) as log,
        pytest.raises(UserError, match=rf"{LOG_FILE}.*entry 2 is damaged; restore"),
    ):
        list(log.read())


def test_entry_of_a_newer_release_says_so(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0):
        pass
    unknown = b"\x9a\x06\x02\x08\x01"
    with closing(sqlite3.connect(tmp_path / LOG_FILE)) as connection, connection:
        ((first,),) = connection.execute("SELECT digest FROM entries").fetchall()
    row = (entry_checksum(2, 1, unknown), chained(first, 2, 1, unknown))
    change(tmp_path, "INSERT INTO entries VALUES (2, 1, ?, ?, ?)", unknown, *row)
    with (
        RunLog.open(tmp_path, wall_s=2.0) as log,
        pytest.raises(UserError, match="entry 2 was written by another"),
    ):
        list(log.read())


def test_log_of_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0):
        pass
    change(tmp_path, "PRAGMA user_version = 4")
    with pytest.raises(UserError, match="newer release"):
        RunLog.open(tmp_path, wall_s=2.0)
    change(tmp_path, "PRAGMA user_version = 3")
    assert entries_of(tmp_path, epoch=2) == [opened(1)]


def test_file_that_is_no_database_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / LOG_FILE).write_bytes(b"not a database, but long enough to be one" * 100)
    with pytest.raises(UserError, match=r"not a database; restore"):
        RunLog.open(tmp_path, wall_s=1.0)


def test_directory_below_a_file_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give a directory"):
        RunLog.open(tmp_path / "file" / "log", wall_s=1.0)


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Writes beyond fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_refuses_the_append_and_keeps_the_log(tmp_path: Path) -> None:
    members = tuple(
        GenerationMember(worker=WorkerId(f"w{number:04}"), incarnation=Incarnation("i" * 32))
        for number in range(5000)
    )
    large = GenerationOpened(job=JobId("j"), generation=Generation(1), members=members, reason="", wall_s=1.0)
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        log.append([submitted("before")])
        with no_file_above(100_000), pytest.raises(LogFull, match=LOG_FILE):
            log.append([submitted("lost"), large])
        assert list(log.read()) == [opened(1), submitted("before")]
        log.append([submitted("after")])
    assert entries_of(tmp_path, epoch=2) == [opened(1), submitted("before"), submitted("after")]


def test_a_log_that_cannot_be_opened_for_want_of_room_is_told_from_one_that_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk SQLite has no memory to share between processes, and calls that an I/O error."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    with pytest.raises(UserError, match="give a directory"), damage_explained(tmp_path / LOG_FILE):
        raise error
    here = os.statvfs(tmp_path)
    full = SimpleNamespace(f_favail=1, f_files=1, f_bavail=3, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", lambda path: full if path == tmp_path else here)
    with pytest.raises(LogFull, match="no room is left"), damage_explained(tmp_path / LOG_FILE):
        raise error


def test_closed_log_takes_nothing(tmp_path: Path) -> None:
    log = RunLog.open(tmp_path, wall_s=1.0)
    log.close()
    log.close()
    with pytest.raises(LocalError, match="closed"):
        log.append([submitted("late")])
