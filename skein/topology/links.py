"""Measured links as matrices, with a guess where nothing was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skein.topology.fleet import Fleet

F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_LATENCY_S = 1e-3
_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkMatrices:
    """All directed links of a fleet, (num_workers, num_workers) in the fleet's order; row sends to column.

    `latency_s` has a zero diagonal, `bytes_per_s` an infinite one. `crosses_sites` is for ties only.
    """

    latency_s: F64
    bytes_per_s: F64
    crosses_sites: Mask

    def seconds(self, num_bytes: float) -> F64:
        """Seconds for `num_bytes` over each link, one way."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def seconds_of(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Seconds for `num_bytes` over one link."""
        return float(self.latency_s[sender, receiver] + num_bytes / self.bytes_per_s[sender, receiver])

    def round_trip_s(self, num_bytes: float) -> F64:
        """Seconds for `num_bytes` there and as many back; symmetric."""
        there = self.seconds(num_bytes)
        return there + there.T


def link_cost_s(fleet: Fleet) -> LinkMatrices:
    """The fleet's links as matrices: what transfers cost, in seconds.

    A link that nobody measured counts as the median of its kind (inside a site, or between sites); with none of its
    kind measured, as the median of all; with none at all, as 1 ms and 1 GB/s.
    """
    position_by_worker = {worker.worker: i for i, worker in enumerate(fleet.workers)}
    known = [x for x in fleet.links if x.sender in position_by_worker and x.receiver in position_by_worker]
    senders = [position_by_worker[x.sender] for x in known]
    receivers = [position_by_worker[x.receiver] for x in known]
    sites = np.array([worker.site for worker in fleet.workers], dtype=object)
    crosses_sites = np.asarray(sites[:, None] != sites[None, :], dtype=np.bool_)
    latency_s = _filled([x.latency_s for x in known], senders, receivers, crosses_sites, default=_LATENCY_S)
    bytes_per_s = _filled(
        [x.bytes_per_s for x in known], senders, receivers, crosses_sites, default=_BYTES_PER_S
    )
    np.fill_diagonal(latency_s, 0.0)
    np.fill_diagonal(bytes_per_s, np.inf)
    return LinkMatrices(latency_s=latency_s, bytes_per_s=bytes_per_s, crosses_sites=crosses_sites)


def _filled(
    values: Sequence[float],
    senders: Sequence[int],
    receivers: Sequence[int],
    crosses_sites: Mask,
    *,
    default: float,
) -> F64:
    matrix = np.full(crosses_sites.shape, np.nan)
    matrix[senders, receivers] = values
    is_unknown = np.isnan(matrix)
    overall = float(np.median(matrix[~is_unknown])) if values else default
    for kind in (crosses_sites, ~crosses_sites):
        measured = matrix[kind & ~is_unknown]
        matrix[kind & is_unknown] = np.median(measured) if measured.size else overall
    return matrix
