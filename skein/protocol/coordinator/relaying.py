"""Ways between workers that cannot dial each other: what probes tell, and by which relay tensors go.

Rules of this file
- Of two workers one of which can dial the other, that one does, and is called back at itself: no third party carries.
- Where neither can, a relay carries that both can dial: the coordinator, which every worker can, or a worker that
  offers itself. Each is tried, by a probe through it, and the one that is quickest there and back is kept.
- A path that passes small packets only counts as one by which neither end can dial the other: connections would open,
  and no tensor arrive.
- What is not known is taken to be as ever: whoever advertises an address can be dialled; but whom somebody could not
  dial, and nobody could, cannot be dialled by others either.
- Several workers may be gone before the first of them is told of: what names one of those says nothing until then.
- Nothing here is recorded: after a restart of the coordinator workers join again, and are probed again. Until then they
  keep the ways that they have.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from skein.protocol.membership.membership import Entry
from skein.protocol.messages.directives import Directive, Member, Probe
from skein.protocol.messages.reports import LinksMeasured
from skein.protocol.messages.ways import COORDINATOR_RELAY, Obstacle, RelayPlace, Way, Ways
from skein.topology.fleet import Link
from skein.types import WorkerId

USUAL_BYTES = 1 << 20
"""Size of what relays are compared by: an activation's."""
MAX_TRIED = 4
"""Relays among workers that are tried for a pair."""

