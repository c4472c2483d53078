"""`skein doctor` in set-ups that are really broken: it names the cause in each.

A lab of two machines: the coordinator's real services on one, the command on the other, in namespaces. Where those are
not permitted nothing can be broken, and only what needs no network is looked at.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from client.lab.control import Heal, Slow, ask
from client.lab.network import namespaces
from client.lab.start import LabOptions, RunningLab, start_lab, stop_lab
from client.lab.state import LabFolder
from tests.client.scripted import GOOD

pytestmark = pytest.mark.long
PROBLEM = namespaces.why_not()
OTHER_PROTOCOL = 99
LATE = (
    "import sys, time; real = time.time; time.time = lambda: real() + 90; "
    "from client.cli import run; sys.exit(run(sys.argv[1:]))"
)
FULL = 'mount -t tmpfs -o size=16k none "$0" && head -c 99999 /dev/zero > "$0/log" 2>/dev/null; exec "$@"'
READ_ONLY = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
LITTLE_MEMORY = 'ulimit -v 1500000; exec "$@"'


@dataclass(frozen=True)
class Machines:
    """Two machines, and the coordinator's address on the first; the command runs on the second."""

    lab: RunningLab
    state: Path

    def space(self, name: str) -> str:
        [endpoint] = (x for x in self.lab.status.endpoints if x.name == name)
        assert endpoint.namespace is not None
        return endpoint.namespace

    def on(self, name: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.space(name), *command]

    def ip(self, *arguments: str) -> None:
        """Changes the network of the machine on which the command runs."""
        subprocess.run(["ip", "-n", self.space("north-1"), *arguments], check=True)

    def diagnose(
        self, *options: str, to: str = "10.77.0.1:7411", by: Sequence[str] = ("-m", "client.cli")
    ) -> "Diagnosis":
        given = ["doctor", "--role", "client", "--json", "--timeout", "5 s", "--coordinator", to]
        command = self.on(
            "north-1", sys.executable, "-P", *by, *given, "--state-dir", str(self.state), *options
        )
        return Diagnosis.of(command)


@dataclass(frozen=True)
class Diagnosis:
    """What the command found, by check, and how it ended."""

    code: int
    found: dict[str, str]
    verdicts: dict[str, str]

    @classmethod
    def of(cls, command: Sequence[str]) -> "Diagnosis":
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        findings = [json.loads(line) for line in done.stdout.splitlines()]
        assert findings, done.stderr
        return cls(
            code=done.returncode,
            found={x["check"]: x["found"] for x in findings},
            verdicts={x["check"]: x["verdict"] for x in findings},
        )

    @property
    def failed(self) -> dict[str, str]:
        return {check: self.found[check] for check, verdict in self.verdicts.items() if verdict == "failed"}


@contextmanager
def serving(machines: Machines, port: int, protocol: Sequence[str] = ()) -> Iterator[None]:
    state = machines.state / f"coordinator-{port}"
    state.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.e2e.lone_coordinator",
        str(state),
        "10.77.0.1",
        str(port),
        *protocol,
    ]
    with subprocess.Popen(machines.on("coordinator", *command), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"serves\n"
            yield
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines | None]:
    if PROBLEM is not None:
        yield None
        return
    path = tmp_path_factory.mktemp("doctor")
    folder = LabFolder(path / "lab")
    with ExitStack() as undo:
        undo.callback(stop_lab, folder)
        options = LabOptions(preset="two-sites", num_workers=1, mode="namespaces", has_services=False)
        found = Machines(lab=start_lab(folder, options), state=path)
        undo.enter_context(serving(found, 7411))
        undo.enter_context(serving(found, 7500, (str(OTHER_PROTOCOL),)))
        yield found


@contextmanager
def dropping(machines: Machines, *rule: str) -> Iterator[None]:
    """The coordinator's machine drops some of what comes in."""
    change = ("iptables", "-w", "{}", "INPUT", "-p", "tcp", *rule, "-j", "DROP")
    for verb in ("-A", "-D"):
        command = machines.on("coordinator", *(part.format(verb) for part in change))
        subprocess.run(command, check=True)
        if verb == "-A":
            yield


@contextmanager
def slow(machines: Machines, bytes_per_s: float, latency_s: float) -> Iterator[None]:
    folder = machines.lab.folder.path
    ask(folder, Slow(a="all", b="all", bytes_per_s=bytes_per_s, latency_s=latency_s))
    try:
        yield
    finally:
        ask(folder, Heal())


def test_nothing_is_wrong_where_nothing_is_broken(machines: Machines | None) -> None:
    if machines is None:
        return
    found = machines.diagnose()
    assert (found.code, found.failed) == (0, {})
    assert found.found["mtu"] == "packets of 1500 bytes arrive"
    assert found.verdicts["clock"] == found.verdicts["link"] == "ok"


