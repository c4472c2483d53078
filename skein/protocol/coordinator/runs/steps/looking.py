"""Version of the parameters by which rows are looked at for the next choice: what the log says, if they are still here.

Rules of this file
- The version follows from the log alone, never from how long anything took: so a restart looks at rows by the same one.
- Parameters that steps have changed since are with who has kept a copy. Where a stage on an evaluation path has none
  any more, rows are looked at when the choice is due, by parameters of then.
"""

from collections.abc import Mapping

from skein.plan.plan import Plan
from skein.protocol.log.choosing import RowLook, next_look
from skein.protocol.log.history import JobHistory
from skein.protocol.messages.directives import ChunkVersion
from skein.protocol.messages.reports import Ack
from skein.types import Step, WorkerId


class LookAhead:
    """Looks at rows of one job under one plan."""

    def __init__(self, job: JobHistory) -> None:
        self._job = job
        self._kept: frozenset[Step] = frozenset()

    def adopted(self, plan: Plan, acks: Mapping[WorkerId, Ack]) -> None:
        """A plan is put in place by workers that have told what they hold."""
        self._kept = kept_along(plan, acks, version=self._job.version)

    def begins(self) -> RowLook | None:
        """The look at rows that is to begin now, or goes on, beside steps; None: none is."""
        look = next_look(self._job)
        if look is None or not look.version <= self._job.version < look.due < self._job.total_steps:
            return None
        return look if self._has(look.version) else None

    def version(self) -> Step:
        """Version of the parameters by which rows are chosen now that a choice is due."""
        look = next_look(self._job)
        is_kept = look is not None and look.due == self._job.version and self._has(look.version)
        return look.version if look is not None and is_kept else self._job.version

    def _has(self, version: Step) -> bool:
        return version == self._job.version or version in self._kept


def kept_along(plan: Plan, acks: Mapping[WorkerId, Ack], *, version: Step) -> frozenset[Step]:
    """Older versions of which each chunk on an evaluation path has kept its parameters.

    Args:
        acks: what workers held when the plan was made. Who is given its chunk by another gets no copy of older ones.
        version: that chunks have under the plan.
    """
    stages = {stage.index: stage for stage in plan.stages}
    found: list[frozenset[Step]] = []
    for hop in {hop for path in plan.evaluation_paths for hop in path.hops}:
        ack, stage = acks.get(hop.worker), stages[hop.stage]
        stays = ack is not None and ChunkVersion(stage=stage, version=version) in ack.chunks
        kept = ack.kept if ack is not None and stays else ()
        found.append(frozenset(x.version for x in kept if x.stage == stage))
    return frozenset[Step].intersection(*found) if found else frozenset()
