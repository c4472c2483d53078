"""What an operator sees of a worker: options, exit codes, one line for each thing that went wrong."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from client.local import free_port
from skein.config.resources import Label
from skein.protocol.messages.directives import Dismiss, Measure, Refused
from skein.protocol.messages.reports import Beat, Leaving
from skein.protocol.messages.ways import COORDINATOR_RELAY, RelayPlace, Ways
from skein.types import SiteId
from tests.worker.puppet import WAIT_S, WELCOME, listening, puppet
from worker import __main__ as command_line
from worker.boundary import BoundaryLog
from worker.daemon import DONE, FAILED, USAGE, WorkerOptions, run_worker
from worker.mesh.mesh import Mesh
from worker.telling.logs import LogTail, begin_worker_log


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("worker", "skein")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error without the log."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (WorkerOptions(join="nowhere"), "host:port"),
        (WorkerOptions(join="127.0.0.1:7100", name="two words"), "letters"),
        (WorkerOptions(join="127.0.0.1:7100", listen="0.0.0.0"), "join with a line"),
        (WorkerOptions(join="127.0.0.1:7100", advertise="[::1"), "advertise"),
        (WorkerOptions(join="127.0.0.1:7100", memory_bytes=0), "8GiB"),
        (WorkerOptions(join="127.0.0.1:7100", offers=("books",)), "books=/srv/books"),
        (WorkerOptions(join="127.0.0.1:7100", devices="cpu:2,cuda:0"), "must be alike"),
        (WorkerOptions(join="127.0.0.1:7100", devices="cuda:0,cuda:0"), "named twice"),
        (
            WorkerOptions(join="127.0.0.1:7100", devices="cpu:2,tpu:2"),
            "devices: 'tpu:2': no device of torch's",
        ),
        (WorkerOptions(join="127.0.0.1:7100", devices="cpu:0"), "'cpu:0': no device"),
        (WorkerOptions(join="127.0.0.1:7100", devices=f"cuda:{'9' * 5000}"), "no device"),
        (WorkerOptions(join="127.0.0.1:7100", devices="cpu:999999999"), "give at most 64"),
        (WorkerOptions(join="127.0.0.1:7100", devices="cuda:98,cuda:99"), "cuda:98"),
        (WorkerOptions(join="127.0.0.1:7100", devices="cpu:2", device="cpu"), "not both"),
    ],
)
async def test_a_wrong_option_is_one_line_and_exit_code_2(
    options: WorkerOptions, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run_worker(options) == USAGE
    assert part in one_line(capsys)


async def test_a_gpu_that_torch_does_not_find_is_no_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert await run_worker(WorkerOptions(join="127.0.0.1:7100", device="cuda")) == USAGE
    assert "torch finds no GPU" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--join"),
        (["--join", "127.0.0.1:1", "--memory", "much"], "8 GiB"),
        (["--join", "127.0.0.1:1", "--device", "tpu"], "tpu"),
        (["--join", "127.0.0.1:1", "--nmae", "w"], "--nmae"),
        (["--join", "127.0.0.1:1", "--label", "gpu"], "label: 'gpu=': give KEY=VALUE"),
        (["--join", "127.0.0.1:1", "--label", "a=1", "--label", "a=2"], "label: 'a': give each key once"),
        (
            ["--join", "127.0.0.1:1", *(x for i in range(17) for x in ("--label", f"k{i}=v"))],
            "give 16 at most",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.run(arguments) == USAGE
    assert part in one_line(capsys)


async def test_a_port_in_use_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert await run_worker(WorkerOptions(join="127.0.0.1:7100", port=port)) == FAILED
    assert str(port) in one_line(capsys)


async def test_another_protocol_version_is_exit_code_1() -> None:
    async with puppet() as (coordinator, port):
        ended = asyncio.create_task(run_worker(WorkerOptions(join=f"127.0.0.1:{port}", name="w0")))
        (await coordinator.session()).say(Refused(reason="version 9 is needed"))
        async with asyncio.timeout(WAIT_S):
            assert await ended == FAILED


async def test_a_server_that_is_no_coordinator_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with listening() as port:
        assert await run_worker(WorkerOptions(join=f"127.0.0.1:{port}")) == FAILED
    assert "another release runs there" in one_line(capsys)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_drains(number: signal.Signals) -> None:
    async with puppet() as (coordinator, port):
        ended = asyncio.create_task(run_worker(WorkerOptions(join=f"127.0.0.1:{port}", name="w0")))
        session = await coordinator.session()
        session.say(WELCOME)
        os.kill(os.getpid(), number)
        assert number.name in (await session.heard(Leaving)).reason
        session.say(Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        async with asyncio.timeout(WAIT_S):
            assert await ended == DONE


async def test_a_second_start_under_a_name_ends_itself_and_a_later_one_shows_the_same_secret(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with puppet() as (coordinator, port):
        options = WorkerOptions(join=f"127.0.0.1:{port}", name="w0", state_dir=tmp_path)
        secrets = []
        for _ in range(2):
            ended = asyncio.create_task(run_worker(options))
            session = await coordinator.session()
            secrets.append(session.hello.secret)
            assert await run_worker(options) == FAILED
            assert f"process {os.getpid()} on this machine is that worker" in one_line(capsys)
            session.say(WELCOME, Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
            async with asyncio.timeout(WAIT_S):
                assert await ended == DONE
            assert session.hello.host
    assert secrets[0] == secrets[1] != ""


async def test_a_mesh_that_is_turned_away_while_a_device_owes_an_answer_comes_back_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meshes: list[Mesh] = []
    reads: list[None] = []
    is_asked = threading.Event()

    def clock() -> float:
        """Ten seconds more each time; devices are asked by the second."""
        reads.append(None)
        if len(reads) > 1:
            is_asked.set()
        return 10.0 * len(reads)

    def made(devices: tuple[str, ...]) -> Mesh:
        meshes.append(Mesh(devices, least_patience_s=0.0, clock=clock))
        return meshes[-1]

    monkeypatch.setattr("worker.process.Mesh", made)
    async with puppet() as (coordinator, port):
        options = WorkerOptions(join=f"127.0.0.1:{port}", name="w0", devices="cpu:2")
        ended = asyncio.create_task(run_worker(options))
        session = await coordinator.session()
        frozen = meshes[0].processes.pids[1]
        os.kill(frozen, signal.SIGSTOP)
        await asyncio.to_thread(os.waitpid, frozen, os.WUNTRACED)
        reads.clear()
        is_asked.clear()
        session.say(WELCOME, Measure())
        assert await asyncio.to_thread(is_asked.wait, WAIT_S)
        session.say(Refused(reason="an op has run for long"))
        again = await coordinator.session()
        assert (session.hello.profile.device, again.hello.profile.device) == ("cpu:2", "cpu")
        assert again.hello.incarnation != session.hello.incarnation
        again.say(WELCOME, Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        async with asyncio.timeout(WAIT_S):
            assert await ended == DONE


def struck_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a device of each mesh die before anything is known of it."""

    def made(devices: tuple[str, ...]) -> Mesh:
        mesh = Mesh(devices)
        os.kill(mesh.processes.pids[1], signal.SIGKILL)
        return mesh

    monkeypatch.setattr("worker.process.Mesh", made)


