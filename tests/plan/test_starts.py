"""No plan of a job is slower than the best order that is known for the same workers, cuts, links and memory."""

import numpy as np
import pytest

from bench.studies.schedules.choice import choose
from skein.config.job import JobSpec, PlanSpec
from skein.plan.balanced import pool_of
from skein.plan.plan import Plan
from skein.plan.route.evaluate import timeline
from skein.plan.route.job_problem import Posed, pose
from skein.plan.route.plan_routing import routing_of
from skein.plan.searched import make_searched_plan
from skein.rng import stream
from skein.topology.fleet import Fleet
from tests.plan.builders import fleet, job, link, whole_model_bytes
from tests.support.extent import examples
from tests.support.scheduling.pricing import Cut, Links, Sharing, StageCost

NUM_FLEETS = examples(300)
"""50 in `make test`, all in `make choices`."""


def drawn(number: int) -> tuple[JobSpec, Fleet]:
    """A pipeline of unequal workers and links, with one stage each, two or four, and memory for all or for few."""
    draw = stream(number, "drawn pipelines")
    num_workers, num_chunks = int(draw.integers(2, 5)), int(draw.choice([1, 1, 2, 4]))
    spec = job(
        stages=num_workers * num_chunks,
        replicas=1,
        num_layers=int(num_workers * num_chunks * draw.integers(1, 3)),
        num_microbatches=int(draw.integers(1, 4 * num_workers + 1)),
        is_tied=False,
    )
    spec = spec.model_copy(update={"plan": PlanSpec(budget_s=0.01)})
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
    """Seconds of the best order that there is for these stages in the order of the fleet, with whole backwards."""
    problem, p = posed.problem, posed.problem.num_workers
    links = Links(
        latency_s=problem.transfer_s - problem.wire_s,
        bytes_per_s=np.where(problem.wire_s > 0, 1 / np.maximum(problem.wire_s, 1e-300), np.inf),
        sharing=Sharing.ENDS,
    )
    cuts = []
    for num_chunks in range(1, problem.num_stages // p + 1):
        width, rest = divmod(problem.num_stages, p * num_chunks)
        if not rest:
            runs = [(r % p, range(r * width, (r + 1) * width)) for r in range(p * num_chunks)]
            cuts.append(Cut(stages=tuple(cost(posed, *run) for run in runs), num_chunks=num_chunks))
    most = problem.num_microbatches
    memory = [int(problem.slots[w].min()) * problem.num_stages // p for w in range(p)]
    choice = choose(most, cuts, links, memory, may_split=False)
    return choice.ranking[0].simulation.makespan_s


def cost(posed: Posed, worker: int, stages: range) -> StageCost:
    """Cost of a run of stages; the loss is one op, forward and backward, so the last run has all of it behind."""
    problem = posed.problem
    is_last = stages.stop == problem.num_stages
    passed = list(stages[: len(stages) - is_last])
    return StageCost(
        forward_s=float(problem.forward_s[worker, passed].sum()),
        input_s=float(problem.backward_s[worker, passed].sum()) + is_last * float(problem.loss_s[worker]),
        weight_s=0.0,
        activation_bytes=len(stages),
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
