"""Whether a method of gossip with momentum agrees on a graph, or blows disagreement up.

Without gradients the distance from the mean follows a linear recursion in (x, v), v the momentum in units of
parameters. Its growth per step, over one period of the graph, is the stability radius; from 1 on nothing helps, no
learning rate either. DecentLaM in that form, v' = beta v + (I - W) x, x' = x - v', is x'' = (W + beta) x' - beta x.

A step without an exchange is the same with W = I. So `every_steps` counts too: DecentLaM's momentum goes on with a
correction that nobody renews meanwhile, and overshoots.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from skein.config.rule import GossipMethod, GraphName
from skein.rng import stream
from skein.topology.graphs import F64, Graph, GraphKind, Mixing, graph_of

_MARGIN = (
    1e-6  # eigenvalues of matrices that are not normal move by about the root of the rounding error, 1e-8
)
_SAMPLED_MARGIN = (
    0.02  # what a few thousand drawn rounds may be off: their radii differ by less from seed to seed
)
_NUM_DRAWN_ROUNDS = 1000
_NUM_DRAWS = 4
_MOST_LOST = 32
"""Raise this if a job goes on with more members lost than that, on a directed graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stable:
    """Disagreement shrinks by `radius` in a step, in the long run."""

    radius: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstable:
    """Disagreement grows by `radius` in a step, or cannot be shown to shrink; what comes nearest and is stable.

    `num_members` is how many members that is so for: all of them, or those that are left when others are lost.
    """

    radius: float
    num_members: int
    method: GossipMethod
    graph: GraphName
    instead: str


Verdict = Stable | Unstable


def verdict(
    method: GossipMethod, momentum: float, graph: GraphName, num_members: int, *, every_steps: int = 1
) -> Verdict:
    """Whether the method agrees on the graph, and if not, what to take instead.

    Fewer members count too, as some may be lost on the way: directed graphs do not get stabler with fewer. The
    `measured` graph is judged as a ring: any symmetric connected graph is as stable, and rings are the slowest that
    the search begins with. `radius_on` judges one that is known.
    """
    judged = _judge(method, momentum, graph, num_members, every_steps)
    if isinstance(judged, Stable):
        return judged
    for other_method, other_graph, words in _nearest(method, graph):
        if isinstance(_judge(other_method, momentum, other_graph, num_members, every_steps), Stable):
            return Unstable(
                radius=judged.radius,
                num_members=judged.num_members,
                method=other_method,
                graph=other_graph,
                instead=words,
            )
    raise AssertionError("DmSGD agrees on every connected graph")


def radius_of(method: GossipMethod, momentum: float, graph: Graph, *, every_steps: int = 1) -> float:
    """Growth of disagreement per step without gradients; 0 where a member is alone or all agree within a period.

    Exact up to rounding for graphs with a period; for drawn graphs the largest growth of a few long drawn products.

    >>> round(radius_of("decentlam", 0.8, graph_of("static_exponential", 8)), 3)
    1.18
    """
    if graph.period is None:
        return _drawn_radius(method, momentum, graph, every_steps)
    mixings = [graph.at(round_, seed=0) for round_ in range(graph.period)]
    return radius_on(method, momentum, mixings, every_steps=every_steps)


