"""`skein doctor`: looks for what usually goes wrong, before it does."""

import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from importlib.metadata import packages_distributions
from pathlib import Path

import click

import skein
from client.api import Client
from client.cli import DONE, FAILED
from client.cli.options import connect_client, remote_command, target
from client.cli.show import print_json
from client.connection import DEFAULT_TARGET
from skein.errors import SkeinError, UserError
from skein.own import NAMES, Stranger, install_hint, strangers
from skein.units import format_bytes
from skein.wire.channel import join_address, split_address
from skein.wire.leader import split_addresses
from skein.wire.views import WorkerState

MIN_FILES = 4096
MIN_SHM_BYTES = 256 << 20
MIN_DISK_BYTES = 1 << 30
MAX_SKEW_S = 2.0
_CONNECT_S = 2.0
_TORCH_S = 60.0
_TORCH = (
    "import json, torch; print(json.dumps([torch.__version__, torch.get_num_threads(), "
    "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]]))"
)
_DISTRIBUTION = "skein-train"
_DISK_HINT = "free some space: run log, checkpoints and logs need it"


class Verdict(StrEnum):
    """Fine; works, but look at it; will not work."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """Result of one check: what was found, and what to do about it unless it is fine."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""


@remote_command
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Where a coordinator would keep its state."
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    show_default="the one after its port",
    help="Of the coordinator; tells its clock.",
)
def doctor(*, state_dir: Path | None, metrics_port: int | None, is_json: bool) -> int:
    """Look for what could go wrong here, and with the coordinator if there is one. Exit 1 if something will."""
    findings = []
    for finding in _look(state_dir or Path.home(), metrics_port):
        findings.append(finding)
        print_json(finding) if is_json else click.echo(_line(finding))
    return FAILED if any(finding.verdict is Verdict.FAILED for finding in findings) else DONE


def _line(finding: DoctorFinding) -> str:
    cure = f": {finding.cure}" if finding.cure else ""
    return f"{finding.verdict:<8} {finding.check:<12} {finding.found}{cure}"


def _look(state_dir: Path, metrics_port: int | None) -> Iterator[DoctorFinding]:
    yield DoctorFinding(
        check="skein",
        verdict=Verdict.OK,
        found=f"release {skein.__version__}, protocol {skein.PROTOCOL_VERSION}",
    )
    yield from packages(strangers(), packages_distributions())
    yield _python()
    yield _ray()
    yield _torch()
    # The hard limit: services raise their own to it.
    yield open_files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield free_space("/dev/shm", Path("/dev/shm"), MIN_SHM_BYTES, "give it more: Ray keeps its objects there")  # noqa: S108
    yield free_space("disk", state_dir, MIN_DISK_BYTES, _DISK_HINT)
    yield _token()
    yield from _coordinator(metrics_port)


def packages(found: Iterable[Stranger], owners: Mapping[str, Sequence[str]]) -> Iterator[DoctorFinding]:
    """Whether the packages that Skein imports are its own, and whether others use their names.

    Args:
        found: what stands in their place.
        owners: distributions by the top-level names that they have.
    """
    whole = list(found)
    for stranger in whole:
        yield DoctorFinding(
            check=stranger.name, verdict=Verdict.FAILED, found=stranger.found, cure=stranger.cure
        )
    others = {name: sorted({*owners.get(name, ())} - {_DISTRIBUTION}) for name in NAMES}
    for name, rivals in others.items():
        if rivals:
            cure = "whichever is installed last writes over the other: give Skein an environment of its own (pipx)"
            yield DoctorFinding(
                check=name, verdict=Verdict.WARNING, found=f"{', '.join(rivals)} has one too", cure=cure
            )
    if not whole and not any(others.values()):
        yield DoctorFinding(check="packages", verdict=Verdict.OK, found=f"{', '.join(NAMES)} are Skein's own")


def _python() -> DoctorFinding:
    found = f"{'.'.join(map(str, sys.version_info[:3]))}, {os.cpu_count()} cores"
    return DoctorFinding(check="python", verdict=Verdict.OK, found=found)


def _ray() -> DoctorFinding:
    if importlib.util.find_spec("ray") is None:
        cure = f"fine on workers and clients; a coordinator needs: {install_hint('coordinator')}"
        return DoctorFinding(check="ray", verdict=Verdict.WARNING, found="not installed", cure=cure)
    return DoctorFinding(check="ray", verdict=Verdict.OK, found="installed")


def _torch() -> DoctorFinding:
    """Finding on torch, which is asked in a process of its own: a client does without it."""
    if importlib.util.find_spec("torch") is None:
        cure = f"fine on coordinators and clients; a worker needs: {install_hint('worker')}"
        return DoctorFinding(check="torch", verdict=Verdict.WARNING, found="not installed", cure=cure)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH], capture_output=True, text=True, check=True, timeout=_TORCH_S
        )
    except subprocess.SubprocessError as error:
        cure = "install it anew, for this machine's device"
        return DoctorFinding(
            check="torch", verdict=Verdict.FAILED, found=f"does not load ({error})", cure=cure
        )
    version, num_threads, devices = json.loads(done.stdout)
    found = f"{version}, {', '.join(devices) or f'CPU with {num_threads} threads'}"
    return DoctorFinding(check="torch", verdict=Verdict.OK, found=found)


