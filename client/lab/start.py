"""Starts and ends labs, for the `skein lab` command and for programs.

lab = start_lab(LabFolder(path), LabOptions(preset="two-sites"))
ask(lab.folder.path, Cut(a="north", b="south"))
stop_lab(lab.folder)
"""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from client.api import Client
from client.connection import DEFAULT_TARGET
from client.errors import NotReachable
from client.lab.control import Ask, LabStatus, NoLab, StopLab, ask
from client.lab.network import namespaces
from client.lab.preset import COORDINATOR, Endpoint, lay_out, load_preset
from client.lab.state import LabFile, LabFolder, Mode, runs
from client.local import HOST, READY_S, NotStarted, check_runs, free_port, last_words
from skein.errors import UserError
from skein.wire.channel import join_address, split_address
from skein.wire.identity.passport import Passport
from skein.wire.views import WorkerState

PROXY_HOST, BEHIND_PROXY_HOST = "127.0.0.2", "127.0.0.3"
"""Not the address at which outgoing connections begin, so that a port once seen free stays so."""
_POLL_S = 0.1
_JOIN_S = 10.0
"""Time that a worker takes to import torch and measure itself, while all others do the same."""
_STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabOptions:
    """Options that a user may give a lab.

    Args:
        preset: a name, or the path of a file.
        num_workers: how many; by default one at each site.
        mode: None takes namespaces where they are permitted, else proxies.
        seed: of jitter and loss.
        has_services: a coordinator and workers are started; otherwise the network alone.
        has_closed_homes: nothing gets into an endpoint behind NAT.
        data_roots: folders that workers read data from; by default the working directory.
    """

    preset: str = "ten-cities"
    num_workers: int | None = None
    mode: Mode | None = None
    seed: int = 0
    has_services: bool = True
    has_closed_homes: bool = False
    data_roots: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLab:
    """A lab that answers."""

    folder: LabFolder
    status: LabStatus

    def client(self) -> Client:
        """A client of its coordinator.

        Raises:
            UserError: it has none.
        """
        if self.status.coordinator is None or self.status.identity_file is None:
            raise UserError("--no-services", True, "this lab has no coordinator; start one with services")
        return Client(self.status.coordinator, passport=Passport.load(Path(self.status.identity_file)))


def choose_mode(asked: Mode | None) -> tuple[Mode, str]:
    """The mode and why.

    Raises:
        UserError: what was asked for is not possible here.
    """
    if asked == "proxy":
        return "proxy", "it was asked for"
    problem = namespaces.why_not()
    if problem is None:
        return "namespaces", "network namespaces and TUN devices work here"
    if asked == "namespaces":
        raise UserError("--mode", asked, f"{problem}; run as root on Linux, or give proxy")
    return "proxy", f"no network namespaces: {problem}"


def start_lab(folder: LabFolder, options: LabOptions) -> RunningLab:
    """Bring a lab up in the background; returns when its network is there and its services are started.

    Raises:
        UserError: an option makes no sense, or the folder has a lab already.
        NotStarted: it ended again; its last words are in the text.
    """
    if folder.read() is not None:
        raise UserError("--dir", str(folder.path), "there is a lab already: end it with skein lab down first")
    preset = load_preset(options.preset)
    endpoints = lay_out(preset, options.num_workers)
    mode, reason = choose_mode(options.mode)
    port = free_port(split_address("coordinator", DEFAULT_TARGET)[1])
    if mode == "proxy":
        if any(endpoint.is_behind_nat for endpoint in endpoints):
            reason = _without_nat(reason, options)
        endpoints = _on_loopback(endpoints, port)
    lab = LabFile(
        preset_name=options.preset,
        preset=preset,
        mode=mode,
        reason=reason,
        seed=options.seed,
        endpoints=endpoints,
        has_services=options.has_services,
        has_closed_homes=options.has_closed_homes,
        data_roots=tuple(str(root.absolute()) for root in options.data_roots or (Path(),)),
        door=join_address(HOST, port),
        metrics_door=join_address(HOST, free_port(port + 1)),
        enrol_port=free_port(port + 2),
    )
    folder.write(lab)
    return RunningLab(folder=folder, status=_begin(folder))


