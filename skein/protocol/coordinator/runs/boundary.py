"""The way from one version to the next: what is done between two steps, and the step itself.

Rules of this file
- The parameters' version is the log's. A worker at another version holds nothing.
- A step is recorded first, then announced.
"""

from skein.data.agreement import SHOWN, other_data
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import RowsChosen
from skein.protocol.coordinator.runs import phase as phases
from skein.protocol.coordinator.runs.course import RunCourse
from skein.protocol.coordinator.runs.ending import Rewind
from skein.protocol.coordinator.runs.fencing import Fence
from skein.protocol.coordinator.runs.parts import Parts
from skein.protocol.coordinator.runs.placing.readings import FirstReadings
from skein.protocol.coordinator.runs.steps.counting import count_data, room_doubt
from skein.protocol.coordinator.runs.stopping import Stopping
from skein.protocol.log.records import IncidentKind, StepCommitted
from skein.protocol.messages.directives import Commit, Start, StepRecord
from skein.protocol.messages.reports import ChunksReady, EvaluationDone, Trouble, Vote
from skein.protocol.messages.tensors import Phase
from skein.protocol.rounds.round import Outvoted, RoundEvent, VoteHeard
from skein.types import WorkerId


class Boundary:
    """Has a plan that is in place computed with, and decides after each step what comes next."""

    def __init__(self, parts: Parts, course: RunCourse, stopping: Stopping, fence: Fence) -> None:
        self._parts = parts
        self._course = course
        self._stopping = stopping
        self._fence = fence
        self._first_readings = FirstReadings()

    # --- the plan is in place ---

    def chunks_ready(self, worker: WorkerId, report: ChunksReady, *, now: float) -> None:
        """A worker has what the plan gives it; the last one lets work go on."""
        parts = self._parts
        if not self._course.is_in(phases.BuildPhase):
            return
        parts.vigil.moved(now=now)
        if not parts.placement.is_built(worker, report):
            return
        if not self._agree_on_data(now=now):
            return
        if (doubt := self._data_doubt(now=now)) is not None:
            self._doubted(doubt, now=now)
            return
        parts.evaluation.found(parts.placement.data_of_all().num_validation_samples)
        parts.members.free_unplaced(keeping=parts.checks.aside)
        parts.incidents.over(now=now)
        if parts.placement.resumed is not None and parts.placement.resumed.is_begun:
            self._start_step(now=now)
        else:
            self.go_on(now=now)

    def _data_doubt(self, *, now: float) -> str | None:
        """Record the data that all origins have; gives the reason for which the job cannot be with them."""
        parts, data = self._parts, self._parts.placement.data_of_all()
        doubt = count_data(
            parts.job,
            data.num_train_samples,
            parts.out,
            now=now,
            num_validation_samples=data.num_validation_samples,
            fingerprint=data.data_fingerprint,
        )
        if doubt is None and parts.job.version == 0:
            doubt = room_doubt(parts.job, self._plan(), data.num_train_samples)
        return doubt

    def _doubted(self, doubt: str, *, now: float) -> None:
        """The job cannot be with these data: it fails if two workers have them, or if no other worker could read."""
        parts, origins = self._parts, self._parts.placement.origins()
        here = [entry.hello.worker for entry in parts.candidates()]
        others = [worker for worker in here if worker not in origins]
        trouble = Trouble(generation=parts.job.generation, is_fatal=True, reason=doubt)
        verdicts = [parts.blame.judge(origin, trouble, others) for origin in origins]
        if any(verdict is not None for verdict in verdicts):
            self._stopping.fail(doubt, now=now)
        else:
            self._fence.open(doubt, now=now)

    def _agree_on_data(self, *, now: float) -> bool:
        """Whether all origins have the data of the job; those that have others are left out by a new generation.

        Before the first step the data of most workers that have read so far count. Where as many have others, one more
        is asked; the job fails if there is no other one.
        """
        parts = self._parts
        if parts.job.version or parts.out.history.trained_on(parts.job) is not None:
            odd, is_undecided = parts.placement.odd_readers(), False
        else:
            odd, is_undecided = self._first_readings.odd(
                parts.placement.origins(),
                parts.members.ready,
                here=parts.live.keys(),
                candidates=[entry.hello.worker for entry in parts.candidates()],
                recorded="" if parts.job.counted is None else parts.job.counted.fingerprint,
            )
            parts.blame.fits(self._first_readings.of_most())
        if is_undecided:
            who = " and ".join(self._first_readings.one_for_each())
            self._stopping.fail(f"{who} read different data: give all workers the same files", now=now)
        elif odd:
            self._leave_out(odd, now=now)
        return not odd

    def _leave_out(self, odd: tuple[WorkerId, ...], *, now: float) -> None:
        """Go on without workers that have other data, until the job cannot do without them."""
        parts = self._parts
        trained_on = parts.out.history.trained_on(parts.job)
        reasons: dict[WorkerId, str] = {}
        for worker in odd:
            found = parts.members.ready[worker].data_fingerprint
            if trained_on is not None:
                words = str(other_data(found, trained_on.fingerprint))
            else:
                words = f"reads other data ({found[:SHOWN]}) than the others: give all workers the same files"
            reasons[worker] = f"{worker}: {words}"
        parts.blame.set_aside(reasons, lasts=True)
        self._fence.open("; ".join(reasons.values()), now=now)

    # --- between steps ---

    def _plan(self) -> Plan:
        plan = self._parts.placement.plan
        assert plan is not None
        return plan

    def _change_wanted(self) -> str | None:
        """Reason why another plan is wanted at the next boundary; None if none is."""
        members, excluded = self._parts.members, self._parts.blame.excluded
        going = [worker for worker in members.placed if members.is_going(worker)]
        if going:
            return f"{', '.join(going)} leaving"
        if banned := [worker for worker in members.placed if worker in excluded]:
            return f"without {', '.join(banned)}: {excluded[banned[0]]}"
        return self._parts.improving.wish

    def go_on(self, *, now: float) -> None:
        """Go on from the log's version, where all wait: evaluate, save, end, change the plan, choose rows or step."""
        parts, is_due = self._parts, self._parts.evaluation.is_due()
        parts.vigil.moved(now=now)
        parts.ending.look(is_evaluated=not is_due, now=now)
        stop, change = parts.ending.due(), self._change_wanted()
        if isinstance(stop, Rewind):
            self._fence.failed(IncidentKind.DIVERGED, None, stop.reason, now=now)
        elif is_due if stop is None else stop.evaluates and parts.evaluation.is_due(is_last=True):
            self._course.evaluate(Phase.EVALUATE)
            parts.evaluation.begin()
        elif stop is not None and not (stop.saves and parts.savings.is_behind()):
            self._stopping.stop(stop, now=now)
        elif stop is not None or (change is not None and not parts.candidates()):
            if parts.savings.is_behind():
                self._stopping.save_placed(self._plan())
            else:
                self._fence.give_up_or_wait(change or "", now=now)
        elif change is not None and parts.selecting.is_behind:
            # Under another plan not everybody may have the parameters by which rows are being looked at.
            self._choose(now=now)
        elif change is not None:
            # Between steps whatever was chosen can be put in place; without that, what is here can go on.
            self._fence.change(change, may_go_on=parts.improving.wish == change, now=now)
        elif parts.selecting.is_due() and parts.selecting.settle(now=now):
            self.go_on(now=now)
        elif parts.selecting.is_due():
            self._choose(now=now)
        else:
            self._start_step(now=now)

    def _choose(self, *, now: float) -> None:
        """Have rows chosen, training standing still."""
        self._course.evaluate(Phase.SELECT)
        self._parts.selecting.begin(self._plan(), now=now)

    def chose(self, made: RowsChosen, *, now: float) -> None:
        """Rows were chosen: record them, and draw samples of them; beside steps, once they are due."""
        selecting, is_selecting = self._parts.selecting, self._course.is_selecting
        if selecting.is_ahead or not is_selecting:
            selecting.keep(made, now=now)
            if is_selecting:
                self.go_on(now=now)
        elif selecting.chose(made, now=now):
            self.go_on(now=now)

    def evaluated(self, worker: WorkerId, report: EvaluationDone, *, now: float) -> None:
        """A head has scored its part of the samples; what nobody waits for is dropped."""
        phase = self._course.phase
        if not isinstance(phase, phases.EvaluatePhase) or report.phase is not phase.purpose:
            return
        if phase.purpose.validates and self._parts.evaluation.is_complete(worker, report, now=now):
            self.go_on(now=now)
        elif phase.purpose.scores_walkers and self._parts.leading.is_complete(worker, report, self._plan()):
            self._start_step(now=now)

    # --- a step ---

    def _start_step(self, *, now: float) -> None:
        """Have everybody begin the next step, or go on with it; walkers that elect leaders are scored first."""
        parts = self._parts
        parts.vigil.moved(now=now)
        if self._is_probe_due():
            self._course.evaluate(Phase.PROBE)
            parts.leading.begin(self._plan())
            return
        self._save_if_due(now=now)
        parts.placement.begun()
        self._begin_step(now=now)
        parts.members.send_placed(Start(step=parts.job.version))

    def _is_probe_due(self) -> bool:
        num_samples = self._parts.evaluation.num_validation_samples
        return self._parts.leading.is_due(num_validation_samples=num_samples)

    def _save_if_due(self, *, now: float) -> None:
        savings = self._parts.savings
        if savings.is_due(now=now) and savings.has_room(now=now):
            self._stopping.save(self._plan())

    def _begin_step(self, *, now: float) -> None:
        parts = self._parts
        self._course.step()
        parts.selecting.look_ahead(self._plan(), now=now)
        parts.stepping.begin(now=now)
        parts.improving.step_begins(now=now)
        parts.backups.step_begins(self._plan(), parts.candidates(), step_s=parts.measured.step_s)

    def voted(self, worker: WorkerId, vote: Vote, *, now: float) -> None:
        """A holder says what its group's result is, and of its leader what it has found."""
        parts, round_ = self._parts, self._parts.stepping.round
        group = None if round_ is None else round_.group(vote)
        liar = None if group is None else parts.leading.doubts(worker, vote, group)
        if liar is None:
            self.drive(VoteHeard(worker=worker, vote=vote), now=now)
        else:
            self._fence.blame(liar, "its parameters are not what it claimed", now=now)

    def drive(self, event: RoundEvent, *, now: float) -> None:
        """Hand an event to the step in progress, if there is one, and act on what ends by it."""
        for end in self._parts.stepping.handle(event, now=now):
            if isinstance(end, StepRecord):
                self._decided(end, now=now)
                continue
            self._parts.blame.judged(end)
            if isinstance(end, Outvoted):
                continue
            noticed = self._parts.incidents.noticed
            noticed(IncidentKind.WORKER_FAILED, end.blamed, end.reason, now=now)
            self._fence.open(end.reason, now=now)

    def _decided(self, record: StepRecord, *, now: float) -> None:
        """A step has come out: it is committed, unless a check has it computed again."""
        round_ = self._parts.stepping.round
        sketch = () if round_ is None else round_.sketch
        verdict = self._parts.checks.judged(record, sketch, self._plan())
        if verdict is None:
            self._commit(record, now=now)
        else:
            self._fence.checked(verdict, now=now)

    def _commit(self, record: StepRecord, *, now: float) -> None:
        """Phase two: durable first, then announced."""
        parts = self._parts
        parts.out.record(StepCommitted(job=parts.job.job, record=record, wall_s=now))
        parts.committed(record, self._plan(), now=now)
        is_over = (
            parts.evaluation.is_due()
            or self._is_probe_due()
            or parts.selecting.is_due()
            or parts.ending.due() is not None
        )
        goes_on = not is_over and self._change_wanted() is None
        if goes_on:
            parts.improving.look(parts.candidates(), now=now)
        commit = Commit(
            record=record, goes_on=goes_on, keeps_late=parts.stepping.keeps_late, position=parts.out.position
        )
        parts.members.send_placed(commit)
        self._save_if_due(now=now)
        if goes_on:
            self._begin_step(now=now)
        else:
            self.go_on(now=now)
