"""The failure of a run, from the notice until work goes on: then it is recorded once, with what it cost."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from skein.plan.changing.unfinished import Contribution
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.placing.resuming import Resumed
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.incident import incident_line
from skein.protocol.log.records import Incident, IncidentKind, Remedy, Replayed
from skein.protocol.membership.membership import Lost
from skein.types import MicrobatchId, StageIndex, Step, WorkerId

LONGEST_ABSENCE_S = 86400.0
"""Above this the time between two coordinators is no measured silence: the machine's clock may have been set, and one
such value would hide all others of a histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    """A failure that a job has not recovered from yet: it is recorded, with its cost, once work goes on."""

    kind: IncidentKind
    workers: tuple[WorkerId, ...]
    reason: str
    step: Step
    wall_s: float
    """Wall-clock time of the notice."""


class Incidents(RunPart):
    """The failure that a run is recovering from, if it is. What fails before it is over belongs to it."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._kind: IncidentKind | None = None
        self._workers: dict[WorkerId, None] = {}
        self._reason = ""
        self._silent_s = 0.0
        self._noticed_at = 0.0
        self._fenced_at = 0.0
        self._version = Step(0)
        self._resumed: list[Resumed] = []
        """Since the failure: another one before work goes on leads to another."""
        self._retried = 0
        self._steps_lost = 0
        self._is_averaged = False

    @property
    def open(self) -> OpenIncident | None:
        """The failure that is not over; None: there is none."""
        if self._kind is None:
            return None
        return OpenIncident(
            kind=self._kind,
            workers=tuple(sorted(self._workers)),
            reason=self._reason,
            step=self._version,
            wall_s=self._noticed_at,
        )

    def noticed(
        self,
        kind: IncidentKind,
        workers: Iterable[WorkerId],
        reason: str,
        *,
        silent_s: float = 0.0,
        now: float,
    ) -> None:
        """Note a failure. Of several failures at once the first gives kind and reason."""
        if self._kind is None:
            self._kind, self._reason = kind, reason
            self._noticed_at = now
            self._silent_s = 0.0
            self._version = self._job.version
            self._steps_lost = 0
            self._is_averaged = False
        self._workers |= dict.fromkeys(workers)
        self._silent_s = max(self._silent_s, silent_s)

    def restarted(self, *, now: float) -> None:
        """The run goes on with members that an earlier coordinator had."""
        silent_s = max(0.0, now - self._job.last_wall_s)
        reason = "the coordinator started again"
        if silent_s > LONGEST_ABSENCE_S:
            reason += f", {silent_s / 86400:.1f} days after its last record by a clock that may have been set meanwhile"
            silent_s = 0.0
        self.noticed(IncidentKind.COORDINATOR_LOST, (), reason, silent_s=silent_s, now=now)

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone, which is a failure if it was depended on."""
        if is_missed:
            kind, who = IncidentKind.WORKER_LOST, (change.worker,)
            self.noticed(kind, who, change.reason, silent_s=change.silent_s, now=now)

    def closed(self, *, now: float) -> None:
        """The fence is: nobody acts on anything older any more."""
        self._fenced_at = now

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """The step in progress goes on; or another plan is in place, under which it begins anew."""
        if adoption.resumed is None:
            self._resumed.clear()
        else:
            self._resumed.append(adoption.resumed)
        self._retried = adoption.num_begun
        self._steps_lost += adoption.num_steps_lost
        self._is_averaged = self._is_averaged or adoption.is_averaged

    def over(self, *, now: float) -> None:
        """Work goes on."""
        if self._kind is not None:
            self._record(self._kind, now=now)
        self._kind = None
        self._workers.clear()
        self._resumed.clear()
        self._retried = 0

    def _record(self, kind: IncidentKind, *, now: float) -> None:
        incident = Incident(
            job=self._job.job,
            generation=self._job.generation,
            step=self._version,
            kind=kind,
            workers=tuple(sorted(self._workers)),
            reason=self._reason,
            remedy=self._remedy(),
            silent_s=self._silent_s,
            fenced_s=max(0.0, self._fenced_at - self._noticed_at),
            seconds=now - self._noticed_at,
            num_rerouted=sum(resumed.num_rerouted for resumed in self._resumed),
            replayed=self._replayed(),
            num_retried=self._retried,
            num_steps_lost=self._steps_lost,
            num_samples_repeated=self._num_samples(),
            wall_s=self._noticed_at,
            num_dropped=len({contribution for resumed in self._resumed for contribution in resumed.dropped}),
        )
        self._out.record(incident)
        self._out.log(incident_line(incident))

    def _remedy(self) -> Remedy:
        if self._steps_lost:
            return Remedy.ROLLED_BACK
        if self._is_averaged:
            return Remedy.AVERAGED
        if self._retried:
            return Remedy.RETRIED
        is_resumed = any(resumed.is_begun for resumed in self._resumed)
        return Remedy.RESUMED if is_resumed else Remedy.UNTOUCHED

    def _contributions(self) -> list[Contribution]:
        """Contributions that are replayed, each once however often it was lost."""
        return sorted({contribution for resumed in self._resumed for contribution in resumed.replayed})

    def _replayed(self) -> tuple[Replayed, ...]:
        by_stage: defaultdict[StageIndex, list[MicrobatchId]] = defaultdict(list)
        for microbatch, stage in self._contributions():
            by_stage[stage].append(microbatch)
        return tuple(Replayed(stage=stage, microbatches=tuple(by_stage[stage])) for stage in sorted(by_stage))

    def _num_samples(self) -> int:
        """Samples that some worker computes again."""
        batch = self._job.spec.batch
        again = self._retried or len({microbatch for microbatch, _ in self._contributions()})
        return self._steps_lost * batch.samples + again * batch.microbatch_samples
