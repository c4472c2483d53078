"""Orders with vocabulary shards: published figures, laws, times by hand, and what is found wrong with broken ones."""

from dataclasses import replace

import numpy as np
import pytest

from skein.plan.route.schedules.shape import PipelinePlacement
from tests.plan.schedules.builders import links, share, uniform
from tests.support.scheduling.legality import violations
from tests.support.scheduling.ops import Op, PipelineOpKind, PipelineSchedule, one_f_one_b
from tests.support.scheduling.pricing import Cut, Sharing, StageCost, even_cut
from tests.support.scheduling.simulate import Simulation, simulate
from tests.support.scheduling.vocabulary import one_f_one_b_shards, v_half_shards

BARRIERS = pytest.mark.parametrize("num_barriers", [1, 2])
EXACT = 1e-9
"""Relative; the same seconds are added in another order."""


def shard(num_workers: int, num_barriers: int, num_bytes: int = 0) -> StageCost:
    """A part of an output that takes as long as a worker's share: two products before one barrier, else one."""
    product_s = 1.0 / num_workers
    num_scores = 3 - num_barriers
    return StageCost(
        forward_s=num_scores * product_s,
        input_s=0.0,
        weight_s=num_barriers * product_s,
        output_bytes=num_bytes,
        gradient_bytes=num_bytes,
    )


def split_output(num_workers: int, num_barriers: int, num_chunks: int = 1) -> Cut:
    """Equal workers, each with a shard."""
    placement = PipelinePlacement.V if num_chunks == 2 else PipelinePlacement.LOOP
    body = even_cut([share()] * num_workers, num_chunks, placement)
    return replace(body, shards=(shard(num_workers, num_barriers),) * num_workers, num_barriers=num_barriers)


def made(cut: Cut, m: int, latency_s: float = 0.0, *, is_split: bool = False) -> PipelineSchedule:
    between = links(cut.num_workers, latency_s)
    if cut.num_chunks == 2:
        return v_half_shards(cut, between, m)
    return one_f_one_b_shards(cut, between, m, is_split=is_split)


def ran(cut: Cut, m: int, latency_s: float = 0.0, *, is_split: bool = False) -> Simulation:
    schedule = made(cut, m, latency_s, is_split=is_split)
    return simulate(schedule, cut.costs, links(cut.num_workers, latency_s))


def held(simulation: Simulation) -> list[int]:
    return [peak.num_activations for peak in simulation.peaks]


def test_published_makespans_and_peaks_of_an_output_as_heavy_as_a_stage() -> None:
    one, two = ran(split_output(4, 1), 8), ran(split_output(4, 2), 8)
    assert (one.makespan_s, held(one)) == (39.0, [5, 4, 3, 2])
    assert (two.makespan_s, held(two)) == (40.25, [6, 5, 4, 3])
    heavy = Cut(stages=(*[share()] * 3, share(2.0, 2.0, 2.0)))
    assert simulate(one_f_one_b(heavy.shape(8)), heavy.stages, links(4)).makespan_s == 57.0


@BARRIERS
def test_split_backwards_are_quicker_and_hold_the_same(num_barriers: int) -> None:
    cut = split_output(4, num_barriers)
    whole, split = ran(cut, 8), ran(cut, 8, is_split=True)
    # Two of three ways home are half as long; the weight gradients lie where workers wait.
    assert whole.makespan_s - split.makespan_s == pytest.approx(2.0, rel=EXACT)
    assert held(split) == held(whole)


@BARRIERS
def test_v_half_holds_no_more_with_shards(num_barriers: int) -> None:
    found = ran(split_output(4, num_barriers, 2), 16)
    plain = uniform("v_half", 4, 16, 2)
    assert held(found) == held(plain) == [6, 6, 6, 6]
    assert found.makespan_s <= plain.makespan_s + 16 * 0.75 + 3.0


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32), (3, 12)])
def test_one_barrier_costs_the_way_there_and_back_beside_the_work(p: int, m: int) -> None:
    interval_s = 3.0 + 3.0 / p
    found = ran(split_output(p, 1), m)
    assert found.makespan_s == pytest.approx(m * interval_s + (p - 1) * 3.0, rel=EXACT)
    assert held(found) == [min(m, p - r + 1) for r in range(p)]


