"""Workers that get no more work, and why: strikes, told to people when they exclude somebody or are forgiven."""

from collections.abc import Mapping

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.workers.disputes import Disputes
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.coordinator.runs.workers.strikes import Strikes
from skein.protocol.membership.membership import Entry
from skein.protocol.messages.directives import StepRecord
from skein.protocol.rounds.round import Outvoted, RoundFailed
from skein.types import WorkerId


class Blame(RunPart):
    """The strikes of one run."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.strikes = Strikes()
        self._disputes = Disputes()

    @property
    def excluded(self) -> Mapping[WorkerId, str]:
        """Workers that get no more work, with the last thing that failed."""
        return self.strikes.excluded

    def joined(self, entry: Entry) -> None:
        """A worker came, perhaps again."""
        if self.strikes.joined(entry.hello.worker, entry.hello.incarnation):
            self._disputes.forget(entry.hello.worker)

    def strike(self, worker: WorkerId, reason: str, *, is_hearsay: bool, lasts: bool = False) -> None:
        """Count a failure, which the worker itself reported unless `is_hearsay`; `lasts`: as of `Strikes.strike`."""
        if self.strikes.strike(worker, reason, is_hearsay=is_hearsay, lasts=lasts):
            self._log(f"excluded={worker}: {reason}")

    def judged(self, end: Outvoted | RoundFailed) -> None:
        """Strike workers that reported what cannot be; of those that disagree too often, exclude the least credible."""
        if not (isinstance(end, RoundFailed) and end.is_disputed):
            for worker in end.blamed:
                self.strike(worker, end.reason, is_hearsay=False, lasts=True)
            return
        going = self._disputes.disputed(end.blamed)
        for worker in going:
            self.strikes.convict(worker, end.reason, may_be_wrong=len(going) < len(end.blamed))
            self._log(f"excluded={worker}: {end.reason}")
            self._tell(self.strikes.acquit(self._disputes.cleared(worker)))

    def set_aside(self, reasons: Mapping[WorkerId, str], *, lasts: bool = False) -> None:
        """Give these no work until a step is committed, or longer: they lack what is no fault of theirs."""
        for worker, reason in reasons.items():
            self.strikes.set_aside(worker, reason, lasts=lasts)
            self._log(f"excluded={worker} for now: {reason}")

    def exclude(self, workers: tuple[WorkerId, ...], reason: str) -> None:
        """Give these no more work until the run cannot do without."""
        for worker in workers:
            self.strikes.exclude(worker, reason)
            self._log(f"excluded={worker}: {reason}")

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step was, with a result for each group: who was set aside can have from others what it lacked."""
        self._disputes.agreed(plan.groups)
        self._tell(self.strikes.committed())

    def pardon(self) -> bool:
        """Give another chance to whoever may have been made to look bad; whether there is anybody."""
        pardoned = self.strikes.pardon()
        self._tell(pardoned)
        return bool(pardoned)

    def _tell(self, pardoned: tuple[WorkerId, ...]) -> None:
        for worker in pardoned:
            self._log(f"pardoned={worker}")
