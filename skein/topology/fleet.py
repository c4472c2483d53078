"""A fleet: the workers of one moment with what was measured of them.

Frozen, so that a plan can name what it was made for.
"""

from dataclasses import dataclass

from skein.types import SiteId, WorkerId


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
class Fleet:
    """Workers sorted by id, and the links that were measured; an absent link is unknown, not broken."""

    workers: tuple[FleetWorker, ...]
    links: tuple[Link, ...]