async def test_a_mesh_that_loses_a_device_before_it_has_joined_comes_back_at_the_same_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    struck_at_once(monkeypatch)
    async with puppet() as (coordinator, port):
        options = WorkerOptions(join=f"127.0.0.1:{port}", name="w0", devices="cpu:2", port=free_port())
        ended = asyncio.create_task(run_worker(options))
        session = await coordinator.session()
        assert session.hello.profile.device == "cpu"
        assert session.hello.address == f"127.0.0.1:{options.port}"
        session.say(WELCOME, Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        async with asyncio.timeout(WAIT_S):
            assert await ended == DONE


async def test_a_worker_that_is_stopped_while_it_comes_back_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    struck_at_once(monkeypatch)

    def log_and_signal() -> BoundaryLog:
        os.kill(os.getpid(), signal.SIGTERM)
        return BoundaryLog()

    async with puppet() as (_, port):
        options = WorkerOptions(join=f"127.0.0.1:{port}", name="w0", devices="cpu:2")
        # It has not joined yet, so there is nobody to ask.
        async with asyncio.timeout(WAIT_S):
            assert await run_worker(options, adapt=lambda x: replace(x, boundary_log=log_and_signal)) == DONE


async def test_nothing_of_a_mesh_listens_at_relays_once_it_has_lost_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meshes: list[Mesh] = []

    def made(devices: tuple[str, ...]) -> Mesh:
        meshes.append(Mesh(devices))
        return meshes[-1]

    monkeypatch.setattr("worker.process.Mesh", made)
    relay = RelayPlace(worker=COORDINATOR_RELAY, address="")
    async with puppet() as (coordinator, port):
        options = WorkerOptions(join=f"127.0.0.1:{port}", name="w0", devices="cpu:2")
        ended = asyncio.create_task(run_worker(options))
        session = await coordinator.session()
        session.say(WELCOME)
        await session.heard(Beat)
        before = asyncio.all_tasks()
        session.say(Ways(ways=(), listens=(relay,)))
        while not (
            listening := [x for x in asyncio.all_tasks() - before if "Listening" in str(x.get_coro())]
        ):
            await session.heard(Beat)
        os.kill(meshes[0].processes.pids[1], signal.SIGKILL)
        again = await coordinator.session()
        assert all(task.done() for task in listening)
        again.say(WELCOME, Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        async with asyncio.timeout(WAIT_S):
            assert await ended == DONE


async def test_a_program_that_embeds_the_worker_may_change_its_setting() -> None:
    async with puppet() as (coordinator, port):
        options = WorkerOptions(join=f"127.0.0.1:{port}", name="w0", site="here")
        embedded = run_worker(options, adapt=lambda setting: replace(setting, site=SiteId("elsewhere")))
        ended = asyncio.create_task(embedded)
        session = await coordinator.session()
        assert session.hello.site == "elsewhere"
        session.say(WELCOME, Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        async with asyncio.timeout(WAIT_S):
            assert await ended == DONE


async def test_labels_and_names_of_data_go_up_with_the_hello() -> None:
    async with puppet() as (coordinator, port):
        labels = (Label(key="gpu", value="h100"),)
        options = WorkerOptions(join=f"127.0.0.1:{port}", labels=labels, offers=("books=/nowhere", "a=/"))
        ended = asyncio.create_task(run_worker(options))
        session = await coordinator.session()
        assert session.hello.labels == labels
        assert session.hello.offers == ("a", "books")
        session.say(WELCOME, Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        async with asyncio.timeout(WAIT_S):
            assert await ended == DONE


async def test_an_absent_coordinator_is_said_and_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    async with puppet() as (_, port):
        pass
    ended = asyncio.create_task(run_worker(WorkerOptions(join=f"127.0.0.1:{port}", name="w0")))
    async with puppet(port=port) as (coordinator, _):
        session = await coordinator.session()
        session.say(WELCOME, Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        async with asyncio.timeout(WAIT_S):
            assert await ended == DONE


def test_the_log_tail_bounds_what_a_talkative_worker_sends() -> None:
    tail = LogTail()
    for number in range(700):
        tail.emit(logging.LogRecord("worker", logging.INFO, "", 0, f"line {number}", None, None))
    lines = tail.take()
    assert len(lines) == 101
    assert lines[0].text == "line 200"
    assert "200 lines" in lines[-1].text


def test_a_json_log_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    tail = begin_worker_log("json")
    logging.getLogger("worker.x").info("two\nlines")
    assert capsys.readouterr().err.count("\n") == 1
    assert [line.text for line in tail.take()] == ["two lines"]
