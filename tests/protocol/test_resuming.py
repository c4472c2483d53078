"""A step taken up again: which sums count, who does what is left, what is sent again, and when it must begin anew."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from skein.plan.changing.reroute import rerouted
from skein.plan.ops import Direction
from skein.plan.order import ops_of
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.resuming import Resumed, resume
from skein.protocol.messages.progress import ChunkProgress
from skein.protocol.messages.reports import Ack
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.types import ChunkRef, Layout, MicrobatchId, StageIndex, Step, WorkerId
from tests.support.drawn import random_plan
from tests.support.extent import part
from tests.support.halfway import Halfway, num_ops, slots_of, visits
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of, words_of
from tests.support.resent import op_of

PAIRS = plan_of(
    [chunk(stage, f"w{stage}{side}") for stage in (0, 1) for side in "ab"],
    [path(chunk(0, f"w0{side}"), chunk(1, f"w1{side}")) for side in "abab"],
)
"""Microbatches 0 and 2 go from `w0a` to `w1a`, 1 and 3 from `w0b` to `w1b`."""
START = Step(0)


def halfway_of(plan: Plan, words: str = "") -> Halfway:
    """A step in which these ops were done in this order, as `F0.2 L1.2 B0.2` where the plan has them."""
    halfway = Halfway(slots_of(plan), random.Random(0))
    placed = {words_of([x.op]): x for m, way in enumerate(plan.paths) for x in ops_of(MicrobatchId(m), way)}
    for word in words.split():
        halfway.end(placed[word])
    return halfway


def resumed(plan: Plan, halfway: Halfway) -> Resumed:
    found = resume(plan, halfway.acks(plan), version=START)
    assert found is not None
    return found


def go_on(halfway: Halfway, found: Resumed, *, most: int | None = None) -> None:
    """Every worker does as its resumption says."""
    for worker, told in found.resumptions.items():
        kept = {x.stage: x for x in told.chunks}
        for at, x in halfway.chunks.items():
            if at.worker == worker:
                x.ledger = list(kept[at.stage].ledger)
    halfway.keep(
        {(m, x.stage, kept) for told in found.resumptions.values() for x in told.chunks for kept, m in x.held}
    )
    begin = {(o.microbatch, o.path) for told in found.resumptions.values() for o in told.origins}
    assert all(found.plan.paths[m] == way for m, way in begin)
    given = [op_of(header) for told in found.resumptions.values() for header in told.repeats]
    stuck = halfway.run(
        found.plan.paths,
        [told.schedule for told in found.resumptions.values()],
        slots_of(found.plan),
        given=given,
        most=most,
    )
    assert most is not None or not stuck


def told(found: Resumed, worker: str) -> str:
    return words_of(found.resumptions[WorkerId(worker)].schedule.ops)


# --- any step ---


@pytest.mark.parametrize("seed", part(range(120), every=4))
def test_a_step_that_is_stopped_again_and_again_counts_every_contribution_once(seed: int) -> None:
    luck = random.Random(seed)
    plan = random_plan(luck)
    halfway = Halfway(slots_of(plan), luck)
    halfway.run(plan.paths, plan.schedules, slots_of(plan), most=luck.randint(0, num_ops(plan)))
    for _ in range(3):
        for worker in luck.sample(plan.workers, luck.randint(0, 2) % (1 + len(plan.workers))):
            if rerouted(plan, [at for at in halfway.chunks if at.worker != worker], {}) is not None:
                halfway.lose([worker])
        found = resumed(plan, halfway)
        assert set(found.resumptions) == set(found.plan.workers)
        for at, x in halfway.chunks.items():
            here = {y.stage: y for y in found.resumptions[at.worker].chunks}
            # Nobody's sums are dropped where nobody else has the same.
            assert list(here[at.stage].ledger) == x.ledger
        go_on(halfway, found, most=luck.randint(0, num_ops(plan)))
        plan = found.plan
    found = resumed(plan, halfway)
    go_on(halfway, found)
    assert halfway.ledger().keys() == visits(plan)
    for at, x in halfway.chunks.items():
        assert tuple(x.ledger) == found.expected[at]


def test_a_step_that_was_not_begun_is_resumed_whole() -> None:
    found = resumed(PAIRS, halfway_of(PAIRS))
    assert not found.is_begun
    assert found.plan == PAIRS
    assert found.expected == PAIRS.microbatches_by_chunk()
    assert {w: x.schedule for w, x in found.resumptions.items()} == {x.worker: x for x in PAIRS.schedules}
    assert (found.replayed, found.num_rerouted) == ((), 0)


# --- a death ---


def test_after_a_death_only_its_contributions_are_replayed_and_what_they_need_is_sent_again() -> None:
    halfway = halfway_of(PAIRS, "F0.0 L1.0 B0.0 F0.1 L1.1 B0.1 F0.2 F0.3")
    halfway.lose(["w1a"])
    found = resumed(PAIRS, halfway)
    # w1a's loss of 0 is lost; its loss of 2 was to come.
    assert found.replayed == ((MicrobatchId(0), StageIndex(1)),)
    assert found.num_rerouted == 2
    assert found.is_begun
    assert sorted(told(found, "w1b").split()) == ["L1.0", "L1.2", "L1.3"]
    again_from = [(header.microbatch, header.hop) for header in found.resumptions[WorkerId("w0a")].repeats]
    assert again_from == [(0, 1), (2, 1)]
    assert found.expected[chunk(0, "w0a")] == microbatches(0, 2)


def test_a_tensor_is_sent_again_with_the_path_that_holds_now() -> None:
    halfway = halfway_of(PAIRS, "F0.0")
    halfway.lose(["w1a"])
    found = resumed(PAIRS, halfway)
    [header] = found.resumptions[WorkerId("w0a")].repeats
    assert header == HopTensor(
        direction=Direction.FORWARD,
        phase=Phase.TRAIN,
        step=START,
        microbatch=MicrobatchId(0),
        hop=1,
        path=found.plan.paths[0],
    )
    assert header.path.hops[1].worker == "w1b"


def test_a_gradient_that_was_lost_on_its_way_is_sent_again() -> None:
    found = resumed(PAIRS, halfway_of(PAIRS, "F0.0 L1.0"))
    [header] = found.resumptions[WorkerId("w1a")].repeats
    assert (header.direction, header.hop) == (Direction.BACKWARD, 0)
    assert not found.resumptions[WorkerId("w0a")].repeats
    assert found.replayed == ()


def test_what_is_begun_again_has_its_new_path_as_origin() -> None:
    halfway = halfway_of(PAIRS, "F0.0 L1.0")
    halfway.lose(["w0a"])
    found = resumed(PAIRS, halfway)
    origins = {x.microbatch: x.path for x in found.resumptions[WorkerId("w0b")].origins}
    assert sorted(origins) == [0, 1, 2, 3]
    assert all(way == found.plan.paths[m] for m, way in origins.items())
    # Its forward is made again for its backward's sake, and for that the gradient is here still.
    assert [x.microbatch for x in found.resumptions[WorkerId("w1a")].repeats] == [0]


def test_without_a_holder_of_some_stage_there_is_nothing_to_go_on_with() -> None:
    halfway = halfway_of(PAIRS, "F0.0 L1.0")
    halfway.lose(["w1a", "w1b"])
    assert resume(PAIRS, halfway.acks(PAIRS), version=START) is None


def test_a_chunk_at_another_version_or_of_another_cut_holds_nothing() -> None:
    halfway = halfway_of(PAIRS, "F0.0")
    acks = halfway.acks(PAIRS)
    assert resume(PAIRS, acks, version=Step(1)) is None
    late = halfway.acks(PAIRS, version=1)[WorkerId("w1a")]
    found = resume(PAIRS, {**acks, WorkerId("w1a"): late}, version=START)
    assert found is not None
    assert found.plan.holders(StageIndex(1)) == ("w1b",)
    [held] = acks[WorkerId("w1a")].chunks
    other_cut = replace(held, stage=replace(held.stage, stop=held.stage.stop + 1))
    cut = replace(acks[WorkerId("w1a")], chunks=(other_cut,))
    found = resume(PAIRS, {**acks, WorkerId("w1a"): cut}, version=START)
    assert found is not None
    assert found.plan.holders(StageIndex(1)) == ("w1b",)


# --- who came back ---


def with_ledger(acks: Mapping[WorkerId, Ack], worker: str, stage: int, *ids: int) -> dict[WorkerId, Ack]:
    """The same, but that a worker says to have accumulated something else."""
    name = WorkerId(worker)
    changed = tuple(
        replace(x, ledger=microbatches(*ids), gradients=microbatches(*ids)) if x.stage == stage else x
        for x in acks[name].progress
    )
    return {**acks, name: replace(acks[name], progress=changed)}


DONE_ONCE = "F0.0 L1.0 B0.0 F0.1 L1.1 B0.1"


def test_a_ledger_that_overlaps_what_is_believed_is_dropped_whole() -> None:
    """w1b was taken for dead, w1a did its microbatch again; then w1b came back with that and one more."""
    acks = with_ledger(halfway_of(PAIRS, DONE_ONCE).acks(PAIRS), "w1b", 1, 0, 1)
    found = resume(PAIRS, acks, version=START)
    assert found is not None
    [kept] = found.resumptions[WorkerId("w1b")].chunks
    assert kept.ledger == ()
    assert [x.ledger for x in found.resumptions[WorkerId("w1a")].chunks] == [microbatches(0)]
    assert found.replayed == ((MicrobatchId(1), StageIndex(1)),)
    assert found.expected[chunk(1, "w1b")][0] == 1
    assert sorted(found.expected[chunk(1, "w1a")] + found.expected[chunk(1, "w1b")]) == [0, 1, 2, 3]


def test_a_disjoint_ledger_of_who_came_back_is_kept_wherever_it_was_planned() -> None:
    acks = with_ledger(halfway_of(PAIRS, DONE_ONCE).acks(PAIRS), "w1b", 1, 1, 2)
    found = resume(PAIRS, acks, version=START)
    assert found is not None
    [kept] = found.resumptions[WorkerId("w1b")].chunks
    assert kept.ledger == microbatches(1, 2)
    assert found.plan.paths[2].hops[1].worker == "w1b"
    assert "L1.2" not in told(found, "w1a") + told(found, "w1b")
    assert found.replayed == ()
    assert found.num_rerouted == 1


def test_a_ledger_with_what_no_path_brings_there_is_dropped() -> None:
    acks = with_ledger(halfway_of(PAIRS, DONE_ONCE).acks(PAIRS), "w1b", 1, 1, 7)
    found = resume(PAIRS, acks, version=START)
    assert found is not None
    assert [x.ledger for x in found.resumptions[WorkerId("w1b")].chunks] == [()]


def test_an_activation_of_what_another_has_accumulated_is_given_up() -> None:
    acks = halfway_of(PAIRS, "F0.0 L1.0 B0.0").acks(PAIRS)
    idle = acks[WorkerId("w0b")]
    [done] = idle.progress
    acks[WorkerId("w0b")] = replace(idle, progress=(replace(done, forwards=microbatches(0)),))
    found = resume(PAIRS, acks, version=START)
    assert found is not None
    assert [x.forwards for x in found.resumptions[WorkerId("w0b")].chunks] == [()]


def test_a_spoilt_chunk_does_all_of_its_own_again_and_nobody_else_does() -> None:
    halfway = halfway_of(PAIRS, DONE_ONCE)
    halfway.chunks[chunk(0, "w0a")].ledger.clear()
    found = resumed(PAIRS, halfway)
    assert found.expected[chunk(0, "w0a")] == microbatches(0, 2)
    assert [x.ledger for x in found.resumptions[WorkerId("w0a")].chunks] == [()]
    assert told(found, "w0a").startswith("F0.0 ")
    assert "L1.0" not in told(found, "w1a")
    assert [x.microbatch for x in found.resumptions[WorkerId("w1a")].repeats] == [0]
    assert found.num_rerouted == 0


# --- the boundary log ---


def without_logged(
    acks: Mapping[WorkerId, Ack], worker: str, *, gradients: bool = False
) -> dict[WorkerId, Ack]:
    name = WorkerId(worker)

    def shortened(x: ChunkProgress) -> ChunkProgress:
        return replace(x, gradients=()) if gradients else replace(x, outputs=())

    return {**acks, name: replace(acks[name], progress=tuple(map(shortened, acks[name].progress)))}


def test_a_step_begins_anew_if_an_activation_that_is_needed_is_in_no_log() -> None:
    acks = halfway_of(PAIRS, "F0.0").acks(PAIRS)
    assert resume(PAIRS, without_logged(acks, "w0a"), version=START) is None
    assert resume(PAIRS, without_logged(acks, "w0b"), version=START) is not None
    assert resume(PAIRS, without_logged(acks, "w0a", gradients=True), version=START) is not None


def test_a_step_begins_anew_if_a_gradient_that_is_needed_is_in_no_log() -> None:
    acks = halfway_of(PAIRS, "F0.0 L1.0").acks(PAIRS)
    assert resume(PAIRS, without_logged(acks, "w1a", gradients=True), version=START) is None
    assert resume(PAIRS, without_logged(acks, "w0a"), version=START) is not None


def test_what_nobody_needs_any_more_need_not_be_logged() -> None:
    acks = halfway_of(PAIRS, "F0.0 L1.0 B0.0").acks(PAIRS)
    short = without_logged(without_logged(acks, "w0a"), "w1a", gradients=True)
    assert resume(PAIRS, short, version=START) is not None


# --- both ends of a loop ---

LOOP = grid_plan(stages=2, replicas=2, layout=Layout.LOOP)
"""`w0a` and `w0b` hold stage 0 and the head, stage 2."""


def test_whoever_lost_one_end_of_a_loop_goes_on_with_neither() -> None:
    halfway = halfway_of(LOOP, "F0.0 F1.0 L2.0")
    del halfway.chunks[chunk(2, "w0a")]
    found = resumed(LOOP, halfway)
    assert found.plan.holders(StageIndex(0)) == found.plan.holders(StageIndex(2)) == ("w0b",)
    assert all(
        x.path.hops[0].worker == x.path.hops[-1].worker == "w0b"
        for x in found.resumptions[WorkerId("w0b")].origins
    )


def test_ledgers_that_would_tear_the_ends_of_a_loop_apart_do_not_both_count() -> None:
    """w0b came back and says to have the loss of a microbatch whose first hop w0a has gone back through."""
    acks = halfway_of(LOOP, "F0.0 F1.0 L2.0 B1.0 B0.0").acks(LOOP)
    torn = with_ledger(with_ledger(acks, "w0a", 2), "w0b", 2, 0)
    found = resume(LOOP, torn, version=START)
    assert found is not None
    ledgers: dict[ChunkRef, tuple[MicrobatchId, ...]] = {
        ChunkRef(stage=x.stage, worker=w): x.ledger for w, r in found.resumptions.items() for x in r.chunks
    }
    assert ledgers[chunk(0, "w0a")] == microbatches(0)
    assert ledgers[chunk(2, "w0b")] == ()
    assert found.plan.paths[0].hops[-1].worker == "w0a"
    assert "L2.0" in told(found, "w0a")


def test_what_one_end_of_a_loop_has_done_draws_the_other() -> None:
    halfway = halfway_of(LOOP, "F0.0 F1.0 L2.0")
    halfway.lose(["w1a"])
    found = resumed(LOOP, halfway)
    assert (found.plan.paths[0].hops[0].worker, found.plan.paths[0].hops[-1].worker) == ("w0a", "w0a")
    go_on(halfway, found)
    assert halfway.ledger().keys() == visits(LOOP)


# --- split backwards ---

SPLIT = plan_of(
    [chunk(stage, f"w{stage}{side}") for stage in (0, 1, 2) for side in "ab"],
    [replace(path(*(chunk(stage, f"w{stage}{side}") for stage in (0, 1, 2))), split=(1,)) for side in "abab"],
)


def test_a_weight_op_goes_on_from_what_is_put_aside() -> None:
    found = resumed(SPLIT, halfway_of(SPLIT, "F0.0 F1.0 L2.0 I1.0"))
    assert found.replayed == ()
    [kept] = found.resumptions[WorkerId("w1a")].chunks
    assert (kept.ledger, kept.forwards, kept.pending) == ((), (), microbatches(0))
    assert told(found, "w1a").startswith("W1.0")
    # The gradient for the hop before is in the log.
    [header] = found.resumptions[WorkerId("w1a")].repeats
    assert (header.direction, header.hop) == (Direction.BACKWARD, 0)


def test_a_contribution_whose_weight_op_was_to_come_is_lost_with_its_chunk() -> None:
    halfway = halfway_of(SPLIT, "F0.0 F1.0 L2.0 I1.0 B0.0")
    halfway.lose(["w1a"])
    found = resumed(SPLIT, halfway)
    assert set(told(found, "w1b").split()) >= {"F1.0", "I1.0", "W1.0"}
    # Whoever has the gradient that the input op makes again does not take it again.
    assert "B0.0" not in told(found, "w0a")
    go_on(halfway, found)
    assert halfway.ledger().keys() == visits(SPLIT)


def test_what_is_put_aside_goes_with_the_ledger_of_its_chunk() -> None:
    halfway = halfway_of(SPLIT, "F0.0 F1.0 L2.0 I1.0 W1.0 F0.2 F1.2 L2.2 I1.2")
    # What was added twice cannot count.
    halfway.chunks[chunk(1, "w1a")].ledger = list(microbatches(0, 0))
    found = resumed(SPLIT, halfway)
    [kept] = found.resumptions[WorkerId("w1a")].chunks
    assert (kept.ledger, kept.pending) == ((), ())
    assert set(told(found, "w1a").split()) == {"F1.0", "I1.0", "W1.0", "F1.2", "I1.2", "W1.2"}


# --- what nobody in its senses tells ---


@pytest.mark.parametrize("seed", part(range(60), every=4))
def test_nonsense_in_one_acknowledgement_neither_ends_anything_nor_counts_twice(seed: int) -> None:
    luck = random.Random(seed)
    plan = random_plan(luck)
    halfway = Halfway(slots_of(plan), luck)
    halfway.run(plan.paths, plan.schedules, slots_of(plan), most=luck.randint(0, num_ops(plan)))
    acks = halfway.acks(plan)
    worker = luck.choice(sorted(acks))
    first, *others = acks[worker].progress
    drawn = tuple(MicrobatchId(luck.randint(-1, len(plan.paths))) for _ in range(luck.randint(0, 5)))
    nonsense = (
        replace(first, ledger=drawn),
        replace(first, forwards=drawn, outputs=drawn),
        replace(first, pending=drawn, gradients=drawn),
        replace(first, stage=StageIndex(luck.randint(-1, len(plan.stages)))),
    )
    acks[worker] = replace(
        acks[worker],
        progress=(luck.choice(nonsense), *others),
        chunks=acks[worker].chunks[luck.randint(0, 1) :],
    )
    found = resume(plan, acks, version=START)
    if found is not None:
        counted = [(m, at.stage) for at, ledger in found.expected.items() for m in ledger]
        assert sorted(counted) == sorted(visits(plan))


def test_who_has_one_end_of_a_loop_alone_does_not_count() -> None:
    chunks = [chunk(stage, worker) for stage in (0, 2) for worker in ("w0", "w1")]
    body = chunk(1, "w2")
    plan = plan_of(
        [*chunks, body],
        [path(chunk(0, worker), body, chunk(2, worker)) for worker in ("w0", "w1")],
        layout=Layout.LOOP,
    )
    acks = halfway_of(plan, "F0.0 F1.0 L2.0 B1.0 B0.0").acks(plan)
    acks[WorkerId("w0")] = replace(acks[WorkerId("w0")], chunks=acks[WorkerId("w0")].chunks[:1])
    found = resume(plan, acks, version=START)
    assert found is None or WorkerId("w0") not in found.plan.workers
