"""A run log that has lost its end is refused, with what is gone, until an operator accepts that."""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.records.logfile import LOG_FILE, Holder, Tail, entry_checksum, read_tail
from coordinator.records.mirror import KEY_FILE, MIRROR_FILE, LogLost, Mirror, read_mirror, write_mirror
from coordinator.records.store import Lookout, RunLog
from skein.errors import UserError
from skein.protocol.log.records import EpochOpened
from skein.types import Epoch
from skein.wire.codec import RECORD
from tests.coordinator.test_store import as_after_a_crash, change, no_file_above, opened, submitted

FIRST, SECOND = Holder(name="a", address="10.0.0.1:7411"), Holder(name="b", address="10.0.0.2:7411")
NAMES = [f"j{number}" for number in range(6)]


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A directory as a killed coordinator leaves it: 8 entries in 2 epochs, all of them mirrored."""
    directory = tmp_path / "log"
    RunLog.open(directory, wall_s=1.0).close()
    with RunLog.open(directory, wall_s=2.0) as log:
        log.append([submitted(name) for name in NAMES])
        log.mirror()
        return as_after_a_crash(directory, tmp_path / "crashed")


def lose_entries(directory: Path) -> None:
    change(directory, "DELETE FROM entries WHERE number > 5")


def lose_epoch(directory: Path) -> None:
    change(directory, "DELETE FROM entries WHERE number > 1")
    change(directory, "UPDATE owner SET epoch = 1")


def lose_write_ahead_log(directory: Path) -> None:
    (directory / f"{LOG_FILE}-wal").unlink()
    (directory / f"{LOG_FILE}-shm").unlink()


def empty_file(directory: Path) -> None:
    lose_write_ahead_log(directory)
    os.truncate(directory / LOG_FILE, 0)


def lose_file(directory: Path) -> None:
    empty_file(directory)
    (directory / LOG_FILE).unlink()


def damage_last(directory: Path) -> None:
    change(directory, "UPDATE entries SET payload = x'00' WHERE number = 8")


LOSSES: list[tuple[Callable[[Path], None], str]] = [
    (lose_entries, "the log ends at entry 5 of epoch 2"),
    (lose_epoch, "the log ends at entry 1 of epoch 1"),
    (lose_write_ahead_log, "the log"),
    (empty_file, "the log is empty"),
    (lose_file, "the log is empty"),
    (damage_last, "the log ends at entry 7 of epoch 2"),
]


@pytest.mark.parametrize(("lose", "told"), LOSSES)
def test_a_log_that_lost_its_end_is_refused_until_that_is_accepted(
    known: Path, lose: Callable[[Path], None], told: str
) -> None:
    lose(known)
    says = rf"{told}.*knows entry 8 of epoch 2; restore .*--accept-lost-log"
    with pytest.raises(LogLost, match=says):
        RunLog.open(known, wall_s=3.0, holder=FIRST)
    # Refused again, and as often as it is tried: nothing was changed by the refusal.
    with pytest.raises(LogLost, match=says):
        RunLog.open(known, wall_s=3.0, holder=FIRST)
    with RunLog.open(known, wall_s=3.0, holder=FIRST, accepts_loss=True) as log:
        # Above every epoch that anybody has heard of.
        assert log.epoch == 3
        assert any("going on without, as asked" in line for line in log.warnings)
        assert list(log.read())[-1] == EpochOpened(epoch=Epoch(3), wall_s=3.0, accepts_loss=True)
        log.append([submitted("after")])
    with RunLog.open(known, wall_s=4.0) as log:
        assert (log.epoch, log.warnings) == (4, ())
        assert list(log.read())[-2:] == [submitted("after"), opened(4)]


def test_a_whole_log_is_taken_whatever_the_mirror_has_not_seen_yet(known: Path) -> None:
    write_mirror(known, Mirror(tail=Tail(entry=1, epoch=Epoch(1), digest=None), key=b""))
    with RunLog.open(known, wall_s=3.0) as log:
        assert len(list(log.read())) == 9


def test_another_log_of_the_same_length_is_refused(known: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    RunLog.open(other, wall_s=1.0).close()
    with RunLog.open(other, wall_s=2.0) as log:
        log.append([submitted(f"other-{name}") for name in NAMES])
    (known / MIRROR_FILE).replace(other / MIRROR_FILE)
    with pytest.raises(LogLost, match=r"entry 8 is not the one that run\.position"):
        RunLog.open(other, wall_s=3.0)


def test_an_entry_that_was_replaced_whole_breaks_the_chain(known: Path) -> None:
    with RunLog.open(known, wall_s=3.0):
        pass
    other = RECORD.to_bytes(submitted("other"))
    values = (other, entry_checksum(5, 2, other))
    change(known, "UPDATE entries SET payload = ?, crc32 = ? WHERE number = 5", *values)
    with RunLog.open(known, wall_s=4.0) as log, pytest.raises(UserError, match="entry 5 is damaged"):
        list(log.read())


def test_a_standby_does_not_lead_with_a_log_that_lost_its_end(known: Path) -> None:
    lose_entries(known)
    lookout = Lookout(known)
    with pytest.raises(LogLost, match="entry 8 of epoch 2"):
        lookout.take(lookout.lease(), wall_s=3.0, holder=SECOND)
    lookout.close()


def test_a_mirror_that_cannot_be_read_is_told_and_compared_with_nothing(known: Path) -> None:
    (known / MIRROR_FILE).write_text("{")
    with RunLog.open(known, wall_s=3.0) as log:
        [line] = log.warnings
        assert "cannot be read" in line
        log.mirror()
    assert read_mirror(known) is not None


def test_what_an_owner_left_half_written_is_cleared_away(known: Path) -> None:
    left = known / f".{MIRROR_FILE}-4711"
    left.write_text('{"entry": 9')
    with RunLog.open(known, wall_s=3.0) as log:
        assert log.warnings == ()
        assert not left.exists()


def test_a_launcher_that_accepted_a_loss_accepts_it_once(known: Path, tmp_path: Path) -> None:
    lose_entries(known)
    with RunLog.open(known, wall_s=3.0, holder=FIRST, accepts_loss=True):
        killed = as_after_a_crash(known, tmp_path / "killed")
    with RunLog.open(killed, wall_s=4.0, holder=FIRST, accepts_loss=True) as log:
        assert list(log.read())[-1] == opened(4)


def test_a_full_disk_leaves_the_mirror_as_it_was(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        log.mirror()
        before = read_mirror(tmp_path)
        log.append([submitted("a")])
        with no_file_above(0), pytest.raises(OSError, match="too large"):
            log.mirror()
        assert read_mirror(tmp_path) == before
        log.mirror()
        assert read_mirror(tmp_path) != before


def test_a_log_of_the_release_before_goes_on_with_digests(tmp_path: Path) -> None:
    with RunLog.open(tmp_path, wall_s=1.0) as log:
        log.append([submitted("a")])
    (tmp_path / MIRROR_FILE).unlink()
    change(tmp_path, "ALTER TABLE entries DROP COLUMN digest")
    change(tmp_path, "PRAGMA user_version = 2")
    with RunLog.open(tmp_path, wall_s=2.0) as log:
        log.append([submitted("b")])
        assert list(log.read()) == [opened(1), submitted("a"), opened(2), submitted("b")]
        assert list(log.read(after=3)) == [submitted("b")]
    change(tmp_path, "DELETE FROM entries WHERE number > 2")
    with pytest.raises(LogLost, match="entry 4 of epoch 2"):
        RunLog.open(tmp_path, wall_s=3.0)


def key_of(directory: Path) -> tuple[bytes, tuple[str, ...]]:
    """The key of a log, and what its opening warns of."""
    with RunLog.open(directory, wall_s=9.0) as log:
        return log.key, log.warnings


def test_a_log_keeps_its_key_as_long_as_one_of_two_files_has_it(known: Path) -> None:
    key, warnings = key_of(known)
    assert (len(key), warnings) == (32, ())
    assert (known / KEY_FILE).stat().st_mode & 0o777 == 0o600
    (known / MIRROR_FILE).unlink()
    assert key_of(known) == (key, ())
    for damaged in (b"damaged", b"\xff\xfe\x80 no text at all", b""):
        (known / KEY_FILE).write_bytes(damaged)
        assert key_of(known) == (key, ())
    (known / KEY_FILE).unlink()
    assert key_of(known) == (key, ())
    assert bytes.fromhex((known / KEY_FILE).read_text()) == key


def test_a_log_without_a_key_gets_one_and_says_so_once(known: Path) -> None:
    key, _ = key_of(known)
    (known / MIRROR_FILE).unlink()
    (known / KEY_FILE).unlink()
    new, [line] = key_of(known)
    assert new != key
    assert "run.key: made anew" in line
    assert key_of(known) == (new, ())


def test_a_key_that_may_not_be_read_is_not_replaced(known: Path) -> None:
    (known / KEY_FILE).unlink()
    (known / KEY_FILE).mkdir()
    with pytest.raises(UserError, match=r"run\.key.*let the coordinator read it"):
        RunLog.open(known, wall_s=3.0)


@settings(max_examples=15)  # each opens a log twice, with fsyncs
@given(appends=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=5), num_lost=st.integers(0, 4))
def test_the_mirror_is_never_ahead_and_finds_every_loss_that_it_can_know_of(
    appends: list[tuple[int, bool]], num_lost: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("log")
    num_mirrored = 0
    with RunLog.open(directory, wall_s=1.0) as log:
        num_entries = 1
        for index, (count, is_mirrored) in enumerate(appends):
            log.append([submitted(f"{index}-{number}") for number in range(count)])
            num_entries += count
            if is_mirrored:
                log.mirror()
                num_mirrored = num_entries
        crashed = as_after_a_crash(directory, tmp_path_factory.mktemp("crashed"))
    mirror = read_mirror(crashed)
    assert (0 if mirror is None else mirror.tail.entry) == num_mirrored
    change(crashed, "DELETE FROM entries WHERE number > ?", num_entries - num_lost)
    if max(0, num_entries - num_lost) < num_mirrored:
        with pytest.raises(LogLost, match=f"knows entry {num_mirrored} "):
            RunLog.open(crashed, wall_s=2.0)
    else:
        RunLog.open(crashed, wall_s=2.0).close()
        connection = sqlite3.connect(crashed / LOG_FILE)
        assert read_tail(connection).entry == max(0, num_entries - num_lost) + 1
        connection.close()