@pytest.mark.parametrize(
    ("to", "check", "cause"),
    [
        ("nowhere.invalid:7411", "name", "nowhere.invalid does not resolve"),
        ("10.77.0.99:7411", "port", "no answer at all from 10.77.0.99"),
        ("10.77.0.1:7999", "port", "nothing listens at 10.77.0.1:7999"),
        ("10.77.0.1:7412", "service", "10.77.0.1:7412 speaks HTTP/1"),
        ("10.77.0.1:7500", "version", "does not fit the coordinator's"),
    ],
)
def test_an_address_that_is_wrong_is_told_apart(
    machines: Machines | None, to: str, check: str, cause: str
) -> None:
    if machines is None:
        return
    found = machines.diagnose(to=to)
    assert found.code == 1
    assert list(found.failed) == [check]
    assert cause in found.failed[check]


def test_a_machine_without_a_route_is_told_so(machines: Machines | None) -> None:
    if machines is None:
        return
    machines.ip("route", "del", "default")
    try:
        found = machines.diagnose(to="203.0.113.5:7411")
    finally:
        machines.ip("route", "add", "default", "dev", "wan0")
    assert found.failed == {"route": "none to 203.0.113.5 (Network is unreachable)"}


def test_a_firewall_is_told_from_a_machine_that_is_off(machines: Machines | None) -> None:
    if machines is None:
        return
    with dropping(machines, "--dport", "7411"):
        found = machines.diagnose()
    assert found.failed == {
        "port": "10.77.0.1:7411 is silent though that machine answers: a firewall drops the port"
    }


def test_packets_that_vanish_for_their_size_are_noticed(machines: Machines | None) -> None:
    if machines is None:
        return
    # A link as narrow as that is crossed packet by packet.
    with slow(machines, 3e6, 0.005), dropping(machines, "-m", "length", "--length", "1300:65535"):
        found = machines.diagnose()
    assert found.failed == {"mtu": "packets of 1500 bytes vanish, those of 1280 arrive"}


def test_a_slow_link_is_measured(machines: Machines | None) -> None:
    if machines is None:
        return
    with slow(machines, 250e3, 0.1):
        found = machines.diagnose()
    assert (found.code, found.verdicts["link"]) == (0, "warning")
    assert "round trip 20" in found.found["link"]
    assert "KiB/s up" in found.found["link"]


def test_a_clock_that_is_off_is_told_by_how_much(machines: Machines | None) -> None:
    if machines is None:
        return
    found = machines.diagnose(by=("-c", LATE))
    assert list(found.failed) == ["clock"]
    assert found.failed["clock"].startswith(("89.", "90."))
    assert "ahead of the coordinator's" in found.failed["clock"]


@pytest.mark.parametrize(
    ("breaking", "check", "verdict", "cause"),
    [
        (FULL, "disk", "failed", "No space left on device"),
        (READ_ONLY, "disk", "failed", "Read-only file system"),
        (LITTLE_MEMORY, "memory", "warning", "1.4 GiB can be used"),
    ],
)
def test_a_machine_without_room_is_told_which(
    tmp_path: Path, breaking: str, check: str, verdict: str, cause: str
) -> None:
    if PROBLEM is not None:
        return
    doctor = [sys.executable, "-P", "-m", "client.cli", "doctor", "--role", "client", "--json"]
    inside = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        breaking,
        str(tmp_path),
        *doctor,
        "--state-dir",
        str(tmp_path),
    ]
    found = Diagnosis.of(inside)
    assert found.verdicts[check] == verdict
    assert cause in found.found[check]


@pytest.mark.parametrize(
    ("path", "cause"),
    [("books", "no such file or folder"), ("empty", "nothing there is called **/*.txt"), ("/etc", "/etc")],
)
def test_data_that_a_worker_could_not_read_are_named(tmp_path: Path, path: str, cause: str) -> None:
    (tmp_path / "empty").mkdir()
    job = tmp_path / "job.yaml"
    job.write_text(GOOD.replace("/books", str(tmp_path / path)))
    doctor = [sys.executable, "-P", "-m", "client.cli", "doctor", "--role", "client", "--json"]
    found = Diagnosis.of([*doctor, "--job", str(job), "--data-root", str(tmp_path)])
    assert (found.code, list(found.failed)) == (1, ["data.sources[0].path"])
    assert cause in found.failed["data.sources[0].path"]


@pytest.mark.parametrize(("name", "cause"), [("books", None), ("films", "data://films")])
def test_data_that_a_worker_would_not_offer_are_named(tmp_path: Path, name: str, cause: str | None) -> None:
    (tmp_path / "a.txt").write_text("text")
    job = tmp_path / "job.yaml"
    job.write_text(GOOD.replace("/books", f"data://{name}"))
    doctor = [sys.executable, "-P", "-m", "client.cli", "doctor", "--role", "client", "--json"]
    found = Diagnosis.of([*doctor, "--job", str(job), "--data", f"books={tmp_path}"])
    assert found.failed.get("data.sources[0].path") == cause
