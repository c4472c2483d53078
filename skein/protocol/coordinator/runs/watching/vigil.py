"""Notices that somebody, or everybody, gets nowhere although all of them live: the last resort, behind leases."""

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.incidents import Incidents
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.phase import BuildPhase, RunPhase
from skein.protocol.coordinator.runs.watching.detection import OpWatch
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.records import IncidentKind
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.directives import StepRecord
from skein.protocol.messages.reports import Beat
from skein.types import WorkerId

STALL_S = 60.0
"""No op has ended anywhere for so long in a running step: something is stuck, and a new generation unsticks it.

Steps that are predicted to take longer have `STALL_STEPS` of their own time. It costs what was on its way, so each time
that it was in vain doubles the wait: a tensor that takes longer than anybody knew arrives in the end.
"""
STALL_STEPS = 4.0
STUCK_STALLS = 2.0
"""Stalls without acknowledging a new generation after which a worker is the stuck one, and is turned away."""
_MAX_DOUBLINGS = 6


class Vigil(RunPart):
    """The watch over single ops, and over when something moved last: an op ended, a step was committed, and so on."""

    def __init__(self, members: Members, measured: Measured, *, now: float) -> None:
        super().__init__(members)
        self._moved_at = now
        self._num_barks = 0
        self._ops = OpWatch(measured.chunk_time)

    def beat(self, worker: WorkerId, beat: Beat) -> None:
        """A worker lives, and says how long its running op has been at it."""
        self._ops.beat(worker, beat)

    def moved(self, *, now: float) -> None:
        """Note that something moved."""
        self._moved_at = now

    def barks_at(self, plan: Plan | None) -> float:
        """Time at which nothing has moved for too long under this plan."""
        return self._moved_at + _stall_s(plan) * 2.0**self._num_barks

    def gives_up_at(self, plan: Plan | None) -> float:
        """Time at which workers that have not acknowledged a generation by then are turned away."""
        return self._moved_at + STUCK_STALLS * _stall_s(plan)

    def fenced(self, *, now: float) -> None:
        """A generation is opened."""
        self.moved(now=now)

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone."""
        self._ops.lose(change.worker)

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Watch the ops of the plan that is in place."""
        self._ops.planned(adoption.plan)

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is: all is well."""
        self._moved_at = now
        self._num_barks = 0
        self._ops.committed()

    def barked(
        self, phase: RunPhase, incidents: Incidents, blame: Blame, *, owing: tuple[WorkerId, ...], now: float
    ) -> str:
        """Note a stall and exclude who is to blame; gives the reason to begin anew.

        Those are workers that still build while others have, or that owe a sketch of what they have voted on.
        """
        still_s = now - self._moved_at
        late = self._members.late() if isinstance(phase, BuildPhase) else owing
        reason = phase.standstill(still_s)
        incidents.noticed(IncidentKind.STALLED, late, reason, silent_s=still_s, now=now)
        blame.exclude(late, reason)
        self._num_barks = min(self._num_barks + 1, _MAX_DOUBLINGS)
        return reason

    def stuck(self, plan: Plan | None, *, is_fencing: bool, now: float) -> tuple[tuple[WorkerId, str], ...]:
        """Workers that live and get nowhere, each with the reason: an op never ends, or they do not acknowledge."""
        found = self._ops.stuck()
        if is_fencing and now >= self.gives_up_at(plan):
            reason = "it does not answer, though it beats: start it again"
            found = dict.fromkeys(self._members.unacknowledged(), reason) | found
        return tuple(sorted(found.items()))


def _stall_s(plan: Plan | None) -> float:
    return max(STALL_S, STALL_STEPS * (0.0 if plan is None else plan.predicted_step_s))
