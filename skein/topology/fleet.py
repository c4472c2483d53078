"""A fleet: the workers of one moment with what was measured of them.

Frozen, so that a plan can name what it was made for.
"""

import math
from dataclasses import dataclass, replace

from skein.types import SiteId, StageSpec, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements that a worker made of itself.

    `flops_per_s` is sustained fp32 matrix multiplication on the device, the median of several short runs, and `spread`
    how far these lay apart, as a share of it; `memory_bytes` is what a job may use.
    """

    device: str
    device_name: str
    flops_per_s: float
    memory_bytes: int
    spread: float = 0.0

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that the worker has: those of a mesh, as `skein.plan.mesh.profile` names them, or one.

        >>> [Profile(device=x, device_name="", flops_per_s=1, memory_bytes=1).devices for x in ("cpu:2", "cuda:3")]
        [('cpu', 'cpu'), ('cuda:3',)]
        """
        kind, _, number = self.device.partition(":")
        is_counted = kind == "cpu" and number.isdecimal()
        return (kind,) * int(number) if is_counted else tuple(self.device.split(","))

    @property
    def num_devices(self) -> int:
        """Number of devices that the worker has."""
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorker:
    """A worker that may be given work."""

    worker: WorkerId
    site: SiteId
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed pair of workers: one-way latency in seconds and bandwidth in bytes per second.

    `via` is the worker that relays, "" for the coordinator; None: one of the two dials the other.
    """

    sender: WorkerId
    receiver: WorkerId
    latency_s: float
    bytes_per_s: float
    via: WorkerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds that a worker takes for one microbatch of a stage, as measured while it trained.

    Of the backward, weight gradients take `weight_s`; None: it was whole.
    """

    worker: WorkerId
    stage: StageSpec
    forward_s: float
    backward_s: float
    weight_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Workers sorted by id, and what was measured: links (an absent one is unknown, not broken) and stages."""

    workers: tuple[FleetWorker, ...]
    links: tuple[Link, ...]
    stage_times: tuple[StageTime, ...] = ()


_FACTOR = 1.01
"""Measurements nearer to each other than this are taken for equal."""
_LEAST_S = 1e-6


def rounded(fleet: Fleet) -> Fleet:
    """`fleet` with everything measured put to the nearest power of 1.01, so within half a percent of what it was.

    Equal workers on equal links then look equal, and predictions are as good as measurements are. Larger noise makes
    another fleet; that it makes no other plan is up to whoever replaces plans.

    >>> profile = Profile(device="cpu", device_name="", flops_per_s=1e10, memory_bytes=1)
    >>> alike = (FleetWorker(worker=WorkerId(w), site=SiteId(""), profile=replace(profile, flops_per_s=x))
    ...          for w, x in (("a", 1.000e10), ("b", 1.001e10)))
    >>> {f"{w.profile.flops_per_s:.4g}" for w in rounded(Fleet(workers=tuple(alike), links=())).workers}
    {'9.992e+09'}
    """
    return Fleet(
        workers=tuple(
            replace(w, profile=replace(w.profile, flops_per_s=_near(w.profile.flops_per_s)))
            for w in fleet.workers
        ),
        links=tuple(
            replace(
                link,
                latency_s=_near(max(link.latency_s, _LEAST_S)),
                bytes_per_s=_near(link.bytes_per_s),
            )
            for link in fleet.links
        ),
        stage_times=tuple(
            replace(x, forward_s=_near(x.forward_s), backward_s=_near(x.backward_s))
            for x in fleet.stage_times
        ),
    )


def _near(value: float) -> float:
    """The power of `_FACTOR` nearest to a positive value; others stay."""
    return float(_FACTOR ** round(math.log(value, _FACTOR))) if 0 < value < math.inf else value
