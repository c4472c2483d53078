"""All trips that can matter, one row each, and what the cheapest of them cost at given prices of workers.

Between a forward and its backward at the last hop there is little time: the links to the loss and back, and the loss.
If that gap is shorter than any op of this worker, either the worker idles through it, or it runs another op there and
the microbatch waits until that has ended. So such a trip has two rows: one with idle time, one longer. (Gaps without an
op are parts of different pauses between two ops, so their idle times add up.)
"""

from dataclasses import dataclass

import numpy as np

from skein.plan.route.bounds.lots import Tariff
from skein.plan.route.bounds.trips import FAR, MOST_CLOSED, Trips
from skein.plan.route.problem import F64, I64

MOST_TRIPS = 1_000_000
"""Rows up to which trips are listed: about 0.1 s to price once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Catalogue:
    """Trips by origin, then by length.

    Args:
        workers: (num_trips, num_hops), and the loss's worker as one more column in a `LINE`.
        length_s: (num_trips,) round trip if nothing waits.
        held_s: (num_trips, num_hops) how long each hop's slot is taken, at least.
        idle_s: (num_trips,) how long the last hop's worker idles for it.
        first: (num_workers + 1,) rows at which origins begin.
    """

    workers: I64
    length_s: F64
    held_s: F64
    idle_s: F64
    first: I64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Prices of each worker, (num_workers,), at least 0.

    As a later hop: for a second of its device, for a visit, for a second of a slot; for a second as the loss's worker.
    """

    work: F64
    visit: F64
    hold: F64
    loss: F64


def longest_s(trips: Trips, counts: tuple[int, ...], end_s: float) -> F64:
    """(num_workers,) what a trip may take at most in a lot that ends by `end_s`.

    Whoever takes longer than the end less a shortest trip shares a slot with nobody, so the others would have to do
    with one slot less; that is out of the question if one of those would then hold too many for the time.
    """
    trip_s = trips.least_s()
    slots, count = np.maximum(trips.slots[0], 1), min(counts)
    others = np.ceil((count - 1) / np.maximum(slots - 1, 1))
    is_shared = (count > 1) & ((slots == 1) | (others * trip_s > end_s))
    return np.where(np.isfinite(trip_s), np.where(is_shared, end_s - trip_s, end_s), -FAR)


def catalogue(trips: Trips, limit_s: F64) -> Catalogue | None:
    """Every trip over different workers that is no longer than `limit_s` at its origin; None if they are too many."""
    size = len(trips.loss_s)
    if size > MOST_CLOSED:
        return None
    rest_s = (*trips.rests_s(), *([] if trips.is_loop else [np.zeros((size, size))]))
    pair_s = trips.pair_s()
    origins = np.flatnonzero(np.isfinite(limit_s))
    rows, so_far_s = origins[:, None], trips.both_s[0][origins]
    for hop in range(1, trips.num_hops + (not trips.is_loop)):
        own_s = trips.both_s[hop] if hop < trips.num_hops else trips.loss_s
        num_workers = len(own_s)
        if len(rows) * num_workers > 4 * MOST_TRIPS:
            return None
        reached_s = so_far_s[:, None] + pair_s[rows[:, -1]] + own_s
        # No worker twice: programs are made only where each holds one chunk.
        reached_s[np.arange(len(rows))[:, None], rows] = FAR
        # Trips that cannot be home in time are dropped hop by hop, or the list would grow with every one.
        keeps = reached_s + rest_s[hop - 1][:, rows[:, 0]].T <= limit_s[rows[:, 0]][:, None]
        which, worker = np.nonzero(keeps)
        rows, so_far_s = np.hstack([rows[which], worker[:, None]]), reached_s[which, worker]
    if not len(rows) or len(rows) > MOST_TRIPS:
        return None
    length_s = so_far_s
    if trips.is_loop:
        home_s = pair_s[rows[:, -1], rows[:, 0]] if trips.num_hops > 1 else 0.0
        length_s = length_s + home_s + trips.loss_s[rows[:, 0]]
    held_s = _held_s(trips, rows, length_s)
    rows, length_s, held_s, idle_s = _with_gaps(trips, rows, length_s, held_s)
    order = np.lexsort((length_s, rows[:, 0]))
    return Catalogue(
        workers=rows[order],
        length_s=length_s[order],
        held_s=held_s[order],
        idle_s=idle_s[order],
        first=np.searchsorted(rows[order, 0], np.arange(len(trips.loss_s) + 1)),
    )