Pair = tuple[WorkerId, WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A directive to a worker."""

    worker: WorkerId
    directive: Directive


class Relaying:
    """Knowledge of who can dial whom, and the ways that follow.

    Args:
        live: every worker that is here.
        to_probe: a worker as those may know it who are to measure the link to it.
    """

    def __init__(self, live: Mapping[WorkerId, Entry], to_probe: Callable[[Member], Member]) -> None:
        self._live = live
        self._to_probe = to_probe
        self._dials: dict[Pair, bool] = {}
        """Whether the first can dial the second, as far as it was tried."""
        self._tried: dict[Pair, dict[WorkerId, tuple[Link, ...]]] = defaultdict(dict)
        """Links there and back by relay, for pairs in order of names; none for one by which nothing came through."""
        self._relays: dict[Pair, WorkerId] = {}
        """Relay from the first to the second."""
        self._obstacles: dict[Pair, Obstacle] = {}
        """Fault of the direct path, for pairs in order of names that a probe could not use it for."""
        self._broken: set[Pair] = set()
        """Pairs in order of names whose direct path was usable once, and is not."""
        self._told: dict[WorkerId, Ways | None] = {}
        """Ways that each worker was told; None for one that may have missed them."""
        self._asked: set[Pair] = set()

    @property
    def relays(self) -> Mapping[Pair, WorkerId]:
        """Relay from one worker to another, "" for the coordinator, where one does not dial the other."""
        return self._relays

    @property
    def obstacles(self) -> Mapping[Pair, Obstacle]:
        """Fault of the direct path, for pairs in order of names; as the newest probe found it."""
        return self._obstacles

    @property
    def dials(self) -> Mapping[Pair, bool]:
        """Whether the first can dial the second, for pairs that were tried."""
        return self._dials

    @property
    def num_tried(self) -> int:
        """Results of tries that are kept."""
        return sum(map(len, self._tried.values()))

    @property
    def links(self) -> Iterator[Link]:
        """Links by way of relays, as measured."""
        for pair, relay in self._relays.items():
            links = self._tried.get(_ordered(*pair), {}).get(relay, ())
            yield from (link for link in links if (link.sender, link.receiver) == pair)

    # --- what is told ---

    def joined(self, worker: WorkerId) -> Iterator[Told]:
        """A worker is here, or back on a new stream, by which it may have missed what it was told."""
        if worker in self._told:
            self._told[worker] = None
        yield from self._tell()

    def lost(self, worker: WorkerId) -> Iterator[Told]:
        """A worker is gone, and with it what it carried; who comes in its name may be elsewhere."""
        for known in (self._dials, self._tried, self._relays, self._obstacles):
            for pair in [pair for pair in known if worker in pair]:
                del known[pair]
        for tried in self._tried.values():
            tried.pop(worker, None)
        self._told.pop(worker, None)
        self._asked = {pair for pair in self._asked if worker not in pair}
        self._broken = {pair for pair in self._broken if worker not in pair}
        orphans = {_ordered(*pair) for pair, relay in self._relays.items() if relay == worker}
        for one, other in sorted(orphans):
            if one in self._live and other in self._live:
                yield from self._settle(one, other)
        yield from self._tell()

    def measured(self, worker: WorkerId, report: LinksMeasured) -> Iterator[Told]:
        """A worker tells whom it reached, by which way, and who cannot dial it."""
        found: dict[tuple[WorkerId, WorkerId | None], list[Link]] = defaultdict(list)
        for link in report.links:
            found[link.receiver if link.sender == worker else link.sender, link.via].append(link)
        failed: dict[tuple[WorkerId, WorkerId | None], list[Link]] = {
            (unreached.peer, unreached.via): [] for unreached in report.unreached
        }
        obstacles = {
            unreached.peer: unreached.obstacle for unreached in report.unreached if unreached.via is None
        }
        peers = set()
        for (peer, via), links in {**failed, **found}.items():
            if peer not in self._live or peer == worker or not self._may_relay(via):
                continue
            peers.add(peer)
            if via is None:
                self._dialled(
                    worker,
                    peer,
                    is_back=peer not in report.shut_out,
                    obstacle=None if links else obstacles[peer],
                )
            elif via == worker and not links:
                # Whoever is called back here did dial this worker, and may no longer: it is to try again.
                self._dials.pop((peer, worker), None)
                self._asked.discard((peer, worker))
            else:
                self._tried[_ordered(worker, peer)][via] = tuple(links)
        # A relay may have been found that both ends dial, and was not tried.
        peers |= {
            to
            for (sender, to), relay in self._relays.items()
            if sender == worker and relay not in (sender, to)
        }
        for peer in sorted(peers):
            yield from self._settle(worker, peer)
        yield from self._tell()

    def doubted(self, worker: WorkerId, peer: WorkerId) -> Iterator[Told]:
        """A worker could not reach a peer by the way that it has: it looks which there are now."""
        if worker in self._live and peer in self._live and worker != peer:
            yield self._probe(worker, peer)

    # --- what follows ---

    def _dialled(self, worker: WorkerId, peer: WorkerId, *, is_back: bool, obstacle: Obstacle | None) -> None:
        """A worker has tried to dial a peer; `is_back`: the peer could dial it, where it was reached."""
        pair, was_dialled = _ordered(worker, peer), self._dials.get((worker, peer), False)
        self._dials[worker, peer] = obstacle is None
        if obstacle is None:
            self._dials[peer, worker] = is_back
            self._obstacles.pop(pair, None)
            self._broken.discard(pair)
        else:
            self._obstacles[pair] = obstacle
        if obstacle is Obstacle.FULL_PACKETS_VANISH:
            self._dials[peer, worker] = False
        elif obstacle is not None and was_dialled:
            # The path has changed, so what is known of the other direction is from before.
            self._broken.add(pair)
            self._dials.pop((peer, worker), None)
            self._asked.discard((peer, worker))

    def _settle(self, one: WorkerId, other: WorkerId) -> Iterator[Told]:
        """Decide how two workers reach each other, as far as can be said; probes find out the rest."""
        there, back = self._can_dial(one, other), self._can_dial(other, one)
        for pair in ((one, other), (other, one)):
            self._relays.pop(pair, None)
        if there and back:
            return
        if there or back:
            dialling, dialled = (one, other) if there else (other, one)
            if (dialling, dialled) not in self._dials:
                if _ordered(one, other) in self._broken:
                    # Both reach the coordinator, so tensors pass while one of them finds out.
                    self._relays[one, other] = self._relays[other, one] = COORDINATOR_RELAY
                    yield from self._tell()
                yield from self._ask(dialling, dialled)
                return
            self._relays[dialled, dialling] = dialled
            return
        pair = _ordered(one, other)
        tried = self._tried[pair]
        candidates = self._candidates(pair)
        untried = [relay for relay in candidates if relay not in tried]
        best = untried[0] if untried else min(candidates, key=lambda relay: (_seconds(tried[relay]), relay))
        self._relays[pair] = self._relays[pair[::-1]] = best
        if untried:
            yield from self._tell()
            yield self._probe(*pair)

    def _candidates(self, pair: Pair) -> list[WorkerId]:
        """Relays that both can dial."""
        offered = [
            worker
            for worker, entry in sorted(self._live.items())
            if entry.hello.offers_relay
            and worker not in pair
            and all(self._dials.get((end, worker), False) for end in pair)
        ]
        return [COORDINATOR_RELAY, *offered[:MAX_TRIED]]

    def _may_relay(self, via: WorkerId | None) -> bool:
        """Whether a relay is here: a report may name anybody, and what it names would be kept."""
        return via in (None, COORDINATOR_RELAY) or via in self._live

    def _can_dial(self, sender: WorkerId, receiver: WorkerId) -> bool:
        known = self._dials.get((sender, receiver))
        if known is not None:
            return known
        others = [is_reached for (_, dialled), is_reached in self._dials.items() if dialled == receiver]
        return not others or any(others)

    def _ask(self, dialling: WorkerId, dialled: WorkerId) -> Iterator[Told]:
        """Have a worker try, once, what nobody knows."""
        if (dialling, dialled) not in self._asked:
            self._asked.add((dialling, dialled))
            yield self._probe(dialling, dialled)

    def _probe(self, worker: WorkerId, peer: WorkerId) -> Told:
        return Told(worker=worker, directive=Probe(peers=(self._to_probe(self._live[peer].member),)))

    def _tell(self) -> Iterator[Told]:
        """The ways of everybody who does not know them."""
        wanted: dict[WorkerId, Ways] = {}
        for worker in {worker for pair in self._relays for worker in pair} | self._told.keys():
            if worker in self._live:
                wanted[worker] = self._ways_of(worker)
        for worker, ways in sorted(wanted.items()):
            if self._told.get(worker) != ways:
                self._told[worker] = ways
                yield Told(worker=worker, directive=ways)

    def _ways_of(self, worker: WorkerId) -> Ways:
        ways = tuple(
            Way(
                peer=receiver,
                incarnation=self._live[receiver].hello.incarnation,
                relay=self._place(relay),
            )
            for (sender, receiver), relay in sorted(self._relays.items())
            if sender == worker and receiver in self._live and self._may_relay(relay)
        )
        listens = {
            relay
            for (_, receiver), relay in self._relays.items()
            if receiver == worker and relay != worker and self._may_relay(relay)
        }
        return Ways(ways=ways, listens=tuple(self._place(relay) for relay in sorted(listens)))

    def _place(self, relay: WorkerId) -> RelayPlace:
        address = "" if relay == COORDINATOR_RELAY else self._live[relay].hello.address
        return RelayPlace(worker=relay, address=address)


def _seconds(links: Sequence[Link]) -> float:
    """Seconds there and back; infinite where nothing came through."""
    took = sum(link.latency_s + USUAL_BYTES / link.bytes_per_s for link in links if link.bytes_per_s > 0)
    return took or inf


def _ordered(one: WorkerId, other: WorkerId) -> Pair:
    return (one, other) if one < other else (other, one)
