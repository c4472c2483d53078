"""The step in progress: a Round, the reductions it asks for, and the terms it decides by."""

from collections import deque
from dataclasses import replace
from math import inf

from skein.config.schedule import learning_rate
from skein.plan.agreeing.quorum import NUM_REMEMBERED, Eager
from skein.plan.agreeing.rounds import StepGroups, step_groups
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.checking.checks import Checks
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.placing.placement import Placement
from skein.protocol.coordinator.runs.steps.leading import Leading
from skein.protocol.coordinator.runs.steps.overlapping import Overlapping
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.messages.directives import Prepare, StepRecord, TakeSketch
from skein.protocol.rounds.round import (
    Outvoted,
    OverlappedEnded,
    Patience,
    Round,
    RoundEvent,
    RoundFailed,
    StepTerms,
    VoteHeard,
)
from skein.types import WorkerId


class Stepping(RunPart):
    """Makes a Round for each step and carries its requests to the members; what it comes to is the run's business."""

    def __init__(self, members: Members, placement: Placement, leading: Leading, checks: Checks) -> None:
        super().__init__(members)
        self._checks = checks
        self.round: Round | None = None
        self._overlapping = Overlapping(members)
        self._past: deque[tuple[float, ...]] = deque(maxlen=NUM_REMEMBERED)
        """Seconds until each walker was done, for each of the last rounds of this plan."""
        self._begun_at = 0.0
        self._was_late = False
        self._placement = placement
        self._leading = leading

    @property
    def keeps_late(self) -> bool:
        """Whether walkers that a step is decided without go on with theirs: fast ones make more steps then."""
        return self._job.spec.aggregation.is_eager

    def grace_ends_at(self) -> float:
        """Time at which late walkers are waited for no longer; infinite while none are."""
        ends_at = None if self.round is None else self.round.deadline()
        return inf if ends_at is None else ends_at

    @property
    def owing(self) -> tuple[WorkerId, ...]:
        """Workers that were asked for a sketch and have not given it."""
        return () if self.round is None else self.round.unsketched

    def over(self) -> None:
        """No step is in progress any more."""
        self.round = None

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """The step is."""
        self.over()

    def fenced(self, *, now: float) -> None:
        """Other walkers may be there from now on."""
        self.over()
        self._overlapping.fenced(now=now)
        self._past.clear()
        self._was_late = False

    def begin(self, *, now: float) -> None:
        """The job's version is the step that is computed now."""
        spec, version, history = self._job.spec, self._job.version, self._out.history
        plan = self._placement.plan
        assert plan is not None
        terms = StepTerms(
            step=version,
            num_steps=self._job.total_steps,
            learning_rate=learning_rate(spec.optimizer, version, self._job.total_steps)
            * self._job.learning_rate_ratio,
            clip_norm=spec.optimizer.clip_norm,
            batch_samples=spec.batch.samples,
        )
        self._overlapping.begin(plan)
        groups = step_groups(
            plan,
            spec.aggregation,
            version,
            num_steps=self._job.total_steps,
            seed=spec.seed,
            num_tokens=self._job.learned,
            leaders=self._leading.leaders(plan, self._members.sites),
            tree=self._placement.tree,
        )
        resumed = self._placement.resumed
        is_whole = resumed is None or not resumed.dropped
        checkers = tuple(self._leading.checkers(group) for group in groups.exchanged)
        self.round = Round(
            terms,
            replace(groups, checkers=checkers),
            [path.end for path in plan.paths],
            expected=self._placement.expected(),
            epoch=history.epoch,
            generation=self._job.generation,
            patience=self._patience(groups, now=now),
            overlapped=self._overlapping.ending(),
            seed_of=lambda votes: self._checks.seed(
                votes, plan, is_whole=is_whole, is_settled=self._placement.is_settled
            ),
        )
        for vote in self._overlapping.results():
            # The step's own votes are still to come, so nothing can follow from these yet.
            self.round.handle(OverlappedEnded(vote=vote), now=now)

    def _patience(self, groups: StepGroups, *, now: float) -> Patience | None:
        """Patience with late walkers; None: all are waited for. Nobody is left out twice in a row."""
        self._begun_at = now
        if groups.quorum is None or (self._was_late and not isinstance(groups.quorum, Eager)):
            return None
        return Patience(quorum=groups.quorum, begun_at=now, past=tuple(self._past))

    def handle(self, event: RoundEvent, *, now: float) -> list[StepRecord | Outvoted | RoundFailed]:
        """Take a report of the step, if there is one; reductions are asked for here."""
        ends: list[StepRecord | Outvoted | RoundFailed] = []
        if isinstance(event, VoteHeard) and self._overlapping.is_on_its_way(event.vote):
            ended = self._overlapping.voted(event.worker, event.vote)
            if ended is None or isinstance(ended, RoundFailed):
                return [] if ended is None else [ended]
            event = OverlappedEnded(vote=ended)
        if self.round is None:
            return ends
        for command in self.round.handle(event, now=now):
            if isinstance(command, Prepare):
                # Also to late walkers, which have no part in an exchange and take its result.
                self._members.send(command, *command.group.workers)
                continue
            if isinstance(command, TakeSketch):
                self._members.send(command, *self.round.holders(command.group))
                continue
            if isinstance(command, StepRecord):
                self._remember(self.round, command, now=now)
            elif isinstance(command, Outvoted | RoundFailed):
                for worker in command.blamed:
                    self._log(f"worker={worker} struck: {command.reason}")
            ends.append(command)
        return ends

    def _remember(self, ended: Round, record: StepRecord, *, now: float) -> None:
        """Remember what a round took; of late walkers it is known that they took longer than it was open."""
        self._was_late = bool(ended.late)
        if self.keeps_late or not ended.arrived:
            return
        done_s = [at - self._begun_at for at in ended.arrived.values()]
        self._past.append((*done_s, *[now - self._begun_at] * len(ended.late)))
        if ended.late:
            self._log(
                f"step={ended.terms.step} without late walkers={list(ended.late)}: "
                f"{record.num_late_samples} of {ended.terms.batch_samples} samples left out after "
                f"{now - self._begun_at:.3g} s, for the others took {max(done_s):.3g} s"
            )
