"""Two who want one run log: who leads is decided in the log itself, whatever either believes."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.records import logfile, store
from coordinator.records.logfile import (
    LOG_FILE,
    Holder,
    Lease,
    LogBusy,
    LogFull,
    current,
    journal_mode,
    move_on,
)
from coordinator.records.mirror import MIRROR_FILE
from coordinator.records.store import LOCK_FILE, Fenced, LogHeld, Lookout, RunLog, state_path
from skein.errors import UserError
from skein.protocol.log.records import EpochOpened, JobSubmitted, Record
from skein.types import Epoch
from tests.coordinator.test_store import change, no_file_above, opened, submitted
from tests.support.extent import examples, part

FIRST, SECOND = Holder(name="a", address="10.0.0.1:7411"), Holder(name="b", address="10.0.0.2:7411")


def all_of(lookout: Lookout) -> list[Record]:
    """What it had not told yet."""
    found: list[Record] = []
    while piece := lookout.news():
        found += piece
    return found


def taken(lookout: Lookout, holder: Holder = SECOND) -> RunLog:
    log = lookout.take(lookout.lease(), wall_s=2.0, holder=holder)
    assert log is not None
    return log


def test_the_lease_says_who_leads_and_where(tmp_path: Path) -> None:
    lookout = Lookout(tmp_path)
    assert lookout.lease().holder is None
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as log:
        log.renew(FIRST.address)
        assert lookout.lease() == Lease(epoch=Epoch(1), holder=FIRST, beats=1, has_lock=True)
    assert lookout.lease().holder is None
    assert all_of(lookout) == [opened(1)]


def test_a_standby_reads_along_each_entry_once(tmp_path: Path) -> None:
    lookout = Lookout(tmp_path)
    assert lookout.news() == []
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as log:
        log.append([submitted("a")])
        assert all_of(lookout) == [opened(1), submitted("a")]
        log.append([submitted(f"b{number}") for number in range(600)])
        assert all_of(lookout) == [submitted(f"b{number}") for number in range(600)]
        assert lookout.news() == []


def test_a_standby_takes_a_log_whose_owner_lives_and_holds_the_lock(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as old:
        lookout = Lookout(tmp_path)
        with taken(lookout) as new:
            assert new.epoch == 2
            with pytest.raises(Fenced, match=r"epoch 1 is over.*10\.0\.0\.2:7411 leads now"):
                old.append([submitted("late")])
            with pytest.raises(Fenced, match="epoch 1 is over"):
                old.renew(FIRST.address)
            new.append([submitted("kept")])
            assert list(new.read(after=1)) == [opened(2), submitted("kept")]
            # What the fenced one gives back is no longer its own.
            old.close()
            assert lookout.lease().holder == SECOND


@pytest.mark.parametrize("sign", ["renewal", "opening"])
def test_a_sign_of_life_comes_before_a_standby_that_was_about_to_take_over(tmp_path: Path, sign: str) -> None:
    lookout = Lookout(tmp_path)
    old = RunLog.open(tmp_path, wall_s=1.0, holder=FIRST)
    seen = lookout.lease()
    if sign == "renewal":
        old.renew(FIRST.address)
    else:
        old.close()
        old = RunLog.open(tmp_path, wall_s=2.0, holder=FIRST)
    assert lookout.take(seen, wall_s=2.0, holder=SECOND) is None
    old.append([submitted("a")])
    old.close()


def test_of_two_standbys_one_takes_over(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST):
        one, other = Lookout(tmp_path), Lookout(tmp_path)
        seen = other.lease()
        with taken(one):
            assert other.take(seen, wall_s=2.0, holder=FIRST) is None


def test_who_took_over_from_a_frozen_owner_gets_the_lock_when_that_one_has_died(tmp_path: Path) -> None:
    frozen = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(frozen, fcntl.LOCK_EX)
    lookout = Lookout(tmp_path)
    with taken(lookout) as new:
        new.renew(SECOND.address)
        assert not lookout.lease().has_lock
        os.close(frozen)
        # Nobody has the lock, yet the log has a living owner.
        with pytest.raises(LogHeld, match=r"10\.0\.0\.2:7411 is using it"):
            RunLog.open(tmp_path, wall_s=3.0, holder=FIRST)
        new.renew(SECOND.address)
        assert lookout.lease().has_lock
        with pytest.raises(LogHeld, match=f"process id {os.getpid()}"):
            RunLog.open(tmp_path, wall_s=3.0, holder=FIRST)


def test_a_damaged_last_entry_is_dropped_at_the_takeover(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as old:
        old.append([submitted("kept"), submitted("torn")])
        change(tmp_path, "UPDATE entries SET payload = x'00' WHERE number = 3")
        lookout = Lookout(tmp_path)
        assert all_of(lookout) == [opened(1), submitted("kept")]
        with taken(lookout) as new:
            assert "entry, 3, was damaged" in new.warnings[0]
            assert list(new.read(after=lookout.num_read)) == [opened(2)]


def test_a_full_disk_leaves_the_owner_in_place(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as log:
        lookout = Lookout(tmp_path)
        with no_file_above(4096):
            with pytest.raises(LogFull):
                lookout.take(lookout.lease(), wall_s=2.0, holder=SECOND)
            with pytest.raises(LogFull):
                log.renew(FIRST.address)
        log.append([submitted("a")])
        log.renew(FIRST.address)


def test_a_log_of_the_format_before_is_read_on(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        log.append([submitted("a")])
    for column in ("holder", "address", "beats", "has_lock"):
        change(tmp_path, f"ALTER TABLE owner DROP COLUMN {column}")
    change(tmp_path, "ALTER TABLE entries DROP COLUMN digest")
    (tmp_path / MIRROR_FILE).unlink()
    change(tmp_path, "PRAGMA user_version = 1")
    with RunLog.open(tmp_path, wall_s=2.0) as log:
        assert list(log.read()) == [opened(1), submitted("a"), opened(2)]


@pytest.mark.parametrize("url", ["s3://bucket/state", "file://elsewhere/state", "https://host/state"])
def test_a_url_without_compare_and_swap_is_refused_with_the_reason(url: str) -> None:
    with pytest.raises(UserError, match="needs compare-and-swap"):
        state_path(url)


@pytest.mark.parametrize(
    ("kind", "mode"), [("ext4", "wal"), ("overlay", "wal"), ("nfs4", "delete"), ("fuse.gluster", "delete")]
)
def test_shared_memory_is_used_where_all_who_open_the_file_are_on_one_machine(kind: str, mode: str) -> None:
    mounts = f"root / ext4 rw 0 0\nserver:/x /mnt/a\\040b {kind} rw 0 0\nother /mnt nfs rw 0 0\n"
    assert journal_mode(Path("/mnt/a b/state"), mounts) == mode
    assert journal_mode(Path("/home"), mounts) == "wal"


# --- a file system that several machines share ---


def on_a_shared_disk(_directory: Path, _mounts: str) -> str:
    return "delete"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All directories are on one."""
    monkeypatch.setattr(logfile, "journal_mode", on_a_shared_disk)


