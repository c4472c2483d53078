"""Both 1-bit rules beyond the laws of all rules, and their guards. What DeepSpeed makes: test_one_bit_deepspeed."""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from skein.config import aggregation
from skein.config.optimizer import AdamWSpec, LambSpec
from skein.config.rule import Due
from skein.numeric.aggregate.one_bit.adam import OneBitAdamRule
from skein.numeric.aggregate.one_bit.freezing import (
    ERROR,
    MOMENTUM,
    MOMENTUM_SCALE,
    SHARD_ERROR,
    OneBit,
)
from skein.numeric.aggregate.one_bit.lamb import OneBitLambRule
from skein.numeric.aggregate.rule import Rule, Terms
from skein.numeric.gradients import flatten
from skein.numeric.optim.adamw import MEAN_OF_SQUARES
from skein.numeric.optim.lamb import Lamb
from skein.numeric.walker import StateClass, Tensors, Walker
from tests.support.exchanges import exchange, talks_by_shard
from tests.support.extent import part

WARMUP = 5
RATE = 0.01
Make = Callable[..., OneBit]


def one_bit_adam(*, warmup_steps: int = WARMUP, error_feedback: bool = True, eps: float = 1e-6) -> OneBit:
    return OneBitAdamRule(
        spec=aggregation.OneBitAdam(
            rule="one_bit_adam", warmup_steps=warmup_steps, error_feedback=error_feedback
        ),
        optimizer=AdamWSpec(betas=(0.9, 0.99), eps=eps, weight_decay=0.1),
    )


def one_bit_lamb(*, warmup_steps: int = WARMUP, error_feedback: bool = True, eps: float = 1e-6) -> OneBit:
    return OneBitLambRule(
        spec=aggregation.OneBitLamb(
            rule="one_bit_lamb", warmup_steps=warmup_steps, error_feedback=error_feedback
        ),
        optimizer=LambSpec(name="lamb", betas=(0.9, 0.99), eps=eps, weight_decay=0.1),
    )


@pytest.fixture(params=[one_bit_adam, one_bit_lamb], ids=["adam", "lamb"])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


def make_params(dtype: torch.dtype = torch.float32) -> Tensors:
    """101 elements: no number of shards divides them."""
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"embed": (9, 7), "head": (5, 6), "norm": (7,), "scale": ()}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def make_grads(params: Mapping[str, Tensor], *, step: int, member: int) -> Tensors:
    """Noise around the gradient of a bowl, its size different in every tensor."""
    generator = torch.Generator().manual_seed(1000 * step + member)
    return {
        name: (param + torch.randn(param.shape, generator=generator, dtype=param.dtype)) * 10.0**-index
        for index, (name, param) in enumerate(sorted(params.items()))
    }


def terms_of(step: int) -> Terms:
    return Terms(step=step, learning_rate=RATE, gradient_scale=0.5)


def new_walkers(rule: Rule, num: int, dtype: torch.dtype = torch.float32) -> list[Walker]:
    return [Walker(params=p, state=rule.init(p)) for p in (make_params(dtype) for _ in range(num))]


def mean_of(grads: Sequence[Mapping[str, Tensor]]) -> Tensors:
    return {name: torch.stack([grad[name] for grad in grads]).mean(dim=0) for name in grads[0]}


def advance(rule: OneBit, walkers: Sequence[Walker], steps: range, *, num_shards: int = 0) -> list[Walker]:
    """The walkers after `steps`; whoever reduces gradients in the warm-up is played by `mean_of`."""
    now = list(walkers)
    for step in steps:
        grads = [make_grads(w.params, step=step, member=member) for member, w in enumerate(now)]
        due = rule.spec.due(step)
        if due:
            talks = talks_by_shard(due[0], num_members=len(now), num_shards=num_shards or len(now))
            now = exchange(rule, now, grads, [terms_of(step)] * len(now), talks)
        else:
            now = [walker.copy() for walker in now]
            for walker in now:
                rule.local_step(walker, mean_of(grads), terms_of(step), talks=False)
    return now


