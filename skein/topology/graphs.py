"""Graphs of gossip and their mixing matrices: who averages with whom, with which weights, in which round.

Rules of this file
- `rows[i, j]` is the weight that member i puts on what it receives from j. Every matrix made here is doubly
  stochastic, so that mixing leaves the mean of all members as it is.
- A pure function of (graph, number of members, round, seed): all who compute it agree without a message.
- Undirected graphs get Metropolis weights 1 / (1 + max(degree_i, degree_j)); on regular ones that is equal weights.

Sources: Assran et al. 2019 (exponential graphs); Ying et al. 2021 (one-peer graphs average exactly after a period if,
and only if, the members are a power of two); Xiao and Boyd 2004 (Metropolis weights).
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from skein.rng import stream

F64 = npt.NDArray[np.float64]
Adjacency = npt.NDArray[np.bool_]

GraphKind = Literal[
    "ring",
    "mesh",
    "symmetric_exponential",
    "static_exponential",
    "one_peer_exponential",
    "one_peer_hypercube",
    "random_matching",
]
"""All graphs that a number of members defines; `measured` wants links as well (`skein.topology.consensus`)."""

_SUM_ERROR = (
    1e-9  # what rounding may make of a sum of weights, far below what anyone would choose as a weight
)
_BALANCED = 1e-12  # far below the error that is allowed
_LEAST_WEIGHT = 1e-15  # less than this is what subtracting equal weights leaves


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixing:
    """The weights of one round, (num_members, num_members): row i is what member i makes of what it receives.

    Raises:
        ValueError: not square, not finite, negative, or a row that does not sum to 1.
    """

    rows: F64

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape[0] != self.rows.shape[1] or not self.rows.size:
            raise ValueError(f"a square matrix is needed, not one of shape {self.rows.shape}")
        if not np.all(np.isfinite(self.rows)) or np.any(self.rows < 0):
            raise ValueError("weights are finite and not negative")
        if np.abs(self.rows.sum(axis=1) - 1.0).max() > _SUM_ERROR:
            raise ValueError("each row of weights sums to 1")
        self.rows.setflags(write=False)

    @property
    def num_members(self) -> int:
        return int(self.rows.shape[0])

    @property
    def is_symmetric(self) -> bool:
        """Whether any two members put equal weights on each other."""
        return bool(np.abs(self.rows - self.rows.T).max() <= _SUM_ERROR)

    @property
    def is_doubly_stochastic(self) -> bool:
        """Whether columns sum to 1 too, which is what preserves the mean."""
        return bool(np.abs(self.rows.sum(axis=0) - 1.0).max() <= _SUM_ERROR)

    @property
    def rho(self) -> float:
        """The spectral norm of W - 11ᵀ/n: by what factor, at most, one round shrinks the distance from the mean."""
        return float(np.linalg.norm(self.rows - 1.0 / self.num_members, 2))

    def senders_to(self, member: int) -> tuple[int, ...]:
        """Members that `member` receives from, in order, itself left out."""
        return tuple(int(j) for j in np.flatnonzero(self.rows[member]) if j != member)

    def receivers_of(self, member: int) -> tuple[int, ...]:
        """Members that receive from `member`, in order, itself left out."""
        return tuple(int(i) for i in np.flatnonzero(self.rows[:, member]) if i != member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A named graph on so many members; `period` rounds repeat, None: every round is drawn anew."""

    kind: GraphKind
    num_members: int
    period: int | None

    @property
    def is_symmetric(self) -> bool:
        """Whether whom a member sends to is whom it receives from, in every round, for any number of members."""
        return self.kind not in ("static_exponential", "one_peer_exponential")

    def at(self, round_: int, *, seed: int) -> Mixing:
        """The weights of a round, counted from 0; only drawn graphs look at the seed."""
        return mixing_at(self.kind, self.num_members, round_, seed=seed)


def graph_of(kind: GraphKind, num_members: int) -> Graph:
    """The graph called `kind` on so many members.

    Raises:
        ValueError: there is no such graph, or not a single member.
    """
    if kind not in get_args(GraphKind) or num_members < 1:
        raise ValueError(f"no graph {kind!r} of {num_members} members")
    if kind == "random_matching":
        period = None
    else:
        period = max(1, num_doublings(num_members)) if kind.startswith("one_peer") else 1
    return Graph(kind=kind, num_members=num_members, period=period)


