"""A coordinator, a relay and emulated workers, as processes on this machine."""

import json
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil

from bench.cluster import START_S, Cluster
from bench.emulated.fleet import WORKER_HOST, EmulatedWorker, Links, OpTimes, Relays, cities_of, write_whole
from bench.emulated.job import ACTIVATION_BYTES
from skein.protocol.coordinator.coordinator import NUM_PROBED_PEERS
from skein.topology.fleet import Link
from skein.wire.channel import join_address, split_address

NICE = 5
"""Of workers: their sleep is what counts, and others work on this machine too."""
_POLL_S = 0.05


class EmulatedCluster(Cluster):
    """Workers e00, e01, ... in the ten cities, in turn; each joins when the one before has probed its links.

    So no two probe at once, which would find each other's bytes on the lines. The programs are started together, and
    wait for their files.
    """

    def __init__(self, directory: Path, links: Links) -> None:
        super().__init__(directory)
        self.links = links
        self.names = tuple(f"e{i:02}" for i in range(len(links.addresses)))

    def start_fleet(
        self,
        times: Sequence[OpTimes],
        *,
        flops_per_s: float,
        memory_bytes: int,
        sites: Sequence[str] = (),
    ) -> None:
        """Start everything, and wait until all links are known to the coordinator.

        Args:
            times: of each worker.
            flops_per_s: that each says of itself.
            memory_bytes: likewise.
            sites: where each is; the ten cities in turn where none are given.
        """
        self.start_coordinator()
        for name in self.names:
            self.start_worker(name)
        relays = self._start_relay()
        sites = sites or cities_of(len(self.names))
        with self.client() as client:
            num_links = 0
            for i, name in enumerate(self.names):
                _, port = split_address("addresses", self.links.addresses[i])
                worker = EmulatedWorker(
                    join=self.target,
                    name=name,
                    site=sites[i],
                    port=port,
                    flops_per_s=flops_per_s,
                    memory_bytes=memory_bytes,
                    times=times[i],
                    ways=relays.ways[i],
                )
                write_whole(self._file_of(name), worker.model_dump_json())
                num_links += 2 * min(i, NUM_PROBED_PEERS)
                until_s = time.monotonic() + START_S
                while len(client.workers()) <= i or len(client.links()) < num_links:
                    assert time.monotonic() < until_s, self.log_of(name)
                    time.sleep(_POLL_S)

    def worst_link(self) -> str:
        """How far the coordinator's idea of a transfer is off at most, and where: in words."""
        with self.client() as client:
            found = [(self._off_by(link), link) for link in client.links()]
        off_by, link = max(found, key=lambda x: abs(x[0]))
        middle = median(x[0] for x in found)
        where = f"{off_by:+.1%} from {link.sender} to {link.receiver}"
        return f"{len(found)} measured, {middle:+.1%} off in the middle, {where}"

    def _off_by(self, link: Link) -> float:
        here, there = self.names.index(link.sender), self.names.index(link.receiver)
        measured_s = link.latency_s + ACTIVATION_BYTES / link.bytes_per_s
        return measured_s / self.links.transfer_s(here, there, ACTIVATION_BYTES) - 1

    def _start_relay(self) -> Relays:
        given, out = self.directory / "links.json", self.directory / "relays.json"
        given.write_text(self.links.model_dump_json(), encoding="utf-8")
        self.run("relay", "bench.emulated.links", [str(given), str(out)])
        until_s = time.monotonic() + START_S
        while not out.exists():
            assert time.monotonic() < until_s, self.log_of("relay")
            time.sleep(_POLL_S)
        return Relays.model_validate(json.loads(out.read_text(encoding="utf-8")))

    def start_worker(self, name: str) -> None:
        """Start it; it waits for its file."""
        process = self.run(name, "bench.emulated.worker", [str(self._file_of(name))])
        psutil.Process(process.pid).nice(NICE)

    def _file_of(self, name: str) -> Path:
        return self.directory / f"{name}.json"


def free_addresses(count: int) -> tuple[str, ...]:
    """Where so many workers may listen on this machine; nobody else's connections begin at that address."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((WORKER_HOST, 0))
        return tuple(join_address(WORKER_HOST, each.getsockname()[1]) for each in sockets)