def _with_gaps(trips: Trips, rows: I64, length_s: F64, held_s: F64) -> tuple[I64, F64, F64, F64]:
    """Trips, lengths, held and idle times with two rows for each trip with a short gap; see the top of the file."""
    last = trips.num_hops - 1
    if last < 1:
        return rows, length_s, held_s, np.zeros(len(rows))
    op_s = np.minimum(trips.forward_s[1:].min(axis=0), trips.backward_s[1:].min(axis=0))
    worker = rows[:, last]
    gap_s = held_s[:, last] - trips.both_s[last][worker]
    waits_s = np.maximum(0.0, op_s[worker] - gap_s)
    idle_s = np.where(waits_s > 0.0, gap_s, 0.0)
    short = np.flatnonzero(waits_s > 0.0)
    return (
        np.concatenate([rows, rows[short]]),
        np.concatenate([length_s, length_s[short] + waits_s[short]]),
        np.concatenate([held_s, held_s[short] + waits_s[short, None]]),
        np.concatenate([idle_s, np.zeros(len(short))]),
    )


def _held_s(trips: Trips, rows: I64, length_s: F64) -> F64:
    """Seconds that each hop's slot is taken: what is left of the trip without the hops and links before it."""
    pair_s = trips.pair_s()
    held_s = np.zeros((len(rows), trips.num_hops))
    held_s[:, 0] = length_s
    for hop in range(1, trips.num_hops):
        before, here = rows[:, hop - 1], rows[:, hop]
        held_s[:, hop] = held_s[:, hop - 1] - trips.both_s[hop - 1][before] - pair_s[before, here]
    return held_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offers:
    """The cheapest trips at some prices: `tariff`, and for each origin the corners of its convex price.

    corners[o]: (lengths, prices, rows of the catalogue), lengths ascending.
    """

    tariff: Tariff
    corners: tuple[tuple[F64, F64, I64], ...]

    def mixture(self, origin: int, length_s: float) -> list[tuple[int, float]]:
        """Rows and shares that cost what the tariff says for a trip of `length_s`."""
        lengths, _, rows = self.corners[origin]
        on_grid_s = np.ceil(length_s / self.tariff.step_s) * self.tariff.step_s
        after = int(np.searchsorted(lengths, on_grid_s, side="right"))
        if after == 0 or after == len(lengths):
            return [(int(rows[max(0, after - 1)]), 1.0)]
        share = float((on_grid_s - lengths[after - 1]) / (lengths[after] - lengths[after - 1]))
        return [(int(rows[after - 1]), 1.0 - share), (int(rows[after]), share)]


def offers(trips: Trips, listed: Catalogue, prices: Prices, end_s: float, num_points: int) -> Offers:
    """The cheapest trips at `prices`, up to lengths of `end_s`."""
    price = _price(trips, listed, prices)
    step_s = end_s / (num_points - 1)
    grid_s = step_s * np.arange(num_points)
    corners, rows_of_price = [], []
    for begin, stop in zip(listed.first[:-1], listed.first[1:], strict=True):
        lengths, of_origin = listed.length_s[begin:stop], price[begin:stop]
        least = np.minimum.accumulate(of_origin)
        falls = np.flatnonzero(np.concatenate([[True], of_origin[1:] < least[:-1]])[: len(least)])
        kept = _convex(lengths[falls], of_origin[falls])
        at = falls[kept]
        corners.append((lengths[at], of_origin[at], begin + at))
        if len(at):
            curve = np.interp(grid_s, lengths[at], of_origin[at])
            rows_of_price.append(np.where(grid_s < lengths[at[0]] - 1e-9, FAR, curve))
        else:
            rows_of_price.append(np.full(num_points, FAR))
    return Offers(tariff=Tariff(step_s=step_s, price=np.array(rows_of_price)), corners=tuple(corners))


def _price(trips: Trips, listed: Catalogue, prices: Prices) -> F64:
    price = np.zeros(len(listed.workers))
    for hop in range(1, trips.num_hops):
        work = prices.work * np.where(np.isfinite(trips.both_s[hop]), trips.both_s[hop], 0.0)
        price += (work + prices.visit)[listed.workers[:, hop]]
        if prices.hold.any():
            price += prices.hold[listed.workers[:, hop]] * listed.held_s[:, hop]
    if trips.num_hops > 1:
        price += prices.work[listed.workers[:, trips.num_hops - 1]] * listed.idle_s
    if not trips.is_loop:
        price += (prices.loss * trips.loss_s)[listed.workers[:, -1]]
    return price


def _convex(lengths: F64, prices: F64) -> list[int]:
    """Indexes of the lower left corners of points whose lengths ascend and prices fall."""
    kept: list[int] = []
    for i in range(len(lengths)):
        if kept and lengths[i] == lengths[kept[-1]]:
            kept.pop()
        while len(kept) >= 2:
            a, b = kept[-2], kept[-1]
            if (prices[b] - prices[a]) * (lengths[i] - lengths[a]) < (prices[i] - prices[a]) * (
                lengths[b] - lengths[a]
            ):
                break
            kept.pop()
        kept.append(i)
    return kept
