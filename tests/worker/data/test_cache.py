"""Tokens are made once for all who want them, and what lies on the disk is believed only when it is whole."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from worker.data import cache as module
from worker.data.cache import TokenCache
from worker.data.samples import Integers

DTYPE = np.dtype(np.uint16)
ENTRY_BYTES = 64 + 2 * 1000


class Maker:
    """A thousand tokens, and how often they were made."""

    def __init__(self, first: int = 0) -> None:
        self.times = 0
        self._first = first

    def __call__(self) -> Iterator[Integers]:
        self.times += 1
        yield np.arange(self._first, self._first + 400)
        yield np.arange(self._first + 400, self._first + 1000)


def entries(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.tokens")}


def test_tokens_are_made_once_and_mapped(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(2):
        found = TokenCache(tmp_path).tokens("a", DTYPE, make)
        assert isinstance(found, np.memmap)
        assert np.array_equal(found, np.arange(1000))
    assert make.times == 1


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_entry_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    TokenCache(tmp_path).tokens("a", DTYPE, make)
    damage(tmp_path / "a.tokens")
    assert np.array_equal(TokenCache(tmp_path).tokens("a", DTYPE, make), np.arange(1000))
    assert make.times == 2
    assert "made anew" in caplog.text
    TokenCache(tmp_path).tokens("a", DTYPE, make)
    assert make.times == 2


def test_what_was_not_used_for_longest_goes_first_and_stays_readable_for_who_has_it(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path, most_bytes=2 * ENTRY_BYTES)
    first = cache.tokens("a", DTYPE, Maker(1))
    cache.tokens("b", DTYPE, Maker(2))
    for age_s, name in ((20, "a"), (10, "b")):
        path = tmp_path / f"{name}.tokens"
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    cache.tokens("a", DTYPE, Maker(1))
    cache.tokens("c", DTYPE, Maker(3))
    assert entries(tmp_path) == {"a", "c"}
    cache.tokens("d", DTYPE, Maker(4))
    cache.tokens("e", DTYPE, Maker(5))
    assert "a" not in entries(tmp_path)
    assert np.array_equal(first, np.arange(1, 1001))


def test_what_is_larger_than_the_bound_is_used_but_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = TokenCache(tmp_path, most_bytes=ENTRY_BYTES - 1).tokens("a", DTYPE, Maker())
    assert np.array_equal(found, np.arange(1000))
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    assert "not kept" in caplog.text


def test_without_a_folder_that_can_be_written_tokens_are_made_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "below"):
        assert np.array_equal(TokenCache(folder).tokens("a", DTYPE, Maker()), np.arange(1000))


def test_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Integers]:
        yield np.arange(10)
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        TokenCache(tmp_path).tokens("a", DTYPE, broken)
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_nobody_makes_what_another_is_making(tmp_path: Path) -> None:
    began, may_end, make = threading.Event(), threading.Event(), Maker()

    def slow() -> Iterator[Integers]:
        began.set()
        may_end.wait(10)
        yield from make()

    threads = [
        threading.Thread(target=TokenCache(tmp_path).tokens, args=("a", DTYPE, each)) for each in (slow, make)
    ]
    threads[0].start()
    began.wait(10)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert make.times == 1
    assert entries(tmp_path) == {"a"}


def test_nothing_is_kept_of_an_empty_source_but_its_emptiness(tmp_path: Path) -> None:
    for _ in range(2):
        assert len(TokenCache(tmp_path).tokens("a", DTYPE, lambda: iter(()))) == 0


def test_a_draft_that_goes_while_it_is_waited_for_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".a.gone.part").symlink_to("nothing")
    with (tmp_path / ".a.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Who waits says so once it has looked at the drafts.
        monkeypatch.setattr(module, "call_moved", lock.close)
        assert len(TokenCache(tmp_path).tokens("a", DTYPE, Maker())) == 1000


def test_what_is_not_the_caches_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "notes.txt").touch()
    draft = tmp_path / ".b.0.part"
    draft.touch()
    for path in (tmp_path / "lost+found", tmp_path / "notes.txt", draft):
        os.utime(path, (0, 0))
    TokenCache(tmp_path).tokens("a", DTYPE, Maker())
    assert entries(tmp_path) == {"a"}
    assert (tmp_path / "lost+found").is_dir()
    assert (tmp_path / "notes.txt").is_file()
    assert not draft.exists()
