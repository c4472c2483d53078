"""DiLoCo against its equations in numpy, and what must stay true when walkers or exchanges are lost."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from skein.config.aggregation import DiLoCo
from skein.config.robust import CentredClip, Krum, NormClip, TrimmedMean
from skein.config.rule import Due, Wire
from skein.numeric.aggregate.diloco import (
    GLOBAL,
    MOMENTUM,
    RESIDUAL,
    SHARD_RESIDUAL,
    DiLoCoRule,
)
from skein.numeric.aggregate.fragments import fragment_spans, gathered
from skein.numeric.optim.adamw import AdamW
from skein.numeric.optim.sgd import Sgd
from skein.numeric.walker import StateClass, Walker
from skein.plan.agreeing.payload import payload_bytes
from tests.support.exchanges import put, take, talks_by_shard
from tests.support.extent import part
from tests.support.walks import Walk, drawn, problem, terms_at, walk_of, walkers_at

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
F32 = np.float32
LOSSY: tuple[Wire, ...] = ("bf16", "int8", "int4", "int2")


def rule_of(spec: DiLoCo, *, momentum: float = 0.9) -> DiLoCoRule:
    return DiLoCoRule(spec=spec, optimizer=Sgd(momentum=momentum, nesterov=False, weight_decay=0.0))


def bits(tensors: Mapping[str, Tensor]) -> list[bytes]:
    return [tensors[name].numpy().tobytes() for name in sorted(tensors)]


def saved(rule: DiLoCoRule, walker: Walker) -> list[list[bytes]]:
    """All that a checkpoint would have of a walker."""
    slots = [walker.state[slot] for slot in sorted(rule.slots) if rule.slots[slot].is_saved]
    return [bits(walker.params), *map(bits, slots)]


# --- the equations, in numpy ---


@dataclass(slots=True, kw_only=True)
class Numpy:
    """Four walkers in numpy: no shards, all tensors as one vector, element by element."""

    spec: DiLoCo
    theta: Array
    own: list[Array]
    weights: tuple[float, ...]

    def run(self, curvatures: list[Array], targets: list[Array], num_steps: int) -> None:
        """Heavy ball within, the outer step without; every operation in float32, in the order of the docstring."""
        spec, num_cycle = self.spec, self.spec.local_steps
        inner = [np.zeros_like(self.theta) for _ in self.own]
        outer = np.zeros_like(self.theta)
        ends = {(k + 1) * num_cycle // spec.fragments % num_cycle: k for k in range(spec.fragments)}
        waiting: list[tuple[int, int, Array]] = []
        for step in range(num_steps):
            rate = F32(terms_at(step).learning_rate)
            for i, x in enumerate(self.own):
                inner[i] = inner[i] * F32(0.9) + (x - targets[i]) * curvatures[i] * F32(0.5)
                self.own[i] = x - inner[i] * rate
            fragment = ends.get((step + 1) % num_cycle)
            if fragment is not None:
                terms = [(self.theta - x) * F32(w) for x, w in zip(self.own, self.weights, strict=True)]
                delta = terms[0]
                for term in terms[1:]:
                    delta = delta + term
                waiting.append((step + spec.overlap_steps, fragment, delta))
            for _, fragment_now, delta in [entry for entry in waiting if entry[0] == step]:
                here = self.fragment_of_each() == fragment_now
                momentum = outer * F32(spec.outer_momentum) + delta
                move = momentum * F32(spec.outer_momentum) + delta if spec.nesterov else momentum
                theta = self.theta - move * F32(spec.outer_learning_rate)
                outer, self.theta = np.where(here, momentum, outer), np.where(here, theta, self.theta)
                for i, x in enumerate(self.own):
                    mixed = x * F32(1 - spec.mix) + self.theta * F32(spec.mix)
                    self.own[i] = np.where(here, self.theta if spec.mix == 1 else mixed, x)

    def fragment_of_each(self) -> Array:
        """The last fragment that begins at an element or before it."""
        size, num = self.theta.size, self.spec.fragments
        fragments = [max(k for k in range(num) if k * size // num <= at) for at in range(size)]
        return np.array(fragments)


SPECS = (
    DiLoCo(rule="diloco", wire="fp32", local_steps=3),
    DiLoCo(
        rule="diloco", wire="fp32", local_steps=4, nesterov=False, outer_learning_rate=1.0, outer_momentum=0.5
    ),
    DiLoCo(rule="diloco", wire="fp32", local_steps=5, fragments=3, mix=0.7),
    DiLoCo(rule="diloco", wire="fp32", local_steps=6, fragments=3, overlap_steps=1),
    DiLoCo(rule="diloco", wire="fp32", local_steps=6, fragments=4, overlap_steps=5, mix=0.5),
)


@pytest.mark.parametrize(("spec", "num_shards"), part(list(product(SPECS, (1, 4))), every=3))
def test_walkers_go_the_way_of_the_equations_in_numpy_bit_by_bit(spec: DiLoCo, num_shards: int) -> None:
    walk = walk_of(rule_of(spec), 4, num_shards=num_shards)
    walk.weights = ((0, 0.125), (1, 0.25), (2, 0.5), (3, 0.125))
    theta = vector(walk.walkers[0].params)
    oracle = Numpy(spec=spec, theta=theta, own=[theta] * 4, weights=tuple(w for _, w in walk.weights))
    walk.run(25)
    targets = [vector(own.target) for own in walk.problems]
    oracle.run([vector(own.curvature) for own in walk.problems], targets, 25)
    for walker, own in zip(walk.walkers, oracle.own, strict=True):
        np.testing.assert_array_equal(vector(walker.state[GLOBAL]), oracle.theta)
        np.testing.assert_array_equal(vector(walker.params), own)


def vector(tensors: Mapping[str, Tensor]) -> Array:
    """All elements in order of the names, copied."""
    return np.concatenate([tensors[name].numpy().ravel() for name in sorted(tensors)])


def test_one_local_step_and_a_plain_outer_step_are_averaged_gradients() -> None:
    spec = DiLoCo(rule="diloco", wire="fp32", local_steps=1, outer_learning_rate=1.0, outer_momentum=0.0)
    walk = walk_of(rule_of(spec, momentum=0.0), 4)
    expected = {name: param.double() for name, param in walk.walkers[0].params.items()}
    walk.run(10)
    for step in range(10):
        grads = [own.grads(expected) for own in walk.problems]
        for name, x in expected.items():
            x -= terms_at(step).learning_rate * 0.5 * torch.stack([grad[name] for grad in grads]).mean(0)
    for name, x in expected.items():
        # Ten steps of a few float32 roundings of numbers up to about 3.
        torch.testing.assert_close(walk.walkers[0].params[name].double(), x, rtol=0, atol=1e-5)


def test_the_outer_step_is_the_one_of_torch() -> None:
    spec = DiLoCo(rule="diloco", wire="fp32", local_steps=2)
    walk = walk_of(rule_of(spec), 2)
    x = walk.walkers[0].params["a.weight"].clone().requires_grad_()
    theirs = torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        walk.run(1)
        before = [walker.copy() for walker in walk.walkers]
        walk.run(1)
        for walker, own in zip(before, walk.problems, strict=True):
            walk.rule.local_step(walker, own.grads(walker.params), terms_at(walk.step - 1), talks=False)
        x.grad = x.detach() - sum(walker.params["a.weight"] for walker in before) / 2
        theirs.step()
        # torch contracts products and sums; a few units of float32 for numbers up to about 3.
        torch.testing.assert_close(walk.walkers[0].state[GLOBAL]["a.weight"], x.detach(), rtol=0, atol=3e-6)


# --- the wire ---


@pytest.mark.parametrize(
    ("wire", "num_shards"),
    [*part(list(product(LOSSY, (1, 3))), every=3), *((wire, 40) for wire in part(LOSSY, every=4, start=2))],
)
def test_what_is_rounded_away_is_kept(wire: Wire, num_shards: int) -> None:
    """sum w (delta + e) + E = d + sum w e' + E', with 40 shards more than a fragment has elements."""
    spec = DiLoCo(rule="diloco", wire=wire, local_steps=4, fragments=2)
    walk = walk_of(rule_of(spec), 3, num_shards=num_shards, dtype=torch.float64)
    walk.weights = ((0, 0.5), (1, 0.25), (2, 0.25))
    for _ in range(2):
        walk.run(3)
        for fragment in range(2):
            spans = fragment_spans(walk.walkers[0].params, fragment=fragment, num_fragments=2)
            said = sum(
                weight
                * (
                    gathered(w.state[GLOBAL], spans)
                    - gathered(w.params, spans)
                    + gathered(w.state[RESIDUAL], spans)
                )
                for w, (_, weight) in zip(walk.walkers, walk.weights, strict=True)
            ) + owned(walk, fragment)
            exchange = walk.take(Due(round=0, fragment=fragment))
            joined = walk.rule.join(walk.walkers[0], exchange.talks[0], exchange.results)
            put(walk.rule, walk.walkers, exchange, [terms_at(0)] * 3)
            left = sum(
                weight * gathered(w.state[RESIDUAL], spans)
                for w, (_, weight) in zip(walk.walkers, walk.weights, strict=True)
            ) + owned(walk, fragment)
            # Ten float64 roundings of numbers up to about 10.
            torch.testing.assert_close(joined + left, said, rtol=0, atol=1e-13)
            assert num_shards > 1 or float(torch.as_tensor(left).abs().max()) > 0


def owned(walk: Walk, fragment: int) -> Tensor:
    """What the owners keep of a fragment, in order of the shards; zero before they own any."""
    kept = {k: v for walker in walk.walkers for k, v in walker.state[SHARD_RESIDUAL].items()}
    keys = [f"{fragment}.{shard}.{walk.num_shards}" for shard in range(walk.num_shards)]
    return torch.cat([kept[key] for key in keys]) if keys[0] in kept else torch.zeros(())


@pytest.mark.parametrize(
    ("wire", "num_walkers", "num_shards"),
    [
        (wire, *counts)
        for wire, counts in part(list(product(("fp32", *LOSSY), ((2, 2), (4, 1), (4, 7), (5, 3)))), every=3)
    ],
)
def test_theta_is_bit_equal_at_all_walkers(wire: Wire, num_walkers: int, num_shards: int) -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire=wire, local_steps=4, fragments=2, overlap_steps=1, mix=0.5))
    walk = walk_of(rule, num_walkers, num_shards=num_shards)
    walk.run(14)
    for slot in (GLOBAL, MOMENTUM):
        assert all(bits(walker.state[slot]) == bits(walk.walkers[0].state[slot]) for walker in walk.walkers)
    assert len({tuple(bits(walker.params)) for walker in walk.walkers}) == num_walkers


def test_small_changes_beside_a_large_one_arrive_with_feedback_and_never_without() -> None:
    """Each round one element moves by 1 and the others by 0.01, a fourteenth of a step of the grid they share."""
    moved = {}
    for feedback in (True, False):
        spec = DiLoCo(
            rule="diloco",
            wire="int4",
            local_steps=1,
            outer_learning_rate=1.0,
            outer_momentum=0.0,
            error_feedback=feedback,
        )
        rule = rule_of(spec)
        params = {"w": torch.zeros(64)}
        walkers = [Walker(params=params, state=rule.init(params))]
        for round_ in range(200):
            params["w"].sub_(torch.tensor([1.0] + [0.01] * 63))
            talks = talks_by_shard(Due(round=round_), num_members=1, num_shards=1)
            put(rule, walkers, take(rule, walkers, talks), [terms_at(0)])
        moved[feedback] = walkers[0].state[GLOBAL]["w"][1:].neg()
    # After 200 rounds each should be at 2. Sender and owner hold back half a step of 1/7 each, if the block's largest
    # stays what it is; residuals make that up to three times as large.
    assert float((moved[True] - 2.0).abs().max()) < 0.5
    assert float(moved[False].abs().max()) == 0.0


def test_a_fragment_weighs_what_its_wire_says() -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="int4", local_steps=2))
    params = {"w": torch.randn(100_000)}
    walkers = [Walker(params={"w": params["w"].clone()}, state=rule.init(params)) for _ in range(4)]
    exchange = take(rule, walkers, talks_by_shard(Due(round=0), num_members=4, num_shards=4))
    shard = payload_bytes("int4", 25_000)
    # Three of four shards leave each walker, beside a norm of 8 bytes; each result goes to three others.
    assert exchange.num_bytes == 4 * 3 * (shard + 8) + 4 * 3 * shard


# --- walkers that are missing ---


def test_a_walker_without_weight_takes_theta_and_keeps_its_residual() -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="int4", local_steps=4, mix=0.5))
    walk = walk_of(rule, 3)
    walk.run(7)
    residuals = [bits(walker.state[RESIDUAL]) for walker in walk.walkers]
    walk.weights = ((0, 0.5), (1, 0.5), (2, 0.0))
    walk.run(1)
    assert [bits(w.params) == bits(w.state[GLOBAL]) for w in walk.walkers] == [False, False, True]
    kept = [bits(w.state[RESIDUAL]) == old for w, old in zip(walk.walkers, residuals, strict=True)]
    assert kept == [False, False, True]


@pytest.mark.parametrize(
    "absent", [((0, 0.5), (1, 0.5), (2, 0.0)), ((0, 0.5), (1, 0.5)), ((0, 3.0), (1, 3.0))]
)
def test_an_absent_walker_leaves_the_mean_of_the_others(absent: tuple[tuple[int, float], ...]) -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="fp32", local_steps=4))
    walk, without = walk_of(rule, 3), walk_of(rule, 2)
    walk.weights = absent
    walk.run(4)
    without.run(4)
    assert bits(walk.walkers[2].state[GLOBAL]) == bits(without.walkers[0].state[GLOBAL])


def test_an_exchange_in_which_nobody_has_a_weight_is_refused() -> None:
    walk = walk_of(rule_of(DiLoCo(rule="diloco", local_steps=4)), 2)
    walk.weights = ((0, 0.0), (1, 0.0))
    with pytest.raises(ValueError, match="nobody's part has a weight"):
        walk.run(4)


def test_an_exchange_that_is_never_applied_has_changed_nothing_and_taken_anew_gives_the_same() -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="int4", local_steps=4, fragments=2, overlap_steps=1))
    walk = walk_of(rule, 3)
    walk.run(10)
    before = [saved(rule, walker) for walker in walk.walkers]
    lost = walk.take(Due(round=2, fragment=1))
    assert [saved(rule, walker) for walker in walk.walkers] == before
    again = walk.take(Due(round=2, fragment=1))
    results = [
        bits({f"{s}.{name}": x.float() for s, r in taken.results.items() for name, x in r.items()})
        for taken in (lost, again)
    ]
    assert results[0] == results[1]


# --- membership ---


def test_a_newcomer_begins_at_theta_without_residuals() -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="int4", local_steps=4, mix=0.5))
    walk = walk_of(rule, 3)
    walk.run(10)
    # Whatever it held before, it has been given a copy of what is copied.
    newcomer = walk.walkers[0].copy()
    rule.on_membership(newcomer, before=3, after=4, me=None)
    assert bits(newcomer.params) == bits(walk.walkers[0].state[GLOBAL])
    assert not any(bool(x.any()) for x in newcomer.state[RESIDUAL].values())
    assert not newcomer.state[SHARD_RESIDUAL]


def test_survivors_keep_all_but_what_they_owned() -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="int4", local_steps=4))
    walk = walk_of(rule, 3)
    walk.run(10)
    before = walk.walkers[1].copy()
    assert walk.walkers[1].state[SHARD_RESIDUAL]
    rule.on_membership(walk.walkers[1], before=3, after=2, me=1)
    assert not walk.walkers[1].state[SHARD_RESIDUAL]
    for slot in (GLOBAL, MOMENTUM, RESIDUAL, "momentum"):
        assert bits(walk.walkers[1].state[slot]) == bits(before.state[slot])
    assert bits(walk.walkers[1].params) == bits(before.params)


def test_theta_stays_bit_equal_while_walkers_come_and_go() -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="int4", local_steps=4, fragments=2))
    walk = walk_of(rule, 3)
    walk.run(9)
    del walk.walkers[1]
    for me, walker in zip((0, 2), walk.walkers, strict=True):
        rule.on_membership(walker, before=3, after=2, me=me)
    walk.problems = [problem(0), problem(2)]
    walk.run(9)
    newcomer = walk.walkers[1].copy()
    for place, walker in enumerate(walk.walkers):
        rule.on_membership(walker, before=2, after=3, me=place)
    rule.on_membership(newcomer, before=2, after=3, me=None)
    walk.walkers.append(newcomer)
    walk.problems = [problem(i) for i in range(3)]
    walk.run(9)
    assert len({tuple(bits(walker.state[GLOBAL])) for walker in walk.walkers}) == 1


# --- what bad members can do ---


@pytest.mark.parametrize(
    "robust",
    [
        NormClip(kind="median_norm_clip"),
        TrimmedMean(kind="trimmed_mean"),
        Krum(kind="krum"),
        CentredClip(kind="centred_clip"),
    ],
)
def test_one_bad_walker_moves_theta_no_farther_than_the_others(
    robust: NormClip | TrimmedMean | Krum | CentredClip,
) -> None:
    num_shards = 1 if isinstance(robust, Krum | CentredClip) else 3
    rule = rule_of(DiLoCo(rule="diloco", wire="int8", local_steps=4, robust=robust))
    honest, attacked = walk_of(rule, 5, num_shards=num_shards), walk_of(rule, 6, num_shards=num_shards)
    for walk in (honest, attacked):
        walk.run(11)
    begin = attacked.walkers[0].copy().state[GLOBAL]
    for param in attacked.walkers[5].params.values():
        param.add_(1e4)
    attacked.run(1)
    honest.run(1)
    moved = [
        sum(float((walk.walkers[0].state[GLOBAL][name] - begin[name]).square().sum()) for name in begin)
        ** 0.5
        for walk in (honest, attacked)
    ]
    assert moved[1] < 3 * moved[0]


def test_a_part_that_makes_no_sense_does_not_count() -> None:
    rule = rule_of(DiLoCo(rule="diloco", wire="int8", local_steps=4))
    walk = walk_of(rule, 3, num_shards=1)
    walk.run(3)
    talk = talks_by_shard(Due(round=0), num_members=3, num_shards=1)[0]
    parts = [rule.contribution(walker, talk)[0] for walker in walk.walkers]
    alone = talks_by_shard(Due(round=0), num_members=3, num_shards=1, weights=((0, 0.5), (1, 0.5)))[0]
    expected = rule.combine(walk.walkers[0].copy(), alone, 0, parts[:2])
    for bad in ({"codes": parts[2]["codes"]}, parts[2] | {"scales": parts[2]["scales"] * torch.nan}, {}):
        result = rule.combine(walk.walkers[0].copy(), talk, 0, [*parts[:2], bad])
        assert bits(result) == bits(expected)


def test_rules_that_compare_whole_fragments_want_one_shard() -> None:
    walk = walk_of(rule_of(DiLoCo(rule="diloco", local_steps=4, robust=Krum(kind="krum"))), 5, num_shards=2)
    with pytest.raises(ValueError, match="whole fragments"):
        walk.run(4)


# --- state ---


@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_all_state_is_declared(wire: Wire) -> None:
    spec = DiLoCo(rule="diloco", wire=wire, local_steps=4, robust=CentredClip(kind="centred_clip"))
    rule = DiLoCoRule(spec=spec, optimizer=AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))
    walk = walk_of(rule, 2, num_shards=1)
    assert walk.walkers[0].state.keys() == rule.slots.keys()
    walk.run(5)
    assert walk.walkers[0].state.keys() == rule.slots.keys()
    kinds = {name: slot.kind for name, slot in rule.slots.items()}
    assert kinds[GLOBAL] is kinds[MOMENTUM] is StateClass.REPLICATED
    assert all(kinds[name] is StateClass.PRIVATE for name in rule.optimizer.slots)


def test_newcomers_who_had_no_time_to_go_far_do_not_make_the_others_unusual() -> None:
    plain = DiLoCo(
        rule="diloco", local_steps=1, wire="fp32", outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False
    )
    rule = rule_of(plain)
    num_steps = (1, 1, 50)
    walkers = walkers_at(rule, 3)
    direction = drawn(7)
    for walker, n in zip(walkers, num_steps, strict=True):
        for name, param in walker.params.items():
            param.sub_(direction[name] * (0.01 * n))
    begun = walkers[0].state[GLOBAL]["b.bias"].clone()
    weights = tuple((i, n / sum(num_steps)) for i, n in enumerate(num_steps))
    talks = talks_by_shard(Due(round=0), num_members=3, num_shards=2, weights=weights)
    put(rule, walkers, take(rule, walkers, talks), [terms_at(0)] * 3)
    moved = begun - walkers[0].state[GLOBAL]["b.bias"]
    expected = direction["b.bias"] * 0.01 * sum(w * n for (_, w), n in zip(weights, num_steps, strict=True))
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)