def replicated(rule: Rule, walker: Walker) -> dict[str, Tensor]:
    kinds = {slot for slot, kept in rule.slots.items() if kept.kind is StateClass.REPLICATED}
    state = {f"{slot}/{name}": t for slot in sorted(kinds) for name, t in walker.state[slot].items()}
    return dict(walker.params) | state


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def all_equal(rule: Rule, walkers: Sequence[Walker]) -> bool:
    return all(same_bits(replicated(rule, walkers[0]), replicated(rule, walker)) for walker in walkers)


# --- laws ---


@pytest.mark.parametrize(("num_members", "num_shards"), part(list(product((3, 1), (1, 3, 7))), every=2))
def test_what_members_give_comes_out_or_is_kept_as_error(
    make: Make, num_members: int, num_shards: int
) -> None:
    rule = make()
    walkers = advance(rule, new_walkers(rule, num_members, torch.float64), range(10), num_shards=num_shards)
    talks = talks_by_shard(
        Due(round=10 - WARMUP),
        num_members=num_members,
        num_shards=num_shards,
        weights=((0, 0.5), (1, 0.25), (2, 0.25)) if num_members == 3 else (),
    )
    weights = [weight for _, weight in talks[0].weights[0]]

    def left_over() -> Tensor:
        """Mean of the members' errors and the shards' own, as one vector."""
        own = sum(
            (w * flatten(walker.state[ERROR]) for w, walker in zip(weights, walkers, strict=True)),
            start=torch.zeros(101, dtype=torch.float64),
        )
        layout = rule.layout(walkers[0], talks[0])
        for shard in range(num_shards):
            error = walkers[shard % num_members].state[SHARD_ERROR][layout.key(shard)]
            ranges = layout.ranges(shard)
            pieces = torch.split(error, [stop - start for start, stop in ranges])
            for (start, stop), piece in zip(ranges, pieces, strict=True):
                own[start:stop] += piece
        return own

    for member, walker in enumerate(walkers):
        grads = make_grads(walker.params, step=10, member=member)
        rule.local_step(walker, grads, terms_of(10), talks=True)
    given_in = left_over() + sum(
        w * walker.state[MOMENTUM]["all"] for w, walker in zip(weights, walkers, strict=True)
    )
    sent = [rule.contribution(walker, talk) for walker, talk in zip(walkers, talks, strict=True)]
    results = {
        shard: rule.combine(
            walkers[shard % num_members], talks[shard % num_members], shard, [part[shard] for part in sent]
        )
        for shard in range(num_shards)
    }
    out = rule.join(walkers[0], talks[0], results) + left_over()
    # Sums of a few terms of order 1 in float64.
    torch.testing.assert_close(out, given_in, rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_updates", [1, WARMUP])
def test_the_warm_up_is_the_inner_optimizer_without_bias_correction(make: Make, num_updates: int) -> None:
    rule = make()
    is_lamb = isinstance(rule, OneBitLambRule)
    # Adam without bias correction is LAMB whose ratio can only be 1.
    reference = Lamb(
        betas=rule.optimizer.betas,
        eps=rule.optimizer.eps,
        weight_decay=rule.optimizer.weight_decay,
        min_ratio=0.01 if is_lamb else 1.0,
        max_ratio=10.0 if is_lamb else 1.0,
        bias_correction=False,
    )
    (walker,) = new_walkers(rule, 1, torch.float64)
    params = make_params(torch.float64)
    mirrored = Walker(params=params, state=reference.init(params))
    for step in range(num_updates):
        grads = make_grads(walker.params, step=step, member=0)
        rule.local_step(walker, grads, terms_of(step), talks=False)
        reference.update(mirrored, grads, learning_rate=RATE, gradient_scale=0.5)
    for name, param in walker.params.items():
        torch.testing.assert_close(param, mirrored.params[name], rtol=1e-13, atol=1e-14)  # float64


def test_without_anything_to_round_one_bit_is_full_precision(make: Make) -> None:
    # One element is its sign times its own root mean square: nothing is lost, however many members there are.
    rule = make()
    params = [{"w": torch.tensor([0.7], dtype=torch.float64)} for _ in range(3)]
    walkers = [Walker(params=p, state=rule.init(p)) for p in params]
    alone = walkers[0].copy()
    for step in range(12):
        rule.local_step(
            alone,
            mean_of([make_grads(alone.params, step=step, member=member) for member in range(3)]),
            terms_of(step),
            talks=False,
        )
    walkers = advance(rule, walkers, range(12))
    torch.testing.assert_close(walkers[0].params["w"], alone.params["w"], rtol=1e-12, atol=0)  # float64
    assert walkers[0].state[ERROR]["w"].abs().max() < 1e-15


def test_a_saved_walker_goes_on_bit_for_bit(make: Make) -> None:
    rule = make()
    walkers = advance(rule, new_walkers(rule, 3), range(7))
    loaded = []
    for walker in walkers:
        named = {f"p/{name}": t for name, t in walker.params.items()} | {
            f"{slot}/{name}": t
            for slot, kept in rule.slots.items()
            if kept.is_saved
            for name, t in walker.state[slot].items()
        }
        state: dict[str, Tensors] = {slot: {} for slot in rule.slots}
        params: Tensors = {}
        for key, tensor in load(save(named)).items():
            slot, name = key.split("/")
            (params if slot == "p" else state[slot])[name] = tensor
        loaded.append(Walker(params=params, state=state, num_updates=walker.num_updates))
    after, resumed = (advance(rule, w, range(7, 10)) for w in (walkers, loaded))
    assert all(
        same_bits(replicated(rule, a), replicated(rule, b)) for a, b in zip(after, resumed, strict=True)
    )
    assert all_equal(rule, resumed)


@pytest.mark.parametrize(("before", "after"), part([(4, 3), (3, 5), (2, 1), (1, 4)], every=2))
def test_members_stay_equal_when_some_leave_or_join(make: Make, before: int, after: int) -> None:
    rule = make()
    walkers = advance(rule, new_walkers(rule, before), range(9))
    survivors = walkers[1:] if after < before else walkers
    errors = [copy.deepcopy(walker.state[ERROR]) for walker in survivors]
    newcomers = []
    for _ in range(after - len(survivors)):
        fresh = rule.init(survivors[0].params)
        copied = survivors[0].copy()
        state = {
            slot: copied.state[slot] if rule.slots[slot].is_copied else fresh[slot] for slot in rule.slots
        }
        newcomers.append(Walker(params=copied.params, state=state, num_updates=9))
    members = [*survivors, *newcomers]
    for place, walker in enumerate(members):
        me = place + len(walkers) - len(survivors) if place < len(survivors) else None
        rule.on_membership(walker, before=before, after=after, me=me)
        assert not walker.state[SHARD_ERROR]
    assert all(same_bits(w.state[ERROR], error) for w, error in zip(survivors, errors, strict=True))
    assert not any(error.any() for w in newcomers for error in w.state[ERROR].values())
    for step in range(9, 14):
        members = advance(rule, members, range(step, step + 1))
        assert all_equal(rule, members)


def test_who_only_follows_stays_equal(make: Make) -> None:
    rule = make()
    walkers = new_walkers(rule, 2)
    follower = walkers[0].copy()
    for step in range(9):
        grads = [make_grads(w.params, step=step, member=member) for member, w in enumerate(walkers)]
        due = rule.spec.due(step)
        talks = talks_by_shard(due[0], num_members=2, num_shards=2) if due else []
        for walker, grad in zip([*walkers, follower], [*grads, grads[0]], strict=True):
            if not due:
                rule.local_step(walker, mean_of(grads), terms_of(step), talks=False)
            elif walker is not follower:
                rule.local_step(walker, grad, terms_of(step), talks=True)
        if due:
            sent = [rule.contribution(walker, talk) for walker, talk in zip(walkers, talks, strict=True)]
            results = {s: rule.combine(walkers[s], talks[s], s, [part[s] for part in sent]) for s in range(2)}
            for walker, talk in zip([*walkers, follower], [*talks, talks[0]], strict=True):
                rule.apply(walker, talk, rule.join(walker, talk, results), terms_of(step))
        assert all_equal(rule, [*walkers, follower])


def test_a_shards_error_outlives_a_step_and_not_another_way_of_cutting(make: Make) -> None:
    rule = make()
    (walker,) = advance(rule, new_walkers(rule, 1), range(7), num_shards=2)
    assert set(walker.state[SHARD_ERROR]) == {"0of2x101", "1of2x101"}
    grown = rule.layout(walker, talks_by_shard(Due(round=0), num_members=1, num_shards=3)[0])
    assert not {grown.key(shard) for shard in range(3)} & set(walker.state[SHARD_ERROR])


def test_without_error_feedback_there_are_no_errors(make: Make) -> None:
    rule = make(error_feedback=False)
    walkers = advance(rule, new_walkers(rule, 2), range(9))
    assert all_equal(rule, walkers)
    assert not any(error.any() for w in walkers for error in w.state[ERROR].values())
    assert not any(w.state[SHARD_ERROR] for w in walkers)
    fed = advance(make(), new_walkers(rule, 2), range(9))
    assert not same_bits(walkers[0].params, fed[0].params)


def test_error_feedback_keeps_the_sum_of_momenta_where_it_should_be(make: Make) -> None:
    """Said again and again, the same momentum is said exactly on average: errors stay bounded, so they vanish in it."""
    rule = make()
    walkers = advance(rule, new_walkers(rule, 3, torch.float64), range(WARMUP + 1))
    talks = talks_by_shard(Due(round=0), num_members=3, num_shards=3)
    truth = torch.randn(101, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    said, num_rounds = torch.zeros(101, dtype=torch.float64), 50
    for _ in range(num_rounds):
        for walker in walkers:
            walker.state[MOMENTUM] = {"all": truth.clone()}
        sent = [rule.contribution(walker, talk) for walker, talk in zip(walkers, talks, strict=True)]
        results = {s: rule.combine(walkers[s], talks[s], s, [part[s] for part in sent]) for s in range(3)}
        said += rule.join(walkers[0], talks[0], results)
    # What is missing of the mean is an error divided by 50; signs alone would be off by half of it for good.
    assert (said / num_rounds - truth).norm() < 0.2 * truth.norm()


def test_bytes_are_a_thirtieth_of_full_precision(make: Make) -> None:
    rule = make()
    params = {"w": torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))}
    walkers = [Walker(params=params, state=rule.init(params)).copy() for _ in range(4)]
    talks = talks_by_shard(Due(round=0), num_members=4, num_shards=4)
    for walker in walkers:
        rule.local_step(walker, params, terms_of(WARMUP), talks=True)
    sent = [rule.contribution(walker, talk) for walker, talk in zip(walkers, talks, strict=True)]
    result = rule.combine(walkers[0], talks[0], 0, [part[0] for part in sent])
    up = sum(t.numel() * t.element_size() for shard in (1, 2, 3) for t in sent[0][shard].values())
    down = 3 * sum(t.numel() * t.element_size() for t in result.values())
    full = 2 * 3 / 4 * 4 * 2**20
    assert 30 * (up + down) <= full


