"""Gossip with SGD: trajectories and limits against NumPy and linear algebra, and the mean whoever is missing."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from skein.config.aggregation import Gossip
from skein.config.optimizer import SgdSpec
from skein.config.robust import CentredClip, Krum, NormClip
from skein.config.rule import Due, GossipMethod, Reach
from skein.errors import UserError
from skein.numeric.aggregate.gossip import MOMENTUM, SENT, GossipRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.gradients import flatten
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.walker import StateClass, Walker
from skein.rng import stream
from skein.topology.graphs import GraphKind, Mixing, mesh, mixing_at, ring, static_exponential, without
from tests.support.exchanges import exchange, talks_by_row
from tests.support.extent import part

F64 = NDArray[np.float64]
Gradient = Callable[[F64], F64]

METHODS: tuple[GossipMethod, ...] = get_args(GossipMethod)
DUE = Due(round=0, reach=Reach.NEIGHBOURS)
DIM = 5


def rule_of(method: GossipMethod, momentum: float = 0.8, weight_decay: float = 0.0) -> GossipRule:
    optimizer = SgdSpec(name="sgd", momentum=0.0 if method == "dsgd" else momentum, weight_decay=weight_decay)
    return GossipRule(spec=Gossip(rule="gossip", method=method), optimizer=optimizer)


def walkers_at(rule: GossipRule, x_ND: F64) -> list[Walker]:
    """One walker per row, its parameters in a matrix and a vector, as float64."""
    walkers = []
    for row in x_ND:
        params = {"w": torch.from_numpy(row[:4].reshape(2, 2).copy()), "b": torch.from_numpy(row[4:].copy())}
        walkers.append(Walker(params=params, state=rule.init(params)))
    return walkers


def rows_of(walkers: Sequence[Walker]) -> F64:
    # "b" comes before "w" in a flat vector.
    flat = np.stack([flatten(walker.params).numpy() for walker in walkers])
    return np.concatenate([flat[:, 1:], flat[:, :1]], axis=1)


def grads_of(g_ND: F64) -> list[dict[str, torch.Tensor]]:
    return [
        {"w": torch.from_numpy(g[:4].reshape(2, 2).copy()), "b": torch.from_numpy(g[4:].copy())} for g in g_ND
    ]


def step(
    rule: GossipRule, walkers: list[Walker], mixing: Mixing, gradient: Gradient, terms: Terms
) -> list[Walker]:
    grads = grads_of(gradient(rows_of(walkers)))
    return exchange(rule, walkers, grads, [terms] * len(walkers), talks_by_row(DUE, mixing.rows.tolist()))


def terms_at(step_: int, learning_rate: float, gradient_scale: float = 1.0) -> Terms:
    return Terms(step=step_, learning_rate=learning_rate, gradient_scale=gradient_scale)


class Quadratics:
    """A least-squares problem of its own for each walker: gradient H_i x - c_i."""

    def __init__(self, num_walkers: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        a_NBD = rng.standard_normal((num_walkers, 12, DIM))
        b_NB = rng.standard_normal((num_walkers, 12))
        self.h_NDD: F64 = np.einsum("nbi,nbj->nij", a_NBD, a_NBD) / 12
        self.c_ND: F64 = np.einsum("nbi,nb->ni", a_NBD, b_NB) / 12

    def gradient(self, x_ND: F64) -> F64:
        return np.asarray(np.einsum("nij,nj->ni", self.h_NDD, x_ND) - self.c_ND)

    def fixed_point(self, mix_before: F64, learning_rate: float, w_NN: F64) -> F64:
        """The x at which x = W (x - learning_rate * mix_before g(x)), as one linear system."""
        n = len(w_NN)
        big_h = np.zeros((n * DIM, n * DIM))
        for i in range(n):
            big_h[i * DIM : (i + 1) * DIM, i * DIM : (i + 1) * DIM] = self.h_NDD[i]
        spread = np.kron(w_NN @ mix_before, np.eye(DIM)) * learning_rate
        left = np.eye(n * DIM) - np.kron(w_NN, np.eye(DIM)) + spread @ big_h
        return np.asarray(np.linalg.solve(left, spread @ self.c_ND.reshape(-1)).reshape(n, DIM))


# --- trajectories ---


def numpy_steps(
    method: GossipMethod, beta: float, w_NN: F64, gradient: Gradient, x: F64, rates: Sequence[float]
) -> F64:
    """The equations as the papers print them, DecentLaM and QG-DmSGD with a division by the learning rate."""
    m = np.zeros_like(x)
    for lr in rates:
        g = gradient(x)
        if method == "dsgd":
            x = w_NN @ (x - lr * g)
        elif method == "dmsgd":
            m = beta * m + g
            x = w_NN @ (x - lr * m)
        elif method == "da_dmsgd":
            n = beta * m + g
            x, m = w_NN @ (x - lr * n), w_NN @ n
        elif method == "qg_dmsgd":
            after = w_NN @ (x - lr * (beta * m + g))
            m = beta * m + (1 - beta) * (x - after) / lr
            x = after
        else:
            tilde = (x - w_NN @ (x - lr * g)) / lr
            m = beta * m + tilde
            x = x - lr * m
    return x


@pytest.mark.parametrize(
    ("method", "mixing"), part(list(product(METHODS, (ring(6), mesh(6), static_exponential(6)))), every=2)
)
def test_trajectories_are_those_of_the_printed_equations(method: GossipMethod, mixing: Mixing) -> None:
    rule = rule_of(method, momentum=0.5, weight_decay=0.1)
    problem = Quadratics(6, seed=1)
    x_ND = np.random.default_rng(2).standard_normal((6, DIM))
    rates = [0.05 * (1 + k % 3) for k in range(12)]
    decay = np.array([0.1, 0.1, 0.1, 0.1, 0.0])  # the matrix decays, the vector does not

    walkers = walkers_at(rule, x_ND)
    for k, rate in enumerate(rates):
        terms = terms_at(k, rate, gradient_scale=0.25)
        walkers = step(rule, walkers, mixing, lambda x: 4.0 * problem.gradient(x), terms)

    expected = numpy_steps(method, 0.5, mixing.rows, lambda x: problem.gradient(x) + decay * x, x_ND, rates)
    # Float64 on both sides; a dozen steps of about as many roundings each.
    assert np.allclose(rows_of(walkers), expected, rtol=1e-12, atol=1e-13)
    assert [walker.num_updates for walker in walkers] == [12] * 6


@pytest.mark.parametrize("method", ["dmsgd", "da_dmsgd", "decentlam"])
def test_steps_without_an_exchange_are_plain_momentum_sgd(method: GossipMethod) -> None:
    rule, problem = rule_of(method, weight_decay=0.1), Quadratics(1, seed=3)
    plain = optimizer_of(rule.optimizer)
    (walker,) = walkers_at(rule, np.ones((1, DIM)))
    other = Walker(params=walker.copy().params, state=plain.init(walker.params))
    for k in range(9):
        (grads,) = grads_of(problem.gradient(rows_of([walker])))
        rule.local_step(walker, grads, terms_at(k, 0.1), talks=False)
        plain.update(other, grads, learning_rate=0.1, gradient_scale=1.0)
    # The same operations, of which decentlam's and the others' differ in order.
    assert np.allclose(rows_of([walker]), rows_of([other]), rtol=1e-13, atol=0)


def test_steps_without_an_exchange_are_those_of_a_walker_alone() -> None:
    for method in METHODS:
        rule, problem = rule_of(method), Quadratics(1, seed=4)
        together = walkers_at(rule, np.ones((1, DIM)))
        alone = together[0].copy()
        for k in range(5):
            (grads,) = grads_of(problem.gradient(rows_of([alone])))
            rule.local_step(alone, grads, terms_at(k, 0.1), talks=False)
            together = step(rule, together, ring(1), problem.gradient, terms_at(k, 0.1))
        assert np.array_equal(rows_of([alone]), rows_of(together))


# --- limits ---


def limit(
    method: GossipMethod,
    momentum: float,
    mixing: Mixing,
    problem: Quadratics,
    rate: float,
    num_steps: int = 100,
) -> F64:
    rule = rule_of(method, momentum)
    walkers = walkers_at(rule, np.zeros((mixing.num_members, DIM)))
    for k in range(num_steps):
        walkers = step(rule, walkers, mixing, problem.gradient, terms_at(k, rate))
    return rows_of(walkers)


# The slowest mode, plain gossip's, shrinks by about 0.88 a step: to 3e-6 in 100 of them.
LIMIT = 1e-5


@pytest.mark.parametrize("method", part(["dsgd", "qg_dmsgd", "decentlam"], every=2))
def test_the_limit_is_that_of_plain_gossip_whatever_the_momentum(method: GossipMethod) -> None:
    mixing, problem = mesh(5), Quadratics(5, seed=5)
    expected = problem.fixed_point(np.eye(5), 0.2, mixing.rows)
    found = limit(method, 0.5, mixing, problem, 0.2)
    assert np.linalg.norm(found - expected) <= LIMIT * np.linalg.norm(expected)


def test_momentum_before_mixing_has_the_limit_of_a_larger_learning_rate() -> None:
    mixing, problem = mesh(5), Quadratics(5, seed=5)
    expected = problem.fixed_point(np.eye(5), 0.2 / (1 - 0.5), mixing.rows)
    found = limit("dmsgd", 0.5, mixing, problem, 0.2)
    assert np.linalg.norm(found - expected) <= LIMIT * np.linalg.norm(expected)


def test_averaged_momentum_has_a_limit_in_between() -> None:
    mixing, problem = mesh(5), Quadratics(5, seed=5)
    spread: F64 = np.asarray(np.linalg.inv(np.eye(5) - 0.5 * mixing.rows), dtype=np.float64)
    expected = problem.fixed_point(spread, 0.2, mixing.rows)
    found = limit("da_dmsgd", 0.5, mixing, problem, 0.2)
    assert np.linalg.norm(found - expected) <= LIMIT * np.linalg.norm(expected)


@pytest.mark.parametrize("method", part(METHODS, every=2))
def test_averaging_with_all_has_no_bias(method: GossipMethod) -> None:
    mixing, problem = Mixing(rows=np.full((4, 4), 0.25)), Quadratics(4, seed=6)
    optimum = np.linalg.solve(problem.h_NDD.sum(axis=0), problem.c_ND.sum(axis=0))
    found = limit(method, 0.5, mixing, problem, 0.2, num_steps=50)
    # Plain gossip is the slowest again.
    assert np.abs(found - optimum).max() <= 2e-3 * np.abs(optimum).max()


# --- the mean ---


GRAPHS: tuple[GraphKind, ...] = (
    "ring",
    "mesh",
    "static_exponential",
    "one_peer_exponential",
    "random_matching",
)


@pytest.mark.parametrize(("graph", "method"), part(list(product(GRAPHS, METHODS)), every=3))
def test_the_mean_stays_while_members_miss_rounds(method: GossipMethod, graph: GraphKind) -> None:
    num_walkers, lost = 7, stream(0, "lost")
    rule = rule_of(method, momentum=0.4)
    start = 3.0 + np.random.default_rng(0).standard_normal(
        (num_walkers, DIM)
    )  # of about equal norms, as models are
    walkers = walkers_at(rule, start)
    for k in range(8):
        whole = mixing_at(graph, num_walkers, k, seed=0)
        missing = np.flatnonzero(lost.random(num_walkers) < 0.3).tolist()
        walkers = step(rule, walkers, without(whole, missing), np.zeros_like, terms_at(k, 0.01))
    # Rounding of 8 weighted sums of values of about 3.
    assert np.allclose(rows_of(walkers).mean(axis=0), start.mean(axis=0), atol=1e-13)


@pytest.mark.parametrize("method", part(METHODS, every=2))
def test_the_mean_moves_by_the_mean_gradient_while_members_miss_rounds(method: GossipMethod) -> None:
    rule, rng = rule_of(method, momentum=0.4), np.random.default_rng(0)
    walkers = walkers_at(rule, np.zeros((5, DIM)))
    mean, momentum, trail = np.zeros(DIM), np.zeros(DIM), []
    for k in range(20):
        g_ND = rng.standard_normal((5, DIM))
        mixing = without(ring(5), [k % 5])
        walkers = step(rule, walkers, mixing, lambda _, g=g_ND: g, terms_at(k, 0.01))  # type: ignore[misc]
        moving = 0.4 * momentum + g_ND.mean(axis=0) if method != "dsgd" else g_ND.mean(axis=0)
        trail.append(moving)
        momentum = 0.4 * momentum + 0.6 * moving if method == "qg_dmsgd" else moving
        mean = mean - 0.01 * moving
    # As above.
    assert np.allclose(rows_of(walkers).mean(axis=0), mean, atol=1e-13)


# --- state ---


@pytest.mark.parametrize("method", METHODS)
def test_an_exchange_leaves_walkers_and_gradients_alone(method: GossipMethod) -> None:
    rule = rule_of(method)
    walkers = walkers_at(rule, np.ones((3, DIM)))
    grads = grads_of(np.ones((3, DIM)))
    after = exchange(rule, walkers, grads, [terms_at(0, 0.1)] * 3, talks_by_row(DUE, ring(3).rows.tolist()))
    assert np.array_equal(rows_of(walkers), np.ones((3, DIM)))
    assert all(torch.equal(grad["w"], torch.ones(2, 2, dtype=torch.float64)) for grad in grads)
    assert not np.array_equal(rows_of(after), rows_of(walkers))
    assert all(SENT not in walker.state for walker in after)
    assert all(walker.state.keys() == rule.init(walker.params).keys() for walker in after)


@pytest.mark.parametrize("method", METHODS)
def test_slots_say_what_a_newcomer_and_a_checkpoint_get(method: GossipMethod) -> None:
    slots = rule_of(method).slots
    assert slots[SENT].kind is StateClass.TRANSIENT
    assert (MOMENTUM in slots) == (method != "dsgd")
    if MOMENTUM in slots:
        assert slots[MOMENTUM].kind is StateClass.PRIVATE
        assert slots[MOMENTUM].is_saved
        assert not slots[MOMENTUM].is_copied


def test_a_newcomer_begins_without_momentum_and_the_others_keep_theirs() -> None:
    rule = rule_of("decentlam")
    walkers = walkers_at(rule, np.ones((3, DIM)))
    (first, *_) = step(rule, walkers, ring(3), lambda x: x, terms_at(0, 0.1))
    newcomer, params = first.copy(), rows_of([first])
    rule.on_membership(first, before=3, after=4, me=0)
    rule.on_membership(newcomer, before=3, after=4, me=None)
    assert float(first.state[MOMENTUM]["w"].abs().min()) > 0
    assert float(newcomer.state[MOMENTUM]["w"].abs().max()) == 0
    assert np.array_equal(rows_of([first]), params)
    assert np.array_equal(rows_of([newcomer]), params)


@pytest.mark.parametrize("method", METHODS)
def test_only_those_with_a_weight_get_anything(method: GossipMethod) -> None:
    rule = rule_of(method)
    walkers = walkers_at(rule, np.ones((8, DIM)))
    talks = talks_by_row(DUE, static_exponential(8).rows.tolist())
    rule.local_step(walkers[0], grads_of(np.ones((8, DIM)))[0], terms_at(0, 0.1), talks=True)
    sent = rule.contribution(walkers[0], talks[0])
    assert sorted(sent) == [0, 1, 2, 4]
    assert {what: tensor.shape for what, tensor in sent[1].items()} == dict.fromkeys(
        ["y", "momentum"] if method == "da_dmsgd" else ["y"], (DIM,)
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_of_zero_averages_and_divides_by_nothing(method: GossipMethod) -> None:
    rule = rule_of(method)
    start = np.random.default_rng(0).standard_normal((4, DIM))
    walkers = step(rule, walkers_at(rule, start), ring(4), lambda x: x, terms_at(0, 0.0))
    # One weighted sum of four values.
    assert np.allclose(rows_of(walkers), ring(4).rows @ start, atol=1e-15)
    assert all(
        bool(m.isfinite().all()) for walker in walkers for m in walker.state.get(MOMENTUM, {}).values()
    )


# --- what is refused ---


def test_what_is_not_finite_or_far_too_long_leaves_its_weight_to_oneself() -> None:
    rule = rule_of("dsgd")
    start = np.ones((5, DIM))
    start[1], start[4] = np.nan, 1e6
    walkers = step(rule, walkers_at(rule, start), ring(5), np.zeros_like, terms_at(0, 0.1))
    # Three times a third of 1.
    assert rows_of(walkers)[0].tolist() == pytest.approx([1.0] * DIM)


@pytest.mark.parametrize("robust", [NormClip(kind="median_norm_clip"), CentredClip(kind="centred_clip")])
def test_clipping_bounds_what_one_neighbour_does(robust: NormClip | CentredClip) -> None:
    spec = Gossip(rule="gossip", method="dsgd", robust=robust)
    rule = GossipRule(spec=spec, optimizer=SgdSpec(name="sgd", momentum=0.0, weight_decay=0.0))
    start = np.ones((5, DIM))
    start[1] = 1.1
    start[4] = 5.0
    moved = rows_of(step(rule, walkers_at(rule, start), ring(5), np.zeros_like, terms_at(0, 0.1)))[0] - 1.0
    # The difference of 4 counts as one of 0.1, the lower median: two thirds of 0.1.
    assert moved.tolist() == pytest.approx([0.2 / 3] * DIM)


def test_a_row_that_does_not_sum_to_one_is_refused() -> None:
    rule = rule_of("dsgd")
    walkers = walkers_at(rule, np.ones((2, DIM)))
    talks = talks_by_row(DUE, [[0.5, 0.25], [0.25, 0.5]])
    with pytest.raises(ValueError, match="sum to 1"):
        exchange(rule, walkers, grads_of(np.ones((2, DIM))), [terms_at(0, 0.1)] * 2, talks)


def test_whoever_keeps_nothing_of_its_own_still_has_it_when_others_fail() -> None:
    rule = rule_of("dsgd")
    start = np.stack([np.ones(DIM), np.full(DIM, np.nan)])
    swap = Mixing(rows=np.array([[0.0, 1.0], [1.0, 0.0]]))
    walkers = step(rule, walkers_at(rule, start), swap, np.zeros_like, terms_at(0, 0.1))
    assert rows_of(walkers)[0].tolist() == [1.0] * DIM


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UserError, match="heavy-ball"):
        GossipRule(spec=Gossip(rule="gossip"), optimizer=SgdSpec(name="sgd", nesterov=True))
    with pytest.raises(UserError, match="take dmsgd"):
        GossipRule(spec=Gossip(rule="gossip", method="dsgd"), optimizer=SgdSpec(name="sgd"))
    with pytest.raises(UserError, match="keep the mean"):
        GossipRule(spec=Gossip(rule="gossip", robust=Krum(kind="krum")), optimizer=SgdSpec(name="sgd"))
    rule = rule_of("dmsgd")
    (walker,) = walkers_at(rule, np.ones((1, DIM)))
    with pytest.raises(ValueError, match="names differ"):
        rule.local_step(walker, {"w": torch.ones(2, 2)}, terms_at(0, 0.1), talks=True)
