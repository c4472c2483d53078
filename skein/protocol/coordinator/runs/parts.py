"""All parts of a run, made in one place and told in one place."""

from collections.abc import Mapping

from skein.config.quota import UNBOUNDED, QuotaSpec
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import Outbox
from skein.protocol.coordinator.runs.checking.checks import Checks
from skein.protocol.coordinator.runs.checkpoints.savings import Savings
from skein.protocol.coordinator.runs.checkpoints.storage import Storage
from skein.protocol.coordinator.runs.ending import Ending
from skein.protocol.coordinator.runs.gathering import Gathering
from skein.protocol.coordinator.runs.improving.backups import Backups
from skein.protocol.coordinator.runs.improving.improving import Improving
from skein.protocol.coordinator.runs.improving.joining import Joining
from skein.protocol.coordinator.runs.incidents import Incidents
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.placing.asking import Asking
from skein.protocol.coordinator.runs.placing.holdings import Holdings
from skein.protocol.coordinator.runs.placing.placement import Placement
from skein.protocol.coordinator.runs.steps.evaluation import Evaluation
from skein.protocol.coordinator.runs.steps.leading import Leading
from skein.protocol.coordinator.runs.steps.selecting import Selecting
from skein.protocol.coordinator.runs.steps.stepping import Stepping
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.watching.vigil import Vigil
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import JobHistory
from skein.protocol.membership.absence import Absence
from skein.protocol.membership.membership import Entry, Lost
from skein.protocol.messages.directives import StepRecord
from skein.topology.fleet import Link
from skein.types import WorkerId


class Parts:
    """The parts of one run. They read which of its workers are `live`, and write to `out`."""

    def __init__(
        self,
        job: JobHistory,
        live: Mapping[WorkerId, Entry],
        absence: Absence,
        outbox: Outbox,
        links: Mapping[tuple[WorkerId, WorkerId], Link],
        measured: Measured,
        *,
        quota: QuotaSpec = UNBOUNDED.default,
        now: float,
    ) -> None:
        self.job = job
        self.live = live
        self.out = outbox
        self.measured = measured
        self.members = members = Members(job, live, outbox)
        self.gathering = Gathering(members, now=now)
        self.blame = Blame(members)
        self.checks = Checks(members)
        self.storage = Storage(members, self.blame, self.gathering)
        self.savings = Savings(members, quota)
        self.evaluation = Evaluation(members)
        self.selecting = Selecting(members)
        self.holdings = Holdings(members)
        self.placement = Placement(members, self.holdings, measured, links)
        self.asking = Asking(members, absence, self.holdings, measured, now=now)
        self.leading = Leading(members)
        self.stepping = Stepping(members, self.placement, self.leading, self.checks)
        self.incidents = Incidents(members)
        self.ending = Ending(members)
        self.backups = Backups(members, links)
        self.joining = Joining(members)
        self.improving = Improving(members, self.placement, measured, self.joining)
        self.vigil = Vigil(members, measured, now=now)
        # In the order in which they are made: what several have to say of one thing stands in the log as it always has.
        self._told = [part for part in vars(self).values() if isinstance(part, RunPart)]

    # --- what all are told ---

    def fenced(self, *, now: float) -> None:
        """A generation is opened: whatever was asked for under older ones is void."""
        for part in self._told:
            part.fenced(now=now)

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone; `is_missed`: the phase depended on it."""
        self.members.lost(change.worker)
        self.measured.lost(change.worker)
        for part in self._told:
            part.lost(change, is_missed=is_missed, now=now)

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is recorded, and not announced yet."""
        for part in self._told:
            part.committed(record, plan, now=now)

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """A plan is recorded and assigned."""
        self.measured.adopted()
        for part in self._told:
            part.adopted(adoption, now=now)

    # --- who is here ---

    def candidates(self) -> list[Entry]:
        """Workers that may be given work, by id."""
        return [entry for entry in self.holders() if not entry.is_going]

    def holders(self) -> list[Entry]:
        """Workers whose part of a step in progress counts, by id: also those that want to go when it is over."""
        out = self.blame.excluded.keys() | self.checks.aside
        return [self.live[worker] for worker in sorted(self.live) if worker not in out]

    @property
    def num_candidates(self) -> int:
        """Number of `candidates`."""
        return sum(not entry.is_going for entry in self._counting())

    def may_save(self) -> bool:
        """Whether workers that get no more work may still hold what no checkpoint has."""
        return self.savings.is_behind() and bool(self._counting())

    def _counting(self) -> list[Entry]:
        """The workers of `holders`, in any order."""
        out = self.blame.excluded.keys() | self.checks.aside
        return [entry for worker, entry in self.live.items() if worker not in out]
