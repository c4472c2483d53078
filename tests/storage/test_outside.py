"""Calls that never come back cost a thread, and nobody waits for them longer than silence is borne."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skein.storage.outside import (
    MAX_LEFT,
    NoRoomError,
    Outside,
    SilentError,
    call_moved,
    require_room,
    room_explained,
)

SHORT_S = 0.02


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """What a file system waits for that does not answer; it does in the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


async def test_what_was_asked_is_answered_and_errors_are_passed_on() -> None:
    outside = Outside()
    assert await outside.answer(lambda: 7, "seven") == 7
    with pytest.raises(OSError, match="gone"):
        await outside.answer(_fail, "nothing")
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await outside.answer(iter(()).__next__, "an iterator that has ended")


def _fail() -> None:
    raise OSError("gone")


async def test_a_call_without_a_sign_of_life_is_left_behind(stuck: threading.Event) -> None:
    outside = Outside(silent_s=SHORT_S)
    with pytest.raises(SilentError, match=r"checkpoint.url s3://b gave no sign of life for 0 s"):
        await outside.answer(stuck.wait, "checkpoint.url s3://b")
    assert outside.num_left == 1
    assert await outside.answer(lambda: "others are answered", "more") == "others are answered"


async def test_what_moves_is_waited_for_however_long_it_takes() -> None:
    outside = Outside(silent_s=0.2)
    waits = threading.Event()

    def slow() -> int:
        for _ in range(10):
            waits.wait(0.05)
            call_moved()
        return 1

    assert await outside.answer(slow, "a large file") == 1
    assert outside.num_moved == 10


async def test_a_place_that_answers_nobody_does_not_get_ever_more_threads(stuck: threading.Event) -> None:
    outside = Outside(silent_s=SHORT_S)
    outside.num_left = MAX_LEFT
    with pytest.raises(SilentError, match=f"{MAX_LEFT} earlier calls are still without an answer"):
        await outside.answer(stuck.wait, "once more")


def test_moving_outside_a_call_says_nothing() -> None:
    call_moved()


def test_a_full_place_says_how_much_it_needs_and_has(tmp_path: Path) -> None:
    require_room(tmp_path, 1)
    with pytest.raises(NoRoomError, match=r"needs 1\.0 MiB at .*, 0 B are free"):
        require_room(tmp_path, 1 << 20, reserved_bytes=1 << 62)
    with pytest.raises(NoRoomError, match=r"needs 2\.0 KiB"), room_explained(2048, tmp_path):
        raise OSError(errno.ENOSPC, "no space")
    with pytest.raises(OSError, match="no such"), room_explained(2048, tmp_path):
        raise OSError(errno.ENOENT, "no such")