def journal_of(directory: Path) -> str:
    connection = sqlite3.connect(current(directory))
    ((mode,),) = connection.execute("PRAGMA journal_mode").fetchall()
    connection.close()
    return str(mode)


@pytest.mark.usefixtures("shared")
def test_a_standby_takes_over_where_no_memory_is_shared(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as old:
        lookout = Lookout(tmp_path)
        old.append([submitted("a")])
        reading = old.read()
        assert next(reading) == opened(1)
        # Whoever reads a long log in pieces holds up nobody.
        old.renew(FIRST.address)
        assert all_of(lookout) == [opened(1), submitted("a")]
        with taken(lookout) as new:
            assert journal_of(tmp_path) == "delete"
            with pytest.raises(Fenced):
                old.append([submitted("late")])
            with pytest.raises(Fenced):
                old.renew(FIRST.address)
            new.append([submitted("kept")])
            assert list(new.read()) == [opened(1), submitted("a"), opened(2), submitted("kept")]


@pytest.mark.usefixtures("shared")
def test_a_writer_that_is_frozen_there_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_BLOCKED_MS", 20)
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as old:
        lookout = Lookout(tmp_path)
        frozen = sqlite3.connect(tmp_path / LOG_FILE, isolation_level=None)
        frozen.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogBusy):
            taken(lookout)
        frozen.close()
        # Nobody has taken it, and nobody has sealed it.
        old.append([submitted("a")])
        taken(lookout).close()


