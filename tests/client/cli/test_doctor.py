"""`skein doctor`: what it looks for, and what it says."""

from dataclasses import replace
from pathlib import Path

import pytest

from client.cli import run
from client.doctor.answers import clock_skew, pace_finding, slowest_link
from client.doctor.finding import DoctorFinding, Verdict, fine
from client.doctor.installation import devices_finding, open_files_finding
from client.doctor.room import free_space, memory_finding, writable_space
from client.doctor.way import unlike_grpc
from tests.client.cli.said import Captured, lines
from tests.client.conftest import Scripted
from tests.client.scripted import Script, link, serving, worker


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes seconds to load, and is looked at in a test of its own."""

    def not_looked_at(*, is_needed: bool) -> list[DoctorFinding]:
        return [fine("torch", "not looked at")]

    monkeypatch.setattr("client.doctor.installation._torch", not_looked_at)


def test_doctor_looks_at_the_coordinator_and_its_workers(coordinator: Scripted, capsys: Captured) -> None:
    with serving(Script()) as address:
        coordinator.script.workers = [worker(address=address)]
        code = run(["doctor", "--json"])
    verdict_by_check = {str(found["check"]): found["verdict"] for found in lines(capsys.readouterr().out)}
    looked = ("name", "route", "port", "service", "coordinator", "clock", "link", "workers", "links", "torch")
    assert {check: verdict_by_check[check] for check in looked} == dict.fromkeys(looked, "ok")
    assert code == 0


@pytest.mark.usefixtures("no_torch")
def test_doctor_fails_where_a_worker_cannot_be_reached(capsys: Captured) -> None:
    assert run(["doctor"]) == 1
    found = "w1 cannot be reached at 127.0.0.1:9 from here (nothing listens at 127.0.0.1:9): open its port"
    assert f"failed   workers      {found}" in capsys.readouterr().out


def test_doctor_fails_where_the_named_coordinator_is_silent(capsys: Captured) -> None:
    assert run(["doctor", "--role", "client", "--coordinator", "127.0.0.1:9"]) == 1
    assert (
        "failed   port         nothing listens at 127.0.0.1:9: that machine answers"
        in capsys.readouterr().out
    )


def test_what_only_another_role_needs_is_passed_over(capsys: Captured) -> None:
    run(["doctor", "--role", "client", "--coordinator", "127.0.0.1:9", "--json"])
    checks = {str(found["check"]) for found in lines(capsys.readouterr().out)}
    assert checks.isdisjoint({"torch", "ray", "devices", "open files", "/dev/shm"})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", None),
        (b"SSH-2.0-OpenSSH_9.6", "speaks SSH"),
        (b"\x15\x03\x01\x00\x02", "wants TLS"),
        (b"", "closes the connection without a word"),
        (b"220 mail", "speaks something else: b'220 mail'"),
    ],
)
def test_a_service_is_known_by_its_first_words(said: bytes, expected: str | None) -> None:
    assert unlike_grpc(said) == expected


def test_devices_that_torch_does_not_see_are_worth_a_warning() -> None:
    a_gpu = "NVIDIA H100, 550.54"
    assert devices_finding((), 4, cuda=None, driver=None).found == "CPU with 4 threads"
    assert devices_finding(("NVIDIA H100",), 4, cuda="12.8", driver=a_gpu).verdict is Verdict.OK
    assert "built for CPUs" in devices_finding((), 4, cuda=None, driver=a_gpu).cure
    assert "built for CUDA 12.8" in devices_finding((), 4, cuda="12.8", driver=a_gpu).cure


def test_few_open_files_are_worth_a_warning() -> None:
    assert open_files_finding(1024).verdict is Verdict.WARNING
    assert open_files_finding(65536).verdict is Verdict.OK


def test_full_disk_is_worth_a_warning(tmp_path: Path) -> None:
    assert writable_space("disk", tmp_path / "not" / "there").verdict is Verdict.OK
    assert writable_space("disk", Path("/proc/self")).verdict is Verdict.FAILED
    found = free_space("disk", tmp_path, 1 << 60, "free some")
    assert (found.verdict, found.cure) == (Verdict.WARNING, "free some (1048576.0 TiB or more)")


def test_little_memory_is_worth_a_warning() -> None:
    assert memory_finding(2 << 30, 2 << 30).verdict is Verdict.OK
    assert memory_finding(1 << 30, 2 << 30).found == "1.0 GiB can be used"


@pytest.mark.parametrize(
    ("their_s", "verdict", "found"),
    [
        (100.25, "ok", "at most 0.05 s from the coordinator's"),
        (98.0, "warning", "2.2 s ahead of the coordinator's"),
        (104.0, "warning", "3.7 s behind the coordinator's"),
        (200.0, "failed", "99.7 s behind the coordinator's"),
        (0.0, "warning", "not compared"),
    ],
)
def test_clock_is_compared_to_what_a_round_trip_allows(their_s: float, verdict: str, found: str) -> None:
    finding = clock_skew(100.2, their_s, 100.3)
    assert (finding.verdict, finding.found) == (verdict, found)


def test_slow_links_are_worth_a_warning() -> None:
    assert pace_finding(0.02, 5e6, 5e6).verdict is Verdict.OK
    assert pace_finding(0.02, 0.5e6, 5e6).cure.startswith("a slow link")
    assert pace_finding(0.4, 5e6, 5e6).cure.startswith("a long way")
    slow = replace(link(), bytes_per_s=1024.0)
    assert slowest_link([link(), slow]).found == "slowest of 2: w1 to w2, 1.0 KiB/s, 12.5 ms"
