"""A coordinator and workers as processes at their endpoints."""

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from client.lab.preset import COORDINATOR, Endpoint
from client.lab.state import LabFile, LabFolder, coordinator_of
from client.local import HOST
from skein.wire.channel import join_address, split_address

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
