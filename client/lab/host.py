"""`python -m client.lab.host FOLDER`: a lab, from the file in that folder, until it is told to stop.

Rules of this file
- Everything on one event loop. What blocks it (making namespaces, starting services) happens before there is traffic;
  stopping services waits on a thread.
- What this process leaves behind, if it is killed, `LabFolder.clear` finds: namespaces by their names, processes by the
  folder's list. Services are tied to this process and are told to end when it does.
"""

import asyncio
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol, assert_never

from client.lab import control
from client.lab.control import (
    Answer,
    Ask,
    Cut,
    EndpointStatus,
    Heal,
    LabStatus,
    LinkStatus,
    Request,
    Slow,
    StopLab,
)
from client.lab.network import namespaces
from client.lab.network.doors import NamespaceDoors
from client.lab.network.links import LabNetwork
from client.lab.network.proxies import Proxies
from client.lab.network.wan import Wan
from client.lab.preset import COORDINATOR, accesses, link_specs, pairs_between
from client.lab.services import METRICS_PORT, ServiceProgram, programs, write_line
from client.lab.state import LabFile, LabFolder, coordinator_of
from client.local import HOST, READY_S, NotStarted, Services, last_words, service_environment
from skein.errors import SkeinError, UserError

_log = logging.getLogger(__name__)

_STOP_S = 15.0
_PRIORITY = 1
"""The least of those that go before ordinary processes."""


class _Carrier(Protocol):
    """Carrier of bytes between endpoints: `Wan` or `Proxies`."""

    def refresh(self) -> None: ...

    def traffic(self) -> Mapping[tuple[int, int], Mapping[str, int]]: ...

    async def close(self) -> None: ...


