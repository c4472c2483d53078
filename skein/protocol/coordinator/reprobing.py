"""Repeated probes of links: a fault, or a slow moment, that a probe has found is not to last longer than it does.

Rules of this file
- A pair of workers is probed again while a relay carries for it, or while a link of it is slow: below
  `SLOW_BYTES_PER_S`, or a fourth of the best that was measured. The pauses grow, up to `LAST_PAUSE_S`.
- A pair on a relay tries the direct way alone; only where the link by the relay is slow is that measured again.
- A repeated measurement of a slow link raises its bandwidth and never lowers it: training may use the link meanwhile.
- A pair that needs a relay again soon after it was back on the direct way waits twice as long as before.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from skein.protocol.messages.reports import LinksMeasured
from skein.topology.fleet import Link
from skein.types import WorkerId

FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 300.0
"""Seconds to the first repeated probe of a pair, and the longest pause between two."""
GROWTH = 1.5
"""Factor from one pause to the next: a link is used again after at most about half as long as its fault lasted."""
SLOW_BYTES_PER_S = 1e6
"""Bandwidth below which a measurement is doubted, whatever was measured before."""
SLOWER = 4.0
"""Factor below a link's best measurement at which another one is doubted."""
MAX_AT_ONCE = 8
"""Peers that one worker probes again at a time; the others wait a second."""
_NEXT_S = 1.0
_QUIET = 8.0
"""Pauses that a pair must do without probes before its next fault counts as a new one."""

