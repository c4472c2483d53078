"""Laws that every aggregation rule obeys. A new one adds a row to `laws.ROWS` and inherits them all."""

import pytest
import torch

from skein.config.rule import Walkers
from skein.numeric.aggregate.exchanging.in_memory import owner_of
from skein.numeric.compress.compressor import form_of
from skein.numeric.optim.groups import decayed_names
from skein.numeric.walker import StateClass, Tensors, Walker
from tests.numeric.aggregate.laws import (
    ROWS,
    Flock,
    Row,
    Shards,
    flock,
    same_bits,
    same_walkers,
)
from tests.support.walks import terms_at

WIRE_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}
"""What a tensor's header can say: the values of Dtype in protos/skein/wire/v1/peer.proto."""

OWN_STEPS = ("gossip", "one-bit")
"""Rules whose step is no inner optimizer's, even alone."""


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    chosen: Row = request.param
    return chosen


def test_an_attempt_changes_neither_members_nor_gradients(row: Row) -> None:
    some = flock(row)
    for _ in range(row.num_steps):
        before, grads = [walker.copy() for walker in some.members], some.grads()
        given = [{name: x.clone() for name, x in own.items()} for own in grads]
        in_flight = list(some.in_flight)
        some.attempt(grads)
        some.in_flight = in_flight
        assert same_walkers(some.members, before)
        assert all(same_bits(own, then) for own, then in zip(grads, given, strict=True))
        some.run(1)


def test_an_attempt_made_again_comes_to_the_same(row: Row) -> None:
    some = flock(row)
    for _ in range(row.num_steps):
        in_flight = list(some.in_flight)
        first, _ = some.attempt()
        some.in_flight = in_flight
        some.run(1)
        assert same_walkers(some.members, first)


def test_equal_flocks_come_to_equal_bits(row: Row) -> None:
    one, other = flock(row), flock(row)
    one.run(row.num_steps)
    other.run(row.num_steps)
    assert same_walkers(one.members, other.members)


def test_exchanges_happen_and_members_move(row: Row) -> None:
    some = flock(row)
    before = [walker.copy() for walker in some.members]
    assert (len(some.run(row.num_steps)) >= 3) == row.has_exchanges
    for walker, old in zip(some.members, before, strict=True):
        assert walker.num_updates == row.num_steps
        assert not any(torch.equal(walker.params[name], old.params[name]) for name in walker.params)


def test_what_is_replicated_is_bit_equal_at_all_members_after_every_step(row: Row) -> None:
    some = flock(row)
    for _ in range(row.num_steps):
        some.run(1)
        assert_replicas_agree(some)


def test_all_state_is_declared_and_what_is_transient_is_gone_when_its_step_is(row: Row) -> None:
    slots, some = row.rule.slots, flock(row)
    lasting = {name for name, slot in slots.items() if slot.kind is not StateClass.TRANSIENT}
    assert lasting <= some.members[0].state.keys()
    for _ in range(row.num_steps):
        some.run(1)
        for walker in some.members:
            assert walker.state.keys() <= slots.keys()
            assert not any(walker.state.get(name) for name in slots.keys() - lasting)


def test_neither_combining_nor_applying_changes_what_may_still_be_on_its_way(row: Row) -> None:
    some = flock(row)
    for _ in range(row.num_steps):
        for exchanged in some.run(1):
            pairs = zip(
                (*exchanged.sent, exchanged.results), (*exchanged.as_sent, exchanged.as_made), strict=True
            )
            assert all(same_shards(now, then) for now, then in pairs)


def test_contributions_and_results_travel_as_they_are(row: Row) -> None:
    for exchanged in flock(row).run(row.num_steps):
        travelling = [
            x
            for shards in (*exchanged.sent, exchanged.results)
            for ts in shards.values()
            for x in ts.values()
        ]
        assert travelling
        assert {x.dtype for x in travelling} <= WIRE_DTYPES
        assert not any(x.requires_grad for x in travelling)


def test_every_part_that_a_weight_names_is_sent(row: Row) -> None:
    for exchanged in flock(row).run(row.num_steps):
        for shard in range(exchanged.talks[0].num_shards):
            talk = exchanged.talks[owner_of(exchanged.talks[0], shard)]
            assert all(shard in exchanged.sent[member] for member, _ in talk.weights[shard])


