"""The symmetric graph and weights that bring walkers to agreement soonest over links as they are measured.

Time to agree is seconds per round times rounds. A round's seconds grow with the degrees, its rounds shrink with them:
which of the two counts depends on the links and on the bytes, so it is searched for.

Rules of this file
- A round: every member sends its vector to each of its neighbours, one after another over its uplink, while it
  receives theirs one after another over its downlink; members work at the same time. So a member takes the bytes' time
  on all of its edges, in or out, whichever is longer, and the longest of their latencies; the round takes what its
  slowest member takes, for a step ends for all together.
- Rounds: what the spectral norm of W - 11ᵀ/n needs to shrink any disagreement to a thousandth.
- The search is bounded by numbers of trials, never by a clock: equal links give equal graphs on one build. It never
  leaves connected graphs, and what it finds is no slower than the ring in the members' order.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skein.rng import stream
from skein.topology.graphs import F64, Adjacency, Mixing, mesh, metropolis, ring, symmetric_exponential
from skein.topology.links import LinkMatrices

AGREED_RATIO = 1e-3
"""Share of a disagreement that is left when members count as agreed."""

_TRIALS_COST = 2e8  # trials times members cubed, where that is what takes the time: about a second
_LEAST_TRIALS, _TRIALS_PER_PAIR = 300, 80
_NUM_STARTS = 3
_WEIGHT_ROUNDS = 120
_LEAST_WEIGHT = 1e-3  # an edge with less is not worth its bytes
_FIRST_HEAT, _LAST_HEAT = 0.08, 0.002  # relative slowdowns that are accepted with a probability of 1 / e


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A graph with its weights, and how soon it agrees."""

    mixing: Mixing
    round_s: float
    num_rounds: float

    @property
    def seconds(self) -> float:
        """Seconds until a thousandth of a disagreement is left."""
        return _together(self.round_s, self.num_rounds)


def round_s(links: LinkMatrices, adjacency: Adjacency, *, num_bytes: float) -> float:
    """Seconds of one round in which every member sends `num_bytes` to each neighbour; 0 without edges."""
    edges = adjacency & ~np.eye(len(adjacency), dtype=np.bool_)
    sent_s = np.where(edges, num_bytes / links.bytes_per_s, 0.0)
    latency_s = np.where(edges, np.maximum(links.latency_s, links.latency_s.T), 0.0)
    busy_s = np.maximum(sent_s.sum(axis=1), sent_s.sum(axis=0))
    return float((busy_s + latency_s.max(axis=1)).max())


def num_rounds(mixing: Mixing) -> float:
    """Rounds until a thousandth of a disagreement is left, at least one; infinite if one part never hears from another.

    >>> round(num_rounds(ring(8)), 1)
    31.8
    """
    return _rounds(mixing.rho)


def agreement(links: LinkMatrices, mixing: Mixing, *, num_bytes: float) -> Agreement:
    """Agreement of given weights over these links: the seconds of a round, and the rounds it takes."""
    seconds = round_s(links, mixing.rows > 0, num_bytes=num_bytes)
    return Agreement(mixing=mixing, round_s=seconds, num_rounds=num_rounds(mixing))


