"""Workers that get chunks under a coming plan have them before it is put in place, so that nobody waits for them.

The holders of such a stage take a snapshot and keep what each step applies from then on; whoever is to hold it fetches
the snapshot from all of them at once, beside the steps that go on, and brings it up to date commit by commit. Whoever
is to hold the first stage opens the job's data meanwhile. When all data are open and every copy is at most one commit
behind, the plan may be put in place at the next boundary.

Rules of this file
- A transfer that ends in nothing costs nothing: the wish is given up, and looked at anew.
- What a step applies is a reduced gradient under plain all-reduce alone: under other rules, or of an array, no copy
  can follow the steps, and who is new fetches what a peer has when the plan is put in place.
- What is asked for is asked for by stage and version, so asking again after a change of generation begins nothing anew.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.directives import Follow, OpenData, Prefetch, Snapshot, StepRecord
from skein.protocol.messages.reports import DataOpened, Prefetched
from skein.types import StageIndex, StageSpec, Step, WorkerId

PATIENCE_S = 600.0
"""A plan whose copies are not here after so long is given up: something keeps them from coming."""
MAX_IDLE = 8
"""Commits after which copies that nobody wants any more need not follow."""
MAX_FAILURES = 5
"""Failures of one copy after which the plan is given up."""
MAX_EARLY = 60
"""Times that a copy may be asked for again because its version did not exist yet: a worker waits about ten seconds for
it, and a step of slow workers takes longer."""


@dataclass(slots=True)
class _Transfer:
    """A copy on its way: the version that it was asked for at, and the one that it is at by now."""

    asked: Step
    num_failures: int = 0
    num_early: int = 0
    has_failed: bool = False
    reached: Step | None = None


class Joining(RunPart):
    """Copies and data on their way for a plan that is to come."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self._may_follow = self._job.spec.aggregation.is_additive and not self._job.spec.rows
        self._reading: dict[WorkerId, bool] = {}
        """Workers that open data for the coming plan; True once they are open."""
        self._is_void = False
        """Whether a worker cannot open its data, or is gone."""
        self._transfers: dict[tuple[WorkerId, StageSpec], _Transfer] = {}
        self._wanted: set[tuple[WorkerId, StageSpec]] = set()
        self._present: Plan | None = None
        """Plan whose holders give the copies."""
        self._until = 0.0
        self._num_idle = 0
        """Commits since anything was wanted."""

    def begin(self, present: Plan, coming: Plan, *, now: float) -> None:
        """Have everybody fetch what the coming plan gives them; nothing if nobody can give it."""
        self._until = now + PATIENCE_S
        self._is_void = False
        self._num_idle = 0
        self._present = present
        self._read(present, coming)
        self._wanted = set(_to_fetch(present, coming)) if self._may_follow else set()
        self._transfers = {at: self._transfers[at] for at in self._wanted if at in self._transfers}
        for worker, stage in self._in_order():
            known = self._transfers.get((worker, stage))
            if known is not None:
                self._ask(worker, stage, known.asked, present)
        self._ask_anew([at for at in self._in_order() if at not in self._transfers], present)

    def _read(self, present: Plan, coming: Plan) -> None:
        """Have the holders of the first stage open the data, but for those who have them open."""
        first = StageIndex(0)
        new = sorted(set(coming.holders(first)) - set(present.holders(first)))
        self._reading = {worker: self._reading.get(worker, False) for worker in new}
        for worker, is_open in self._reading.items():
            if not is_open:
                self._open_data(worker)

    def _open_data(self, worker: WorkerId) -> None:
        trained_on = self._out.history.trained_on(self._job)
        opening = OpenData(
            job=self._job.job,
            job_spec=self._job.spec.canonical_json(),
            data_fingerprint="" if trained_on is None else trained_on.fingerprint,
        )
        self._members.tell(opening, worker)

    def opened(self, worker: WorkerId, report: DataOpened) -> None:
        """A worker has the data open, or cannot; who cannot is asked no more."""
        if report.job != self._job.job or worker not in self._reading:
            return
        if report.error:
            del self._reading[worker]
            self._is_void = True
            self._log(f"worker={worker} could not open the data: {report.error}")
        else:
            self._reading[worker] = True

    def try_again(self, present: Plan) -> None:
        """Ask again for what could not be had: who gave it may be gone, or has no snapshot any more."""
        self._present = present
        failed = [at for at in self._in_order() if at in self._transfers and self._transfers[at].has_failed]
        self._ask_anew(failed, present)

    def _in_order(self) -> list[tuple[WorkerId, StageSpec]]:
        return sorted(self._wanted, key=lambda at: (at[0], at[1].index))

    def _ask_anew(self, wanted: Iterable[tuple[WorkerId, StageSpec]], present: Plan) -> None:
        """Have the version that comes next copied, and fetched."""
        version = Step(self._job.version + 1)
        stages_by_donor: defaultdict[WorkerId, set[StageIndex]] = defaultdict(set)
        for worker, stage in wanted:
            before = self._transfers.get((worker, stage))
            num_failures = 0 if before is None else before.num_failures
            self._transfers[worker, stage] = _Transfer(asked=version, num_failures=num_failures)
            for donor in present.holders(stage.index):
                stages_by_donor[donor].add(stage.index)
            self._ask(worker, stage, version, present)
        for donor, stages in sorted(stages_by_donor.items()):
            snapshot = Snapshot(version=version, stages=tuple(sorted(stages)), keeps_results=True)
            self._members.send(snapshot, donor)

    def _ask(self, worker: WorkerId, stage: StageSpec, version: Step, present: Plan) -> None:
        donors = tuple(self._members.donor(donor) for donor in present.holders(stage.index))
        prefetch = Prefetch(
            job=self._job.job,
            job_spec=self._job.spec.canonical_json(),
            stage=stage,
            version=version,
            donors=donors,
            is_backup=False,
            drops_before=Step(0),
        )
        self._members.tell(prefetch, worker)

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is: copies follow."""
        self._num_idle = 0 if self._wanted else self._num_idle + 1
        if self._num_idle > MAX_IDLE:
            self._transfers.clear()
        follow = Follow(job=self._job.job, record=record)
        for worker in sorted({worker for worker, _ in self._transfers}):
            self._members.tell(follow, worker)

    def prefetched(self, worker: WorkerId, report: Prefetched) -> None:
        """A copy is whole, at a version, or cannot be had."""
        at = worker, report.stage
        transfer = self._transfers.get(at)
        if transfer is None or report.job != self._job.job:
            return
        if not report.error:
            transfer.reached = report.version
            return
        if (
            transfer.asked > self._job.version
            and transfer.num_early < MAX_EARLY
            and self._present is not None
        ):
            # The step that makes this version is not committed: the worker gave up before there was anything to fetch.
            transfer.num_early += 1
            self._ask(worker, report.stage, transfer.asked, self._present)
            return
        self._failed(at, report.error)

    def _failed(self, at: tuple[WorkerId, StageSpec], reason: str) -> None:
        transfer = self._transfers[at]
        transfer.reached, transfer.has_failed = None, True
        transfer.num_failures += 1
        self._log(f"worker={at[0]} could not fetch stage {at[1].index}: {reason}")
        if transfer.num_failures >= MAX_FAILURES:
            del self._transfers[at]

    def broke(self, worker: WorkerId) -> None:
        """A worker has another stream: requests and commits that were on the old one may be lost."""
        for at in [at for at in self._transfers if at[0] == worker]:
            self._failed(at, "its stream broke")
        if self._reading.get(worker) is False:
            self._open_data(worker)

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone, with what was on its way to it."""
        self._transfers = {at: x for at, x in self._transfers.items() if at[0] != change.worker}
        self._is_void = self._is_void or self._reading.pop(change.worker, None) is not None

    @property
    def is_ready(self) -> bool:
        """Whether all data are open, and every copy is at most one commit behind."""
        least = self._job.version - 1
        found = (self._transfers.get(at) for at in self._wanted)
        is_read = not self._is_void and all(self._reading.values())
        return is_read and all(x is not None and x.reached is not None and x.reached >= least for x in found)

    def is_hopeless(self, *, now: float) -> bool:
        """Whether a copy will not come: its worker is gone, or it has taken too long."""
        return self._is_void or now > self._until or not self._wanted <= self._transfers.keys()

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Stop fetching, for the plan that it was for is in place, unless the run goes on by the plan that it had."""
        if adoption.resumed is None:
            self.over()

    def fenced(self, *, now: float) -> None:
        """The wish is void. What is on its way may be wanted again."""
        self._wanted.clear()

    def over(self) -> None:
        """The plan is in place, or not wanted any more."""
        self._wanted.clear()
        self._transfers.clear()
        self._reading.clear()
        self._is_void = False


def _to_fetch(present: Plan, coming: Plan) -> Iterator[tuple[WorkerId, StageSpec]]:
    """Chunks of the coming plan that their worker does not hold, and somebody else does."""
    held = {x.chunk for x in present.chunks}
    stages = {stage.index: stage for stage in coming.stages}
    for x in coming.chunks:
        stage = stages[x.chunk.stage]
        if stage in present.stages and x.chunk not in held:
            yield x.chunk.worker, stage
