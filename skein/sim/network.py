"""The network model: sites with fast links inside and slow ones between, one transfer at a time per directed link."""

from collections.abc import Sequence

from skein import rng
from skein.topology.fleet import Link
from skein.types import SiteId, WorkerId

INSIDE_LATENCY_S = 0.0002
INSIDE_BYTES_PER_S = 1.25e9
FAILURE_S = 0.3
"""How long a sender tries before it takes a peer for unreachable."""


class Network:
    """Latency and bandwidth of every directed pair of workers, drawn per pair of sites from `seed`.

    Between sites: 5 to 150 ms one way, 10 to 125 MB/s, unlike in the two directions.
    """

    def __init__(self, sites: Sequence[SiteId], *, seed: int) -> None:
        self._between: dict[tuple[SiteId, SiteId], tuple[float, float]] = {}
        for sender in sites:
            for receiver in sites:
                draw = rng.stream(seed, "link", sender, receiver)
                between = (float(draw.uniform(0.005, 0.150)), float(draw.uniform(10e6, 125e6)))
                self._between[sender, receiver] = between
        for site in sites:
            self._between[site, site] = (INSIDE_LATENCY_S, INSIDE_BYTES_PER_S)
        self._site_of: dict[WorkerId, SiteId] = {}
        self._free_at: dict[tuple[WorkerId, WorkerId], float] = {}
        self._cut: set[tuple[WorkerId, WorkerId]] = set()

    def place(self, worker: WorkerId, site: SiteId) -> None:
        """Say where a worker is."""
        self._site_of[worker] = site

    def cut(self, sender: WorkerId, receiver: WorkerId) -> None:
        """Let nothing through in this direction until `heal`."""
        self._cut.add((sender, receiver))

    def heal(self) -> None:
        """Let everything through again."""
        self._cut.clear()

    def link(self, sender: WorkerId, receiver: WorkerId) -> Link:
        """The link as a perfect probe would measure it."""
        latency_s, bytes_per_s = self._between[self._site_of[sender], self._site_of[receiver]]
        return Link(sender=sender, receiver=receiver, latency_s=latency_s, bytes_per_s=bytes_per_s)

    def arrival_s(self, sender: WorkerId, receiver: WorkerId, num_bytes: int, *, now: float) -> float | None:
        """When the last byte arrives, behind what the link carries already; None if the link is cut."""
        pair = (sender, receiver)
        if pair in self._cut:
            return None
        latency_s, bytes_per_s = self._between[self._site_of[sender], self._site_of[receiver]]
        start = max(now, self._free_at.get(pair, 0.0))
        self._free_at[pair] = start + num_bytes / bytes_per_s
        return self._free_at[pair] + latency_s
