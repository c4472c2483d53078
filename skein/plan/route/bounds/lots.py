"""An origin by itself: when its microbatches can start and end on its slots and its one device.

A *lot* is all n microbatches of an origin with M slots. Sort the n starts of its forwards and, apart, the n ends of its
last backwards. The k-th end frees the slot that the (M + k)-th start takes, so there is a *turn* t_k between them. What
every schedule of the origin obeys (f, b: its forward and backward, the step from 0 to T):

- the first M starts: the i-th is no sooner than (i - 1) f, for forwards run one after the other;
- the last M ends: the i-th last is no later than T - (i - 1) b, likewise;
- turns can be named so that t_{k+1} >= t_k + f + b. Put t_k at the k-th end e_k, or f + b after t_{k-1} if that is
  later.
  If the latter held from t_j on, then t_k = e_j + (k - j)(f + b). Between e_j and the (M + k)-th start the device runs
  backwards j + 1 ... k and forwards M + j ... M + k - 1, all of that, so t_k is no later than that start.

Each microbatch has a place among starts and a place among ends, and what lies between must be at least its trip. If
all trips cost the same, or cost is convex and falls with length, equal places pair best (sorted differences
spread least).
"""

from dataclasses import dataclass

import numpy as np

from skein.plan.route.bounds.trips import FAR, Trips
from skein.plan.route.problem import F64, I64


def alone_s(trips: Trips, trip_s: F64, count: int) -> F64:
    """(num_workers,) the least step in which worker w as an origin sends `count` microbatches of trips `trip_s[w]`."""
    forward_s, backward_s, both_s = trips.forward_s[0], trips.backward_s[0], trips.both_s[0]
    slots = trips.slots[0].astype(np.int64)
    workers = np.arange(len(trip_s))
    turns_s = np.zeros((count, len(trip_s)))
    end_s = np.zeros(len(trip_s))
    with np.errstate(invalid="ignore"):
        for k in range(count):
            freed_s = turns_s[np.maximum(k - slots, 0), workers]
            start_s = np.where(k < slots, k * forward_s, freed_s)
            turns_s[k] = np.maximum(start_s + trip_s, turns_s[k - 1] + both_s if k else 0.0)
            end_s = np.maximum(
                end_s, start_s + trip_s + np.where(k + slots >= count, (count - 1 - k) * backward_s, 0)
            )
    return np.where(np.isfinite(trip_s) & (slots > 0), end_s, FAR)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tariff:
    """Least price of a trip of at most so many seconds at each origin: convex, falling, infinite where it is too short.

    Args:
        step_s: grid points are 0, 1, 2 ... steps; the last one is the step's end or later.
        price: (num_workers, num_points).
    """

    step_s: float
    price: F64

    def at(self, workers: I64, length_s: F64) -> F64:
        """(num_workers, num_lengths) at `workers`; lengths are rounded up to the grid, so prices are low enough."""
        points = np.ceil(length_s / self.step_s).astype(np.int64)
        last = self.price.shape[1] - 1
        found: F64 = self.price[workers[:, None], np.clip(points, 0, last)]
        return np.where(points < 0, FAR, found)

    def line(self, workers: I64, length_s: float) -> tuple[F64, F64]:
        """Level and slope, (num_workers, 1) each, of a line through the price at `length_s`, nowhere above prices."""
        first = np.isfinite(self.price[workers]).argmax(axis=1)
        last = self.price.shape[1] - 1
        point = np.clip(np.maximum(first, int(length_s / self.step_s)), 0, last - 1)
        here, there = self.price[workers, point], self.price[workers, point + 1]
        slope = np.subtract(there, here, out=np.zeros(len(workers)), where=np.isfinite(here)) / self.step_s
        level = here - slope * point * self.step_s
        return level[:, None], slope[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lots:
    """For some workers as origins: the least price of a lot, and (num_workers, count) seconds for each of its trips."""

    price: F64
    length_s: F64


def cheapest_lots(trips: Trips, tariff: Tariff, workers: I64, count: int, end_s: float) -> Lots:
    """No lot of `count` microbatches that ends by `end_s` costs less; `workers` have equally many slots.

    Turns move on the grid: one in [x, x + step) lets what ends there last until x + step and what begins there last
    from x, and the next turn is f + b later, rounded down. A microbatch that begins at a turn and ends at one is priced
    by a line below the tariff, which parts into a term for each of the two turns.
    """
    slots = min(int(trips.slots[0][workers[0]]), count)
    forward_s, backward_s = trips.forward_s[0][workers][:, None], trips.backward_s[0][workers][:, None]
    num_turns = count - slots
    cell_s = tariff.step_s * np.arange(tariff.price.shape[1])
    apart = np.floor(trips.both_s[0][workers] / tariff.step_s).astype(np.int64)[:, None]
    cells = np.arange(len(cell_s))[None, :]
    rows = np.arange(len(workers))[:, None]
    level, slope = tariff.line(workers, end_s * slots / count)

    def end_of(k: int) -> F64:
        found: F64 = end_s - (count - 1 - k) * backward_s
        return found

    # Turn by turn, the least price by cell: each next turn is `apart` later, rounded down so that no lot is missed.
    least = np.zeros((len(workers), len(cell_s)))
    chosen: list[I64] = []
    for turn in range(num_turns):
        if turn:
            least = np.where(cells < apart, FAR, least[rows, np.maximum(cells - apart, 0)])
        # What began with the step has one turn, so it is priced as it is; between two turns the line splits the price.
        ended = tariff.at(workers, cell_s + tariff.step_s - turn * forward_s)
        least = least + (ended if turn < slots else slope * (cell_s + tariff.step_s))
        begun = tariff.at(workers, end_of(slots + turn) - cell_s)
        least = least + (begun if slots + turn >= num_turns else level - slope * cell_s)
        best = np.minimum.accumulate(least, axis=1)
        is_new = np.hstack([np.ones((len(workers), 1), bool), least[:, 1:] < best[:, :-1]])
        chosen.append(np.maximum.accumulate(np.where(is_new, cells, 0), axis=1))
        least = best
    # Backwards through the choices, for the program wants the lots' trips and not only their price.
    turns_s = np.zeros((len(workers), num_turns))
    cell = np.full(len(workers), len(cell_s) - 1)
    for turn in reversed(range(num_turns)):
        cell = chosen[turn][rows[:, 0], cell]
        turns_s[:, turn] = cell_s[cell]
        cell = np.maximum(cell - apart[:, 0], 0)
    starts_s = np.hstack([np.arange(slots) * forward_s, turns_s])
    ends_s = np.hstack([turns_s + tariff.step_s, *(end_of(k) for k in range(num_turns, count))])
    # Whoever begins at the start and ends at the end meets no turn.
    price = least[:, -1] + tariff.at(workers, (ends_s - starts_s)[:, num_turns:slots]).sum(axis=1)
    return Lots(price=price, length_s=ends_s - starts_s)
