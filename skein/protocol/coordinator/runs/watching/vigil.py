"""Notices that somebody, or everybody, gets nowhere although all of them live."""

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.incidents import Incidents
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.phase import BuildPhase, RunPhase
from skein.protocol.coordinator.runs.watching.detection import OpWatch
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.watching.watchdog import Watchdog
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.records import IncidentKind
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.directives import StepRecord
from skein.protocol.messages.reports import Beat
from skein.types import WorkerId


class Vigil(RunPart):
    """The watch over single ops, and the one over all of them together."""

    def __init__(self, members: Members, measured: Measured, *, now: float) -> None:
        self.watchdog = Watchdog(now=now)
        self._ops = OpWatch(measured.chunk_time)
        self._members = members

    def beat(self, worker: WorkerId, beat: Beat) -> None:
        """A worker lives, and says how long its running op has been at it."""
        self._ops.beat(worker, beat)

    def moved(self, *, now: float) -> None:
        """Something did."""
        self.watchdog.moved(now=now)

    def barks_at(self, plan: Plan | None) -> float:
        """When nothing has moved for too long under this plan."""
        return self.watchdog.barks_at(plan)

    def gives_up_at(self, plan: Plan | None) -> float:
        """When whoever has not acknowledged a generation by then is turned away."""
        return self.watchdog.gives_up_at(plan)

    def fenced(self, *, now: float) -> None:
        """A generation is opened."""
        self.moved(now=now)

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone."""
        self._ops.lose(change.worker)

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Another plan is in place."""
        self._ops.planned(adoption.plan)

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is."""
        self.watchdog.committed(now=now)
        self._ops.committed()

    def barked(self, phase: RunPhase, incidents: Incidents, blame: Blame, *, now: float) -> str:
        """Nothing has moved for too long; gives the reason to begin anew, without whoever builds while others have."""
        still_s = self.watchdog.still_for(now=now)
        late = self._members.late() if isinstance(phase, BuildPhase) else ()
        reason = phase.standstill(still_s)
        incidents.noticed(IncidentKind.STALLED, late, reason, silent_s=still_s, now=now)
        blame.exclude(late, reason, now=now)
        self.watchdog.barked()
        return reason

    def stuck(self, plan: Plan | None, *, is_fencing: bool, now: float) -> tuple[tuple[WorkerId, str], ...]:
        """Workers that live and get nowhere, each with the reason: an op never ends, or they do not acknowledge."""
        found = {stuck.worker: stuck.reason for stuck in self._ops.stuck()}
        if is_fencing and now >= self.watchdog.gives_up_at(plan):
            reason = "it does not answer, though it beats: start it again"
            found = dict.fromkeys(self._members.unacknowledged(), reason) | found
        return tuple(sorted(found.items()))
