"""Laws that every aggregation rule obeys. A new one adds a row to `laws.ROWS` and inherits them all."""

from itertools import pairwise

import pytest
import torch

from skein.config.rule import Walkers
from skein.numeric.compress.compressor import form_of
from skein.numeric.walker import StateClass, Tensors, Walker
from tests.numeric.aggregate.laws import (
    ROWS,
    Flock,
    Life,
    Row,
    Shards,
    flock,
    life_of,
    same_bits,
    same_walkers,
)
from tests.support.exchanges import owner_of
from tests.support.extent import part
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


@pytest.fixture(params=part(ROWS, every=2), ids=lambda row: row.name, scope="module")
def life(request: pytest.FixtureRequest) -> Life:
    return life_of(request.param)


def test_an_attempt_changes_nothing_and_comes_to_the_same_when_made_again(life: Life) -> None:
    assert same_walkers(life.after[0].members, flock(life.row).members)
    for before, after in pairwise(life.after):
        some, grads = before.copy(), before.grads()
        given = [{name: x.clone() for name, x in own.items()} for own in grads]
        again, _ = some.attempt(grads)
        assert same_walkers(some.members, before.members)
        assert all(same_bits(own, then) for own, then in zip(grads, given, strict=True))
        assert same_walkers(again, after.members)


def test_exchanges_happen_and_members_move(life: Life) -> None:
    assert (len(life.exchanged) >= 3) == life.row.has_exchanges
    for walker, old in zip(life.after[-1].members, life.after[0].members, strict=True):
        assert walker.num_updates == life.row.num_steps
        assert not any(torch.equal(walker.params[name], old.params[name]) for name in walker.params)


def test_what_is_replicated_is_bit_equal_at_all_members_after_every_step(life: Life) -> None:
    for some in life.after:
        assert_replicas_agree(some)


def test_all_state_is_declared_and_what_is_transient_is_gone_when_its_step_is(life: Life) -> None:
    slots, (first, *later) = life.row.rule.slots, life.after
    lasting = {name for name, slot in slots.items() if slot.kind is not StateClass.TRANSIENT}
    assert lasting <= first.members[0].state.keys()
    for walker in (walker for some in later for walker in some.members):
        assert walker.state.keys() <= slots.keys()
        assert not any(walker.state.get(name) for name in slots.keys() - lasting)


def test_neither_combining_nor_applying_changes_what_may_still_be_on_its_way(life: Life) -> None:
    for exchanged in life.exchanged:
        pairs = zip(
            (*exchanged.sent, exchanged.results), (*exchanged.as_sent, exchanged.as_made), strict=True
        )
        assert all(same_shards(now, then) for now, then in pairs)


def test_contributions_and_results_travel_as_they_are(life: Life) -> None:
    for exchanged in life.exchanged:
        travelling = [
            x
            for shards in (*exchanged.sent, exchanged.results)
            for ts in shards.values()
            for x in ts.values()
        ]
        assert travelling
        assert {x.dtype for x in travelling} <= WIRE_DTYPES
        assert not any(x.requires_grad for x in travelling)


def test_every_part_that_a_weight_names_is_sent(life: Life) -> None:
    for exchanged in life.exchanged:
        for shard in range(exchanged.talks[0].num_shards):
            talk = exchanged.talks[owner_of(exchanged.talks[0], shard)]
            assert all(shard in exchanged.sent[member] for member, _ in talk.weights[shard])


def test_parts_and_results_look_as_every_member_says_that_they_do(life: Life) -> None:
    for exchanged in life.exchanged:
        for talk, (parts, results) in zip(exchanged.talks, exchanged.forms, strict=True):
            for sent in exchanged.as_sent:
                assert {shard: form_of(part) for shard, part in sent.items()}.items() <= parts.items()
            heard = exchanged.heard(talk)
            assert {shard: form_of(result) for shard, result in heard.items()}.items() <= results.items()


def test_all_join_the_same_where_results_are_for_all(life: Life) -> None:
    for exchanged in life.exchanged:
        assert len(set(exchanged.joined)) <= 1 or exchanged.talks[0].is_by_row


def test_when_a_member_leaves_the_others_go_on_as_equals(life: Life) -> None:
    some = life.settled()
    some.leave(0)
    goes_on(some, life.row.num_steps // 2)


def test_a_newcomer_has_what_is_copied_and_else_a_beginning_and_is_one_of_equals(life: Life) -> None:
    some = life.settled()
    some.join()
    donor, newcomer = some.members[0], some.members[-1]
    fresh = life.row.rule.init(newcomer.params)
    for name, slot in life.row.rule.slots.items():
        if slot.kind is StateClass.PRIVATE and not slot.is_copied:
            assert same_bits(newcomer.state[name], fresh[name])
    assert newcomer.num_updates == donor.num_updates
    assert_replicas_agree(some)
    goes_on(some, life.row.num_steps // 2)


def test_members_come_and_go_between_any_two_steps(life: Life) -> None:
    some = life.after[0].copy()
    for step in range(life.row.num_steps):
        some.settle()
        if step % 3 == 1 and len(some.members) > 1:
            some.leave(step % len(some.members))
        if step % 3 == 2:
            some.join()
        goes_on(some, 1)


def test_what_is_saved_is_enough_to_go_on_identically(life: Life) -> None:
    """And what members had only until the next step is not missed."""
    saved = next(some for some in life.after[5:] if not some.in_flight)
    resumed = saved.resumed()
    resumed.run(life.row.num_steps - saved.step)
    assert same_walkers(life.after[-1].members, resumed.members)


def test_a_member_alone_can_do_what_many_can(life: Life) -> None:
    some = flock(life.row, 1)
    assert bool(some.run(life.row.num_steps)) == life.row.has_exchanges
    assert_replicas_agree(some)
    assert_finite(some)


def test_a_step_without_an_exchange_is_the_inner_optimizers(life: Life) -> None:
    row, some, terms = life.row, life.after[0], terms_at(0)
    if row.inner is None:
        assert row.name.startswith(OWN_STEPS)
        return
    walker, grads = some.members[1].copy(), some.grads()[1]
    alone = Walker(params=walker.copy().params, state=row.inner.init(walker.params))
    row.rule.local_step(walker, grads, terms, talks=False)
    row.inner.update(alone, grads, learning_rate=terms.learning_rate, gradient_scale=terms.gradient_scale)
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


def goes_on(some: Flock, num_steps: int) -> None:
    """As equals, and nothing overflows."""
    for _ in range(num_steps):
        some.run(1)
        assert_replicas_agree(some)
        assert_finite(some)


def assert_finite(some: Flock) -> None:
    for walker in some.members:
        tensors = (walker.params, *walker.state.values())
        assert all(bool(x.isfinite().all()) for named in tensors for x in named.values())


def same_shards(left: Shards, right: Shards) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[shard], right[shard]) for shard in left)
