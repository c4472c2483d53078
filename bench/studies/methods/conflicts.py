"""SkipPipe's conflict-based search: all microbatches of a wave take their best trips, then some give way.

Three kinds of conflict, one after the other, each resolved by forbidding something to some microbatches in a few
different ways and finding their trips anew: A, more visits of a stage than its workers' slots; B, more visits of a
worker than its slots; C, two microbatches at a worker at the same time.

Rules of this file
- Entries are taken up by when their last trip is over; of equal ones the one with fewer open chunks, then the older.
- A microbatch's trip depends on its own bans and windows only, so only those whose own have changed are found anew.

Source: SkipPipe (arXiv 2502.19913), its second phase, with the limits of the published search.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, count, islice

from bench.studies.methods.method import MayGoOn
from bench.studies.methods.wave import Trip, Visit, Wave, Window, find_trip

NUM_CANDIDATES = 32
"""Ways to spread the wave over the stages, after which workers are looked at."""
STAGE_CHILDREN = 3
WORKER_CHILDREN = 2
EXCESS_S = 0.01
"""What each visit too many of a worker that is not looked at yet counts."""
NUM_COLLISION_FREE = 8
"""After so many plans without collisions the search is over."""
GOOD_ENOUGH = 0.88
"""So is it below this part of the first plan's makespan."""
HOPELESS_S = 5.0
"""Plans so far above the best are not taken up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A wave's trips with all that led to them; each tuple has one element per microbatch.

    Args:
        trips: the best that bans and windows allow.
        is_open: chunks that each may visit, as bits.
        windows: when each has to wait.
    """

    trips: tuple[Trip, ...]
    is_open: tuple[int, ...]
    windows: tuple[tuple[Window, ...], ...]

    @property
    def finish_s(self) -> float:
        return max(trip.finish_s for trip in self.trips)

    @property
    def num_open(self) -> int:
        return sum(chunks.bit_count() for chunks in self.is_open)


Judge = Callable[[Entry], float]
"""Makespan of a wave's plan in seconds, infinite if it deadlocks."""


class Trips:
    """Finds trips, each only once, while it may go on."""

    def __init__(self, wave: Wave, may_go_on: MayGoOn) -> None:
        self.wave = wave
        self.may_go_on = may_go_on
        self._known: dict[tuple[int, int, tuple[Window, ...]], Trip | None] = {}

    def first(self) -> Entry | None:
        """Everybody's best trip, with nothing forbidden."""
        every = (1 << len(self.wave.stage_of)) - 1
        num = self.wave.num_microbatches
        return self._entry((every,) * num, ((),) * num)

    def without(self, entry: Entry, bans: Mapping[int, int]) -> Entry | None:
        """`entry` after chunks, as bits, were closed to some microbatches; None if one finds no trip any more."""
        is_open = tuple(chunks & ~bans.get(m, 0) for m, chunks in enumerate(entry.is_open))
        return self._entry(is_open, entry.windows)

    def after(self, entry: Entry, microbatch: int, window: Window) -> Entry | None:
        """`entry` after one microbatch was told to wait."""
        windows = list(entry.windows)
        windows[microbatch] = (*windows[microbatch], window)
        return self._entry(entry.is_open, tuple(windows))

    def _entry(self, is_open: tuple[int, ...], windows: tuple[tuple[Window, ...], ...]) -> Entry | None:
        trips: list[Trip] = []
        for m, (chunks, when) in enumerate(zip(is_open, windows, strict=True)):
            trip = self._trip(m, chunks, when)
            if trip is None:
                return None
            trips.append(trip)
        return Entry(trips=tuple(trips), is_open=is_open, windows=windows)

    def _trip(self, microbatch: int, is_open: int, windows: tuple[Window, ...]) -> Trip | None:
        key = (microbatch, is_open, windows)
        if key not in self._known:
            self._known[key] = find_trip(self.wave, microbatch, is_open, windows, self.may_go_on)
        return self._known[key]