def mixing_at(kind: GraphKind, num_members: int, round_: int, *, seed: int) -> Mixing:
    """The weights of a round, counted from 0.

    Raises:
        ValueError: there is no such graph, not a single member, or no such round.

    >>> mixing_at("one_peer_exponential", 4, 1, seed=0).rows[0].tolist()
    [0.5, 0.0, 0.5, 0.0]
    """
    graph = graph_of(kind, num_members)
    if round_ < 0:
        raise ValueError(f"rounds are counted from 0, not {round_}")
    if graph.period is None:
        return random_matching(num_members, round_, seed=seed)
    return _BUILDERS[graph.kind](num_members, round_ % graph.period)


def num_doublings(num_members: int) -> int:
    """Number of times 1 is doubled until it is `num_members` or more.

    >>> [num_doublings(n) for n in (1, 2, 3, 8, 9)]
    [0, 1, 2, 3, 4]
    """
    return (num_members - 1).bit_length()


# --- undirected ---


def metropolis(adjacency: Adjacency) -> Mixing:
    """Symmetric weights for any undirected graph: 1 / (1 + larger degree) on its edges, the rest on the diagonal.

    Raises:
        ValueError: the adjacency is not square and symmetric.
    """
    if adjacency.ndim != 2 or not np.array_equal(adjacency, adjacency.T):
        raise ValueError("the adjacency of an undirected graph is symmetric")
    edges = adjacency & ~np.eye(len(adjacency), dtype=np.bool_)
    degrees = edges.sum(axis=1)
    rows = np.where(edges, 1.0 / (1.0 + np.maximum(degrees[:, None], degrees[None, :])), 0.0)
    return Mixing(rows=rows + np.diag(1.0 - rows.sum(axis=1)))


def adjacency_of(num_members: int, edges: Collection[tuple[int, int]]) -> Adjacency:
    """The symmetric matrix of a collection of pairs."""
    adjacency = np.zeros((num_members, num_members), dtype=np.bool_)
    for i, j in edges:
        adjacency[i, j] = adjacency[j, i] = i != j
    return adjacency


