"""The network model: sites with fast links inside and slow ones between, one transfer at a time per directed link.

Rules of this file
- A cut link is a black hole: nothing arrives, nobody is told. Cuts are counted, so that faults may overlap. A cut holds
  for every way between its ends, relays too; a blocked path is one that relays lead around.
- A link that drops large messages passes those of up to `SMALL_BYTES`. A worker that probes it finds that out.
- A walled worker dials out and is dialled by no worker. Tensors take the way that the coordinator told their sender, if
  any: over the receiver's own connection, or by a relay, whose links they take one after the other.
- A worker dials another if messages pass in both directions and the other answers.
- The coordinator has a place too, in the first site, so that what cuts sites off cuts control streams.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from skein import rng
from skein.protocol.messages.reports import LinksMeasured
from skein.protocol.messages.ways import COORDINATOR_RELAY, Obstacle, Unreached, Ways
from skein.topology.fleet import Link
from skein.types import SiteId, WorkerId

INSIDE_LATENCY_S = 0.0002
INSIDE_BYTES_PER_S = 1.25e9
SMALL_BYTES = 1300
"""The largest message that passes a link which drops large ones: a packet of a path with a small MTU."""
PROBE_S, UNANSWERED_S, VANISHED_S = 0.5, 2.0, 4.5
"""Seconds of a probe that is answered, of one that is not, and of one whose full packets vanish."""
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
        self._blocked: Counter[Pair] = Counter()
        self._dropping_large: Counter[Pair] = Counter()
        self._weather: dict[Pair, Weather] = {}
        self._luck = rng.stream(seed, "weather")
        self.walled: set[WorkerId] = set()
        """Workers that nobody can dial."""
        self.is_up: Callable[[WorkerId], bool] = lambda _: True
        """Whether a process is there that could relay: a worker's, or the coordinator's."""
        self.answers: Callable[[WorkerId], bool] = lambda _: True
        """Whether a worker's process answers who dials it: a frozen one does not."""
        self._ways: dict[WorkerId, dict[WorkerId, WorkerId]] = {}

    def place(self, worker: WorkerId, site: SiteId) -> None:
        """Say where a worker is; its process is new, and knows no ways yet."""
        self._site_of[worker] = site
        self._ways.pop(worker, None)

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

    def block(self, one: WorkerId, other: WorkerId) -> None:
        """Let nothing pass directly between two workers until `unblock`, or `heal`; relays lead around."""
        self._blocked.update([(one, other), (other, one)])
        self.on_changed()

    def unblock(self, one: WorkerId, other: WorkerId) -> None:
        """Take one `block` back."""
        self._blocked.subtract(pair for pair in ((one, other), (other, one)) if self._blocked[pair])
        self._blocked += Counter()
        self.on_changed()

    def drop_large(self, sender: WorkerId, receiver: WorkerId) -> None:
        """Let messages of up to `SMALL_BYTES` through alone in this direction, until `pass_large`, or `heal`."""
        self._dropping_large[sender, receiver] += 1
        self.on_changed()

    def pass_large(self, sender: WorkerId, receiver: WorkerId) -> None:
        """Take one `drop_large` back."""
        self._dropping_large[sender, receiver] -= self._dropping_large[sender, receiver] > 0
        self._dropping_large += Counter()
        self.on_changed()

    def heal(self) -> None:
        """Let everything through again."""
        self._cut.clear()
        self._blocked.clear()
        self._dropping_large.clear()
        self.on_changed()

    def take_ways(self, worker: WorkerId, told: Ways) -> None:
        """Have a worker send by these ways from now on."""
        self._ways[worker] = {way.peer: way.relay.worker for way in told.ways}

    def is_cut(self, sender: WorkerId, receiver: WorkerId) -> bool:
        """Whether nothing gets from one to the other, by the way that there is."""
        if not (self._cut or self._blocked or self.walled or self._ways):
            return False
        if receiver not in self.walled and self._is_cut(sender, receiver):
            return True
        hops = self._hops(sender, receiver)
        return not hops or any(self._is_cut(*hop) or self._blocked[hop] > 0 for hop in hops)

    def drops_large(self, sender: WorkerId, receiver: WorkerId) -> bool:
        """Whether large messages are lost from one to the other, by the way that there is."""
        return bool(self._dropping_large) and any(
            self._dropping_large[hop] > 0 for hop in self._hops(sender, receiver)
        )

    def _hops(self, sender: WorkerId, receiver: WorkerId) -> tuple[Pair, ...]:
        """Links that tensors take, none where there is no way."""
        if COORDINATOR in (sender, receiver):
            return ((sender, receiver),)
        relay = self._ways.get(sender, {}).get(receiver)
        if relay is not None:
            return self._carried(sender, receiver, relay)
        return () if receiver in self.walled else ((sender, receiver),)

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

    def probe(
        self, worker: WorkerId, peers: Sequence[WorkerId], *, only_direct: bool = False
    ) -> tuple[LinksMeasured, float]:
        """Report of a worker that probes these peers, and the seconds that this takes it.

        Args:
            worker: the prober.
            peers: workers that it probes: by dialling them, else by the relay that it was told.
            only_direct: whether it tries no relay.
        """
        links: list[Link] = []
        unreached: list[Unreached] = []
        seconds = PROBE_S
        for peer in peers:
            if (obstacle := self._obstacle(worker, peer)) is None:
                links += [self._probed(worker, peer), self._probed(peer, worker)]
                self._ways.get(worker, {}).pop(peer, None)
                continue
            seconds = max(seconds, self._unanswered_s(peer, obstacle))
            unreached.append(Unreached(peer=peer, obstacle=obstacle))
            relay = None if only_direct else self._ways.get(worker, {}).get(peer)
            if relay is None:
                continue
            if self._carries(worker, peer):
                links += self._relayed_links(worker, peer, relay)
            else:
                unreached.append(Unreached(peer=peer, via=relay))
        reached = {link.receiver for link in links if link.via is None}
        shut_out = tuple(peer for peer in peers if peer in reached and worker in self.walled)
        report = LinksMeasured(links=tuple(links), unreached=tuple(unreached), shut_out=shut_out)
        return report, seconds

    def _probed(self, sender: WorkerId, receiver: WorkerId) -> Link:
        """A link as a probe measures it in the weather of the moment."""
        link, slower = self.link(sender, receiver), self._weather.get((sender, receiver), FAIR).slower
        return replace(link, latency_s=link.latency_s * slower, bytes_per_s=link.bytes_per_s / slower)

    def _obstacle(self, worker: WorkerId, peer: WorkerId) -> Obstacle | None:
        """Fault of the direct way as a probe finds it; None: there is none."""
        if peer in self.walled or not self.answers(peer):
            return Obstacle.NO_ANSWER
        if self._is_cut(worker, peer) or self._is_cut(peer, worker) or self._blocked[worker, peer]:
            return Obstacle.NO_ANSWER
        if self._dropping_large[worker, peer] or self._dropping_large[peer, worker]:
            return Obstacle.FULL_PACKETS_VANISH
        return None

    def _unanswered_s(self, peer: WorkerId, obstacle: Obstacle) -> float:
        """Seconds until a probe knows of an obstacle; a walled worker's router refuses at once."""
        if obstacle is Obstacle.FULL_PACKETS_VANISH:
            return VANISHED_S
        return PROBE_S if peer in self.walled else UNANSWERED_S

    def _carries(self, worker: WorkerId, peer: WorkerId) -> bool:
        """Whether bulk passes to a peer and back by the way that there is."""
        if self.is_cut(worker, peer) or not self.answers(peer):
            return False
        hops = self._hops(worker, peer)
        both = (*hops, *((receiver, sender) for sender, receiver in hops))
        return not any(self._is_cut(*hop) or self._blocked[hop] or self._dropping_large[hop] for hop in both)

    def _relayed_links(self, worker: WorkerId, peer: WorkerId, relay: WorkerId) -> tuple[Link, Link]:
        """The links there and back by a relay."""
        hops = [self._probed(*hop) for hop in self._hops(worker, peer)]
        latency_s, rate = sum(x.latency_s for x in hops), min(x.bytes_per_s for x in hops)
        there = Link(sender=worker, receiver=peer, latency_s=latency_s, bytes_per_s=rate, via=relay)
        return there, replace(there, sender=peer, receiver=worker)

    def arrival_s(self, sender: WorkerId, receiver: WorkerId, num_bytes: int, *, now: float) -> float | None:
        """Time at which the last byte arrives, behind what links carry already; None if it does not."""
        if self.is_cut(sender, receiver):
            return None
        if num_bytes > SMALL_BYTES and self.drops_large(sender, receiver):
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
