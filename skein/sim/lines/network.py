"""The network model: sites with fast links inside and slow ones between, one transfer at a time per directed link.

Rules of this file
- A cut link is a black hole: nothing arrives, nobody is told. Cuts are counted, so that faults may overlap.
- Whoever is walled in dials out and is dialled by nobody. Tensors to it take the way that the sender was told: over the
  receiver's own connection, or by a relay, whose links they take one after the other.
- The coordinator has a place too, in the first site, so that what cuts sites off cuts control streams.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skein import rng
from skein.protocol.messages.reports import LinksMeasured
from skein.protocol.messages.ways import COORDINATOR_RELAY, Unreached, Ways
from skein.topology.fleet import Link
from skein.types import SiteId, WorkerId

INSIDE_LATENCY_S = 0.0002
INSIDE_BYTES_PER_S = 1.25e9
COORDINATOR = WorkerId("(coordinator)")
"""Stands for the coordinator where a link has two ends."""

Pair = tuple[WorkerId, WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Effect of a link on tensors for a while: each takes up to `jitter_s` longer, so that later ones overtake it.

    `loss` and `repeats` are the chances that one is lost on the way (its stream breaks), or arrives twice.
    """

    slower: float = 1.0
    jitter_s: float = 0.0
    loss: float = 0.0
    repeats: float = 0.0


FAIR = Weather()


