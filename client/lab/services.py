"""A coordinator and workers as processes at their endpoints."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from client.aio import AsyncClient
from client.errors import NotReachable
from client.lab.preset import COORDINATOR, MAX_WORKERS, Endpoint
from client.lab.state import LabFile, LabFolder, coordinator_of
from client.local import HOST
from skein.wire.channel import join_address, split_address
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.passport import Passport, write_private

METRICS_PORT = 7412
"""Port of the coordinator's metrics, on its own loopback."""
_LINE_S = 30 * 86400.0
_POLL_S = 0.1


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
        *("--advertise", join_address(endpoint.address, endpoint.port)),
        *("--certificates", "--enrol-port", str(lab.enrol_port)),
        *("--metrics-host", HOST, "--metrics-port", str(metrics_port)),
        *("--state-dir", str(folder.coordinator_state)),
        *("--checkpoint-root", str(folder.checkpoints)),
    )
    return _placed(folder, lab, endpoint, "coordinator", arguments)


def _worker(folder: LabFolder, lab: LabFile, endpoint: Endpoint) -> ServiceProgram:
    arguments = (
        *("--join", f"@{folder.line}", "--state-dir", str(folder.worker_state)),
        *("--name", endpoint.name, "--site", endpoint.site),
        *("--listen", endpoint.listen, "--port", str(endpoint.port)),
        *("--advertise", join_address(endpoint.address, endpoint.port)),
        *(("--relay",) if lab.preset.sites[endpoint.site].relay else ()),
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


async def write_line(folder: LabFolder, lab: LabFile, check: Callable[[], None]) -> None:
    """Write the line by which workers join, once the coordinator makes it out.

    Args:
        folder: of the lab; the coordinator's admin is written there anew when that leads.
        lab: says where it is.
        check: raises what ends the wait.
    """
    while not folder.admin.exists():
        check()
        await asyncio.sleep(_POLL_S)
    async with AsyncClient(lab.door, passport=Passport.load(folder.admin)) as client:
        while (text := await _asked(client)) is None:
            check()
            await asyncio.sleep(_POLL_S)
    # Proxies stand in front of one port of an endpoint; nobody measures how long it takes to join.
    enrol_address = join_address(coordinator_of(lab).listen, lab.enrol_port)
    line = replace(JoinLine.parse("line", text), enrol_addresses=enrol_address)
    write_private(folder.line, line.text())


async def _asked(client: AsyncClient) -> str | None:
    with suppress(NotReachable):
        text, _ = await client.create_token("worker", life_s=_LINE_S, uses=10 * MAX_WORKERS)
        return text
    return None