def choose(links: LinkMatrices, *, num_bytes: float) -> Agreement:
    """The graph and weights that agree soonest over these links, as far as the search finds.

    Args:
        num_bytes: of one exchange with one neighbour.

    Raises:
        ValueError: a link's latency or bandwidth, or the number of bytes, is negative or not finite.
    """
    n = len(links.latency_s)
    _check(links, num_bytes)
    if n <= 2:
        return agreement(links, ring(n), num_bytes=num_bytes)
    seconds_of = _judge(links, num_bytes)
    starts = sorted(_starts(links, num_bytes), key=seconds_of)[:_NUM_STARTS]
    num_trials = int(min(_TRIALS_PER_PAIR * n * (n - 1) / 2, max(_LEAST_TRIALS, _TRIALS_COST / n**3)))
    searched = [_searched(start, seconds_of, num_trials // len(starts)) for start in starts]
    found = [metropolis(adjacency) for adjacency in searched]
    found += [fastest_weights(adjacency) for adjacency in searched]
    return min(
        (agreement(links, mixing, num_bytes=num_bytes) for mixing in (ring(n), *found)),
        key=lambda x: x.seconds,
    )


def fastest_weights(adjacency: Adjacency) -> Mixing:
    """Symmetric weights on a connected graph's edges with a spectral norm as small as descent finds.

    Descends a smooth bound of the norm, the p-norm of the eigenvalues, with p growing: an eigenvalue with vector u
    changes with the weight of edge (i, j) by -(u_i - u_j)². Starts from Metropolis weights and is never worse.

    Source: Boyd, Diaconis and Xiao, "Fastest Mixing Markov Chain on a Graph" (2004), with descent instead of a
    semidefinite program.
    """
    best = metropolis(adjacency)
    best_rho, n = best.rho, best.num_members
    first, second = np.nonzero(np.triu(adjacency, 1))
    weights, velocity = best.rows[first, second].copy(), np.zeros(len(first))
    for k in range(_WEIGHT_ROUNDS):
        rows = _rows(weights, first, second, n)
        values, vectors = np.linalg.eigh(rows - 1.0 / n)
        rho = float(np.abs(values).max())
        if rho < best_rho - 1e-12:
            best, best_rho = Mixing(rows=rows), rho
        power = 8.0 * 1.04**k
        share = (np.abs(values) / max(rho, 1e-12)) ** (power - 1) * np.sign(values)
        slope = -(((vectors[first] - vectors[second]) ** 2) @ share)
        velocity = 0.8 * velocity - 0.2 * slope / max(float(np.abs(slope).max()), 1e-12)
        weights = _within(weights + 0.08 * 0.97**k * velocity, first, second, n)
    return best


Places = npt.NDArray[np.intp]


# --- the search ---

Seconds = Callable[[Adjacency], float]


def _judge(links: LinkMatrices, num_bytes: float) -> Seconds:
    def seconds(adjacency: Adjacency) -> float:
        rho = _symmetric_rho(metropolis(adjacency).rows)
        return _together(round_s(links, adjacency, num_bytes=num_bytes), _rounds(rho))

    return seconds


def _searched(start: Adjacency, seconds_of: Seconds, num_trials: int) -> Adjacency:
    """Adds, drops and moves edges at random, for the better or, ever more rarely, a little for the worse."""
    luck = stream(0, "consensus", len(start))
    at, at_s = start, seconds_of(start)
    best, best_s = at, at_s
    for trial in range(num_trials):
        heat = _FIRST_HEAT * (_LAST_HEAT / _FIRST_HEAT) ** (trial / num_trials)
        other = _changed(at, luck)
        other_s = seconds_of(other)
        if other_s <= at_s or (at_s > 0.0 and luck.random() < math.exp((at_s - other_s) / (heat * at_s))):
            at, at_s = other, other_s
            if at_s < best_s:
                best, best_s = at, at_s
    return best


def _changed(adjacency: Adjacency, luck: np.random.Generator) -> Adjacency:
    """Graph with one edge more, one less, or one end of an edge elsewhere."""
    changed = adjacency.copy()
    i, j, k = luck.choice(len(adjacency), size=3, replace=False).tolist()
    neighbours = np.flatnonzero(adjacency[i])
    kind = luck.random()
    if kind < 0.6 and len(neighbours):  # drop one of i's, and half of the time take another instead
        gone = int(neighbours[luck.integers(len(neighbours))])
        changed[i, gone] = changed[gone, i] = False
    if kind > 0.3:
        end = i if luck.random() < 0.5 else k
        changed[end, j] = changed[j, end] = True
    return changed


def _starts(links: LinkMatrices, num_bytes: float) -> Iterable[Adjacency]:
    """The usual graphs, in the members' order and along a short round trip; the cheapest tree; nearest neighbours."""
    cost_s = links.round_trip_s(num_bytes)
    n = len(cost_s)
    in_order, trip = np.arange(n), np.array(_short_trip(cost_s))
    for order in (in_order, trip):
        for graph in (ring(n), mesh(n), symmetric_exponential(n)):
            adjacency = np.zeros((n, n), dtype=np.bool_)
            adjacency[np.ix_(order, order)] = graph.rows > 0
            yield _bare(adjacency)
    tree = _cheapest_tree(cost_s)
    yield tree
    for degree in (1, 2, 3):
        near = np.zeros((n, n), dtype=np.bool_)
        np.put_along_axis(near, np.argsort(cost_s, axis=1, kind="stable")[:, : degree + 1], True, axis=1)
        yield _bare(near | near.T | tree)


def _bare(adjacency: Adjacency) -> Adjacency:
    return np.asarray(adjacency & ~np.eye(len(adjacency), dtype=np.bool_))


def _short_trip(cost_s: F64) -> list[int]:
    """A round trip from member 0 to the nearest next, then untangled: two of its hops crossed over while that helps."""
    n = len(cost_s)
    trip, left = [0], set(range(1, n))
    while left:
        trip.append(min(left, key=lambda j: (cost_s[trip[-1], j], j)))
        left.remove(trip[-1])
    shortened = True
    while shortened:
        shortened = False
        for i in range(n - 1):
            for j in range(i + 2, n if i else n - 1):
                a, b, c, d = trip[i], trip[i + 1], trip[j], trip[(j + 1) % n]
                if cost_s[a, c] + cost_s[b, d] < cost_s[a, b] + cost_s[c, d] - 1e-12:
                    trip[i + 1 : j + 1] = trip[i + 1 : j + 1][::-1]
                    shortened = True
    return trip


def _cheapest_tree(cost_s: F64) -> Adjacency:
    """Grown from member 0 by the cheapest edge to somebody new."""
    n = len(cost_s)
    tree = np.zeros((n, n), dtype=np.bool_)
    inside = [0]
    while len(inside) < n:
        outside = [j for j in range(n) if j not in inside]
        i, j = min(((i, j) for i in inside for j in outside), key=lambda e: (cost_s[e], e))
        tree[i, j] = tree[j, i] = True
        inside.append(j)
    return tree


# --- numbers ---


def _rounds(rho: float) -> float:
    if rho >= 1.0 - 1e-9:
        return math.inf
    return max(1.0, math.log(AGREED_RATIO) / math.log(rho)) if rho > 0.0 else 1.0


def _together(seconds: float, rounds: float) -> float:
    """Seconds times rounds; nothing makes up for never agreeing."""
    return seconds * rounds if math.isfinite(rounds) else math.inf


def _symmetric_rho(rows: F64) -> float:
    values = np.linalg.eigvalsh(rows - 1.0 / len(rows))
    return float(max(values[-1], -values[0]))


def _rows(weights: F64, first: Places, second: Places, num_members: int) -> F64:
    rows = np.zeros((num_members, num_members))
    rows[first, second] = rows[second, first] = np.where(weights < _LEAST_WEIGHT, 0.0, weights)
    return rows + np.diag(np.maximum(1.0 - rows.sum(axis=1), 0.0))


def _within(weights: F64, first: Places, second: Places, num_members: int) -> F64:
    """Weights that are not negative, and that nobody has more than 1 of."""
    weights = np.maximum(weights, 0.0)
    sums = np.bincount(first, weights, num_members) + np.bincount(second, weights, num_members)
    return np.asarray(weights / np.maximum(1.0, np.maximum(sums[first], sums[second])))


def _check(links: LinkMatrices, num_bytes: float) -> None:
    apart = ~np.eye(len(links.latency_s), dtype=np.bool_)
    latency_s, bytes_per_s = links.latency_s[apart], links.bytes_per_s[apart]
    if not (np.all(np.isfinite(latency_s)) and np.all(latency_s >= 0) and np.all(bytes_per_s > 0)):
        raise ValueError("links have latencies of at least 0 s and carry more than 0 bytes/s")
    if not (math.isfinite(num_bytes) and num_bytes >= 0):
        raise ValueError(f"at least 0 bytes, not {num_bytes}")
