"""Stages that processes hold by a plan."""

from collections.abc import Mapping

from skein.plan.plan import Plan
from skein.protocol.log.records import GenerationMember
from skein.types import StageSpec, WorkerId

Holding = Mapping[GenerationMember, frozenset[StageSpec]]
"""Stages that a plan gives each process."""


def holding_of(members: tuple[GenerationMember, ...], plan: Plan) -> Holding:
    """Stages that a plan gives each of the members that it has work for."""
    stages = {stage.index: stage for stage in plan.stages}
    by_worker: dict[WorkerId, set[StageSpec]] = {}
    for placed in plan.chunks:
        by_worker.setdefault(placed.chunk.worker, set()).add(stages[placed.chunk.stage])
    return {m: frozenset(by_worker[m.worker]) for m in members if m.worker in by_worker}
