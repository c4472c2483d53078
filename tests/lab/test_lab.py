"""Labs for real: what crosses namespaces, what a cut holds back, homes behind NAT, and that nothing stays behind.

Where namespaces are not permitted, the same tests see the error that says so.
"""

import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from client.lab.control import Ask, Cut, Heal, LabStatus, NoLab, Slow, ask
from client.lab.network import namespaces
from client.lab.start import LabOptions, RunningLab, choose_mode, start_lab, stop_lab
from client.lab.state import LabFolder, Mode
from client.local import NotStarted
from skein.errors import UserError

PROBLEM = namespaces.why_not()
PATIENCE_S = 300.0
"""Far above what anything here takes; reached only when something is lost."""


@contextmanager
def network(
    path: Path, preset: str, *, num_workers: int, has_closed_homes: bool = False
) -> Iterator[RunningLab]:
    """A lab without services, in namespaces."""
    folder = LabFolder(path / "lab")
    options = LabOptions(
        preset=preset,
        num_workers=num_workers,
        mode="namespaces",
        has_services=False,
        has_closed_homes=has_closed_homes,
    )
    try:
        yield start_lab(folder, options)
    finally:
        stop_lab(folder)


@pytest.fixture(scope="module")
def two_sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLab | None]:
    """A lab of two workers for tests that leave it as it was; None where namespaces are not permitted."""
    path = tmp_path_factory.mktemp("two-sites")
    if refused(PROBLEM, path):
        yield None
        return
    with network(path, "two-sites", num_workers=2) as lab:
        yield lab