def test_the_number_of_threads_changes_no_bit(make: Make) -> None:
    rule = make(warmup_steps=2)
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(300_001, generator=generator)
    grads = [{"big": torch.randn(300_001, generator=generator)} for _ in range(2)]
    talks = talks_by_shard(Due(round=0), num_members=2, num_shards=2)
    results, num_threads = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            walkers = []
            for _ in range(2):
                params = {"big": start.clone()}
                walkers.append(Walker(params=params, state=rule.init(params)))
                rule.local_step(walkers[-1], grads[0], terms_of(0), talks=False)
            results.append(exchange(rule, walkers, grads, [terms_of(2)] * 2, talks)[0])
    finally:
        torch.set_num_threads(num_threads)
    assert all(same_bits(replicated(rule, results[0]), replicated(rule, other)) for other in results)


# --- guards ---


def test_an_exchange_in_the_warm_up_is_refused(make: Make) -> None:
    rule = make()
    (walker,) = new_walkers(rule, 1)
    with pytest.raises(ValueError, match="warm-up"):
        rule.local_step(walker, make_grads(walker.params, step=0, member=0), terms_of(0), talks=True)


def test_a_refused_step_has_changed_nothing(make: Make) -> None:
    rule = make()
    (walker,) = new_walkers(rule, 1)
    before = walker.copy()
    grads = make_grads(walker.params, step=0, member=0)
    grads["embed"] = grads["embed"][1:]
    for step, talks in ((0, False), (WARMUP, True)):
        with pytest.raises(ValueError, match="embed"):
            rule.local_step(walker, grads, terms_of(step), talks=talks)
        assert same_bits(walker.params, before.params)
        assert all(same_bits(walker.state[slot], before.state[slot]) for slot in rule.slots)


