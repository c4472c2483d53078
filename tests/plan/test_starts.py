"""No plan is slower than the best order known for the same workers, cuts, links and memory, split backwards or not."""

from itertools import product
from typing import Literal

import numpy as np
import pytest

from bench.studies.schedules.choice import choose
from skein.config.job import JobSpec, PlanSpec
from skein.plan.balanced import pool_of
from skein.plan.ops import OpKind
from skein.plan.plan import Plan
from skein.plan.route.evaluate import timeline
from skein.plan.route.job_problem import Posed, pose
from skein.plan.route.plan_routing import routing_of
from skein.plan.route.schedules.shape import PipelinePlacement, Shape
from skein.plan.searched import make_searched_plan
from skein.rng import stream
from skein.topology.fleet import Fleet
from tests.plan.builders import fleet, job, link, whole_model_bytes
from tests.support.extent import examples
from tests.support.scheduling.pricing import Cut, Links, Sharing, StageCost

NUM_FLEETS = examples(300)
"""50 in `make test`, all in `make choices`."""


def drawn(number: int) -> tuple[JobSpec, Fleet]:
    """A pipeline of unequal workers and links, with one stage each, two or four, and memory for all or for few.

    Every other two have split backwards.
    """
    draw = stream(number, "drawn pipelines")
    num_workers, num_chunks = int(draw.integers(2, 5)), int(draw.choice([1, 1, 2, 4]))
    spec = job(
        stages=num_workers * num_chunks,
        replicas=1,
        num_layers=int(num_workers * num_chunks * draw.integers(1, 3)),
        num_microbatches=int(draw.integers(1, 4 * num_workers + 1)),
        is_tied=False,
    )
    backward: Literal["whole", "split"] = "split" if number % 4 > 1 else "whole"
    spec = spec.model_copy(update={"plan": PlanSpec(budget_s=0.01, backward=backward)})
    names = [f"w{i}" for i in range(num_workers)]
    flops = sum(layer.forward_flops + layer.backward_flops for layer in spec.layers) * 2
    speeds = [1e9 * float(draw.uniform(1, 4 if number % 2 else 1.01)) for _ in names]
    op_s = flops / num_workers / 2e9
    links = [
        link(a, b, float(draw.choice([1e-6, 0.1, 0.5, 2.0])) * op_s, float(draw.choice([1e9, 1e7])))
        for a in names
        for b in names
        if a != b
    ]
    is_tight = num_chunks == 1 and number % 3 == 0
    share = whole_model_bytes(spec) / num_workers * float(draw.uniform(1.5, 3))
    return spec, fleet(speeds, links=links, memory_bytes=int(share) if is_tight else 2**40)


def known_s(posed: Posed) -> float:
    """Seconds of the best order that there is for these stages in the order of the fleet."""
    problem, p = posed.problem, posed.problem.num_workers
    links = Links(
        latency_s=problem.transfer_s - problem.wire_s,
        bytes_per_s=np.where(problem.wire_s > 0, 1 / np.maximum(problem.wire_s, 1e-300), np.inf),
        sharing=Sharing.ENDS,
    )
    cuts = []
    for num_chunks, placement in product(range(1, problem.num_stages // p + 1), PipelinePlacement):
        width, rest = divmod(problem.num_stages, p * num_chunks)
        if not rest and (placement is PipelinePlacement.LOOP or num_chunks == 2):
            shape = Shape(num_workers=p, num_microbatches=1, num_chunks=num_chunks, placement=placement)
            runs = [(w, range(r * width, (r + 1) * width)) for r, w in enumerate(shape.worker_by_stage)]
            stages = tuple(cost(posed, *run) for run in runs)
            cuts.append(Cut(stages=stages, num_chunks=num_chunks, placement=placement))
    most = problem.num_microbatches
    memory = [int(problem.slots[w].min()) * problem.num_stages // p for w in range(p)]
    choice = choose(most, cuts, links, memory, may_split=problem.is_split)
    return choice.ranking[0].simulation.makespan_s


def cost(posed: Posed, worker: int, stages: range) -> StageCost:
    """Cost of a run of stages; the loss is one op, forward and backward, so the last run has all of it behind."""
    problem = posed.problem
    is_last = stages.stop == problem.num_stages
    passed = list(stages[: len(stages) - is_last])
    home = [OpKind.INPUT, OpKind.LOSS_INPUT] if problem.is_split else [OpKind.BACKWARD, OpKind.LOSS]
    input_s, loss_s = (problem.seconds_of([kind])[worker] for kind in home)
    weight_s = problem.seconds_of([OpKind.WEIGHT])[worker, list(stages)] * problem.is_split
    return StageCost(
        forward_s=float(problem.forward_s[worker, passed].sum()),
        input_s=float(input_s[passed].sum()) + is_last * float(loss_s[-1]),
        weight_s=float(weight_s.sum()),
        activation_bytes=len(stages),
        kept_bytes=len(stages) * problem.is_split,
        output_bytes=int(not is_last),
        gradient_bytes=int(not is_last),
    )


@pytest.mark.parametrize("number", range(NUM_FLEETS))
def test_a_plan_is_no_slower_than_the_best_order_that_is_known(number: int) -> None:
    spec, on = drawn(number)
    plan = make_searched_plan(spec, on, None, number)
    assert isinstance(plan, Plan)
    posed = pose(spec, on, plan, pool_of(spec, on))
    routing = routing_of(plan, posed)
    assert routing is not None
    assert timeline(posed.problem, routing).step_s <= 1.001 * known_s(posed)
