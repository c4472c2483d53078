"""What a job leaves to the planner: all ways are tried, the shortest is taken and stays, and what cannot be is not."""

import pytest

from skein.config.job import JobSpec, ParallelSpec, PlanSpec, SkipSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.changing.leeway import is_settled, settled, settlings
from skein.plan.check import violations
from skein.plan.cut import cut
from skein.plan.load import stage_loads
from skein.plan.ops import OpKind
from skein.plan.plan import Plan
from skein.plan.searched import make_searched_plan, searched_step_s
from skein.topology.fleet import Fleet
from skein.types import Layout
from tests.plan.builders import fleet, job, link

NAMES = [f"w{i}" for i in range(4)]


def line(hop_s: float, num_workers: int = 4) -> Fleet:
    """Equal workers with equal links."""
    names = NAMES[:num_workers]
    links = [link(a, b, hop_s, 1e9) for a in names for b in names if a != b]
    return fleet([1e9] * num_workers, links=links)


def open_job(layout: Layout = Layout.LINE, *, method: str = "search", num_layers: int = 14) -> JobSpec:
    """Four stages; the planner chooses how many chunks each worker has, and whether backwards are split."""
    spec = job(stages=4, replicas=1, num_layers=num_layers, layout=layout)
    plan = PlanSpec.model_validate({"method": method, "backward": "auto", "budget_s": 0.05})
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
    found = [planned(x, on) for x in settlings(spec, None)]
    assert plan.predicted_step_s <= 1.02 * min(x.predicted_step_s for x in found)
    assert "rather than" in str(plan.reason)


def test_a_plan_with_split_backwards_is_shorter_than_any_with_whole_ones_and_has_weight_ops_moved() -> None:
    on = line(0.02)
    whole, split = (planned(x, on) for x in settlings(open_job(), None) if x.parallel.chunks == 1)
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
        later = planned(spec, line(0.001, num_workers), first)
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
    assert "not 4 chunks and whole backwards and 1 more: stages 4 to 7 need" in reason
    assert (
        "192.0 KiB are missing in the cut that comes nearest, and batch.microbatch_samples: 1 frees" in reason
    )
