"""A fleet: the workers of one moment with what was measured of them.

Frozen, so that a plan can name what it was made for.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from skein.types import SiteId, StageSpec, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a worker measured of itself.

    `flops_per_s` is sustained fp32 matrix multiplication on the device; `memory_bytes` what a job may use.
    """

    device: str
    device_name: str
    flops_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorker:
    """A worker that may be given work."""

    worker: WorkerId
    site: SiteId
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed pair of workers: one-way latency in seconds and bandwidth in bytes per second."""

    sender: WorkerId
    receiver: WorkerId
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """What a worker takes for one microbatch of a stage, in seconds, as measured while it trained."""

    worker: WorkerId
    stage: StageSpec
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Workers sorted by id, and what was measured: links (an absent one is unknown, not broken) and stages."""

    workers: tuple[FleetWorker, ...]
    links: tuple[Link, ...]
    stage_times: tuple[StageTime, ...] = ()


_FACTOR = 1.5
"""Measurements nearer to each other than this are taken for equal."""
_LEAST_LATENCY_S = 0.001


def rounded(fleet: Fleet) -> Fleet:
    """`fleet` with speeds and links rounded, so that the noise of measuring makes no other plan.

    Speeds go to the nearest power of 1.5 around their median, bandwidths and latencies likewise; latencies of less than
    a millisecond count as one.

    >>> profile = Profile(device="cpu", device_name="", flops_per_s=1.1e10, memory_bytes=1)
    >>> slow, fast = (FleetWorker(worker=WorkerId(w), site=SiteId(""), profile=replace(profile, flops_per_s=x))
    ...               for w, x in (("a", 1.0e10), ("b", 1.1e10)))
    >>> {w.profile.flops_per_s for w in rounded(Fleet(workers=(slow, fast), links=())).workers}
    {10500000000.0}
    """
    speeds = _Rounding(worker.profile.flops_per_s for worker in fleet.workers)
    bandwidths = _Rounding(link.bytes_per_s for link in fleet.links)
    latencies = _Rounding(max(link.latency_s, _LEAST_LATENCY_S) for link in fleet.links)
    return replace(
        fleet,
        workers=tuple(
            replace(w, profile=replace(w.profile, flops_per_s=speeds.of(w.profile.flops_per_s)))
            for w in fleet.workers
        ),
        links=tuple(
            replace(
                link,
                latency_s=latencies.of(max(link.latency_s, _LEAST_LATENCY_S)),
                bytes_per_s=bandwidths.of(link.bytes_per_s),
            )
            for link in fleet.links
        ),
    )


class _Rounding:
    """To the nearest power of `_FACTOR` around the median of positive values."""

    def __init__(self, values: Iterable[float]) -> None:
        self._middle = median([*values] or [1.0])

    def of(self, value: float) -> float:
        steps = round(math.log(value / self._middle, _FACTOR)) if value > 0 < self._middle else 0
        return float(self._middle * _FACTOR**steps)
