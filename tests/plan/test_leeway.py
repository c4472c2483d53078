"""What a job leaves to the planner: all ways are tried, the shortest is taken and stays, and what cannot be is not."""

import pytest

from skein.config.job import JobSpec, ParallelSpec, PlanSpec, SkipSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.changing.clauses import parse_clauses
from skein.plan.changing.leeway import beginning_ops, by_promise, is_settled, settled, settlings
from skein.plan.check import violations
from skein.plan.clock.holding import planned_uses
from skein.plan.cut import cut
from skein.plan.load import stage_loads
from skein.plan.ops import OpKind
from skein.plan.plan import Plan
from skein.plan.searched import OPS_PER_S, make_searched_plan, searched_step_s
from skein.topology.fleet import Fleet
from skein.types import Layout
from skein.units import format_bytes
from tests.plan.builders import fleet, job, link

NAMES = [f"w{i}" for i in range(4)]


def line(hop_s: float, num_workers: int = 4) -> Fleet:
    """Equal workers with equal links."""
    names = NAMES[:num_workers]
    links = [link(a, b, hop_s, 1e9) for a in names for b in names if a != b]
    return fleet([1e9] * num_workers, links=links)


ENOUGH_S, BRIEF_S = 1.2, 0.05
"""Enough to begin with each of the six ways of the job below, and enough for a search of one of them."""


def open_job(
    layout: Layout = Layout.LINE, *, method: str = "search", num_layers: int = 14, budget_s: float = ENOUGH_S
) -> JobSpec:
    """Four stages; the planner chooses how many chunks each worker has, and whether backwards are split."""
    spec = job(stages=4, replicas=1, num_layers=num_layers, layout=layout)
    plan = PlanSpec.model_validate({"method": method, "backward": "auto", "budget_s": budget_s})
    parallel = ParallelSpec(stages=4, layout=layout, chunks="auto")
    return spec.model_copy(update={"plan": plan, "parallel": parallel})


def manners(spec: JobSpec, previous: Plan | None = None) -> list[tuple[object, str]]:
    return [(x.parallel.chunks, x.plan.backward) for x in settlings(spec, previous)]


def planned(spec: JobSpec, on: Fleet, previous: Plan | None = None) -> Plan:
    plan = make_searched_plan(spec, on, previous, 0)
    assert isinstance(plan, Plan), plan
    assert violations(plan, spec, on) == ()
    return plan


def test_a_job_can_be_settled_in_all_ways_that_its_layers_allow() -> None:
    whole_and_split = ("whole", "split")
    assert manners(open_job()) == [(chunks, x) for chunks in (1, 2, 4) for x in whole_and_split]
    assert manners(open_job(num_layers=6)) == [(chunks, x) for chunks in (1, 2) for x in whole_and_split]
    skipping = open_job().model_copy(update={"skip": SkipSpec(ratio=0.25)})
    assert manners(skipping) == [(1, "whole"), (1, "split")]
    assert [is_settled(x) for x in settlings(open_job(), None)] == [True] * 6


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("method", ["search", "balanced"])
def test_of_all_ways_the_shortest_is_taken(layout: Layout, method: str) -> None:
    spec, on = open_job(layout, method=method), line(0.001)
    plan = planned(spec, on)
    if method == "balanced":
        made = [make_balanced_plan(x, on, None, 0) for x in settlings(spec, None)]
        assert plan.predicted_step_s == min(x.predicted_step_s for x in made if isinstance(x, Plan))
        return
    # What a search begins with decides, and it is never worse than that.
    found = [planned(x, on) for x in settlings(open_job(layout, budget_s=BRIEF_S), None)]
    assert plan.predicted_step_s <= 1.02 * min(x.predicted_step_s for x in found)
    assert "rather than" in str(plan.reason)


