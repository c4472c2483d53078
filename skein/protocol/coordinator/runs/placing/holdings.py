"""Chunks that members hold, by what they have said, and sources of the state of a plan's chunks.

Rules of this file
- Nothing is decided or said here: the same question has the same answer until a member says more, or a plan is built.
"""

from collections.abc import Mapping

from skein.plan.agreeing.walkers import walkers_of
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.ending import rewind_of
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.placing.planning import held_plan
from skein.protocol.coordinator.runs.placing.sources import Sources, choose_sources
from skein.protocol.coordinator.runs.placing.walking import held_walkers, walker_sources
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.messages.directives import SourceKind
from skein.protocol.messages.reports import Ack
from skein.types import ChunkRef, WorkerId


class Holdings(RunPart):
    """The state that the members of a run have among them."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._built: Plan | None = None
        """The last plan of which everybody had all that it gave them."""
        self._given: set[ChunkRef] = set()
        """Chunks that plans since have given somebody."""

    def built(self, plan: Plan) -> None:
        """Note that every worker has all that this plan gave it."""
        self._built = plan
        self._given.clear()

    def gave(self, sources: Sources) -> None:
        """A plan gives workers what these are the sources of."""
        self._given.update(at for at, x in sources.by_chunk.items() if x.kind is not SourceKind.KEEP)

    def _walked(self) -> Plan | None:
        """Plan whose walkers are what members hold: the last that was built by all, or that made a step."""
        return self._built or (None if self._job.worked is None else self._job.worked.plan)

    def _changed(self) -> set[ChunkRef]:
        """Chunks that plans since may have given somebody; after a restart, as far as the log tells."""
        worked = self._job.worked
        if self._built is not None or worked is None:
            return self._given
        fallen = (x for x in walkers_of(worked.plan) if x not in self._job.standing)
        return self._given.union(*fallen)

    def held(self, acks: Mapping[WorkerId, Ack] | None = None) -> Plan | None:
        """Chunks that members hold at the job's version, if together they are the whole model; of walkers, whole ones.

        Args:
            acks: acknowledgements of what they hold, if not those that they have sent.
        """
        acks = self._members.acks if acks is None else acks
        if rewind_of(self._job) is not None:
            return None  # Nobody wants it.
        if self._job.spec.aggregation.walkers.are_lines:
            before = self._walked()
            if before is None:
                return None
            return held_walkers(before, acks, version=self._job.version, given=self._changed())
        return held_plan(acks, version=self._job.version, parallel=self._job.spec.parallel)

    def is_recut(self, plan: Plan) -> bool:
        """Whether `plan` wants stages that nobody has, though the whole model is here in other pieces."""
        held = self.held()
        return self._job.version > 0 and held is not None and not set(plan.stages) <= set(held.stages)

    def sources(self, plan: Plan, acks: Mapping[WorkerId, Ack] | None = None) -> Sources:
        """Source of the state of each of a plan's chunks, by what members have said or by `acks`."""
        job, acks = self._job, self._members.acks if acks is None else acks
        version, checkpoint = job.version, job.newest_checkpoint
        rewind = rewind_of(job)
        if rewind is not None:
            # Whatever is held has seen what is to be forgotten.
            version, acks = rewind.version, {}
            checkpoint = next((x for x in job.checkpoints if x.version == version), None)
        if job.spec.aggregation.walkers.are_lines:
            before, given = self._walked(), self._changed()
            return walker_sources(plan, before, acks, version=version, checkpoint=checkpoint, given=given)
        return choose_sources(plan, acks, version=version, checkpoint=checkpoint, job=job)