class Network:
    """Latency and bandwidth of every directed pair of workers, drawn per pair of sites from `seed`.

    Between sites: 5 to 150 ms one way, 10 to 125 MB/s, unlike in the two directions. `on_changed` is called whenever
    less gets through, or more.
    """

    def __init__(self, sites: Sequence[SiteId], *, seed: int) -> None:
        self.on_changed: Callable[[], None] = lambda: None
        self._between: dict[tuple[SiteId, SiteId], tuple[float, float]] = {}
        for sender in sites:
            for receiver in sites:
                draw = rng.stream(seed, "link", sender, receiver)
                between = (float(draw.uniform(0.005, 0.150)), float(draw.uniform(10e6, 125e6)))
                self._between[sender, receiver] = between
        for site in sites:
            self._between[site, site] = (INSIDE_LATENCY_S, INSIDE_BYTES_PER_S)
        self._site_of: dict[WorkerId, SiteId] = {COORDINATOR: sites[0]}
        self._free_at: dict[Pair, float] = {}
        self._cut: Counter[tuple[WorkerId | SiteId, WorkerId | SiteId]] = Counter()
        self._weather: dict[Pair, Weather] = {}
        self._luck = rng.stream(seed, "weather")
        self.walled: set[WorkerId] = set()
        """Workers that nobody can dial."""
        self.is_up: Callable[[WorkerId], bool] = lambda _: True
        """Whether a process is there that could relay: a worker's, or the coordinator's."""
        self._ways: dict[WorkerId, dict[WorkerId, WorkerId]] = {}

    def place(self, worker: WorkerId, site: SiteId) -> None:
        """Say where a worker is."""
        self._site_of[worker] = site

    def site_of(self, worker: WorkerId) -> SiteId:
        """Site of a worker that is there, or was."""
        return self._site_of[worker]

    @property
    def sites(self) -> tuple[SiteId, ...]:
        """All places, sorted."""
        return tuple(sorted({sender for sender, _ in self._between}))

    # --- what befalls links ---

    def cut(self, sender: WorkerId | SiteId, receiver: WorkerId | SiteId) -> None:
        """Let nothing through in this direction until `mend`, or `heal`; of a site, whoever comes there meanwhile."""
        self._cut[sender, receiver] += 1
        self.on_changed()

    def mend(self, sender: WorkerId | SiteId, receiver: WorkerId | SiteId) -> None:
        """Take one cut back."""
        self._cut[sender, receiver] -= self._cut[sender, receiver] > 0
        self._cut += Counter()  # Without those that are cut no more: it is asked for every tensor.
        self.on_changed()

    def heal(self) -> None:
        """Let everything through again."""
        self._cut.clear()
        self.on_changed()

    def take_ways(self, worker: WorkerId, told: Ways) -> None:
        """Have a worker send by these ways from now on."""
        self._ways[worker] = {way.peer: way.relay.worker for way in told.ways}

    def is_cut(self, sender: WorkerId, receiver: WorkerId) -> bool:
        """Whether nothing gets from one to the other, by the way that there is."""
        if not self._cut and receiver not in self.walled:
            return False
        hops = self._hops(sender, receiver)
        return not hops or any(self._is_cut(*hop) for hop in hops)

    def _hops(self, sender: WorkerId, receiver: WorkerId) -> tuple[Pair, ...]:
        """Links that tensors take, none where there is no way."""
        if receiver not in self.walled or COORDINATOR in (sender, receiver):
            return ((sender, receiver),)
        relay = self._ways.get(sender, {}).get(receiver)
        return () if relay is None else self._carried(sender, receiver, relay)

    def _carried(self, sender: WorkerId, receiver: WorkerId, relay: WorkerId) -> tuple[Pair, ...]:
        """Links by way of a relay; none where it is gone, or cannot be dialled by both."""
        if relay in (sender, receiver):
            return () if relay in self.walled else ((sender, receiver),)
        carrier = COORDINATOR if relay == COORDINATOR_RELAY else relay
        is_there = self.is_up(carrier) and carrier not in self.walled
        return ((sender, carrier), (carrier, receiver)) if is_there else ()

    def _is_cut(self, sender: WorkerId, receiver: WorkerId) -> bool:
        between = (self._site_of[sender], self._site_of[receiver])
        return self._cut[sender, receiver] > 0 or self._cut[between] > 0

    def set_weather(self, sender: WorkerId, receiver: WorkerId, weather: Weather) -> None:
        """Set the weather of a link from now on; `FAIR` ends it."""
        self._weather[sender, receiver] = weather

    # --- what links do ---

    def latency_s(self, sender: WorkerId, receiver: WorkerId) -> float:
        """Seconds from one worker to another, in fair weather."""
        return self._between[self._site_of[sender], self._site_of[receiver]][0]

    def link(self, sender: WorkerId, receiver: WorkerId) -> Link:
        """The link as a perfect probe would measure it in fair weather."""
        latency_s, bytes_per_s = self._between[self._site_of[sender], self._site_of[receiver]]
        return Link(sender=sender, receiver=receiver, latency_s=latency_s, bytes_per_s=bytes_per_s)

    def probe(self, worker: WorkerId, peers: Sequence[WorkerId]) -> LinksMeasured:
        """Report of a worker that probes these peers: by dialling them, else by the way that it was told."""
        links: list[Link] = []
        unreached: list[Unreached] = []
        for peer in peers:
            if peer not in self.walled:
                links += [self.link(worker, peer), self.link(peer, worker)]
                continue
            unreached.append(Unreached(peer=peer))
            if (relay := self._ways.get(worker, {}).get(peer)) is None:
                continue
            if self.is_cut(worker, peer):
                unreached.append(Unreached(peer=peer, via=relay))
            else:
                hops = [self.link(*hop) for hop in self._hops(worker, peer)]
                latency_s, rate = sum(x.latency_s for x in hops), min(x.bytes_per_s for x in hops)
                ends = Link(sender=worker, receiver=peer, latency_s=latency_s, bytes_per_s=rate, via=relay)
                links += [ends, replace(ends, sender=peer, receiver=worker)]
        dialled = [peer for peer in peers if peer not in self.walled]
        shut_out = tuple(dialled) if worker in self.walled else ()
        return LinksMeasured(links=tuple(links), unreached=tuple(unreached), shut_out=shut_out)

    def arrival_s(self, sender: WorkerId, receiver: WorkerId, num_bytes: int, *, now: float) -> float | None:
        """Time at which the last byte arrives, behind what links carry already; None if the way is cut."""
        if self.is_cut(sender, receiver):
            return None
        for hop in self._hops(sender, receiver):
            now = self._passed_s(*hop, num_bytes, now=now)
        return now

    def _passed_s(self, sender: WorkerId, receiver: WorkerId, num_bytes: int, *, now: float) -> float:
        pair = (sender, receiver)
        latency_s, bytes_per_s = self._between[self._site_of[sender], self._site_of[receiver]]
        weather = self._weather.get(pair, FAIR)
        start = max(now, self._free_at.get(pair, 0.0))
        self._free_at[pair] = start + num_bytes * weather.slower / bytes_per_s
        return self._free_at[pair] + latency_s * weather.slower

    def fate(self, sender: WorkerId, receiver: WorkerId) -> tuple[bool, bool, float]:
        """Fate of one tensor on a link: whether it is lost, whether it arrives twice, and how late it is in seconds."""
        weather = self._weather.get((sender, receiver), FAIR)
        if weather is FAIR:
            return False, False, 0.0
        lost, repeated, late = (float(x) for x in self._luck.random(3))
        return lost < weather.loss, repeated < weather.repeats, late * weather.jitter_s