def radius_on(
    method: GossipMethod, momentum: float, mixings: Sequence[Mixing], *, every_steps: int = 1
) -> float:
    """The same for given rounds, which repeat."""
    num_members = mixings[0].num_members
    if num_members == 1:
        return 0.0
    step = _STEPS[method]
    return max(_product_radius(step, momentum, mode, every_steps) for mode in _modes(mixings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growing:
    radius: float
    num_members: int


def _judge(
    method: GossipMethod, momentum: float, graph: GraphName, num_members: int, every_steps: int
) -> Stable | _Growing:
    """The radius with all members, or the first with fewer that is too large."""
    kind: GraphKind = "ring" if graph == "measured" else graph
    margin = _SAMPLED_MARGIN if kind == "random_matching" else _MARGIN
    radii: list[float] = []
    for count in _counts(kind, num_members):
        radii.append(radius_of(method, momentum, graph_of(kind, count), every_steps=every_steps))
        if radii[-1] >= 1.0 - margin:
            return _Growing(radius=radii[-1], num_members=count)
    return Stable(radius=radii[0])


def _counts(kind: GraphKind, num_members: int) -> range:
    """Numbers of members to judge: all, and of graphs whose radius jumps with the number, those left after losses."""
    num_lost = 0
    if kind in ("static_exponential", "one_peer_exponential"):
        num_lost = min(_MOST_LOST, num_members // 2)
    elif kind == "random_matching":  # an odd one is alone
        num_lost = min(1, num_members - 1)
    return range(num_members, num_members - num_lost - 1, -1)


def _nearest(method: GossipMethod, graph: GraphName) -> Iterator[tuple[GossipMethod, GraphName, str]]:
    """Replacements, the smallest change first: a graph that is as quick, then a method that is as good."""
    if graph == "static_exponential":
        yield method, "symmetric_exponential", f"{method} on graph symmetric_exponential"
    yield "qg_dmsgd", graph, f"method qg_dmsgd on graph {graph}"
    yield method, "ring", f"{method} on graph ring"
    yield "dmsgd", graph, f"method dmsgd on graph {graph}"


# --- one step, as a matrix over (x, v) ---

C128 = npt.NDArray[np.complex128]
Step = Callable[[F64 | C128, float], F64 | C128]


def _dsgd(w: F64 | C128, beta: float) -> F64 | C128:
    """x' = W x; it has no v, whatever beta is."""
    del beta
    zero = np.zeros_like(w)
    return np.block([[w, zero], [zero, zero]])


def _dmsgd(w: F64 | C128, beta: float) -> F64 | C128:
    """v' = beta v, x' = W (x - v')."""
    return np.block([[w, -beta * w], [np.zeros_like(w), beta * np.eye(len(w))]])


def _da_dmsgd(w: F64 | C128, beta: float) -> F64 | C128:
    """x' = W (x - beta v), v' = W beta v."""
    return np.block([[w, -beta * w], [np.zeros_like(w), beta * w]])


def _qg_dmsgd(w: F64 | C128, beta: float) -> F64 | C128:
    """x' = W (x - beta v), v' = beta v + (1 - beta) (x - x')."""
    one = np.eye(len(w))
    return np.block([[w, -beta * w], [(1 - beta) * (one - w), beta * one + (1 - beta) * beta * w]])


def _decentlam(w: F64 | C128, beta: float) -> F64 | C128:
    """v' = beta v + (I - W) x, x' = x - v'."""
    one = np.eye(len(w))
    return np.block([[w, -beta * one], [one - w, beta * one]])


_STEPS: dict[GossipMethod, Step] = {
    "dsgd": _dsgd,
    "dmsgd": _dmsgd,
    "da_dmsgd": _da_dmsgd,
    "qg_dmsgd": _qg_dmsgd,
    "decentlam": _decentlam,
}


def _modes(mixings: Sequence[Mixing]) -> list[list[F64 | C128]]:
    """The rounds on the subspace of disagreement, taken apart into as small blocks as is quick.

    One symmetric matrix falls apart into its eigenvalues. So do matrices in which each row is the one above, moved on
    by one place: all of them have the discrete Fourier modes. Others stay whole.
    """
    first = mixings[0]
    if all(_is_circulant(mixing.rows) for mixing in mixings):
        values = np.fft.fft(np.stack([mixing.rows[:, 0] for mixing in mixings]), axis=1)
        return [[np.array([[value]]) for value in column] for column in values.T[1:]]
    basis = _disagreement(first.num_members)
    inner = [basis.T @ mixing.rows @ basis for mixing in mixings]
    if len(mixings) == 1 and first.is_symmetric:
        return [[np.array([[value]])] for value in np.linalg.eigvalsh(inner[0])]
    return [list(inner)]


def _is_circulant(rows: F64) -> bool:
    return np.array_equal(rows[1:], np.roll(rows[:-1], 1, axis=1))


def _disagreement(num_members: int) -> F64:
    """(num_members, num_members - 1): an orthonormal basis of what is orthogonal to equal values for all."""
    start = np.eye(num_members)
    start[:, 0] = 1.0
    return np.asarray(np.linalg.qr(start)[0][:, 1:])


def _product_radius(step: Step, momentum: float, inner: Sequence[F64 | C128], every_steps: int) -> float:
    alone = np.linalg.matrix_power(step(np.eye(len(inner[0])), momentum), every_steps - 1)
    product: F64 | C128 = np.eye(2 * len(inner[0]))
    for w in inner:
        product = step(w, momentum) @ alone @ product
    radius = float(np.abs(np.linalg.eigvals(product)).max())
    return float(radius ** (1.0 / (len(inner) * every_steps)))


def _drawn_radius(method: GossipMethod, momentum: float, graph: Graph, every_steps: int) -> float:
    if graph.num_members == 1:
        return 0.0
    return max(_drawn_growth(method, momentum, graph, every_steps, seed) for seed in range(_NUM_DRAWS))


def _drawn_growth(method: GossipMethod, momentum: float, graph: Graph, every_steps: int, seed: int) -> float:
    """Growth per step of one drawn vector over drawn rounds: the largest Lyapunov exponent, almost surely."""
    step, one = _STEPS[method], np.eye(1)
    # Every block of a step is a number plus a number times W.
    base, alone = step(0.0 * one, momentum), step(one, momentum)
    slope, between = alone - base, np.linalg.matrix_power(alone, every_steps - 1)
    state: F64 | C128 = stream(seed, "gossip stability").standard_normal((2, graph.num_members))
    log_growth = 0.0
    for partners in _drawn_partners(graph, seed):
        before = between @ state
        state = base @ before + slope @ ((before + before[:, partners]) * 0.5)
        state = state - state.mean(axis=1, keepdims=True)  # rounding may not leave the subspace
        norm = float(np.linalg.norm(state))
        if norm == 0.0:
            return 0.0
        log_growth += np.log(norm)
        state /= norm
    return float(np.exp(log_growth / (_NUM_DRAWN_ROUNDS * every_steps)))


@lru_cache(maxsize=4 * _NUM_DRAWS)
def _drawn_partners(graph: Graph, seed: int) -> npt.NDArray[np.intp]:
    """Partner that each member averages with in each drawn round, or itself: the same for whatever method is judged."""
    drawn = (graph.at(round_, seed=seed).rows for round_ in range(_NUM_DRAWN_ROUNDS))
    # Pairs have four weights of a half; less what is on the diagonal is largest at the partner, if there is one.
    return np.stack([(rows - 0.25 * np.eye(len(rows))).argmax(axis=1) for rows in drawn])
