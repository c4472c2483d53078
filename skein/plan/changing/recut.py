"""Stages for the workers that hold them: a slow worker's stage gets fewer layers.

A plan from nothing is cut as if all workers were alike, because who holds what is not known yet. Once it is, the same
workers may do better with unequal stages. Only a job without any state may be cut anew: state is kept stage by stage.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from skein.config.job import JobSpec
from skein.model.rows import RowCut
from skein.plan.balanced import make_balanced_plan, pool_of
from skein.plan.changing.clauses import About
from skein.plan.changing.silent import working
from skein.plan.cut import cut_within
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet


def recut(job: JobSpec, fleet: Fleet, plan: Plan) -> Plan | None:
    """`plan`'s workers with stages cut by their speeds; None if that changes nothing or does not fit.

    A stage's speed is that of its holders together, over the share of the microbatches that visit it; it takes no more
    memory than the least of theirs.
    """
    pool = pool_of(job, fleet)
    position = {worker: i for i, worker in enumerate(pool.workers)}
    plan = working(plan, set(pool.workers))
    visits = plan.microbatches_by_chunk()
    num_stages = len(plan.stages) - plan.layout.num_head_stages
    num_held = Counter(chunk.worker for chunk in visits if chunk.stage < num_stages)
    speeds, rooms_bytes = [], []
    for index in range(num_stages):
        held = [chunk for chunk in visits if chunk.stage == index]
        num_visits = sum(len(visits[chunk]) for chunk in held)
        shares = [(position[chunk.worker], num_held[chunk.worker]) for chunk in held]
        speeds.append(float(sum(pool.speeds[at] / count for at, count in shares)) / max(1, num_visits))
        rooms_bytes.append(float(min(pool.memory_bytes[at] // count for at, count in shares)))
    if job.parallel.vocabulary.rows is not RowCut.SPEED:
        # A shard as fast as it has rows is cut as it was.
        for index in (*job.parallel.runs[0], *job.parallel.runs[2]):
            speeds[index] = float(plan.stages[index].stop - plan.stages[index].first)
    stages = cut_within(job, list(np.array(speeds) / max(speeds)), rooms_bytes)
    if stages is None or stages == plan.stages:
        return None
    made = make_balanced_plan(job, fleet, replace(plan, stages=stages), 0)
    if not isinstance(made, Plan) or made.stages != stages:
        return None
    return replace(made, reason=made.reason.before(About.MOVES))


def widths(plan: Plan) -> str:
    """Numbers of layers of the stages, as text.

    >>> from tests.support.plans import grid_plan
    >>> widths(grid_plan(stages=2, replicas=1))
    '2, 2'
    """
    return ", ".join(str(stage.stop - stage.first) for stage in plan.stages)
