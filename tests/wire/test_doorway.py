"""Connections without a call are few of one address; the others are left alone."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from skein.wire.serving import doorway
from skein.wire.serving.doorway import CALLED_BYTES, Doorway

WAIT_S = 120.0


@pytest.fixture(params=["127.0.0.1", "::1", "::"])
def opened(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Doorway, list[socket.socket], list[socket.socket]]]:
    """Where five connections have come in one after the other, and their ends in this process as a server has them."""
    host = str(request.param)
    with ExitStack() as stack:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = stack.enter_context(
            socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        )
        port = server.getsockname()[1]
        at = Doorway(port, least_bytes=CALLED_BYTES)
        theirs, ours = [], []
        for _ in range(5):
            dialled = "127.0.0.1" if host == "::" else host
            theirs.append(stack.enter_context(socket.create_connection((dialled, port), timeout=WAIT_S)))
            ours.append(stack.enter_context(server.accept()[0]))
            assert at.look() == 0
        yield at, theirs, ours


def test_the_oldest_that_say_nothing_are_ended(
    opened: tuple[Doorway, list[socket.socket], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "PER_ADDRESS", 2)
    at, theirs, ours = opened
    theirs[0].sendall(b"x" * CALLED_BYTES)
    assert ours[0].recv(CALLED_BYTES, socket.MSG_WAITALL)
    theirs[1].sendall(b"x")
    assert at.look() == 2
    assert [connection.recv(1) for connection in theirs[1:3]] == [b"", b""]
    for their, our in ((theirs[0], ours[0]), *zip(theirs[3:], ours[3:], strict=True)):
        our.sendall(b"y")
        assert their.recv(1) == b"y"
    for our in ours[1:3]:
        our.close()
    assert at.look() == 0


def test_a_look_leaves_no_files_open_also_where_connections_wait_to_be_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        at = Doorway(server.getsockname()[1], least_bytes=CALLED_BYTES)
        for _ in range(3):
            stack.enter_context(socket.create_connection(server.getsockname(), timeout=WAIT_S))
        before = os.listdir("/proc/self/fd")
        assert at.look() == 0
        assert os.listdir("/proc/self/fd") == before


def test_what_is_no_socket_any_more_is_let_go_of() -> None:
    with Path("/dev/null").open("rb") as file:
        before = os.listdir("/proc/self/fd")
        assert doorway._num_received(file.fileno(), 1) is None
        assert os.listdir("/proc/self/fd") == before


def test_a_look_is_due_once_so_many_files_were_opened_that_there_may_be_too_many(
    opened: tuple[Doorway, list[socket.socket], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "PER_ADDRESS", 8)
    at, theirs, ours = opened
    for their, our in zip(theirs[:3], ours[:3], strict=True):
        their.sendall(b"x" * CALLED_BYTES)
        assert our.recv(CALLED_BYTES, socket.MSG_WAITALL)
    assert at.look() == 0
    num_files = len(os.listdir("/proc/self/fd"))
    # Two have not called: six more may come, and one beyond that.
    assert [at.may_have_too_many(num_files + more) for more in (0, 6, 8)] == [False, False, True]

    monkeypatch.setattr(doorway, "PER_ADDRESS", 1)
    assert at.look() == 1
    assert [at.may_have_too_many(num_files - 1 + more) for more in (0, 2)] == [False, True]


def test_other_ports_are_nobodys_business(
    opened: tuple[Doorway, list[socket.socket], list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "PER_ADDRESS", 0)
    at, _, _ = opened
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert Doorway(other.getsockname()[1], least_bytes=CALLED_BYTES).look() == 0
    assert at.look() == 5
