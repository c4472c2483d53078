"""Seconds to bring stages to workers, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from skein.plan.balanced import make_balanced_plan, pool_of
from skein.plan.changing.clauses import About
from skein.plan.changing.moving import Held, fetch_s, move_s
from skein.plan.load import brought_bytes, moved_bytes, stage_loads
from skein.plan.plan import Plan
from skein.types import ChunkRef, Layout, StageIndex, WorkerId
from tests.plan.builders import fleet, job, link, planned, without

SPEC = job(stages=2, replicas=1, num_layers=4)
NAMES = ("w0", "w1", "w2")
# w2 is far from w0 and near w1.
LINKS = [
    link(x, y, {("w0", "w2"): 0.3, ("w2", "w0"): 0.3}.get((x, y), 0.1), 1e6)
    for x in NAMES
    for y in NAMES
    if x != y
]
ON = fleet([1e9, 1e9, 1e9], links=LINKS)


def plan_on(*names: str) -> Plan:
    lost = [WorkerId(name) for name in NAMES if name not in names]
    plan = make_balanced_plan(SPEC, without(ON, *lost), None, 0)
    assert isinstance(plan, Plan)
    return plan


POOL = pool_of(SPEC, ON)
BEFORE = plan_on("w0", "w1")
LOADS = stage_loads(SPEC, BEFORE.stages)
FREE_LOADS = tuple(replace(load, tied_bytes={}) for load in LOADS)
"""As if nothing were tied."""


def chunk(stage: int, worker: str) -> ChunkRef:
    return ChunkRef(stage=StageIndex(stage), worker=WorkerId(worker))


def test_a_stage_comes_from_its_nearest_holder_and_costs_nothing_where_it_is() -> None:
    seconds = fetch_s(FREE_LOADS, POOL, [chunk(0, "w0"), chunk(0, "w1"), chunk(1, "w1")], Layout.LINE)
    state_s = [load.state_bytes / 1e6 for load in LOADS]
    assert seconds == pytest.approx(
        np.array([[0, 0.1 + state_s[1]], [0, 0], [0.1 + state_s[0], 0.1 + state_s[1]]])
    )


def test_a_stage_that_nobody_holds_costs_the_same_everywhere() -> None:
    assert not fetch_s(LOADS, POOL, [chunk(0, "gone")], Layout.LINE).any()


def test_workers_fetch_side_by_side() -> None:
    after = plan_on("w2")
    assert move_s(BEFORE, BEFORE, LOADS, POOL) == 0
    assert move_s(BEFORE, after, FREE_LOADS, POOL) == pytest.approx(
        sum(fetch_s(FREE_LOADS, POOL, [x.chunk for x in BEFORE.chunks], Layout.LINE)[2])
    )


def test_what_both_ends_of_a_line_share_comes_once() -> None:
    tied_bytes = 3 * sum(LOADS[1].tied_bytes.values())
    assert 0 < tied_bytes < LOADS[1].state_bytes
    # w0 has the first stage; w2 has neither, and fetches the first one whole.
    seconds = fetch_s(LOADS, POOL, [chunk(0, "w0"), chunk(1, "w1")], Layout.LINE)
    assert seconds[0, 1] == pytest.approx(0.1 + (LOADS[1].state_bytes - tied_bytes) / 1e6)
    assert seconds[2, 1] == pytest.approx(0.1 + LOADS[1].state_bytes / 1e6)
    apart = sum(fetch_s(LOADS, POOL, [x.chunk for x in BEFORE.chunks], Layout.LINE)[2])
    after = plan_on("w2")
    assert move_s(BEFORE, after, LOADS, POOL) == pytest.approx(apart - tied_bytes / 1e6)
    moved = [x.chunk for x in after.chunks]
    both_bytes = LOADS[0].state_bytes + LOADS[1].state_bytes
    assert brought_bytes(LOADS, Layout.LINE, moved, moved) == both_bytes - tied_bytes
    assert brought_bytes(LOADS, Layout.LINE, moved[1:], moved) == LOADS[1].state_bytes - tied_bytes
    # Its first stage is built before what it has already, so it comes whole.
    assert brought_bytes(LOADS, Layout.LINE, moved[:1], moved) == LOADS[0].state_bytes


def test_what_moving_costs_is_spread_over_the_steps_to_come() -> None:
    once, often = (Held(plan=BEFORE, steps_left=n).move_s(BEFORE.stages, LOADS, POOL) for n in (1, 10))
    assert once is not None
    assert often is not None
    assert often == pytest.approx(once / 10)
    assert Held(plan=BEFORE, steps_left=None).move_s(BEFORE.stages, LOADS, POOL) is None
    assert Held(plan=BEFORE, steps_left=1).move_s(BEFORE.stages[:1], LOADS, POOL) is None


def test_the_head_of_a_loop_goes_where_its_first_stage_goes() -> None:
    spec = job(stages=2, replicas=1, num_layers=4, layout=Layout.LOOP)
    plan = make_balanced_plan(spec, ON, None, 0)
    assert isinstance(plan, Plan)
    loads = stage_loads(spec, plan.stages)
    whole = fetch_s(loads, POOL, [x.chunk for x in plan.chunks], Layout.LOOP)
    body = Held(plan=plan, steps_left=1).move_s(plan.stages, loads, POOL)
    assert body == pytest.approx(np.stack([whole[:, 0] + whole[:, 2], whole[:, 1]], axis=1))


def test_a_tied_head_brings_only_its_own_where_it_goes_with_the_first_stage() -> None:
    spec = job(stages=2, replicas=1, num_layers=4, layout=Layout.LOOP)
    loads = stage_loads(spec, planned(spec, ON).stages)
    # The gain of the final norm, with two moments, in float32.
    assert moved_bytes(loads, Layout.LOOP) == (loads[0].state_bytes, loads[1].state_bytes, 3 * 4 * 64)
    assert moved_bytes(loads, Layout.LINE) == tuple(load.state_bytes for load in loads)


def test_what_moves_is_told_in_a_clause() -> None:
    assert list(Held(plan=BEFORE, steps_left=1).moved(BEFORE, LOADS)) == []
    [clause] = Held(plan=BEFORE, steps_left=1).moved(plan_on("w2"), LOADS)
    assert clause.about is About.MOVES
    assert clause.words.endswith("of state: stage 0 to w2 and 1 more")