Pair = tuple[WorkerId, WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Probe that is due: `prober` measures the links to `peers`, by the direct way alone if `only_direct`."""

    prober: WorkerId
    peers: tuple[WorkerId, ...]
    only_direct: bool


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A pair whose links are probed again, or were until `due_at` is a while ahead."""

    pause_s: float
    due_at: float
    is_relayed: bool
    is_slow: bool
    num_asked: int = 0

    @property
    def is_open(self) -> bool:
        return self.is_relayed or self.is_slow


class Reprobing:
    """Pairs of workers that are to be probed again, and when.

    Args:
        live: every worker that is here; others are not watched, whatever a report names.
        dials: whether one worker can dial another, by pair; absent: it was not tried.
    """

    def __init__(self, live: Container[WorkerId], dials: Mapping[Pair, bool]) -> None:
        self._live = live
        self._dials = dials
        self._watched: dict[Pair, _Watched] = {}
        """By pair in order of names."""
        self._queue: list[tuple[float, Pair]] = []
        """Heap of times at which a pair is due; one that its pair does not have any more is skipped."""
        self._best: dict[tuple[WorkerId, WorkerId, WorkerId | None], float] = {}
        """Best bandwidth of a link by sender, receiver and relay."""

    def believed(self, report: LinksMeasured, links: Mapping[Pair, Link]) -> LinksMeasured:
        """The report, with links that were measured again because they were slow no slower than they were.

        Args:
            report: measurements of a probe.
            links: the measurements before, by sender and receiver.
        """
        return replace(report, links=tuple(self._raised(link, links) for link in report.links))

    def _raised(self, link: Link, links: Mapping[Pair, Link]) -> Link:
        watched = self._watched.get(_ordered(link.sender, link.receiver))
        before = links.get((link.sender, link.receiver))
        if watched is None or not watched.is_slow or not watched.num_asked or before is None:
            return link
        if before.via != link.via or before.bytes_per_s <= link.bytes_per_s:
            return link
        return replace(link, bytes_per_s=before.bytes_per_s)

    def measured(
        self, worker: WorkerId, report: LinksMeasured, relays: Mapping[Pair, WorkerId], *, now: float
    ) -> None:
        """A worker has probed: watch the pairs that a relay carries for, or that have a slow link.

        Args:
            worker: the prober.
            report: its measurements.
            relays: relays from sender to receiver, as they are after this report.
            now: time.
        """
        slow: dict[Pair, bool] = {}
        for link in report.links:
            peer = link.receiver if link.sender == worker else link.sender
            if peer in self._live and {link.sender, link.receiver} == {worker, peer}:
                pair = _ordered(worker, peer)
                slow[pair] = self._is_slow(link) or slow.get(pair, False)
        for unreached in report.unreached:
            if unreached.peer in self._live:
                slow.setdefault(_ordered(worker, unreached.peer), False)
        for pair, is_slow in slow.items():
            is_relayed = pair in relays or pair[::-1] in relays
            self._note(pair, is_relayed=is_relayed, is_slow=is_slow, now=now)

    def _is_slow(self, link: Link) -> bool:
        key = link.sender, link.receiver, link.via
        best = self._best[key] = max(self._best.get(key, 0.0), link.bytes_per_s)
        return link.bytes_per_s < max(SLOW_BYTES_PER_S, best / SLOWER)

    def _note(self, pair: Pair, *, is_relayed: bool, is_slow: bool, now: float) -> None:
        watched = self._watched.get(pair)
        if watched is None:
            if not (is_relayed or is_slow):
                return
            watched = self._watched[pair] = _Watched(
                pause_s=FIRST_PAUSE_S, due_at=now + FIRST_PAUSE_S, is_relayed=is_relayed, is_slow=is_slow
            )
            heappush(self._queue, (watched.due_at, pair))
            return
        was_open = watched.is_open
        watched.is_relayed, watched.is_slow = is_relayed, is_slow
        if was_open and not watched.is_open:
            self._set_due(pair, watched, now + _QUIET * watched.pause_s)
        elif watched.is_open and not was_open:
            watched.pause_s = min(2 * watched.pause_s, LAST_PAUSE_S)
            self._set_due(pair, watched, now + watched.pause_s)

    def lost(self, worker: WorkerId) -> None:
        """A worker is gone: a process that comes in its name has other links."""
        for pair in [pair for pair in self._watched if worker in pair]:
            del self._watched[pair]
        for link in [link for link in self._best if worker in link]:
            del self._best[link]

    def deadline(self) -> float | None:
        """Time at which `due` is to be called; None: no pair is watched."""
        return self._queue[0][0] if self._queue else None

    def due(self, *, now: float) -> Iterator[Retry]:
        """Probes that are due; each counts as asked."""
        peers: dict[tuple[WorkerId, bool], list[WorkerId]] = defaultdict(list)
        while self._queue and self._queue[0][0] <= now:
            due_at, pair = heappop(self._queue)
            watched = self._watched.get(pair)
            if watched is None or watched.due_at != due_at:
                continue
            if not watched.is_open:
                del self._watched[pair]
                continue
            prober, peer = self._ends(pair, watched)
            chosen = peers[prober, not watched.is_slow]
            if len(chosen) < MAX_AT_ONCE:
                chosen.append(peer)
                self._asked(pair, watched, now=now)
            else:
                self._set_due(pair, watched, now + _NEXT_S)
        for (prober, only_direct), named in sorted(peers.items()):
            yield Retry(prober=prober, peers=tuple(named), only_direct=only_direct)

    def _ends(self, pair: Pair, watched: _Watched) -> Pair:
        """Prober and peer: the worker that cannot dial the other one, or each in turn."""
        one, other = pair
        there, back = self._dials.get((one, other)), self._dials.get((other, one))
        if watched.is_relayed and there != back and True in (there, back):
            return (other, one) if there else (one, other)
        return (other, one) if watched.num_asked % 2 else (one, other)

    def _asked(self, pair: Pair, watched: _Watched, *, now: float) -> None:
        watched.num_asked += 1
        watched.pause_s = min(watched.pause_s * GROWTH, LAST_PAUSE_S)
        self._set_due(pair, watched, now + watched.pause_s)
        if watched.pause_s == LAST_PAUSE_S:
            # It has been so for long: the link is another one than it was.
            self._forget_best(pair)

    def _forget_best(self, pair: Pair) -> None:
        for link in [link for link in self._best if set(pair) == {link[0], link[1]}]:
            del self._best[link]

    def _set_due(self, pair: Pair, watched: _Watched, due_at: float) -> None:
        watched.due_at = due_at
        heappush(self._queue, (due_at, pair))


def _ordered(one: WorkerId, other: WorkerId) -> Pair:
    return (one, other) if one < other else (other, one)
