"""One process on a machine has a worker's name; the next one proves that it is the same worker."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from skein.errors import UserError
from skein.types import WorkerId
from worker.naming import take_name

W, JOIN = WorkerId("w1"), "127.0.0.1:7411"


def test_a_second_process_of_a_name_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with (
        closing(take_name(tmp_path, W, JOIN)),
        pytest.raises(UserError, match=f"process {os.getpid()} on this"),
    ):
        take_name(tmp_path, W, JOIN)


def test_the_next_process_has_the_same_secret_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    with closing(take_name(tmp_path, W, JOIN)) as first:
        pass
    with closing(take_name(tmp_path, W, JOIN)) as second:
        assert first.secret == second.secret
        assert len(second.secret) == 32
    [file] = (tmp_path / "workers").glob("w1-*.secret")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_killed_process_leaves_its_name_to_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from worker.naming import take_name\n"
        "taken = take_name(Path(sys.argv[1]), 'w1', '127.0.0.1:7411'); print(taken.secret, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, stdout=subprocess.PIPE, text=True
    )
    assert killed.returncode == -9
    with closing(take_name(tmp_path, W, JOIN)) as taken:
        assert taken.secret == killed.stdout.strip()


def test_workers_of_other_coordinators_may_have_the_name_too(tmp_path: Path) -> None:
    here, there = take_name(tmp_path, W, JOIN), take_name(tmp_path, W, "other:7411")
    # A coordinator that goes on at another address knows its workers again.
    assert here.secret == there.secret
    here.close()
    there.close()


def test_machines_that_share_a_home_are_not_the_same_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(take_name(tmp_path, W, JOIN)) as here:
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        with closing(take_name(tmp_path, W, JOIN)) as there:
            assert here.secret != there.secret


def test_a_damaged_file_gets_a_new_secret(tmp_path: Path) -> None:
    take_name(tmp_path, W, JOIN).close()
    [file] = (tmp_path / "workers").glob("w1-*.secret")
    file.write_text("?")
    with closing(take_name(tmp_path, W, JOIN)) as taken:
        assert len(taken.secret) == 32


def test_without_a_place_for_the_secret_a_worker_goes_on_and_says_what_that_costs(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("")
    with closing(take_name(tmp_path, W, JOIN)) as taken:
        assert taken.secret == ""
        assert taken.warning is not None
        assert "give --state-dir" in taken.warning
