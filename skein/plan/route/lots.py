"""One origin by itself: when its microbatches can start and end on its slots and its one device.

A *lot* is all n microbatches of an origin with M slots. Rank the n starts of its forwards and, apart, the n ends of its
last backwards. The k-th end frees the slot that the (M + k)-th start takes, so there is a *turn* t_k between them. What
every schedule of the origin obeys (f, b: its forward and backward, the step from 0 to T):

- the first M starts: the i-th is no sooner than (i - 1) f, for forwards run one after the other;
- the last M ends: the i-th last is no later than T - (i - 1) b, likewise;
- turns can be named so that t_{k+1} >= t_k + f + b. Put t_k at the k-th end e_k, or f + b after t_{k-1} if that is
  later.
  If the latter held from t_j on, then t_k = e_j + (k - j)(f + b). Between e_j and the (M + k)-th start the device runs
  backwards j + 1 ... k and forwards M + j ... M + k - 1, all of that, so t_k is no later than that start.

Each microbatch has a rank as a start and a rank as an end, and what lies between must be at least its trip. If all
trips cost the same, or cost is convex and falls with length, equal ranks pair best (sorted differences spread least).
"""

import numpy as np

from skein.plan.route.problem import F64
from skein.plan.route.trips import FAR, Trips


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
