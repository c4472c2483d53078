"""What a coordinator refuses before it starts anything: one line, the cause and the cure, exit code 1 or 2."""

import errno
import fcntl
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import launcher
from coordinator.launcher import (
    FAILED,
    USAGE,
    CoordinatorOptions,
    needs_certificates,
    run_coordinator,
)
from coordinator.records.store import LOCK_FILE


def refusal(options: CoordinatorOptions, capsys: pytest.CaptureFixture[str], code: int = FAILED) -> str:
    """The one line that it ends with."""
    assert run_coordinator(options) == code
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def no_directory(tmp_path: Path) -> CoordinatorOptions:
    (tmp_path / "file").write_text("")
    return CoordinatorOptions(state_dir=tmp_path / "file" / "below")


def no_port(tmp_path: Path) -> CoordinatorOptions:
    return CoordinatorOptions(state_dir=tmp_path, port=70_000)


def short_lease(tmp_path: Path) -> CoordinatorOptions:
    return CoordinatorOptions(state_dir=tmp_path, lease_s=0.01)


def short_silence(tmp_path: Path) -> CoordinatorOptions:
    return CoordinatorOptions(state_dir=tmp_path, takeover_s=0.1)


def no_address(tmp_path: Path) -> CoordinatorOptions:
    return CoordinatorOptions(state_dir=tmp_path, advertise="lab.example:port")


def no_quotas(tmp_path: Path) -> CoordinatorOptions:
    return CoordinatorOptions(state_dir=tmp_path, quotas_file=tmp_path / "none.yaml")


def wrong_quotas(tmp_path: Path) -> CoordinatorOptions:
    (tmp_path / "quotas.yaml").write_text("default: {workers: none}")
    return CoordinatorOptions(state_dir=tmp_path, quotas_file=tmp_path / "quotas.yaml")


@pytest.mark.parametrize(
    ("wrong", "code", "field", "cure"),
    [
        (no_quotas, USAGE, "quotas", "give a YAML file"),
        (wrong_quotas, USAGE, "default.workers", "give a whole number"),
        (no_directory, FAILED, "state_dir", "give a directory that you can write"),
        (no_port, USAGE, "port", "between 1 and 65535"),
        (short_lease, USAGE, "lease_s", "at least 0.5 s"),
        (short_silence, USAGE, "takeover_s", "at least 0.5 s"),
        (no_address, USAGE, "advertise", "give host:port"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    wrong: Callable[[Path], CoordinatorOptions],
    code: int,
    field: str,
    cure: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refusal(wrong(tmp_path), capsys, code)
    assert line.startswith(f"error: {field}: ")
    assert cure in line


@pytest.mark.parametrize("which", ["listen", "metrics_port"])
def test_a_port_in_use_is_refused(which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        options = CoordinatorOptions(
            state_dir=tmp_path,
            port=port if which == "listen" else free,
            metrics_port=port if which == "metrics_port" else free,
        )
        line = refusal(options, capsys)
    assert (
        line
        == f"error: {which}: '127.0.0.1:{port}': Address already in use; give another one, or end what listens there"
    )


def test_a_state_directory_in_use_is_waited_for_and_then_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LOCK_WAIT_S", 0.05)
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        assert run_coordinator(CoordinatorOptions(state_dir=tmp_path)) == 1
    waiting, line = capsys.readouterr().err.splitlines()
    assert waiting.endswith(f"process 4711 to leave {tmp_path}")
    assert "the coordinator with process id 4711 is using it" in line


def test_a_start_on_a_full_disk_waits_for_room_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def allocate(descriptor: int, offset: int, length: int) -> None:
        tries.append(length)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launcher, "_TICK_S", 0.0)
    monkeypatch.setattr("os.posix_fallocate", allocate)
    with launcher._Signals() as signals:
        assert launcher._prepare(CoordinatorOptions(state_dir=tmp_path), signals) == tmp_path
    assert len(tries) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"waiting: No space left on device: a start needs 1.0 MiB in {tmp_path}; make room"


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("10.0.0.5", None, "10.0.0.5:7411"),
        ("0.0.0.0", None, f"{socket.gethostname()}:7411"),
        ("0.0.0.0", "lab.example", "lab.example:7411"),
        ("::", "lab.example:80", "lab.example:80"),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(
    host: str, advertise: str | None, address: str, tmp_path: Path
) -> None:
    options = CoordinatorOptions(state_dir=tmp_path, host=host, advertise=advertise)
    assert launcher.advertised(options) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "lab.example"])
def test_beyond_this_machine_callers_need_certificates_unless_it_is_said_otherwise(
    tmp_path: Path, host: str
) -> None:
    beyond = CoordinatorOptions(state_dir=tmp_path, host=host)
    assert needs_certificates(beyond)
    assert not needs_certificates(replace(beyond, allow_insecure=True))
    assert not needs_certificates(replace(beyond, host="127.0.0.1"))
    assert needs_certificates(replace(beyond, host="127.0.0.1", has_certificates=True))
