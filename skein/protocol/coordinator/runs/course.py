"""The course of a run: its phase, why it is in that, and what it waits for there."""

from skein.protocol.coordinator.runs import phase as phases
from skein.protocol.coordinator.runs.parts import Parts
from skein.protocol.coordinator.runs.placing.planning import num_wanted
from skein.protocol.messages.tensors import Phase
from skein.types import WorkerId


class RunCourse:
    """The one place where the phase of a run changes. Whoever changes it says why it is entered."""

    def __init__(self, parts: Parts) -> None:
        self.phase: phases.RunPhase = phases.GatherPhase()
        self.reason = "waiting for workers"
        self._num_wanted = num_wanted(parts.job.spec.parallel)
        self._parts = parts

    def enter(self, phase: phases.RunPhase, reason: str | None = None) -> None:
        """Be in this phase from now on; without a reason the last one stands."""
        self.phase = phase
        self.reason = self.reason if reason is None else reason

    def explain(self, reason: str) -> None:
        """In the same phase, for another reason."""
        self.reason = reason

    def is_in(self, kind: type[phases.RunPhase]) -> bool:
        """Whether the run is in a phase of this kind."""
        return isinstance(self.phase, kind)

    def step(self) -> None:
        """A step is computed from now on, by the plan that is in place."""
        self.enter(phases.StepPhase(may_go_on=self.phase.may_go_on))

    def evaluate(self, purpose: Phase) -> None:
        """No step is in progress, and samples are scored."""
        self.enter(phases.EvaluatePhase(purpose=purpose, may_go_on=self.phase.may_go_on))
        self._parts.stepping.over()

    def depends_on(self, worker: WorkerId) -> bool:
        """Whether the present phase would miss this worker."""
        members, phase = self._parts.members, self.phase
        if worker not in members:
            return False
        # Once everybody has acknowledged, who holds nothing counts no more, unless it is to be given something.
        if isinstance(phase, phases.FencePhase) and phase.held_back is not None:
            return worker in phase.held_back.workers or members.has_state(worker)
        if phase.waits_for_state and members.has_state(worker):
            return True
        return phase.waits_for_all or (phase.waits_for_placed and worker in members.placed)

    def may_suspect(self, accuser: WorkerId, peer: WorkerId) -> bool:
        """Whether the plan in place has anything go from one of two workers to the other."""
        if accuser == peer or isinstance(self.phase, phases.FencePhase | phases.EndPhase):
            return False
        return peer in self._parts.members and self._parts.members.may_have_met(accuser, peer)

    def is_to_fence(self) -> bool:
        """Whether a generation is to be opened when enough workers are here, to go on or at least to save."""
        if not self.is_in(phases.GatherPhase) or self._parts.gathering.is_hopeless:
            return False
        return self._parts.num_candidates > 0 or self._parts.may_save()

    def is_watched(self) -> bool:
        """Whether something should move by now and then."""
        is_building = self.is_in(phases.BuildPhase) and not self._parts.storage.is_looking
        is_saving = self.is_in(phases.SavePhase) and not self._parts.savings.is_resting
        is_computing = self.phase.is_computing and not (
            self.is_selecting and self._parts.selecting.is_choosing
        )
        return is_computing or is_building or is_saving

    @property
    def is_selecting(self) -> bool:
        """Whether rows are being chosen."""
        return isinstance(self.phase, phases.EvaluatePhase) and self.phase.purpose.selects

    def gathers_at(self) -> float:
        """Time from which the workers that are here are enough."""
        return self._parts.gathering.ends_at(num_here=self._parts.num_candidates, num_wanted=self._num_wanted)
