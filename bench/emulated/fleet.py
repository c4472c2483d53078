"""What is emulated, as the files that its processes are started with, and the ten cities to make them from."""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from skein.config.job import JobSpec
from skein.plan.cut import cut, cut_job
from skein.plan.load import ends_spared_bytes, stage_loads
from skein.plan.ops import WEIGHT_SHARE

_CITIES = Path(__file__).with_name("cities.json")
_GIB = 2**30

RELAY_HOST, WORKER_HOST = "127.0.0.2", "127.0.0.3"
"""Not the address at which outgoing connections begin, so that a port once seen free stays so."""
TABLE_ACTIVATION_BYTES = 4 * 1024 * 1024 * 8
"""Of the microbatches whose transfers are scaled. Source: SkipPipe's 20 workers (arXiv 2502.19913, its scheduler)."""
OVERHEAD_S = 0.35
"""What a transfer takes there besides latency and bytes. Source: as above."""

Rows = tuple[tuple[float, ...], ...]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Links(_File):
    """Directed links, (num_workers, num_workers), row sends to column; `addresses` are the workers' own."""

    addresses: tuple[str, ...]
    latency_s: Rows
    bytes_per_s: Rows

    def transfer_s(self, sender: int, receiver: int, num_bytes: int) -> float:
        """Seconds of one transfer that meets no other."""
        return self.latency_s[sender][receiver] + num_bytes / self.bytes_per_s[sender][receiver]


class Relays(_File):
    """Where to dial in order to reach a worker: `ways[i]` is worker i's, by the address that the peer advertises."""

    ways: tuple[dict[str, str], ...]


class OpTimes(_File):
    """Seconds of the ops on one microbatch, by stage; `loss_s` of a stage at which paths end.

    Weight ops take `weight_s` of a backward or loss.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    loss_s: tuple[float, ...]
    weight_s: tuple[float, ...]


class EmulatedWorker(_File):
    """All that one worker is told."""

    join: str
    name: str
    site: str
    port: int
    flops_per_s: float
    memory_bytes: int
    times: OpTimes
    ways: dict[str, str]


class _Pair(_File):
    a: str = ""
    b: str = ""
    latency_ms: float
    bandwidth_gib_s: float


class _Cities(_File):
    source: str
    cities: tuple[str, ...]
    same_city: _Pair
    links: tuple[_Pair, ...]


def write_whole(path: Path, text: str) -> None:
    """Let a file appear with all that is in it, for whoever waits for it."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


def load_cities(path: Path = _CITIES) -> _Cities:
    """The table in this folder."""
    return _Cities.model_validate(json.loads(path.read_text(encoding="utf-8")))


def cities_of(num_workers: int) -> tuple[str, ...]:
    """The city of each worker, in turn."""
    cities = load_cities().cities
    return tuple(cities[i % len(cities)] for i in range(num_workers))


def ten_cities(addresses: Sequence[str], *, scale: float, activation_bytes: int) -> Links:
    """Links between workers in the ten cities, in turn, on which an activation takes `scale` times as long.

    That is: one of `activation_bytes` takes `scale` times what one of `TABLE_ACTIVATION_BYTES` takes between the
    cities, of which latency and overhead are latency here too.
    """
    table = load_cities()
    pairs = {(city, city): table.same_city for city in table.cities}
    pairs |= {(x.a, x.b): x for x in table.links} | {(x.b, x.a): x for x in table.links}
    cities = cities_of(len(addresses))
    shrunk = activation_bytes / TABLE_ACTIVATION_BYTES / scale

    def rows(of: Sequence[Sequence[float]]) -> Rows:
        return tuple(tuple(row) for row in of)

    return Links(
        addresses=tuple(addresses),
        latency_s=rows(
            [[scale * (pairs[a, b].latency_ms / 1000 + OVERHEAD_S) for b in cities] for a in cities]
        ),
        bytes_per_s=rows([[pairs[a, b].bandwidth_gib_s * _GIB * shrunk for b in cities] for a in cities]),
    )


def op_times(job: JobSpec, flops_per_s: float) -> OpTimes:
    """What the job's ops take on a device that computes `flops_per_s`, for stages of equal work."""
    loads = stage_loads(job, cut_job(job))
    return OpTimes(
        forward_s=tuple(load.forward_flops / flops_per_s for load in loads),
        backward_s=tuple(load.backward_flops / flops_per_s for load in loads),
        loss_s=tuple(load.flops / flops_per_s for load in loads),
        weight_s=tuple(WEIGHT_SHARE * load.backward_flops / flops_per_s for load in loads),
    )


def memory_for(job: JobSpec, slots: int) -> int:
    """Bytes that the fullest chunk takes with so many microbatches; the first stage's holder has the head of `loop`."""
    layers = job.layers
    loads = stage_loads(job, cut(layers, job.parallel.stages, job.parallel.layout))
    needed = [load.memory_bytes(slots) for load in loads]
    if len(loads) > job.parallel.stages:
        needed[0] += loads[-1].memory_bytes(1) - ends_spared_bytes(job)
    return max(needed)
