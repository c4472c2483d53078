"""What is left of a step that was stopped: it can be carried out, does each thing that is missing once."""

import random
from collections.abc import Iterator

import pytest

from skein.plan.changing.reroute import rerouted
from skein.plan.changing.unfinished import Held, Need, Rest, rest_of
from skein.plan.ops import Kept
from skein.plan.order import PlacedOp, ops_of
from skein.plan.plan import Plan
from skein.types import ChunkRef, MicrobatchId, StageIndex, WorkerId
from tests.support.drawn import random_plan
from tests.support.extent import part
from tests.support.halfway import Halfway, num_ops, slots_of, visits
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of, words_of

SEEDS = part(range(150), every=4)


def first_stop(plan: Plan, luck: random.Random) -> Halfway:
    """A step by its plan, up to some op."""
    halfway = Halfway(slots_of(plan), luck)
    halfway.run(plan.paths, plan.schedules, slots_of(plan), most=luck.randint(0, num_ops(plan)))
    return halfway


def kill_some(halfway: Halfway, plan: Plan, luck: random.Random) -> Plan:
    """Some workers die, if that leaves a holder of each stage; the plan without them."""
    for worker in luck.sample(plan.workers, luck.randint(0, len(plan.workers))):
        alive = [at for at in halfway.chunks if at.worker != worker]
        if rerouted(plan, alive, {}) is not None:
            halfway.lose([worker])
    after = rerouted(plan, halfway.chunks.keys(), halfway.ledger())
    assert after is not None
    return after


def left_of(halfway: Halfway, plan: Plan) -> Rest:
    return rest_of(
        plan.paths,
        slots_of(plan),
        plan.workers,
        ledger=frozenset(halfway.ledger()),
        held=halfway.held(plan.paths),
    )


def go_on(halfway: Halfway, plan: Plan, rest: Rest, *, most: int | None = None) -> None:
    halfway.keep(rest.held)
    stuck = halfway.run(
        plan.paths, rest.schedules, slots_of(plan), given=[need.op for need in rest.needs], most=most
    )
    assert most is not None or not stuck, f"{stuck} can never run"


