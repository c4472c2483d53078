"""Stages that processes hold by a plan."""

from collections.abc import Collection, Mapping

from skein.plan.plan import Plan
from skein.protocol.log.records import GenerationMember
from skein.protocol.messages.directives import ChunkVersion
from skein.types import Incarnation, StageSpec, Step, WorkerId

Holding = Mapping[GenerationMember, frozenset[StageSpec]]
"""Stages that a plan gives each process."""


def holding_of(members: tuple[GenerationMember, ...], plan: Plan) -> Holding:
    """Stages that a plan gives each of the members that it has work for."""
    stages = {stage.index: stage for stage in plan.stages}
    by_worker: dict[WorkerId, set[StageSpec]] = {}
    for placed in plan.chunks:
        by_worker.setdefault(placed.chunk.worker, set()).add(stages[placed.chunk.stage])
    return {m: frozenset(by_worker[m.worker]) for m in members if m.worker in by_worker}


def absent(
    may_hold: Mapping[GenerationMember, frozenset[ChunkVersion]], members: Collection[GenerationMember]
) -> dict[Incarnation, Step]:
    """Processes that may hold chunks and are no members of the newest generation, each with its newest version."""
    return {
        member.incarnation: max(held.version for held in chunks)
        for member, chunks in may_hold.items()
        if member not in members
    }
