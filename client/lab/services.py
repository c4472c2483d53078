"""A coordinator and workers as processes at their endpoints."""

import os
import secrets
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from client.lab.preset import COORDINATOR, Endpoint
from client.lab.state import LabFile, LabFolder, coordinator_of
from client.local import HOST, service_environment
from skein.wire.channel import join_address, split_address
from skein.wire.process.tether import start_tethered

METRICS_PORT = 7412
"""Port of the coordinator's metrics, on its own loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProgram:
    """A service as it is started."""

    name: str
    module: str
    arguments: tuple[str, ...]


def programs(folder: LabFolder, lab: LabFile) -> tuple[ServiceProgram, ...]:
    """Programs that run at the lab's endpoints, the coordinator first."""
    return tuple(
        _coordinator(folder, lab, endpoint)
        if endpoint.name == COORDINATOR
        else _worker(folder, lab, endpoint)
        for endpoint in lab.endpoints
    )


def _coordinator(folder: LabFolder, lab: LabFile, endpoint: Endpoint) -> ServiceProgram:
    in_proxy = lab.mode == "proxy"
    metrics_port = split_address("metrics", lab.metrics_door)[1] if in_proxy else METRICS_PORT
    arguments = (
        *("--host", endpoint.listen, "--port", str(endpoint.port)),
        *("--metrics-host", HOST, "--metrics-port", str(metrics_port)),
        *("--state-dir", str(folder.coordinator_state), "--token-file", str(folder.token)),
        *("--checkpoint-root", str(folder.checkpoints)),
    )
    return _placed(folder, lab, endpoint, "coordinator", arguments)


def _worker(folder: LabFolder, lab: LabFile, endpoint: Endpoint) -> ServiceProgram:
    coordinator = coordinator_of(lab)
    arguments = (
        *("--join", join_address(coordinator.address, coordinator.port)),
        *("--name", endpoint.name, "--site", endpoint.site),
        *("--listen", endpoint.listen, "--port", str(endpoint.port)),
        *("--advertise", join_address(endpoint.address, endpoint.port)),
        *("--token-file", str(folder.token)),
        *(part for root in lab.data_roots for part in ("--data-root", root)),
        *("--checkpoint-root", str(folder.checkpoints)),
    )
    return _placed(folder, lab, endpoint, "worker", arguments)


def _placed(
    folder: LabFolder, lab: LabFile, endpoint: Endpoint, module: str, arguments: tuple[str, ...]
) -> ServiceProgram:
    if lab.mode == "proxy":
        return ServiceProgram(name=endpoint.name, module=module, arguments=arguments)
    inside = (folder.namespace(endpoint), module, *arguments)
    return ServiceProgram(name=endpoint.name, module="client.lab.enter", arguments=inside)


def write_token(path: Path) -> None:
    """A fresh token that only we can read; one that is there stays."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")


class Services:
    """The processes of a lab, from `start` to `stop`; they end with this process, too, however it ends."""

    def __init__(self, folder: LabFolder) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, planned: tuple[ServiceProgram, ...]) -> None:
        """Start all; workers dial until the coordinator answers."""
        environment = service_environment(len(planned))
        for program in planned:
            process = start_tethered(
                program.module, program.arguments, log=self.log(program.name), environment=environment
            )
            self._processes[program.name] = process
            self._folder.note_process(process.pid)

    def log(self, name: str) -> Path:
        """File with what the service prints."""
        return self._folder.logs / f"{name}.log"

    def process_of(self, name: str) -> int | None:
        """The process id of a service that runs."""
        process = self._processes.get(name)
        return process.pid if process is not None and process.poll() is None else None

    def stop(self, seconds: float) -> None:
        """Ask workers, then the coordinator, to end, and wait so long for each; what remains is not for us to kill."""
        groups = [name for name in self._processes if name != COORDINATOR], [COORDINATOR]
        for names in groups:
            stopping = [self._processes[name] for name in names if name in self._processes]
            for process in stopping:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in stopping:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