def test_parts_and_results_look_as_every_member_says_that_they_do(row: Row) -> None:
    for exchanged in flock(row).run(row.num_steps):
        for talk, (parts, results) in zip(exchanged.talks, exchanged.forms, strict=True):
            for sent in exchanged.as_sent:
                assert {shard: form_of(part) for shard, part in sent.items()}.items() <= parts.items()
            heard = exchanged.heard(talk)
            assert {shard: form_of(result) for shard, result in heard.items()}.items() <= results.items()


def test_all_join_the_same_where_results_are_for_all(row: Row) -> None:
    some = flock(row)
    for exchanged in some.run(row.num_steps):
        distinct = set(exchanged.joined)
        assert len(distinct) <= 1 or exchanged.talks[0].is_by_row


def test_when_a_member_leaves_the_others_go_on_as_equals(row: Row) -> None:
    some = flock(row)
    some.run(row.num_steps)
    settle(some)
    some.leave(0)
    for _ in range(row.num_steps):
        some.run(1)
        assert_replicas_agree(some)
        assert_finite(some)


def test_a_newcomer_is_one_of_equals_from_its_first_step(row: Row) -> None:
    some = flock(row)
    some.run(row.num_steps)
    settle(some)
    some.join()
    assert_replicas_agree(some)
    for _ in range(row.num_steps):
        some.run(1)
        assert_replicas_agree(some)
        assert_finite(some)


def test_a_newcomer_has_of_private_state_what_is_copied_and_else_a_beginning(row: Row) -> None:
    some = flock(row)
    some.run(row.num_steps)
    settle(some)
    some.join()
    donor, newcomer = some.members[0], some.members[-1]
    fresh = row.rule.init(newcomer.params)
    for name, slot in row.rule.slots.items():
        if slot.kind is StateClass.PRIVATE and not slot.is_copied:
            assert same_bits(newcomer.state[name], fresh[name])
    assert newcomer.num_updates == donor.num_updates


def test_members_come_and_go_between_any_two_steps(row: Row) -> None:
    some = flock(row)
    for step in range(2 * row.num_steps):
        settle(some)
        if step % 3 == 1 and len(some.members) > 1:
            some.leave(step % len(some.members))
        if step % 3 == 2:
            some.join()
        some.run(1)
        assert_replicas_agree(some)
        assert_finite(some)


def test_what_is_saved_is_enough_to_go_on_identically(row: Row) -> None:
    some = flock(row)
    some.run(row.num_steps // 2 + 1)
    settle(some)
    resumed = some.resumed()
    some.run(row.num_steps)
    resumed.run(row.num_steps)
    assert same_walkers(some.members, resumed.members)


def test_a_member_alone_can_do_what_many_can(row: Row) -> None:
    some = flock(row, 1)
    assert bool(some.run(row.num_steps)) == row.has_exchanges
    assert_replicas_agree(some)
    assert_finite(some)


def test_a_step_without_an_exchange_is_the_inner_optimizers(row: Row) -> None:
    if row.inner is None:
        assert row.name.startswith(OWN_STEPS)
        return
    some, terms = flock(row), terms_at(0)
    walker, grads = some.members[1].copy(), some.grads()[1]
    alone = Walker(params=walker.copy().params, state=row.inner.init(walker.params))
    row.rule.local_step(walker, grads, terms, talks=False)
    row.inner.update(
        alone,
        grads,
        learning_rate=terms.learning_rate,
        gradient_scale=terms.gradient_scale,
        decayed=decayed_names(alone.params),
    )
    assert same_bits(walker.params, alone.params)
    assert all(same_bits(walker.state[slot], tensors) for slot, tensors in alone.state.items())
    assert walker.num_updates == alone.num_updates == 1


# --- what the laws are stated with ---


def replicated(row: Row, walker: Walker) -> Tensors:
    """All that must be bit-equal at all members, by slot and name."""
    slots = [name for name, slot in row.rule.slots.items() if slot.kind is StateClass.REPLICATED]
    found = {f"{slot}/{name}": x for slot in slots for name, x in walker.state.get(slot, {}).items()}
    return found | (walker.params if row.walkers is Walkers.ONE else {})


def assert_replicas_agree(some: Flock) -> None:
    first, *others = (replicated(some.row, walker) for walker in some.members)
    assert all(same_bits(first, other) for other in others)


def assert_finite(some: Flock) -> None:
    for walker in some.members:
        tensors = (walker.params, *walker.state.values())
        assert all(bool(x.isfinite().all()) for named in tensors for x in named.values())


def same_shards(left: Shards, right: Shards) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[shard], right[shard]) for shard in left)


def settle(some: Flock) -> None:
    """Steps until nothing is in flight: what is, is of the membership it began with."""
    while some.in_flight:
        some.run(1)