def test_the_freeze_is_not_missed_when_the_last_warm_up_step_is_left_out(make: Make) -> None:
    rule = make()
    walkers = advance(rule, new_walkers(rule, 2), range(WARMUP - 1))
    assert not any(scale.item() for scale in walkers[0].state[MOMENTUM_SCALE].values())
    walkers = advance(rule, walkers, range(WARMUP, WARMUP + 4))
    assert all(scale.item() for scale in walkers[0].state[MOMENTUM_SCALE].values())
    assert all_equal(rule, walkers)


def test_second_moments_are_frozen_and_have_their_floor(make: Make) -> None:
    rule = make()
    walkers = advance(rule, new_walkers(rule, 2), range(WARMUP))
    warm = walkers[0].state[MEAN_OF_SQUARES]
    walkers = advance(rule, walkers, range(WARMUP, WARMUP + 1))
    frozen = walkers[0].state[MEAN_OF_SQUARES]
    for name, v in warm.items():
        torch.testing.assert_close(frozen[name], v.clamp(min=0.01 * v.mean().item()))
    walkers = advance(rule, walkers, range(WARMUP + 1, WARMUP + 5))
    assert same_bits(walkers[0].state[MEAN_OF_SQUARES], frozen)


def test_units_that_were_dead_in_the_warm_up_do_not_explode(make: Make) -> None:
    rule = make(eps=1e-8)
    walkers = new_walkers(rule, 2)

    def grads_of(step: int, member: int) -> Tensors:
        grads = make_grads(walkers[0].params, step=step, member=member)
        grads["norm"].zero_()  # a whole tensor
        grads["embed"][3:].zero_()  # and some rows of another
        return grads

    for step in range(40):
        grads = [grads_of(step, member) for member in range(2)]
        if step < WARMUP:
            for walker in walkers:
                rule.local_step(walker, mean_of(grads), terms_of(step), talks=False)
        else:
            talks = talks_by_shard(Due(round=step - WARMUP), num_members=2, num_shards=2)
            walkers = exchange(rule, walkers, grads, [terms_of(step)] * 2, talks)
    start = make_params()
    for name, param in walkers[0].params.items():
        # Forty steps of at most 4 * 10 * learning rate each would be 16; a division by eps would be 1e5.
        assert (param - start[name]).abs().max() < 16


def test_a_stage_without_parameters_just_counts(make: Make) -> None:
    rule = make(warmup_steps=2)
    walkers = [Walker(params={}, state=rule.init({})) for _ in range(2)]
    assert [walker.num_updates for walker in advance(rule, walkers, range(4))] == [4, 4]