class Lab:
    """A network, what carries it, and the services on it."""

    def __init__(self, folder: LabFolder, lab: LabFile) -> None:
        self._folder = folder
        self._lab = lab
        self._endpoints = lab.endpoints
        self._network = LabNetwork(
            [x.name for x in lab.endpoints],
            link_specs(lab.preset, lab.endpoints),
            accesses=accesses(lab.preset, lab.endpoints),
            seed=lab.seed,
        )
        self._services = Services(folder.logs, service_environment(len(lab.endpoints)))
        self._doors: NamespaceDoors | None = None
        self._carrier: _Carrier | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Bring everything up, answer requests, and take everything down again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        _hurry()
        try:
            self._carrier = await self._open()
            if self._lab.has_services:
                await self._start_services()
            server = await control.serve(self._folder.path, self._answer)
            _log.info("up: mode=%s preset=%s", self._lab.mode, self._lab.preset_name)
            await self._stopped.wait()
            server.close()
        finally:
            await self._take_down()

    async def _open(self) -> _Carrier:
        if self._lab.mode == "proxy":
            proxies = Proxies(self._network, self._endpoints, self._services.process_of)
            await proxies.open()
            return proxies
        names = tuple(map(self._folder.wan_namespace, self._endpoints))
        for name in names:
            namespaces.make(name)
        wan = Wan(self._network, names, tuple(x.address for x in self._endpoints))
        wan.open()
        for endpoint in self._endpoints:
            if endpoint.is_behind_nat:
                port = None if self._lab.has_closed_homes else endpoint.port
                namespaces.hide(self._folder.namespace(endpoint), endpoint.listen, forwarded_port=port)
        return wan

    async def _start_services(self) -> None:
        if self._lab.mode == "namespaces":
            coordinator = coordinator_of(self._lab)
            self._doors = NamespaceDoors(self._folder.namespace(coordinator))
            await self._doors.open(self._lab.door, coordinator.listen, coordinator.port)
            await self._doors.open(self._lab.metrics_door, HOST, METRICS_PORT)
        first, *workers = programs(self._folder, self._lab)
        # It lies there anew when this coordinator leads.
        if self._folder.admin.exists():
            self._folder.admin.unlink()
        self._start(first)
        until_s = time.monotonic() + READY_S
        await write_line(self._folder, self._lab, partial(self._check, until_s))
        for program in workers:
            self._start(program)

    def _start(self, program: ServiceProgram) -> None:
        process = self._services.run(program.name, program.module, program.arguments)
        self._folder.note_process(process.pid)

    def _check(self, until_s: float) -> None:
        self._services.check()
        if self._stopped.is_set() or time.monotonic() > until_s:
            said = last_words(self._services.log(COORDINATOR))
            raise NotStarted(f"the coordinator was not ready: {said}")

    async def _take_down(self) -> None:
        _log.info("going down")
        await asyncio.to_thread(self._services.ask_to_end, _STOP_S)
        _log.info("services have ended, or all workers were given %.0f s, and then the coordinator", _STOP_S)
        if self._doors is not None:
            await self._doors.close()
        if self._carrier is not None:
            await self._carrier.close()
        num_killed = await asyncio.to_thread(self._folder.clear)
        _log.info("down: ended %d processes that were left", num_killed)

    # --- requests ---

    async def _answer(self, request: Request) -> Answer:
        match request:
            case Cut(a=a, b=b, is_one_way=is_one_way):
                return self._change(self._network.cut, self._pairs(a, b, is_one_way=is_one_way))
            case Slow(a=a, b=b, is_one_way=is_one_way):
                return self._change(partial(self._slow, request), self._pairs(a, b, is_one_way=is_one_way))
            case Heal(a=a, b=b):
                return self._change(self._network.heal, self._pairs(a, b, is_one_way=False))
            case Ask():
                return Answer(status=self._status())
            case StopLab():
                asyncio.get_running_loop().call_soon(self._stopped.set)
                return Answer()
            case _:
                assert_never(request)

    def _pairs(self, a: str, b: str, *, is_one_way: bool) -> list[tuple[int, int]]:
        found = list(pairs_between(self._endpoints, a, b, is_one_way=is_one_way))
        if not found:
            raise UserError("B", b, f"give another endpoint than {a}: that is all there is")
        return found

    def _slow(self, request: Slow, pair: tuple[int, int]) -> None:
        try:
            self._network.slow(pair, request.changes)
        except ValueError as error:
            raise UserError("slow", f"{request.a} {request.b}", str(error)) from error

    def _change(self, change: Callable[[tuple[int, int]], None], pairs: list[tuple[int, int]]) -> Answer:
        for pair in pairs:
            change(pair)
        assert self._carrier is not None
        self._carrier.refresh()
        return Answer(num_links=len(pairs))

    def _status(self) -> LabStatus:
        has_services = self._lab.has_services
        return LabStatus(
            mode=self._lab.mode,
            reason=self._lab.reason,
            preset=self._lab.preset_name,
            seed=self._lab.seed,
            folder=str(self._folder.path),
            coordinator=self._lab.door if has_services else None,
            metrics=f"http://{self._lab.metrics_door}/metrics" if has_services else None,
            identity_file=str(self._folder.admin) if has_services else None,
            endpoints=tuple(self._endpoint_status(number) for number in range(len(self._endpoints))),
            links=self._link_statuses(),
        )

    def _endpoint_status(self, number: int) -> EndpointStatus:
        endpoint = self._endpoints[number]
        site = self._lab.preset.sites[endpoint.site]
        return EndpointStatus(
            **endpoint.model_dump(exclude={"listen"}),
            up_bytes_per_s=site.up,
            down_bytes_per_s=site.down,
            namespace=self._folder.namespace(endpoint) if self._lab.mode == "namespaces" else None,
            process=self._services.process_of(endpoint.name),
            log=str(self._services.log(endpoint.name)) if self._lab.has_services else None,
        )

    def _link_statuses(self) -> tuple[LinkStatus, ...]:
        assert self._carrier is not None
        traffic = self._carrier.traffic()
        return tuple(
            LinkStatus(
                sender=self._endpoints[pair[0]].name,
                receiver=self._endpoints[pair[1]].name,
                is_cut=line.is_cut,
                is_changed=line.spec != self._network.presets[pair],
                **asdict(line.spec),
                traffic=dict(traffic.get(pair, {})),
            )
            for pair, line in self._network.lines.items()
        )


def _hurry() -> None:
    """Go before the workers, which would delay packets by computing; children do not inherit it."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))


def main() -> int:
    """Run the lab of the folder that is named; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder = LabFolder(Path(sys.argv[1]))
    lab = folder.read()
    if lab is None:
        print(f"error: no lab is described in {folder.path}", file=sys.stderr)
        return 2
    try:
        # Not epoll, which would let every packet wait for the next whole millisecond.
        with asyncio.Runner(
            loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
        ) as runner:
            runner.run(Lab(folder, lab).run())
    except (SkeinError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
