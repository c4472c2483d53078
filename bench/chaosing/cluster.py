"""A coordinator and workers as processes on this machine, with everything that can be done to them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.chaosing.blows import COORDINATOR
from bench.chaosing.wires import ChaosWorker, Wires
from bench.cluster import Cluster
from bench.emulated.cluster import free_addresses
from coordinator.records.store import LogHeld, RunLog
from skein.protocol.log.records import Record
from skein.wire.channel import split_address

_RELEASE_S = 30.0
"""Within which a killed coordinator's process must let go of its directory."""
_POLL_S = 0.1


class ChaosCluster(Cluster):
    """Workers w0, w1, ... of one thread, each with a port of its own, that reach everybody through wires."""

    module = "bench.chaosing.worker"
    """What a worker's process runs; it is given the path of a `ChaosWorker`."""

    def __init__(self, directory: Path, num_workers: int) -> None:
        super().__init__(directory)
        self.names = tuple(f"w{index}" for index in range(num_workers))
        self._addresses = dict(zip(self.names, free_addresses(num_workers), strict=True))
        self.wires = Wires({**self._addresses, COORDINATOR: self.target})

    def start_worker(self, name: str) -> None:
        """Start it, for the first time or again under its old name and port."""
        _, port = split_address("addresses", self._addresses[name])
        told = ChaosWorker(
            join=self.wires.way(name, COORDINATOR),
            name=name,
            port=port,
            ways=self.wires.ways_of(name, but=COORDINATOR),
        )
        path = self.directory / f"{name}.json"
        path.write_text(told.model_dump_json(), encoding="utf-8")
        self.run(name, self.module, [str(path)])

    def read_log(self) -> tuple[Record, ...]:
        """Everything that was recorded; only when the coordinator is gone or going."""
        until_s = time.monotonic() + _RELEASE_S
        while True:
            try:
                with RunLog.open(self.directory / "state", wall_s=time.time()) as log:
                    return tuple(log.read())
            except LogHeld:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_POLL_S)


@contextmanager
def running_behind_wires(directory: Path, num_workers: int) -> Iterator[ChaosCluster]:
    """A cluster whose workers all have joined; ended on the way out."""
    cluster = ChaosCluster(directory, num_workers)
    with cluster.wires, cluster:
        cluster.start_all(cluster.names)
        yield cluster
