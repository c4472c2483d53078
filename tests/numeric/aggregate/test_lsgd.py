"""Pulls towards leaders: where walkers go, what stays untouched, what travels."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from skein.config.aggregation import Lsgd
from skein.config.rule import Due, Reach
from skein.numeric.aggregate.lsgd import START, LsgdRule
from skein.numeric.aggregate.rule import Talk, Terms
from skein.numeric.gradients import flatten
from skein.numeric.optim.sgd import Sgd
from skein.numeric.walker import StateClass, Walker
from skein.plan.agreeing.election import elect
from tests.support.exchanges import InFlight, led_by, put, take, talks_by_shard

EVERY = Lsgd(rule="lsgd", local_every_steps=1, global_every_steps=1, groups="all", global_pull=0.05)
BOTH = Lsgd(rule="lsgd", local_every_steps=1, global_every_steps=2, local_pull=0.5, global_pull=0.25)
Loss = Callable[[Tensor], Tensor]


def rule_of(spec: Lsgd, *, momentum: float = 0.0) -> LsgdRule:
    return LsgdRule(spec=spec, optimizer=Sgd(momentum=momentum, nesterov=False, weight_decay=0.0))


def walkers_at(rule: LsgdRule, points: Sequence[Sequence[float]]) -> list[Walker]:
    walkers = []
    for point in points:
        params = {"x": torch.tensor(point, dtype=torch.float64)}
        walkers.append(Walker(params=params, state=rule.init(params)))
    return walkers


def terms_at(step: int, *, learning_rate: float = 0.1) -> Terms:
    return Terms(step=step, learning_rate=learning_rate, gradient_scale=1.0)


def stepped(
    rule: LsgdRule, walkers: Sequence[Walker], grads: Sequence[Sequence[float]], terms: Terms
) -> None:
    for walker, grad in zip(walkers, grads, strict=True):
        tensor = {"x": torch.tensor(grad, dtype=torch.float64)}
        rule.local_step(walker, tensor, terms, talks=bool(rule.spec.due(terms.step)))


def pulled(
    rule: LsgdRule, walkers: Sequence[Walker], leader: int, terms: Terms, due: Due, *, num_shards: int = 2
) -> InFlight:
    talks = talks_by_shard(due, num_members=len(walkers), num_shards=num_shards)
    exchange = take(rule, walkers, [led_by(talk, leader) for talk in talks])
    put(rule, walkers, exchange, [terms] * len(walkers))
    return exchange


def at(walker: Walker) -> list[float]:
    listed: list[float] = walker.params["x"].tolist()
    return listed


def descend(
    rule: LsgdRule, walkers: Sequence[Walker], loss: Loss, num_steps: int, *, learning_rate: float
) -> None:
    """Exact gradients, the leader by exact loss, an exchange of all every step."""
    for step in range(num_steps):
        scores = {i: (float(loss(walker.params["x"])), "") for i, walker in enumerate(walkers)}
        leader = elect(scores)
        assert leader is not None
        terms = terms_at(step, learning_rate=learning_rate)
        stepped(rule, walkers, [slope(loss, walker) for walker in walkers], terms)
        pulled(rule, walkers, leader, terms, rule.spec.due(step)[-1])


def slope(loss: Loss, walker: Walker) -> list[float]:
    x = walker.params["x"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x)
    listed: list[float] = grad.tolist()
    return listed


def test_a_follower_goes_a_share_of_the_way_to_where_the_leaders_step_began() -> None:
    rule = rule_of(EVERY)
    walkers = walkers_at(rule, [[1.0, 4.0], [3.0, 0.0]])
    terms = terms_at(0)
    stepped(rule, walkers, [[1.0, 2.0], [10.0, 10.0]], terms)
    pulled(rule, walkers, 1, terms, rule.spec.due(0)[0])
    # 1 - 0.1 * 1 = 0.9, then 5 % of the way to 3; 4 - 0.1 * 2 = 3.8, then 5 % of the way to 0.
    assert at(walkers[0]) == pytest.approx([0.9 + 0.05 * 2.1, 3.8 * 0.95], rel=1e-15)
    assert at(walkers[1]) == pytest.approx([2.0, -1.0], rel=1e-15)


@pytest.mark.parametrize("learning_rate", [1e-3, 10.0])
def test_the_learning_rate_does_not_change_a_pull(learning_rate: float) -> None:
    rule = rule_of(EVERY)
    walkers = walkers_at(rule, [[1.0], [3.0]])
    terms = terms_at(0, learning_rate=learning_rate)
    stepped(rule, walkers, [[0.0], [0.0]], terms)
    pulled(rule, walkers, 1, terms, rule.spec.due(0)[0], num_shards=1)
    assert at(walkers[0]) == pytest.approx([1.1])


def test_the_pull_of_the_group_comes_first_and_the_one_of_all_starts_from_there() -> None:
    rule = rule_of(BOTH)
    walkers = walkers_at(rule, [[0.0], [8.0], [100.0]])
    terms = terms_at(1)
    of_group, of_all = rule.spec.due(1)
    assert (of_group.reach, of_all.reach) == (Reach.GROUP, Reach.ALL)
    stepped(rule, walkers, [[0.0]] * 3, terms)
    pulled(rule, walkers[:2], 1, terms, of_group, num_shards=1)
    pulled(rule, walkers[2:], 0, terms, of_group, num_shards=1)
    assert [at(walker) for walker in walkers] == [[4.0], [8.0], [100.0]]
    pulled(rule, walkers, 2, terms, of_all, num_shards=1)
    assert [at(walker) for walker in walkers] == [[4.0 + 24.0], [8.0 + 23.0], [100.0]]


def test_momentum_is_untouched_by_pulls() -> None:
    rule = rule_of(EVERY, momentum=0.9)
    walkers, alone = walkers_at(rule, [[1.0], [3.0]]), walkers_at(rule, [[1.0], [3.0]])
    for some in (walkers, alone):
        stepped(rule, some, [[1.0], [2.0]], terms_at(0))
    pulled(rule, walkers, 0, terms_at(0), rule.spec.due(0)[0], num_shards=1)
    for walker, other in zip(walkers, alone, strict=True):
        assert torch.equal(walker.state["momentum"]["x"], other.state["momentum"]["x"])
    assert at(walkers[1]) != at(alone[1])


def test_only_the_leader_sends_and_its_parameters_go_out_once_in_pieces() -> None:
    rule = rule_of(EVERY)
    walkers = walkers_at(rule, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    stepped(rule, walkers, [[1.0, 1.0, 1.0]] * 2, terms_at(0))
    exchange = pulled(rule, walkers, 1, terms_at(0), rule.spec.due(0)[0])
    assert [sorted(parts) for parts in exchange.sent] == [[], [0, 1]]
    pieces = [exchange.sent[1][shard]["params"] for shard in (0, 1)]
    assert [piece.tolist() for piece in pieces] == [[4.0, 5.0], [6.0]]


def test_what_is_kept_for_an_exchange_is_gone_after_the_last_one() -> None:
    rule = rule_of(BOTH)
    walkers = walkers_at(rule, [[0.0], [8.0]])
    stepped(rule, walkers, [[0.0]] * 2, terms_at(1))
    of_group, of_all = rule.spec.due(1)
    pulled(rule, walkers, 1, terms_at(1), of_group)
    assert all(START in walker.state for walker in walkers)
    pulled(rule, walkers, 1, terms_at(1), of_all)
    assert not any(START in walker.state for walker in walkers)
    # Nor does it outlive an exchange that never came.
    stepped(rule, walkers, [[0.0]] * 2, terms_at(2))
    rule.local_step(walkers[0], {"x": torch.zeros(1, dtype=torch.float64)}, terms_at(3), talks=False)
    assert START not in walkers[0].state


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_nobody_is_pulled_to_a_leader_that_is_not_finite(broken: float) -> None:
    rule = rule_of(EVERY)
    walkers = walkers_at(rule, [[1.0], [broken]])
    stepped(rule, walkers, [[0.0], [0.0]], terms_at(0))
    pulled(rule, walkers, 1, terms_at(0), rule.spec.due(0)[0], num_shards=1)
    assert at(walkers[0]) == [1.0]


def test_all_state_is_the_walkers_own_except_what_lasts_one_step() -> None:
    kinds = {name: slot.kind for name, slot in rule_of(EVERY, momentum=0.9).slots.items()}
    assert kinds == {"momentum": StateClass.PRIVATE, START: StateClass.TRANSIENT}


@pytest.mark.parametrize("leader", [-1, 2])
def test_a_leader_that_is_no_member_is_refused(leader: int) -> None:
    (talk, _) = talks_by_shard(Due(round=0), num_members=2, num_shards=1)
    with pytest.raises(ValueError, match="not one of 2 members"):
        led_by(talk, leader)


def test_an_exchange_without_a_leader_is_refused() -> None:
    rule = rule_of(EVERY)
    (walker,) = walkers_at(rule, [[1.0]])
    stepped(rule, [walker], [[0.0]], terms_at(0))
    talk: Talk = talks_by_shard(Due(round=0), num_members=1, num_shards=1)[0]
    with pytest.raises(ValueError, match="leader"):
        rule.contribution(walker, talk)


# --- where it leads ---


def double_well(x: Tensor) -> Tensor:
    return ((x * x - 1) ** 2 / 4 + 0.02 * x).sum()


def test_all_walkers_come_to_rest_in_the_deeper_of_two_wells() -> None:
    rule = rule_of(EVERY)
    walkers = walkers_at(rule, [[0.9], [-0.9]])
    descend(rule, walkers, double_well, 250, learning_rate=0.1)
    for walker in walkers:
        # The root of x**3 - x + 0.02 below -1.
        assert at(walker) == pytest.approx([-1.009854], abs=5e-7)
        assert abs(slope(double_well, walker)[0]) < 1e-14


def test_where_a_leader_rests_the_gradient_of_the_loss_is_zero_whatever_the_pull() -> None:
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix, target = (
        root @ root.T / 6 + torch.eye(6),
        torch.randn(6, generator=generator, dtype=torch.float64),
    )

    def loss(x: Tensor) -> Tensor:
        return 0.5 * (x - target) @ matrix.double() @ (x - target)

    for pull in (0.01, 0.9):
        rule = rule_of(EVERY.model_copy(update={"global_pull": pull}))
        starts = [torch.randn(6, generator=generator, dtype=torch.float64).tolist() for _ in range(4)]
        walkers = walkers_at(rule, starts)
        descend(rule, walkers, loss, 150, learning_rate=0.2)
        for walker in walkers:
            assert max(map(abs, slope(loss, walker))) < 1e-12


def test_a_follower_contracts_at_least_as_fast_as_the_theory_says() -> None:
    # f(x+) - f* <= (1 - m eta) (f(x) - f*) - eta lambda (f(x) - f(z)) for exact gradients, convex f, small eta, where
    # the pull is eta * lambda. For f = x'Ax / 2 with A's eigenvalues from m to M, "small" is 1 / (2 M) here.
    generator = torch.Generator().manual_seed(7)
    curvature = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    m, eta, pull = 0.5, 1 / 8, 0.1

    def loss(x: Tensor) -> Tensor:
        return 0.5 * (curvature * x * x).sum()

    rule = rule_of(EVERY.model_copy(update={"global_pull": pull}))
    for _ in range(200):
        points = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        follower, leader = sorted(points, key=lambda x: -float(loss(x)))
        walkers = walkers_at(rule, [follower.tolist(), leader.tolist()])
        before, best = float(loss(follower)), float(loss(leader))
        stepped(rule, walkers, [slope(loss, walker) for walker in walkers], terms_at(0, learning_rate=eta))
        pulled(rule, walkers, 1, terms_at(0), rule.spec.due(0)[0], num_shards=1)
        after = float(loss(walkers[0].params["x"]))
        assert after <= (1 - m * eta) * before - pull * (before - best) + 1e-12


def test_flat_parameters_of_several_tensors_come_back_to_their_names() -> None:
    rule = rule_of(EVERY)
    walkers = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        params = {"b": torch.randn(3, generator=generator), "a": torch.randn(2, 2, generator=generator)}
        walkers.append(Walker(params=params, state=rule.init(params)))
    leader = flatten(walkers[0].params)
    zeros = {name: torch.zeros_like(x) for name, x in walkers[0].params.items()}
    for walker in walkers:
        rule.local_step(walker, zeros, terms_at(0), talks=True)
    before = flatten(walkers[1].params)
    pulled(rule, walkers, 0, terms_at(0), rule.spec.due(0)[0], num_shards=3)
    torch.testing.assert_close(flatten(walkers[1].params), 0.95 * before + 0.05 * leader)