def test_a_log_moves_to_a_shared_file_system_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        log.append([submitted("a")])
    monkeypatch.setattr(logfile, "journal_mode", on_a_shared_disk)
    RunLog.open(tmp_path, wall_s=2.0).close()
    assert journal_of(tmp_path) == "delete"
    monkeypatch.undo()
    with RunLog.open(tmp_path, wall_s=3.0) as log:
        assert list(log.read()) == [opened(1), submitted("a"), opened(2), opened(3)]
    assert journal_of(tmp_path) == "wal"


# --- a frozen owner ---

OWNER = """
import sys
from pathlib import Path
from coordinator.records.store import Fenced, Holder, RunLog
from skein.protocol.log.records import JobSubmitted
from skein.types import JobId

log = RunLog.open(Path(sys.argv[1]), wall_s=1.0, holder=Holder(name="a", address="here"))
number = 0
try:
    while True:
        log.append([JobSubmitted(job=JobId(f"j{number}"), key="k", spec="{}", wall_s=1.0)])
        print(number, flush=True)
        number += 1
except Fenced as error:
    sys.exit(f"fenced: {error}")
"""


@contextmanager
def owner_that_appends(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that appends as fast as it can, and prints the number of each append that succeeded."""
    command = [sys.executable, "-c", OWNER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_owner_frozen_at_any_moment_appends_nothing_after_the_takeover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it was told is appended is in its successor's log, and nothing comes after."""
    monkeypatch.setattr(store, "_BLOCKED_MS", 20)
    for attempt in part(range(4), every=2, start=1):
        directory = tmp_path / str(attempt)
        with owner_that_appends(directory) as owner:
            assert owner.stdout is not None
            assert owner.stderr is not None
            told = [owner.stdout.readline() for _ in range(1 + 7 * attempt)]
            owner.send_signal(signal.SIGSTOP)
            lookout = Lookout(directory)
            with taken(lookout) as new:
                new.append([submitted("kept")])
                owner.send_signal(signal.SIGCONT)
                told += owner.stdout.readlines()
                assert "fenced:" in owner.stderr.read()
                records = list(new.read())
        jobs = [str(record.job) for record in records if isinstance(record, JobSubmitted)]
        assert records[-2:] == [EpochOpened(epoch=Epoch(2), wall_s=2.0), submitted("kept")]
        assert jobs[:-1] == [f"j{number}" for number in range(len(jobs) - 1)]
        # At most what it was busy with is there without its knowledge.
        assert len(told) <= len(jobs) - 1 <= len(told) + 1


def test_an_owner_frozen_within_a_transaction_is_left_with_its_file(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as old:
        old.append([submitted("kept")])
        frozen = sqlite3.connect(tmp_path / LOG_FILE, isolation_level=None)
        frozen.execute("BEGIN IMMEDIATE")
        frozen.execute("DELETE FROM entries")
        one, other = Lookout(tmp_path), Lookout(tmp_path)
        assert all_of(one) == [opened(1), submitted("kept")]
        seen = other.lease()
        with taken(one) as new:
            frozen.execute("ROLLBACK")
            # It writes, as if it had been about to, and finds that this does not count.
            with pytest.raises(Fenced, match="epoch 1 is over"):
                old.append([submitted("void")])
            with pytest.raises(Fenced, match="epoch 1 is over"):
                old.renew(FIRST.address)
            new.append([submitted("after")])
            assert all_of(other) == []
            assert other.take(seen, wall_s=3.0, holder=FIRST) is None
            assert other.lease().holder == SECOND
            assert all_of(other) == [opened(1), submitted("kept"), opened(2), submitted("after")]
        frozen.close()
    with RunLog.open(tmp_path, wall_s=3.0) as third:
        assert list(third.read()) == [opened(1), submitted("kept"), opened(2), submitted("after"), opened(3)]


def test_a_log_that_was_sealed_by_one_who_died_goes_on(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0, holder=FIRST) as old:
        old.append([submitted("kept")])
        following = move_on(tmp_path / LOG_FILE)
        following.unlink()
        with pytest.raises(Fenced):
            old.append([submitted("void or not")])
    with RunLog.open(tmp_path, wall_s=2.0) as new:
        assert list(new.read())[:2] == [opened(1), submitted("kept")]
        assert new.epoch == 2
    assert current(tmp_path) == following


# --- any order ---

PARTIES = st.sampled_from([0, 1])


class TwoCoordinators(RuleBasedStateMachine):
    """Two coordinators on one directory, each on a machine of its own: none sees the other's lock."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name)
        self.chain: list[Record] = []
        """What was acknowledged, in order."""
        self.logs: dict[int, RunLog] = {}
        self.lookouts = {party: Lookout(self.directory) for party in (0, 1)}
        self.replayed: dict[int, list[Record]] = {0: [], 1: []}
        self.seen: dict[int, Lease] = {}
        self.leader: int | None = None
        self.num_submitted = 0

    def teardown(self) -> None:
        for log in self.logs.values():
            log.close()
        for lookout in self.lookouts.values():
            lookout.close()
        self.folder.cleanup()

    @property
    def epoch(self) -> int:
        return sum(isinstance(record, EpochOpened) for record in self.chain)

    def leads(self, party: int, log: RunLog) -> None:
        if (before := self.logs.pop(party, None)) is not None:
            before.close()
        assert log.epoch == self.epoch + 1
        self.logs[party], self.leader = log, party
        self.chain.append(EpochOpened(epoch=log.epoch, wall_s=1.0))

    def holder(self, party: int) -> Holder:
        return (FIRST, SECOND)[party]

    @rule(party=PARTIES)
    def open(self, party: int) -> None:
        (self.directory / LOCK_FILE).unlink(missing_ok=True)
        lease = self.lookouts[party].lease()
        try:
            self.leads(party, RunLog.open(self.directory, wall_s=1.0, holder=self.holder(party)))
        except LogHeld:
            assert lease.holder not in (None, self.holder(party))

    @rule(party=PARTIES, number=st.integers(0, 3))
    def append(self, party: int, number: int) -> None:
        if (log := self.logs.get(party)) is None:
            return
        records = [submitted(f"j{self.num_submitted + index}") for index in range(number)]
        self.num_submitted += number
        if party == self.leader:
            log.append(records)
            self.chain += records
        else:
            with pytest.raises(Fenced):
                log.append(records)

    @rule(party=PARTIES)
    def renew(self, party: int) -> None:
        if (log := self.logs.get(party)) is None:
            return
        address = self.holder(party).address
        if party == self.leader:
            log.renew(address)
        else:
            with pytest.raises(Fenced):
                log.renew(address)

    @rule(party=PARTIES)
    def look(self, party: int) -> None:
        self.seen[party] = self.lookouts[party].lease()
        self.replayed[party] += self.lookouts[party].news()

    @rule(party=PARTIES)
    def expire(self, party: int) -> None:
        if party not in self.seen:
            return
        lookout, seen = self.lookouts[party], self.seen[party]
        is_unchanged = lookout.lease() == seen
        log = lookout.take(seen, wall_s=1.0, holder=self.holder(party))
        assert (log is not None) == is_unchanged
        if log is not None:
            self.leads(party, log)
            assert self.replayed[party] + list(log.read(after=lookout.num_read)) == self.chain

    @rule(party=PARTIES)
    def close(self, party: int) -> None:
        if (log := self.logs.pop(party, None)) is not None:
            log.close()
            self.leader = None if self.leader == party else self.leader

    @rule()
    def freeze_within_a_transaction(self) -> None:
        """Whoever leads is thought to be frozen there; nobody writes this file any more."""
        move_on(current(self.directory))
        self.leader = None

    @invariant()
    def the_log_is_one_chain_of_growing_epochs(self) -> None:
        reader = Lookout(self.directory)
        assert all_of(reader) == self.chain
        reader.close()
        epochs = [record.epoch for record in self.chain if isinstance(record, EpochOpened)]
        assert epochs == list(range(1, len(epochs) + 1))


TwoCoordinators.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=20)
test_two_coordinators_in_any_order_make_one_chain = TwoCoordinators.TestCase