def ring(num_members: int) -> Mixing:
    """Each with the one before and the one after.

    >>> ring(4).rows[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    return metropolis(adjacency_of(num_members, [(i, (i + 1) % num_members) for i in range(num_members)]))


def mesh(num_members: int) -> Mixing:
    """A grid as near to a square as it gets, without wrapping around; its last row may be short."""
    width = math.ceil(num_members / math.isqrt(num_members))
    right = [(i, i + 1) for i in range(num_members - 1) if (i + 1) % width]
    down = [(i, i + width) for i in range(num_members - width)]
    return metropolis(adjacency_of(num_members, right + down))


def symmetric_exponential(num_members: int) -> Mixing:
    """Each with those 1, 2, 4, ... places before and after."""
    steps = [2**k for k in range(num_doublings(num_members))]
    edges = [(i, (i + step) % num_members) for i in range(num_members) for step in steps]
    return metropolis(adjacency_of(num_members, edges))


# --- directed, or other ones in each round ---


def static_exponential(num_members: int) -> Mixing:
    """Each receives from those 1, 2, 4, ... places before it, in equal weights: directed."""
    return _circulant(num_members, [0, *(2**k for k in range(num_doublings(num_members)))])


def one_peer_exponential(num_members: int, round_: int) -> Mixing:
    """Each receives from the one 2^round places before it, half and half: directed."""
    return _circulant(num_members, [0, 2**round_ if num_members > 1 else 0])


def one_peer_hypercube(num_members: int, round_: int) -> Mixing:
    """Pairs whose places differ in bit `round_` alone; whose partner does not exist is left alone."""
    partners = [i ^ (1 << round_) for i in range(num_members)]
    return _matching(num_members, [(i, j) for i, j in enumerate(partners) if i < j < num_members])


def random_matching(num_members: int, round_: int, *, seed: int) -> Mixing:
    """Pairs drawn for this round alone; an odd one is left alone."""
    order = stream(seed, "gossip matching", round_).permutation(num_members).tolist()
    return _matching(num_members, list(zip(order[0::2], order[1::2], strict=False)))


def _circulant(num_members: int, steps: Sequence[int]) -> Mixing:
    rows = np.zeros((num_members, num_members))
    members = np.arange(num_members)
    for step in steps:
        rows[members, (members - step) % num_members] += 1.0 / len(steps)
    return Mixing(rows=rows)


def _matching(num_members: int, pairs: Sequence[tuple[int, int]]) -> Mixing:
    rows = np.eye(num_members)
    for i, j in pairs:
        rows[i, i] = rows[i, j] = rows[j, i] = rows[j, j] = 0.5
    return Mixing(rows=rows)


_BUILDERS: dict[GraphKind, Callable[[int, int], Mixing]] = {
    "ring": lambda n, _: ring(n),
    "mesh": lambda n, _: mesh(n),
    "symmetric_exponential": lambda n, _: symmetric_exponential(n),
    "static_exponential": lambda n, _: static_exponential(n),
    "one_peer_exponential": one_peer_exponential,
    "one_peer_hypercube": one_peer_hypercube,
}

# --- what becomes of it ---


def without(mixing: Mixing, missing: Collection[int]) -> Mixing:
    """The weights of a round in which nobody hears from the missing, nor they from anybody; the mean is kept.

    On an undirected graph each weight that is lost goes to the diagonal of the row that loses it; rows are never
    scaled up, which would move the mean. On a directed one a member may lose less as a receiver than as a sender:
    then the weights along a way from the one to the other shrink as well, until columns sum to 1 again.

    Raises:
        ValueError: the weights were not doubly stochastic.

    >>> without(ring(4), {1}).rows.round(3)[0].tolist()
    [0.667, 0.0, 0.0, 0.333]
    """
    if not mixing.is_doubly_stochastic:
        raise ValueError("only doubly stochastic weights keep the mean")
    edges = mixing.rows.copy()
    np.fill_diagonal(edges, 0.0)
    gone = sorted(missing)
    edges[gone, :] = edges[:, gone] = 0.0
    if not mixing.is_symmetric:
        _balance(edges)
    return Mixing(rows=edges + np.diag(1.0 - edges.sum(axis=1)))


def _balance(edges: F64) -> None:
    """Shrinks edges until what a member takes equals what is taken from it.

    A surplus flows along edges to where it is lacking (a flow with sources and sinks is made of ways between them),
    so there is always such a way as long as anything is out of balance.
    """
    while True:
        surplus = edges.sum(axis=0) - edges.sum(axis=1)
        start = int(np.argmax(surplus))
        if surplus[start] <= _BALANCED:
            return
        way = _way(edges, start, surplus < -_BALANCED / len(edges))
        amount = min(surplus[start], -surplus[way[-1]], *(edges[j, i] for i, j in pairwise(way)))
        for i, j in pairwise(way):
            edges[j, i] -= amount
            if edges[j, i] <= _LEAST_WEIGHT:
                edges[j, i] = 0.0


def _way(edges: F64, start: int, is_goal: Adjacency) -> list[int]:
    """The shortest way from a sender over receivers to a goal; among equals the first by place."""
    before: dict[int, int] = {start: start}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        if is_goal[at]:
            way = [at]
            while way[-1] != start:
                way.append(before[way[-1]])
            return way[::-1]
        for there in np.flatnonzero(edges[:, at]).tolist():
            if there not in before:
                before[there] = at
                queue.append(there)
    raise AssertionError("a flow out of balance has a way from surplus to lack")


def residual(mixings: Sequence[Mixing]) -> float:
    """Distance of the product of these rounds from exact averaging: the largest entry of |W_k ... W_1 - 11ᵀ/n|.

    >>> residual([mixing_at("one_peer_exponential", 8, k, seed=0) for k in range(3)])
    0.0
    """
    product = np.eye(mixings[0].num_members)
    for mixing in mixings:
        product = mixing.rows @ product
    return float(np.abs(product - 1.0 / len(product)).max())