def stop_lab(folder: LabFolder) -> int:
    """End a lab, also one that was killed; how many processes it had left behind.

    Namespaces, devices and processes are gone afterwards; logs and the coordinator's state stay.
    """
    running = [process for process in folder.noted_processes() if _is_host(process.cmdline())]
    with suppress(NoLab):
        ask(folder.path, StopLab())
        until_s = time.monotonic() + _STOP_S
        while any(map(runs, running)) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
    return folder.clear()


def wait_for_workers(lab: RunningLab, tell: Callable[[int, int], None]) -> None:
    """Returns when all workers have joined; `tell` hears how many of how many, whenever that changes.

    Raises:
        NotStarted: a service has ended, or it took longer than a machine with few cores needs.
    """
    names = {x.name for x in lab.status.endpoints} - {COORDINATOR}
    patience_s = READY_S + _JOIN_S * len(names)
    until_s, told = time.monotonic() + patience_s, -1
    with lab.client() as client:
        while True:
            joined = _joined(client) & names
            if len(joined) != told:
                told = len(joined)
                tell(told, len(names))
            if joined == names:
                return
            _check(lab.folder)
            if time.monotonic() > until_s:
                missing = ", ".join(sorted(names - joined))
                raise NotStarted(f"after {patience_s:.0f} s still without {missing}: see {lab.folder.logs}")
            time.sleep(_POLL_S)


def _begin(folder: LabFolder) -> LabStatus:
    log = folder.logs / "lab.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "client.lab.host", str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with ExitStack() as undo:
        undo.callback(folder.clear)
        folder.note_process(process.pid)
        # Its network takes no time; its coordinator may take all of `READY_S`.
        status = _answered(
            folder, lambda: check_runs("the lab", process, log), until_s=time.monotonic() + 2 * READY_S
        )
        undo.pop_all()
    return status


def _answered(folder: LabFolder, check: Callable[[], None], *, until_s: float) -> LabStatus:
    while True:
        with suppress(NoLab):
            status = ask(folder.path, Ask()).status
            assert status is not None
            return status
        check()
        if time.monotonic() > until_s:
            raise NotStarted(f"the lab does not answer: see the logs in {folder.logs}")
        time.sleep(_POLL_S)


def _check(folder: LabFolder) -> None:
    """Raises NotStarted if a service has ended."""
    status = ask(folder.path, Ask()).status
    assert status is not None
    for endpoint in status.endpoints:
        if endpoint.process is None:
            assert endpoint.log is not None, "it has services"
            raise NotStarted(f"{endpoint.name} has ended: {last_words(Path(endpoint.log), num_lines=1)}")


def _joined(client: Client) -> set[str]:
    try:
        return {worker.worker for worker in client.workers() if worker.state is not WorkerState.LOST}
    except NotReachable:
        return set()


def _is_host(command: list[str]) -> bool:
    return "client.lab.host" in command


def _without_nat(reason: str, options: LabOptions) -> str:
    if options.has_closed_homes:
        raise UserError("--closed-homes", True, f"proxies have no NAT; run in namespaces ({reason})")
    return f"{reason}; proxies have no NAT, so homes can be dialled"


def _on_loopback(endpoints: tuple[Endpoint, ...], port: int) -> tuple[Endpoint, ...]:
    """The same endpoints, each behind a proxy; the coordinator also listens where commands look for it."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket()) for _ in endpoints]
        for each in sockets:
            each.bind((BEHIND_PROXY_HOST, 0))
        ports = [each.getsockname()[1] for each in sockets]
    return tuple(
        endpoint.model_copy(
            update={
                "address": PROXY_HOST,
                "listen": HOST if endpoint.name == COORDINATOR else BEHIND_PROXY_HOST,
                "port": port if endpoint.name == COORDINATOR else own_port,
                "is_behind_nat": False,
            }
        )
        for endpoint, own_port in zip(endpoints, ports, strict=True)
    )
