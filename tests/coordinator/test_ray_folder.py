"""Ray's folder is private, empty at the start, and nobody else's, whatever was left behind in its place."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.launch import folder as folders
from coordinator.launch.folder import MAX_BYTES, take_folder
from coordinator.launcher import USAGE, CoordinatorOptions, run_coordinator
from skein.errors import UserError

WAIT_S = 120.0
HOLDS = (
    "import os, signal, sys; f = open(sys.argv[1], 'a'); os.setsid(); print('up', flush=True); signal.pause()"
)


@pytest.fixture
def short() -> Iterator[Path]:
    """A place with a short name, as state directories have; those of tests have long ones."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        yield Path(folder).resolve()


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_folder_lies_below_the_state_directory_where_only_its_owner_can_enter(short: Path) -> None:
    with closing(take_folder(short)) as taken:
        assert taken.path == short / "ray" / "0"
        # Ray itself makes what it is given open to everybody.
        taken.path.chmod(0o777)
        assert mode_of(short / "ray") == 0o700


def test_a_place_that_is_open_to_all_is_made_private_and_what_was_left_in_it_removed(short: Path) -> None:
    left = short / "ray" / "0" / "session_of_one_that_was_killed"
    left.mkdir(parents=True)
    (short / "ray").chmod(0o777)
    (short / "ray" / "3").symlink_to(short)
    with closing(take_folder(short)) as taken:
        assert list(taken.path.iterdir()) == []
        assert mode_of(short / "ray") == 0o700
        assert not os.path.lexists(short / "ray" / "3")
        assert short.exists()


def test_a_folder_in_use_is_left_alone_also_while_its_guard_clears_up(short: Path) -> None:
    first = take_folder(short)
    inherited = os.dup(first.lock)
    first.close()
    (first.path / "log").write_text("")
    with closing(take_folder(short)) as second:
        assert second.path == short / "ray" / "1"
        assert (first.path / "log").exists()
        os.close(inherited)
    with closing(take_folder(short)) as third:
        assert third.path == first.path
        assert list(third.path.iterdir()) == []


def test_who_still_writes_in_a_folder_that_was_left_behind_is_ended(short: Path) -> None:
    log = short / "ray" / "0" / "log"
    log.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(log)], stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == b"up\n"
        with closing(take_folder(short)):
            assert left.wait(timeout=WAIT_S) == -signal.SIGKILL


def test_sockets_of_the_longest_path_can_be_had(short: Path) -> None:
    deep = short / ("d" * (MAX_BYTES - len(os.fsencode(short)) - len("/") - len("/ray/64")))
    deep.mkdir()
    with closing(take_folder(deep, elsewhere=())) as taken:
        name = taken.path / "session_2026-11-22_12-53-00_123456_4194304" / "sockets" / "plasma_store"
        name.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(name))
    one_more = deep.rename(deep.with_name(f"{deep.name}d"))
    with pytest.raises(UserError, match=r"its path has more than \d+ bytes; give a shorter one"):
        take_folder(one_more, elsewhere=())


def test_where_the_state_directory_is_too_long_a_private_place_elsewhere_is_taken(short: Path) -> None:
    long = short / ("d" * 60)
    long.mkdir()
    taken_by_a_file, link, place = short / "file", short / "link", short / "place"
    taken_by_a_file.write_text("")
    link.symlink_to(short)
    with closing(take_folder(long, elsewhere=(taken_by_a_file, link, place))) as taken:
        assert taken.path == place / "0"
        assert mode_of(place) == 0o700
    with pytest.raises(UserError, match="another user's, or no folder"):
        take_folder(long, elsewhere=(taken_by_a_file, link))


def test_a_place_of_another_user_is_not_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UserError, match="another user's"):
        take_folder(short, elsewhere=())


def test_a_state_directory_that_machines_share_holds_no_sockets(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "journal_mode", lambda _directory, _mounts: "delete")
    with closing(take_folder(short, elsewhere=(short / "local",))) as taken:
        assert taken.path == short / "local" / "0"


def test_a_lock_is_free_once_its_holder_is_killed(short: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from coordinator.launch.folder import take_folder\n"
        "take_folder(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(short)], check=False).returncode == -9
    with (short / "ray" / "0.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_ray_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert run_coordinator(CoordinatorOptions(state_dir=tmp_path)) == USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert (
        line
        == "error: ray: 'not installed': install it with: pip install '.[coordinator]' in Skein's source folder"
    )