def opened(lab: RunningLab, name: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A socket at that endpoint."""
    [endpoint] = (x for x in lab.status.endpoints if x.name == name)
    assert endpoint.namespace is not None
    with namespaces.inside(endpoint.namespace):
        made = socket.socket(socket.AF_INET, kind)
    made.settimeout(PATIENCE_S)
    return made


def bound(lab: RunningLab, name: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A socket at that endpoint and its port; it listens if it can."""
    made = opened(lab, name, kind)
    made.bind(("", address(lab, name)[1]))
    if kind is socket.SOCK_STREAM:
        made.listen()
    return made


def address(lab: RunningLab, name: str) -> tuple[str, int]:
    [endpoint] = (x for x in lab.status.endpoints if x.name == name)
    return endpoint.address, endpoint.port


def status_of(lab: RunningLab) -> LabStatus:
    found = ask(lab.folder.path, Ask()).status
    assert found is not None
    return found


def wait_for_traffic(lab: RunningLab, sender: str, receiver: str, kind: str) -> None:
    """Until something of that kind was counted from one endpoint to the other."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        [link] = (x for x in status_of(lab).links if (x.sender, x.receiver) == (sender, receiver))
        if link.traffic.get(kind):
            return
    pytest.fail(f"no {kind} from {sender} to {receiver}: {status_of(lab).links}")


def refused(problem: str | None, path: Path) -> bool:
    """True where namespaces are not permitted, after a look at the error."""
    if problem is None:
        return False
    with (
        pytest.raises(UserError, match="run as root on Linux, or give proxy"),
        network(path, "two-sites", num_workers=2),
    ):
        pass
    return True


def test_bytes_cross_namespaces_whole_and_no_sooner_than_the_latency(two_sites: RunningLab | None) -> None:
    if two_sites is None:
        return
    lab = two_sites
    with bound(lab, "south-1") as server:
        data = os.urandom(1 << 20)
        with opened(lab, "north-1") as client:
            began_s = time.monotonic()
            client.connect(address(lab, "south-1"))
            assert time.monotonic() - began_s >= 2 * 0.020
            peer, came_from = server.accept()
            with peer:
                peer.settimeout(PATIENCE_S)
                assert came_from[0] == address(lab, "north-1")[0]
                client.settimeout(None)
                received = _through(client, peer, data)
        assert received == data


def _through(sender: socket.socket, receiver: socket.socket, data: bytes) -> bytes:
    """What arrives; sends as much as fits before each look."""
    sender.setblocking(False)
    received, sent = bytearray(), 0
    while len(received) < len(data):
        if sent < len(data):
            try:
                sent += sender.send(data[sent : sent + (1 << 16)])
                continue
            except BlockingIOError:
                pass
        piece = receiver.recv(1 << 16)
        assert piece
        received += piece
    return bytes(received)


def test_a_cut_drops_one_direction_until_it_is_healed(two_sites: RunningLab | None) -> None:
    if two_sites is None:
        return
    lab = two_sites
    with (
        bound(lab, "north-1", socket.SOCK_DGRAM) as north,
        bound(lab, "south-1", socket.SOCK_DGRAM) as south,
    ):
        assert ask(lab.folder.path, Cut(a="north-1", b="south", is_one_way=True)).num_links == 1
        north.sendto(b"lost", address(lab, "south-1"))
        wait_for_traffic(lab, "north-1", "south-1", "dropped_cut")
        south.sendto(b"back", address(lab, "north-1"))
        assert north.recv(100) == b"back"
        ask(lab.folder.path, Heal())
        north.sendto(b"there", address(lab, "south-1"))
        assert south.recv(100) == b"there"  # what was lost before would have come first


def test_links_change_while_a_lab_runs(two_sites: RunningLab | None) -> None:
    if two_sites is None:
        return
    lab = two_sites
    slow = Slow(a="north-1", b="south-1", is_one_way=True, latency_s=0.5, loss=0.25)
    assert ask(lab.folder.path, slow).num_links == 1
    changed = [x for x in status_of(lab).links if x.is_changed]
    assert [(x.sender, x.receiver, x.latency_s, x.loss, x.bytes_per_s) for x in changed] == [
        ("north-1", "south-1", 0.5, 0.25, 25e6)
    ]
    with pytest.raises(UserError, match="loss 2"):
        ask(lab.folder.path, Slow(a="north", b="south", loss=2.0))
    with pytest.raises(UserError, match="A: 'mars'"):
        ask(lab.folder.path, Cut(a="mars", b="south"))
    with pytest.raises(UserError, match="give another endpoint"):
        ask(lab.folder.path, Cut(a="south-1", b="south-1"))
    socket_mode = (lab.folder.path / "control.sock").stat().st_mode
    assert stat.S_IMODE(socket_mode) == 0o600


def test_homes_hide_their_workers_and_forward_one_port(tmp_path: Path) -> None:
    if refused(PROBLEM, tmp_path):
        return
    with network(tmp_path, "home-uplinks", num_workers=1) as lab:
        # The root namespace is left as it was.
        assert {"wan0", "lan0"}.isdisjoint(psutil.net_if_addrs())
        for dialler, listener in (("cable-1", "coordinator"), ("coordinator", "cable-1")):
            with bound(lab, listener) as server, opened(lab, dialler) as client:
                client.connect(address(lab, listener))
                peer, came_from = server.accept()
                peer.close()
            assert came_from[0] == address(lab, dialler)[0]


def test_nothing_comes_into_a_closed_home(tmp_path: Path) -> None:
    if refused(PROBLEM, tmp_path):
        return
    with (
        network(tmp_path, "home-uplinks", num_workers=1, has_closed_homes=True) as lab,
        bound(lab, "cable-1"),
        opened(lab, "coordinator") as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect(address(lab, "cable-1"))


def test_a_killed_lab_is_cleared_up_and_another_can_begin(tmp_path: Path) -> None:
    if refused(PROBLEM, tmp_path):
        return
    with network(tmp_path, "two-sites", num_workers=2) as lab:
        [host] = lab.folder.noted_processes()
        host.send_signal(signal.SIGKILL)
        host.wait(PATIENCE_S)
        assert len(namespaces.with_prefix(lab.folder.prefix)) == 3
        with pytest.raises(NoLab):
            ask(lab.folder.path, Ask())
        with pytest.raises(UserError, match="there is a lab already"):
            start_lab(lab.folder, LabOptions())
        stop_lab(lab.folder)
        assert not lab.folder.has_remains()
    with network(tmp_path, "two-sites", num_workers=2) as lab:
        assert len(namespaces.with_prefix(lab.folder.prefix)) == 3
    assert namespaces.with_prefix(lab.folder.prefix) == []


def test_processes_in_a_lab_s_namespaces_end_with_it(tmp_path: Path) -> None:
    """Also those that the lab does not know of."""
    if refused(PROBLEM, tmp_path):
        return
    with network(tmp_path, "two-sites", num_workers=1) as lab:
        name = f"{lab.folder.prefix}north-1"
        with namespaces.inside(name):
            child = psutil.Popen(["sleep", "1000"])
        assert namespaces.processes_in(name) == [child.pid]
    assert child.wait(PATIENCE_S) == -signal.SIGTERM


def test_a_namespace_that_somebody_removes_leaves_the_others_connected(tmp_path: Path) -> None:
    if refused(PROBLEM, tmp_path):
        return
    with (
        network(tmp_path, "two-sites", num_workers=2) as lab,
        bound(lab, "coordinator", socket.SOCK_DGRAM) as coordinator,
        bound(lab, "south-1", socket.SOCK_DGRAM) as south,
    ):
        namespaces.remove(f"{lab.folder.prefix}north-1")
        coordinator.sendto(b"to nobody", address(lab, "north-1"))
        coordinator.sendto(b"still here", address(lab, "south-1"))
        assert south.recv(100) == b"still here"
        wait_for_traffic(lab, "coordinator", "north-1", "packets")
        coordinator.sendto(b"and here", address(lab, "south-1"))
        assert south.recv(100) == b"and here"


# --- modes ---


def test_a_lab_that_cannot_begin_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.lab.start.BEHIND_PROXY_HOST", "127.0.0.1")
    with socket.create_server(("127.0.0.2", 0)) as taken:
        monkeypatch.setattr("client.lab.start.free_port", lambda _=0: taken.getsockname()[1])
        folder = LabFolder(tmp_path / "lab")
        with pytest.raises(NotStarted, match="in use"):
            start_lab(folder, LabOptions(preset="two-sites", mode="proxy", has_services=False))
    assert not folder.has_remains()


@pytest.mark.parametrize(
    ("asked", "problem", "mode", "reason"),
    [
        (None, None, "namespaces", "work here"),
        (None, "this is not root", "proxy", "no network namespaces: this is not root"),
        ("proxy", None, "proxy", "asked for"),
        ("namespaces", None, "namespaces", "work here"),
    ],
)
def test_the_mode_is_chosen_by_what_is_permitted(
    monkeypatch: pytest.MonkeyPatch, asked: Mode | None, problem: str | None, mode: Mode, reason: str
) -> None:
    monkeypatch.setattr(namespaces, "why_not", lambda: problem)
    found, why = choose_mode(asked)
    assert found == mode
    assert reason in why


def test_namespaces_that_are_asked_for_and_not_permitted_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "why_not", lambda: "this is not root")
    with pytest.raises(
        UserError, match="--mode: 'namespaces': this is not root; run as root on Linux, or give"
    ):
        choose_mode("namespaces")