class _Queue:
    """Entries by when they are over."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: Entry, extra_s: float = 0.0) -> None:
        item = (entry.finish_s + extra_s, entry.num_open, next(self._numbers), entry)
        heapq.heappush(self._heap, item)

    def pop(self) -> Entry:
        return heapq.heappop(self._heap)[-1]


def spread_over_stages(trips: Trips) -> list[Entry]:
    """Phase A: up to `NUM_CANDIDATES` entries that use no stage too often, the chunks of stages not used closed."""
    queue, candidates = _Queue(), dict[tuple[int, ...], Entry]()
    seen: set[tuple[int, ...]] = set()
    first = trips.first()
    if first is not None:
        queue.push(first)
    while len(queue) and len(candidates) < NUM_CANDIDATES and trips.may_go_on():
        if len(queue) == 1 and len(candidates) > 1:
            break
        entry = queue.pop()
        if entry.is_open in seen:
            continue
        seen.add(entry.is_open)
        bans = _stage_bans(trips.wave, entry)
        if bans is None:
            frozen = _frozen(trips.wave, entry)
            candidates.setdefault(frozen.is_open, frozen)
            continue
        for ban in bans:
            child = trips.without(entry, ban)
            if child is not None:
                queue.push(child)
    return list(candidates.values())


def _stage_bans(wave: Wave, entry: Entry) -> list[dict[int, int]] | None:
    """Ways to relieve the first stage that is visited too often; None if there is none."""
    sizes, path_len = wave.problem.stage_sizes, wave.problem.path_len
    visitors = _visitors(entry, lambda chunk: wave.stage_of[chunk])
    for stage in range(1, wave.problem.num_stages):
        excess = len(visitors[stage]) - sizes[stage] * wave.num_slots
        if excess > 0:
            stages_left = [sum(1 for bits in wave.at_stage if chunks & bits) for chunks in entry.is_open]
            movable = [m for m in visitors[stage] if stages_left[m] > path_len]
            ways = islice(combinations(movable, excess), STAGE_CHILDREN)
            return [dict.fromkeys(way, wave.at_stage[stage]) for way in ways]
    return None


def _frozen(wave: Wave, entry: Entry) -> Entry:
    """`entry` with only those stages open to a microbatch that its trip visits."""
    used = tuple(
        chunks & sum(wave.at_stage[wave.stage_of[chunk]] for chunk in trip.chunks)
        for chunks, trip in zip(entry.is_open, entry.trips, strict=True)
    )
    return Entry(trips=entry.trips, is_open=used, windows=entry.windows)


def spread_over_workers(trips: Trips, candidates: Iterable[Entry]) -> Entry | None:
    """Phase B alone: the first entry that uses no worker too often; None if none was found."""
    queue, seen = _Queue(), set[tuple[int, ...]]()
    for entry in candidates:
        queue.push(entry)
    while len(queue) and trips.may_go_on():
        entry = queue.pop()
        if entry.is_open in seen:
            continue
        seen.add(entry.is_open)
        if not _relieve(trips, queue, entry):
            return entry
    return None


def avoid_collisions(trips: Trips, candidates: Iterable[Entry], judge: Judge) -> Entry | None:
    """Phases B and C: the entry with the least makespan that was come by; None if none got through phase B.

    Args:
        trips: finds them.
        candidates: from phase A.
        judge: a whole step's makespan.
    """
    queue, seen = _Queue(), set[tuple[object, object]]()
    for entry in candidates:
        queue.push(entry)
    best, best_s, first_s, num_free = None, float("inf"), float("inf"), 0
    while len(queue) and num_free < NUM_COLLISION_FREE and trips.may_go_on():
        entry = queue.pop()
        if (entry.is_open, entry.windows) in seen:
            continue
        seen.add((entry.is_open, entry.windows))
        if _relieve(trips, queue, entry):
            continue
        if best is None:
            best, best_s = entry, judge(entry)
            first_s = best_s
        waits = _collision(entry)
        num_free += not waits
        for microbatch, window in waits:
            child = trips.after(entry, microbatch, window)
            if child is None:
                continue
            child_s = judge(child)
            if child_s < best_s:
                best, best_s = child, child_s
            if best_s < GOOD_ENOUGH * first_s:
                return best
            if child_s <= best_s + HOPELESS_S:
                queue.push(child)
    return best


def _relieve(trips: Trips, queue: _Queue, entry: Entry) -> bool:
    """Whether a chunk is visited too often; if so, ways to relieve the first such were added to the queue."""
    wave = trips.wave
    overfull = [
        (chunk, who)
        for chunk, who in sorted(_visitors(entry, lambda chunk: chunk).items())
        if wave.stage_of[chunk] and len(who) > wave.num_slots
    ]
    if not overfull:
        return False
    (chunk, visitors), *rest = overfull
    others = wave.at_stage[wave.stage_of[chunk]] & ~(1 << chunk)
    movable = [m for m in visitors if entry.is_open[m] & others]
    extra_s = EXCESS_S * sum(len(who) - wave.num_slots for _, who in rest)
    for way in islice(combinations(movable, len(visitors) - wave.num_slots), WORKER_CHILDREN):
        child = trips.without(entry, dict.fromkeys(way, 1 << chunk))
        if child is not None:
            queue.push(child, extra_s)
    return True


def _visitors(entry: Entry, of: Callable[[int], int]) -> defaultdict[int, list[int]]:
    """Microbatches that go forward at each stage or chunk, whose trips are over first first."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for _, m in sorted((trip.finish_s, m) for m, trip in enumerate(entry.trips)):
        for chunk in entry.trips[m].chunks:
            found[of(chunk)].append(m)
    return found


def _collision(entry: Entry) -> list[tuple[int, Window]]:
    """Ways out of the first collision: who waits until when. Empty if there is none.

    Pairs are looked at slowest first. Of forward and backward the later begun waits; of two forwards the faster
    microbatch, or, unless the other is one of the slowest quarter, that one. Two backwards are left to themselves.
    """
    slowest_first = sorted(range(len(entry.trips)), key=lambda m: (-entry.trips[m].finish_s, m))
    visits = [_visits_by_chunk(entry.trips[m]) for m in slowest_first]
    for i, j in combinations(range(len(slowest_first)), 2):
        for slow, fast in _overlaps(visits[i], visits[j]):
            slower, faster = slowest_first[i], slowest_first[j]
            slow_waits = (slower, (fast.chunk, fast.begin_s, fast.end_s))
            fast_waits = (faster, (slow.chunk, slow.begin_s, slow.end_s))
            if not (slow.is_forward and fast.is_forward):
                return [fast_waits if slow.begin_s < fast.begin_s else slow_waits]
            return [slow_waits, fast_waits] if i > len(slowest_first) / 4 else [fast_waits]
    return []


def _visits_by_chunk(trip: Trip) -> dict[int, list[Visit]]:
    found: dict[int, list[Visit]] = {}
    for visit in trip.visits:
        found.setdefault(visit.chunk, []).append(visit)
    return found


def _overlaps(ours: dict[int, list[Visit]], theirs: dict[int, list[Visit]]) -> Iterator[tuple[Visit, Visit]]:
    """Visits at the same chunk and time of which one at least is forward."""
    for chunk in sorted(ours.keys() & theirs.keys()):
        for our in ours[chunk]:
            for their in theirs[chunk]:
                do_meet = our.begin_s < their.end_s and their.begin_s < our.end_s
                if do_meet and (our.is_forward or their.is_forward):
                    yield our, their