def test_a_short_budget_is_for_the_ways_that_promise_most_and_the_others_are_told() -> None:
    on = line(0.001)
    every = by_promise(settlings(open_job(), None), on)
    assert sum(map(beginning_ops, every)) <= ENOUGH_S * OPS_PER_S / 2
    enough = planned(open_job(), on)
    assert "more way" not in str(enough.reason)
    # Two of them promise most; the budget is enough for these alone.
    brief_s = 2.01 * sum(map(beginning_ops, every[:2])) / OPS_PER_S
    brief = planned(open_job(budget_s=brief_s), on)
    assert "the budget is too short to try" in str(brief.reason)
    assert brief.predicted_step_s <= 1.05 * enough.predicted_step_s
    # However short it is, there is a plan; it is that of the first way.
    least = planned(open_job(budget_s=1e-6), on)
    assert "4 chunks and split backwards, for the budget is too short to try 5 more ways" in str(least.reason)
    assert len(least.stages) == every[0].parallel.num_stages


def test_a_reason_is_read_as_it_was_told() -> None:
    for budget_s in (BRIEF_S, 1e-6):
        plan = planned(open_job(budget_s=budget_s), line(0.001))
        assert parse_clauses(str(plan.reason)) == plan.reason


def test_a_reason_names_who_holds_most() -> None:
    spec, on = open_job(budget_s=BRIEF_S), line(0.001)
    plan = planned(spec, on)
    uses = planned_uses(plan, settled(spec, plan))
    use = max(uses, key=lambda x: x.fixed_bytes + x.planned_bytes)
    held = ", ".join(map(str, use.planned_peaks))
    num_bytes = format_bytes(use.fixed_bytes + use.planned_bytes)
    assert f"{use.worker} holds most: {num_bytes} with up to {held} microbatches at its stages" in str(
        plan.reason
    ).split("; ")


def test_a_plan_with_split_backwards_is_shorter_than_any_with_whole_ones_and_has_weight_ops_moved() -> None:
    on = line(0.02)
    ways = settlings(open_job(budget_s=BRIEF_S), None)
    whole, split = (planned(x, on) for x in ways if x.parallel.chunks == 1)
    assert split.predicted_step_s < 0.95 * whole.predicted_step_s
    kinds = [op.kind for op in split.schedules[0].ops]
    late = [at for at, kind in enumerate(kinds) if kind is OpKind.WEIGHT]
    early = [at for at, kind in enumerate(kinds) if kind is OpKind.INPUT]
    assert any(w != i + 1 for w, i in zip(late, early, strict=True))
    reckoned_s = searched_step_s(settled(open_job(), split), on, split)
    assert reckoned_s == pytest.approx(split.predicted_step_s, rel=0.02)


def test_what_was_settled_stays_when_workers_go_and_come() -> None:
    spec = open_job()
    first = planned(spec, line(0.001))
    assert manners(spec, first) == [(len(first.stages) // 4, "split" if first.paths[0].split else "whole")]
    for num_workers in (3, 2, 4):
        later = planned(open_job(budget_s=BRIEF_S), line(0.001, num_workers), first)
        assert later.stages == first.stages
        assert [bool(x.split) for x in later.paths] == [bool(x.split) for x in first.paths]


def test_a_plan_of_another_cut_than_a_job_may_have_is_not_taken() -> None:
    spec, on = open_job(), line(0.001)
    three = settlings(spec, None)[0]
    other = three.model_copy(update={"parallel": ParallelSpec(stages=4, chunks=3)})
    plan = make_balanced_plan(other, on, None, 0)
    assert isinstance(plan, Plan)
    assert violations(plan, spec, on) == ("12 stages, the job asks for 4",)


def test_ways_that_do_not_fit_are_told_with_what_is_missing() -> None:
    spec = open_job()
    [one, *_] = settlings(spec, None)
    loads = stage_loads(one, cut(one.layers, 4, Layout.LINE))
    on = fleet([1e9] * 4, memory_bytes=max(load.memory_bytes(1) for load in loads))
    reason = str(planned(spec, on).reason)
    assert "not 4 chunks and split backwards and 1 more: stages 4 to 7 need" in reason
    assert (
        "192.0 KiB are missing in the cut that comes nearest, and batch.microbatch_samples: 1 frees" in reason
    )
