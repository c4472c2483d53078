"""`skein doctor`: what it looks for, and what it says."""

from pathlib import Path

import pytest

from client.cli import run
from client.cli.doctor import DoctorFinding, Verdict, clock_skew, free_space, open_files_finding
from tests.client.cli.said import Captured, lines
from tests.client.conftest import Scripted
from tests.client.scripted import Script, serving, worker


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes seconds to load, and is looked at in a test of its own."""
    finding = DoctorFinding(check="torch", verdict=Verdict.OK, found="not looked at")
    monkeypatch.setattr("client.cli.doctor._torch", lambda: finding)


def test_doctor_looks_at_the_coordinator_and_its_workers(coordinator: Scripted, capsys: Captured) -> None:
    with serving(Script()) as address:
        coordinator.script.workers = [worker(address=address)]
        code = run(["doctor", "--json", "--metrics-port", "1"])
    verdict_by_check = {str(found["check"]): found["verdict"] for found in lines(capsys.readouterr().out)}
    assert verdict_by_check["coordinator"] == verdict_by_check["workers"] == "ok"
    assert verdict_by_check["torch"] == "ok"
    assert verdict_by_check["clock"] == "warning"
    assert code == 0


@pytest.mark.usefixtures("no_torch")
def test_doctor_fails_where_a_worker_cannot_be_reached(capsys: Captured) -> None:
    assert run(["doctor", "--metrics-port", "1"]) == 1
    assert (
        "failed   workers      w1 cannot be reached at 127.0.0.1:9 from here: open its port"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("no_torch")
def test_doctor_fails_where_the_named_coordinator_is_silent(capsys: Captured) -> None:
    assert run(["doctor", "--coordinator", "127.0.0.1:9"]) == 1
    assert "failed   coordinator  no answer: 127.0.0.1:9: nothing listens there" in capsys.readouterr().out


def test_few_open_files_are_worth_a_warning() -> None:
    assert open_files_finding(1024).verdict is Verdict.WARNING
    assert open_files_finding(65536).verdict is Verdict.OK


def test_full_disk_is_worth_a_warning(tmp_path: Path) -> None:
    assert free_space("disk", tmp_path / "not" / "there", 1, "free some").verdict is Verdict.OK
    found = free_space("disk", tmp_path, 1 << 60, "free some")
    assert (found.verdict, found.cure) == (Verdict.WARNING, "free some (1048576.0 TiB or more)")


@pytest.mark.parametrize(
    ("their_s", "verdict"),
    [(100.0, "ok"), (99.0, "ok"), (102.0, "ok"), (98.0, "ok"), (90.0, "warning"), (104.0, "warning")],
)
def test_clock_is_compared_to_what_whole_seconds_allow(their_s: float, verdict: str) -> None:
    assert clock_skew(100.2, their_s, 100.3).verdict == verdict