def stops(seed: int) -> Iterator[tuple[Halfway, Plan, Plan, Rest]]:
    """One step that is stopped again and again: how far it came, the plan before and after, and what is left."""
    luck = random.Random(seed)
    plan = random_plan(luck)
    halfway = first_stop(plan, luck)
    for _ in range(luck.randint(1, 4)):
        after = kill_some(halfway, plan, luck)
        rest = left_of(halfway, after)
        yield halfway, plan, after, rest
        plan = after
        go_on(halfway, plan, rest, most=luck.randint(0, num_ops(plan)))
    rest = left_of(halfway, plan)
    yield halfway, plan, plan, rest


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_can_be_carried_out_in_any_timing_and_completes_the_step(seed: int) -> None:
    *_, (halfway, _, plan, rest) = stops(seed)
    go_on(halfway, plan, rest)
    assert halfway.ledger().keys() == visits(plan)
    assert not any(x.num_in_flight for x in halfway.chunks.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_done_is_not_done_again_and_only_what_was_lost_or_given_up_is(seed: int) -> None:
    for halfway, before, after, rest in stops(seed):
        listed = [(ChunkRef(stage=op.stage, worker=x.worker), op) for x in rest.schedules for op in x.ops]
        left = {op: at for at, op in listed}
        assert len(left) == len(listed)
        ledger, held = halfway.ledger(), halfway.held(after.paths)
        for placed in all_ops(after):
            contribution = placed.op.microbatch, placed.op.stage
            is_there = contribution in ledger or placed.op.kind.row.is_shown_by(
                [kept for kept in Kept if (*contribution, kept) in rest.held]
            )
            assert (placed.op in left) is not is_there
            assert left.get(placed.op, placed.chunk) == placed.chunk
        assert rest.held <= held
        full = {at.stage for at, x in halfway.chunks.items() if x.num_in_flight >= slots_of(before)[at]}
        assert {stage for _, stage, _ in held - rest.held} <= full
        done_by = {placed.op: placed.chunk for placed in halfway.ran}
        for op in left.keys() & done_by.keys():
            # Whoever did it is gone, or holds it no more: it made way for an older microbatch.
            is_given_up = any((op.microbatch, op.stage, kept) in held - rest.held for kept in Kept)
            assert done_by[op] not in halfway.chunks or is_given_up


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_sent_again_is_what_something_left_takes_from_something_done(seed: int) -> None:
    for _, _, after, rest in stops(seed):
        left = {op for x in rest.schedules for op in x.ops}
        ways = [list(ops_of(MicrobatchId(m), way)) for m, way in enumerate(after.paths)]
        expected = [
            Need(op=placed, made_by=made_by)
            for way in ways
            for placed in way
            for made_by in (way[number] for number in placed.at.inputs)
            if placed.op in left and made_by.op not in left
        ]
        assert sorted(rest.needs, key=repr) == sorted(expected, key=repr)


def test_the_drawn_steps_are_stopped_in_every_state() -> None:
    """Some lost what must be made again, some give activations up."""
    num_given_up = num_replayed = 0
    for seed in SEEDS:
        for halfway, _, after, rest in stops(seed):
            num_given_up += halfway.held(after.paths) > rest.held
            done = {placed.op for placed in halfway.ran}
            num_replayed += any(op in done for x in rest.schedules for op in x.ops)
    assert num_given_up > 0
    assert num_replayed > len(SEEDS) / 8


def all_ops(plan: Plan) -> list[PlacedOp]:
    return [placed for m, way in enumerate(plan.paths) for placed in ops_of(MicrobatchId(m), way)]


# --- by hand ---


def rest_words(plan: Plan, rest: Rest) -> dict[str, str]:
    assert [x.worker for x in rest.schedules] == list(plan.workers)
    return {x.worker: words_of(x.ops) for x in rest.schedules}


def contributions(stage: int, *ids: int) -> set[tuple[MicrobatchId, StageIndex]]:
    return {(m, StageIndex(stage)) for m in microbatches(*ids)}


def held_at(stage: int, *ids: int) -> frozenset[Held]:
    return frozenset((m, at, Kept.GRAPH) for m, at in contributions(stage, *ids))


def test_of_a_step_that_was_not_begun_everything_is_left_in_the_plans_own_order() -> None:
    plan = grid_plan(stages=2, replicas=2)
    rest = rest_of(plan.paths, slots_of(plan), plan.workers, ledger=frozenset(), held=frozenset())
    assert rest.schedules == plan.schedules
    assert (rest.held, rest.needs) == (frozenset(), ())


def test_of_a_step_that_is_done_nothing_is_left() -> None:
    plan = grid_plan(stages=2, replicas=2)
    rest = rest_of(plan.paths, slots_of(plan), plan.workers, ledger=frozenset(visits(plan)), held=frozenset())
    assert set(rest_words(plan, rest).values()) == {""}
    assert rest.needs == ()


def test_a_gradient_is_sent_again_where_the_next_hop_is_done_and_an_activation_where_this_one_is() -> None:
    plan = grid_plan(stages=2, replicas=1, num_microbatches=2)
    rest = rest_of(
        plan.paths,
        slots_of(plan),
        plan.workers,
        ledger=frozenset(contributions(1, 0)),
        held=held_at(0, 0, 1),
    )
    assert rest_words(plan, rest) == {"w0a": "B0.0 B0.1", "w1a": "L1.1"}
    assert [(words_of([x.op.op]), words_of([x.made_by.op])) for x in rest.needs] == [
        ("B0.0", "L1.0"),
        ("L1.1", "F0.1"),
    ]


def test_a_lost_forward_is_made_again_though_its_loss_is_there() -> None:
    plan = grid_plan(stages=2, replicas=1, num_microbatches=1)
    rest = rest_of(
        plan.paths,
        slots_of(plan),
        plan.workers,
        ledger=frozenset(contributions(1, 0)),
        held=frozenset(),
    )
    assert rest_words(plan, rest) == {"w0a": "F0.0 B0.0", "w1a": ""}


def test_the_youngest_activation_makes_way_where_all_slots_hold_what_must_wait() -> None:
    """0 goes through `b`, then `c`, 1 and 2 the other way; 0 has the slot of `b`, and 1 and 2 both of `c`."""
    first, b, c, last = chunk(0, "a"), chunk(1, "b"), chunk(2, "c"), chunk(3, "d")
    there, back = path(first, b, c, last), path(first, c, b, last)
    plan = plan_of([first, b, c, last], [there, back, back], slots=1)
    slots = {first: 3, b: 1, c: 2, last: 1}
    held = held_at(0, 0, 1, 2) | held_at(1, 0) | held_at(2, 1, 2)
    rest = rest_of(plan.paths, slots, plan.workers, ledger=frozenset(), held=held)
    assert rest.held == held - held_at(2, 2)
    assert rest_words(plan, rest)["c"] == "F2.0 B2.0 F2.2 B2.1 B2.2"
    assert [words_of([x.op.op]) for x in rest.needs] == ["F2.0", "F1.1", "F2.2"]


def test_an_order_does_not_depend_on_how_sets_are_walked() -> None:
    plan = grid_plan(stages=3, replicas=2, num_microbatches=6)
    ledger = sorted(contributions(2, 0, 1, 2))
    found = {
        repr(
            rest_of(
                plan.paths,
                slots_of(plan),
                [WorkerId(w) for w in plan.workers],
                ledger=frozenset(mixed),
                held=frozenset(),
            ).schedules
        )
        for mixed in (ledger, ledger[::-1])
    }
    assert len(found) == 1