def open_files_finding(limit: int) -> DoctorFinding:
    """Whether so many open files are enough; each worker and client is several connections."""
    if limit == resource.RLIM_INFINITY or limit >= MIN_FILES:
        return DoctorFinding(check="open files", verdict=Verdict.OK, found=f"up to {limit}")
    cure = f"raise it before a coordinator for many workers: ulimit -Hn {MIN_FILES}, as root"
    return DoctorFinding(check="open files", verdict=Verdict.WARNING, found=f"up to {limit}", cure=cure)


def free_space(check: str, path: Path, least_bytes: int, cure: str) -> DoctorFinding:
    """Whether a file system has room."""
    place = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    free_bytes = shutil.disk_usage(place).free
    found = f"{format_bytes(free_bytes)} free in {place}"
    if free_bytes >= least_bytes:
        return DoctorFinding(check=check, verdict=Verdict.OK, found=found)
    cure = f"{cure} ({format_bytes(least_bytes)} or more)"
    return DoctorFinding(check=check, verdict=Verdict.WARNING, found=found, cure=cure)


def _token() -> DoctorFinding:
    if target().token_file is None:
        cure = "fine on one machine; beyond it give coordinator, workers and clients a token file"
        return DoctorFinding(check="token", verdict=Verdict.WARNING, found="no token file", cure=cure)
    try:
        _ = target().token()
    except UserError as error:
        return DoctorFinding(check="token", verdict=Verdict.FAILED, found=str(error.value), cure=error.hint)
    return DoctorFinding(check="token", verdict=Verdict.OK, found=str(target().token_file))


def _coordinator(metrics_port: int | None) -> Iterator[DoctorFinding]:
    """Findings on the coordinator, its workers and its clock; where none is, whether one could be started."""
    name = target().coordinator
    try:
        host, port = split_address("coordinator", split_addresses("coordinator", name)[0])
        with connect_client() as client:
            version = client.version()
            found = f"{name} runs release {version.release}, epoch {version.epoch}"
            yield DoctorFinding(check="coordinator", verdict=Verdict.OK, found=found)
            yield from _peers(client)
            yield _clock(host, metrics_port or port + 1)
    except SkeinError as error:
        if name != DEFAULT_TARGET:
            yield DoctorFinding(
                check="coordinator", verdict=Verdict.FAILED, found="no answer", cure=str(error)
            )
            return
        yield DoctorFinding(check="coordinator", verdict=Verdict.WARNING, found="none here", cure=str(error))
        for number in (port, metrics_port or port + 1):
            yield _free_port(host, number)


def _free_port(host: str, port: int) -> DoctorFinding:
    check = f"port {port}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        cure = "end what listens there, or start the coordinator with another --port and --metrics-port"
        return DoctorFinding(check=check, verdict=Verdict.FAILED, found=str(error.strerror), cure=cure)
    return DoctorFinding(check=check, verdict=Verdict.OK, found="free")


def _peers(client: Client) -> Iterator[DoctorFinding]:
    """Whether this machine can reach the address of every worker, as a worker here would have to."""
    workers = [worker for worker in client.workers() if worker.state is not WorkerState.LOST]
    if not workers:
        cure = f"start some: skein worker up --join {client.target}"
        yield DoctorFinding(check="workers", verdict=Verdict.WARNING, found="none", cure=cure)
        return
    silent = [worker for worker in workers if not _listens(worker.address)]
    for worker in silent:
        cure = "open its port, or start it with --advertise and an address that its peers reach"
        found = f"{worker.worker} cannot be reached at {worker.address} from here"
        yield DoctorFinding(check="workers", verdict=Verdict.FAILED, found=found, cure=cure)
    found = f"{len(workers) - len(silent)} of {len(workers)} can be reached from here"
    yield DoctorFinding(check="workers", verdict=Verdict.FAILED if silent else Verdict.OK, found=found)


def _listens(address: str) -> bool:
    try:
        with socket.create_connection(split_address("worker", address), timeout=_CONNECT_S):
            return True
    except (OSError, UserError):
        return False


def _clock(host: str, port: int, now: Callable[[], float] = time.time) -> DoctorFinding:
    """Finding on how far this clock is from the coordinator's, by the date its metrics port gives; good to a second."""
    url = f"http://{join_address(host, port)}/metrics"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        began = now()
        with direct.open(url, timeout=_CONNECT_S) as reply:
            their_s = parsedate_to_datetime(reply.headers["Date"]).timestamp()
    except (OSError, TypeError, ValueError):
        cure = f"{url} does not answer: give the coordinator's --metrics-port to compare clocks"
        return DoctorFinding(check="clock", verdict=Verdict.WARNING, found="not compared", cure=cure)
    return clock_skew(began, their_s, now())


def clock_skew(began_s: float, their_s: float, ended_s: float) -> DoctorFinding:
    """Finding on the difference of two clocks, by a time cut to whole seconds that was read between two of ours."""
    skew_s = max(0.0, began_s - (their_s + 1), their_s - ended_s)
    found = f"at most {skew_s + 1:.0f} s from the coordinator's" if skew_s < 1 else f"{skew_s:.0f} s off"
    if skew_s <= MAX_SKEW_S:
        return DoctorFinding(check="clock", verdict=Verdict.OK, found=found)
    cure = "set both clocks, for instance with NTP: times in logs and metrics will not fit together"
    return DoctorFinding(check="clock", verdict=Verdict.WARNING, found=found, cure=cure)
