"""Workers that get no more work, and why; people are told who is excluded, and who is forgiven.

Rules of this file
- A worker that fails three times in a row gets no more work for a while (`probation`). What only peers said of a worker
  may be the fault of a link. It counts against both ends of that link (`accusations`), and one of the two goes. Its
  pause is short, and it is pardoned where no plan exists without it.
- A strike lasts where a worker has reported what cannot be, or otherwise than most: steps that are committed all the
  same say nothing for it.
- A worker that cannot read checkpoints is not to blame: it is set aside until a step is committed, for then others have
  what it needs, or until the run cannot do without it. One that lacks what the job names is set aside until the latter:
  that costs its place, never the job. Nobody left: the run waits, says for what, and asks all again now and then.
- A job that is wrong would be wrong everywhere, but a file may be damaged on one worker alone. So two have to say it,
  or the only one there; and of a job that has made steps nobody says it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.workers.accusations import Accusations
from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES, Disputes
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.coordinator.runs.workers.probation import Exclusion, ExclusionCause, Pauses, Probation
from skein.protocol.log.records import Quarantined
from skein.protocol.membership.membership import Entry, Lost
from skein.protocol.messages.directives import StepRecord
from skein.protocol.messages.reports import DataOpened, Trouble
from skein.protocol.rounds.round import Outvoted, RoundFailed
from skein.types import Incarnation, WorkerId

NUM_WITNESSES = 2


class Blame(RunPart):
    """Workers of a run that get no more work, and why; and whether the job itself is to blame."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._disputes = Disputes()
        self._accusations = Accusations()
        self._probation = Probation()
        self._plan: Plan | None = None
        self._incarnations: dict[WorkerId, Incarnation] = {}
        self._num_by_worker: Counter[WorkerId] = Counter()
        self._num_lasting: Counter[WorkerId] = Counter()
        self._excluded = {worker: found.reason for worker, found in self._job.quarantined.items()}
        self._accused: set[WorkerId] = set()
        self._contradicted: set[WorkerId] = set()
        """Workers among the accused ones that said what others contradict."""
        self._disputed: set[WorkerId] = set()
        """Workers that are excluded as less credible than another, and may have been right."""
        self._set_aside: set[WorkerId] = set()
        self._unfit: set[WorkerId] = set()
        """Workers among those set aside that lack what the job names."""
        self._convicted = set(self._job.quarantined)
        """Workers whose exclusion does not end with time: others gave proof against them, or dispute with them."""
        self._deaf: set[WorkerId] = set()
        """Workers that are excluded and do not get what the coordinator sends them."""
        self._witnesses: set[WorkerId] = set()

    @property
    def excluded(self) -> Mapping[WorkerId, str]:
        """Workers that get no more work, with the last thing that failed."""
        return self._excluded

    @property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """Excluded workers by name, each with the cause."""
        return tuple(
            Exclusion(worker=worker, cause=self._cause(worker), reason=reason)
            for worker, reason in sorted(self._excluded.items())
        )

    def _cause(self, worker: WorkerId) -> ExclusionCause:
        if worker in self._convicted:
            return ExclusionCause.PROOF
        if worker in self._set_aside:
            return ExclusionCause.LACKING
        return ExclusionCause.LINK if worker in self._accused else ExclusionCause.FAILURE

    @property
    def deaf(self) -> frozenset[WorkerId]:
        """Excluded workers that no fence waits for: they do not get what the coordinator sends them."""
        return frozenset(self._deaf)

    @property
    def may_pardon(self) -> bool:
        """Whether `pardon` would give somebody another chance."""
        return bool(self._pardonable())

    @property
    def lacking(self) -> str | None:
        """Thing that workers set aside cannot use, which may be mended; None: nobody is set aside."""
        if self._unfit:
            return "what the job names"
        return "the place of the checkpoints" if self._set_aside else None

    def _is_out(self, worker: WorkerId) -> bool:
        """Whether a worker is excluded for what it did, not for what it lacks: nothing that it says undoes that."""
        return worker in self._excluded and worker not in self._set_aside

    # --- what it did ---

    def strike(self, worker: WorkerId, reason: str, *, lasts: bool = False) -> None:
        """Count a failure that a worker has shown itself; the third excludes it, on probation the first.

        Args:
            worker: worker that failed.
            reason: in words.
            lasts: whether steps that are committed in between do not undo it.
        """
        self._num_lasting[worker] += lasts
        self._num_by_worker[worker] += 1
        self._accused.discard(worker)
        if self._is_out(worker):
            return
        if self._num_lasting[worker] >= MAX_STRIKES:
            self._convict(worker, reason)
        elif self._num_by_worker[worker] >= self._most(worker):
            self._exclude(worker, reason)

    def _most(self, worker: WorkerId) -> int:
        """Strikes of a worker that are too many."""
        return 1 if worker in self._probation else MAX_STRIKES

    def missed(self, worker: WorkerId, reason: str) -> None:
        """A worker has another stream, and has not answered what was sent on the old one: a strike.

        After too many the worker gets no more work, and no fence waits for it; of one without work that is the first.
        """
        self._num_by_worker[worker] += 1
        if self._num_by_worker[worker] >= self._most(worker) and not self._is_out(worker):
            self._accused.add(worker)
            self._exclude(worker, reason)
        if worker in self._excluded:
            self._deaf.add(worker)

    def accused(
        self, accuser: WorkerId, accused: WorkerId, reason: str, *, is_possible: bool
    ) -> WorkerId | None:
        """Count an accusation; gives the worker of the two that gets no more work, if this was one too many.

        Args:
            accuser: worker that says that it does not reach its peer.
            accused: that peer.
            reason: in words.
            is_possible: whether the plan has anything go from one of the two to the other.
        """
        heard = self._accusations
        heard.heard(accuser, accused, is_possible=is_possible)
        if all(heard.num_strikes(x) < self._most(x) for x in (accuser, accused)):
            return None
        going = self._probation.worker_to_go(accuser, accused, self._plan)
        if max(heard.num_strikes(accuser), heard.num_strikes(accused)) >= MAX_STRIKES:
            going = heard.less_credible(accuser, accused) or going
        if self._is_out(accused):
            going = accuser
        if self._is_out(going):
            return None
        if going == accuser and heard.less_credible(accuser, accused) == accuser:
            reason = f"it does not reach peers that others reach, at last {accused}"
            self._contradicted.add(going)
        elif going == accuser:
            reason = f"it does not reach {accused}, which keeps its work: fewer workers could take its place"
        self._accused.add(going)
        self._exclude(going, reason)
        self._pardon([x for x in heard.cleared(going) if x in self._accused and x in self._excluded])
        return going

    def reached(self, worker: WorkerId, peers: Iterable[WorkerId]) -> None:
        """A worker says that peers have taken its tensors in this generation."""
        self._accusations.reached(worker, (peer for peer in peers if peer in self._members.placed))

    def fenced(self, *, now: float) -> None:
        """A generation is opened: which workers reach each other is not known yet."""
        self._accusations.fenced()

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone: peers that did not reach it were right."""
        self._accusations.lost(change.worker)

    def judged(self, end: Outvoted | RoundFailed) -> None:
        """Strike workers that reported what cannot be; of those that disagree too often, exclude the least credible."""
        if not (isinstance(end, RoundFailed) and end.is_disputed):
            for worker in end.blamed:
                self.strike(worker, end.reason, lasts=True)
            return
        going = self._disputes.disputed(end.blamed)
        for worker in going:
            self.convict(worker, end.reason, may_be_wrong=len(going) < len(end.blamed))
            self.acquit(self._disputes.cleared(worker))

    def convict(self, worker: WorkerId, reason: str, *, may_be_wrong: bool) -> None:
        """Give a worker no more work that others dispute with; `may_be_wrong`: unless the run cannot do without it."""
        if may_be_wrong:
            self._disputed.add(worker)
        self._convict(worker, reason)

    def _convict(self, worker: WorkerId, reason: str) -> None:
        self._accused.discard(worker)
        self._convicted.add(worker)
        self._exclude(worker, reason)

    def quarantine(self, worker: WorkerId, reason: str, *, now: float) -> None:
        """Give a worker no more work of this job, whatever process has its name: it was convicted."""
        step = self._job.version
        self._out.record(Quarantined(job=self._job.job, worker=worker, step=step, reason=reason, wall_s=now))
        self._disputed.discard(worker)
        self._convict(worker, reason)

    def acquit(self, workers: Iterable[WorkerId]) -> None:
        """Let those back among these who were only less credible than another."""
        self._pardon([worker for worker in workers if worker in self._disputed])

    def exclude(self, workers: Iterable[WorkerId], reason: str) -> None:
        """Give these no more work until the run cannot do without."""
        for worker in workers:
            if not self._is_out(worker):
                self._excluded[worker] = reason
                self._accused.add(worker)
            self._log(f"excluded={worker}: {reason}")

    def _exclude(self, worker: WorkerId, reason: str) -> None:
        self._set_aside.discard(worker)
        self._unfit.discard(worker)
        self._excluded[worker] = reason
        self._log(f"excluded={worker}: {reason}")

    # --- what it lacks ---

    def set_aside(self, reasons: Mapping[WorkerId, str], *, lasts: bool = False) -> None:
        """Give these no work for now, for what may be no fault of theirs; `lasts`: steps do not change it."""
        for worker, reason in reasons.items():
            if not self._is_out(worker):
                self._excluded[worker] = reason
                self._set_aside.add(worker)
                self._unfit.update([worker] if lasts else [])
            self._log(f"excluded={worker} for now: {reason}")

    def judge(self, worker: WorkerId, trouble: Trouble, others: Collection[WorkerId]) -> str | None:
        """Reason why the job has failed, by what this worker says of it; None: the worker is set aside.

        Args:
            worker: who says it.
            trouble: in its words.
            others: workers that could have its place.
        """
        if trouble.is_fatal and self._job.version == 0:
            self._witnesses.add(worker)
            if len(self._witnesses) >= NUM_WITNESSES or not others:
                return f"{worker}: {trouble.reason}"
        self.set_aside({worker: trouble.reason}, lasts=True)
        return None

    def opened(self, worker: WorkerId, report: DataOpened) -> None:
        """A worker that is to come could not open the data."""
        if report.error and report.job == self._job.job:
            self.set_aside({worker: report.error}, lasts=True)

    def fits(self, workers: Iterable[WorkerId]) -> None:
        """Let back workers that were set aside for what they lack, and have it as others have shown."""
        self._pardon([worker for worker in workers if worker in self._unfit])

    # --- what undoes it ---

    def joined(self, entry: Entry) -> None:
        """A worker came. A new process begins anew; of one that was only away, what it has done itself stays."""
        worker, incarnation = entry.process
        is_new = self._incarnations.get(worker) != incarnation
        if is_new:
            self._num_lasting.pop(worker, None)
            self._disputes.forget(worker)
            self._accusations.forget(worker)
            self._probation.forget(worker)
        if is_new or worker in self._accused | self._set_aside:
            self._let_back(worker)
        self._incarnations[worker] = incarnation

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step was, with a result for each group: old failures no longer count, and exclusions end in time.

        Who was set aside can have from others what it lacked.
        """
        self._disputes.agreed(plan.groups)
        self._accusations.committed(plan)
        self._num_by_worker.clear()
        self._probation.proved(plan)
        self._pardon(sorted(self._set_aside - self._unfit))
        may_end = self._excluded.keys() - self._convicted
        by = {worker: self._pause_of(worker) for worker in sorted(may_end)}
        self._pardon(self._probation.over(by, now=now), is_on_probation=True)

    def _pause_of(self, worker: WorkerId) -> Pauses:
        if worker in self._contradicted:
            return Pauses.CONTRADICTED
        return Pauses.HEARSAY if worker in self._accused else Pauses.FAILED

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Note the holders of each stage."""
        self._plan = adoption.plan

    def pardon(self) -> bool:
        """Give another chance to whoever lacks something or was made to look bad; whether there is anybody."""
        pardoned = sorted(self._pardonable())
        self._pardon(pardoned)
        return bool(pardoned)

    def _pardonable(self) -> set[WorkerId]:
        return (self._accused | self._disputed | self._set_aside) & self._excluded.keys()

    def _pardon(self, workers: Iterable[WorkerId], *, is_on_probation: bool = False) -> None:
        for worker in workers:
            self._let_back(worker, is_on_probation=is_on_probation)
            self._log(f"pardoned={worker}{' on probation' if is_on_probation else ''}")

    def _let_back(self, worker: WorkerId, *, is_on_probation: bool = False) -> None:
        """Forget all of a worker but the strikes that last, and a conviction."""
        if worker in self._job.quarantined:
            return
        self._probation.let_back(worker, is_on_probation=is_on_probation)
        if is_on_probation:
            self._accusations.forget(worker)
        del self._num_by_worker[worker]
        self._excluded.pop(worker, None)
        for known in (
            self._accused,
            self._disputed,
            self._set_aside,
            self._unfit,
            self._convicted,
            self._deaf,
            self._contradicted,
        ):
            known.discard(worker)