@BARRIERS
@pytest.mark.parametrize("latency_s", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_schedules_with_shards_violate_nothing_and_do_all_work_once(
    num_barriers: int, latency_s: float, num_chunks: int
) -> None:
    for p in (1, 2, 4, 5):
        for m in (1, p, 2 * p + 1):
            cut = split_output(p, num_barriers, num_chunks)
            for is_split in (False, True):
                assert violations(made(cut, m, latency_s, is_split=is_split)) == (), (p, m)
                found = ran(cut, m, latency_s, is_split=is_split)
                assert found.busy_s == pytest.approx([m * (3.0 + 3.0 / p)] * p, rel=EXACT), (p, m)


def test_unequal_workers_and_shards_run_to_the_end() -> None:
    for seed in range(30):
        luck = np.random.default_rng(seed)
        p, num_barriers = int(luck.integers(2, 6)), int(luck.integers(1, 3))
        shares = [share(*luck.uniform(0.2, 3.0, 3)) for _ in range(p)]
        shards = tuple(
            StageCost(forward_s=float(s), input_s=0.0, weight_s=float(t))
            for s, t in luck.uniform(0, 2, (p, 2))
        )
        cut = replace(even_cut(shares, 1, PipelinePlacement.LOOP), shards=shards, num_barriers=num_barriers)
        between = links(p, float(luck.uniform(0, 3)))
        schedule = one_f_one_b_shards(cut, between, 6, is_split=seed % 2 == 0)
        assert violations(schedule) == (), seed
        found = simulate(schedule, cut.costs, between)
        assert found.makespan_s >= max(found.busy_s), seed


@BARRIERS
def test_more_latency_is_met_by_more_depth_and_not_by_waiting(num_barriers: int) -> None:
    near, far = (ran(split_output(4, num_barriers), 64, latency_s) for latency_s in (0.0, 3.0))
    assert held(far) > held(near)
    # Of 64 intervals of 3.75 s none waits for a round trip of 6 s or more.
    assert far.makespan_s - near.makespan_s < 40.0


def by_hand(num_barriers: int, sharing: Sharing = Sharing.NONE, num_bytes: int = 0) -> Simulation:
    """One microbatch on two workers a second apart."""
    cut = split_output(2, num_barriers)
    shards = (shard(2, num_barriers, num_bytes),) * 2
    between = replace(links(2, 1.0, sharing), bytes_per_s=np.full((2, 2), 4.0))
    return simulate(made(cut, 1, 1.0), cut.stages + shards, between)


def test_one_microbatch_by_hand() -> None:
    # F 0-1, 2-3; S on w1 3-4, on w0 4-5 and back at 6, T and B on w1 6-6.5-8.5, B on w0 9.5-11.5.
    assert by_hand(1).makespan_s == 11.5
    # S 3-3.5 and 4-4.5, back at 5.5; T on w0 6.5-7.5, back at 8.5; B 8.5-10.5, 11.5-13.5.
    assert by_hand(2).makespan_s == 13.5
    # The answer of w0's scores takes half a second more, and so does that of its term.
    assert by_hand(1, num_bytes=2).makespan_s == 12.0
    assert by_hand(2, Sharing.ENDS, num_bytes=2).makespan_s == 14.5


def test_what_is_wrong_with_shards_is_named() -> None:
    schedule = made(split_output(2, 1), 2)
    scores, term = Op(PipelineOpKind.SCORES, 2, 1), Op(PipelineOpKind.TERM, 2, 1)

    def broken(*ops: Op) -> tuple[str, ...]:
        return violations(replace(schedule, ops_by_worker=(ops, schedule.ops_by_worker[1])))

    ops = schedule.ops_by_worker[0]
    assert broken(*(op for op in ops if op != term)) == ("w0 lacks T1 of stage 2",)
    other = {scores: term, term: scores}
    assert broken(*(other.get(op, op) for op in ops)) == (
        "w0 has T1 of stage 2 before S1 of stage 2, which it needs",
        "w0 has T1 of stage 2 before S1 of stage 2, which it needs",
    )
    # With two barriers the last backward waits for all terms; here w0 does its own after the backward that needs it.
    late = made(split_output(2, 2), 1)
    first = late.ops_by_worker[0]
    (backward,) = (op for op in first if op.kind is PipelineOpKind.BACKWARD)
    order = [op for op in first if op.kind is not PipelineOpKind.TERM]
    order += [op for op in first if op.kind is PipelineOpKind.TERM]
    assert order[-2] == backward
    (sentence,) = violations(replace(late, ops_by_worker=(tuple(order), late.ops_by_worker[1])))
    assert sentence == (
        "deadlock: w0 waits with B0 of stage 0 for B0 of stage 1 on w1, "
        "w1 waits with B0 of stage 1 for T0 of stage 2 on w0"
    )
