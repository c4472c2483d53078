"""The Round machine: one step, from the first finished ledger to the decision that will be recorded.

Rules of this file
- A group is reduced as soon as its members' ledgers are complete, while other stages still compute.
- An exchange is asked for once all reductions are voted on, with the numbers that follow from those votes.
- A step is decided when every holder of every group has voted the same attempt and, where all are to have the same
  result, most have the same one. Who has another is outvoted: the step goes on without asking it. Without a majority
  the group is reduced once more; then the round fails, by all of them.
- A walker whose own gradient is not finite makes no local step; the others do. Nor does one that is late, where the
  rule has a quorum: it gives up what it has of the step, and has no say in an exchange that ends it.
- A stage's gradient is a sum over the microbatches that visited it, so it is divided by their tokens and no others.
- All numbers of the decision come from what was reported; members compute with these, never with their own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import assert_never

from skein.config.rule import Reach
from skein.numeric.sketch import Sketch, added
from skein.numeric.sums import exact_sum
from skein.plan.agreeing.quorum import Eager, Quorum
from skein.plan.agreeing.rounds import StepGroups, weighed
from skein.plan.plan import Group
from skein.protocol.deadline import TimePassed
from skein.protocol.messages.array_rounds import ArrayRound
from skein.protocol.messages.directives import (
    Decision,
    ExchangeTerms,
    GroupResult,
    Prepare,
    StepRecord,
    TakeSketch,
)
from skein.protocol.messages.reports import Balance, SketchTaken, StageDone, Vote
from skein.protocol.rounds.votes import largest_camp, ruling, votes_text
from skein.protocol.rounds.weighing import Numbers, clip_of, loss_sum_of, visitors_of, weigh, weigh_array
from skein.types import Attempt, ChunkRef, Epoch, Generation, GroupId, Local, MicrobatchId, Step, WorkerId

# --- events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHeard:
    """A chunk's ledger is complete."""

    worker: WorkerId
    done: StageDone


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteHeard:
    """A holder has a complete result."""

    worker: WorkerId
    vote: Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedEnded:
    """An exchange that went on beside steps has its result; the vote stands for all."""

    vote: Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchHeard:
    """A holder has sketched its result."""

    worker: WorkerId
    taken: SketchTaken


RoundEvent = LedgerHeard | VoteHeard | SketchHeard | TimePassed | OverlappedEnded

# --- commands ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Outvoted:
    """Workers that are blamed for saying otherwise than most; the step goes on with the others' result."""

    reason: str
    blamed: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed:
    """The step cannot be decided under this generation; it is to be tried again from its start.

    `blamed` have reported what cannot be; `is_disputed`: they disagree, and nobody knows who of them has.
    """

    reason: str
    blamed: tuple[WorkerId, ...]
    is_disputed: bool = False


RoundCommand = Prepare | TakeSketch | StepRecord | Outvoted | RoundFailed
"""Reduction or sketch that members are asked for, decision that is to be recorded before it is announced, or blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Numbers that a decision needs beside the votes: learning rate, clipping norm (None: none), samples per step.

    `num_steps` are the whole job's.
    """

    step: Step
    num_steps: int
    learning_rate: float
    clip_norm: float | None
    batch_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Terms on which a round waits for late walkers: a quorum, when it began, and how long the last ones took.

    `past` has for each of the last rounds the seconds from its beginning until each walker was done.
    """

    quorum: Quorum | Eager
    begun_at: float
    past: Sequence[Sequence[float]]


SeedOf = Callable[[Sequence[Vote]], int | None]
"""Gives the seed under which the results of a step are sketched, once they are voted on; None: they are not."""


def unchecked(_votes: Sequence[Vote]) -> None:
    """Seed of a step that is not checked."""


class Round:
    """Collects one step under one generation."""

    def __init__(
        self,
        terms: StepTerms,
        groups: StepGroups,
        ends: Collection[ChunkRef],
        *,
        expected: Mapping[ChunkRef, tuple[MicrobatchId, ...]],
        epoch: Epoch,
        generation: Generation,
        patience: Patience | None = None,
        overlapped: Collection[GroupId] = (),
        seed_of: SeedOf = unchecked,
    ) -> None:
        """`patience` None: all are waited for. `overlapped` exchanges were asked for before, and end with this step."""
        self.terms = terms
        self._patience = patience
        self.arrived: dict[int, float] = {}
        """Time when each unit of the step's groups was done."""
        self._epoch = epoch
        self._generation = generation
        self._step_groups = groups
        every = (*groups.reduced, *groups.exchanged)
        self._groups = {group.group: group for group in every}
        self._reach = dict(zip((x.group for x in groups.exchanged), groups.reach, strict=True))
        self._reach |= dict.fromkeys(overlapped, Reach.ALL)
        self._checkers = dict(zip((x.group for x in groups.exchanged), groups.checkers, strict=False))
        self._voters = {group.group: frozenset(group.workers) for group in every}
        self._groups_of: dict[ChunkRef, list[Group]] = {}
        for group in groups.reduced:
            for member in group.members:
                self._groups_of.setdefault(member, []).append(group)
        self._expected = expected
        self._ends = frozenset(ends)
        self._missing = {g.group: set(g.members) for g in groups.reduced}
        self._done: dict[ChunkRef, StageDone] = {}
        self._attempts: dict[GroupId, Attempt] = {}
        self._votes: dict[GroupId, dict[WorkerId, Vote]] = {}
        self._results: dict[GroupId, Vote] = {}
        self._agreeing: dict[GroupId, tuple[WorkerId, ...]] = {}
        self._numbers: Numbers | None = None
        self._seed_of = seed_of
        self._sketches: dict[GroupId, dict[WorkerId, Sketch]] = {}

    def handle(self, event: RoundEvent, *, now: float) -> list[RoundCommand]:
        """Take one event at time `now` (seconds)."""
        match event:
            case LedgerHeard():
                return self._ledger(event)
            case VoteHeard():
                return self._vote(event, now=now)
            case SketchHeard():
                return self._sketched(event)
            case TimePassed():
                return self._go_on(now=now)
            case OverlappedEnded():
                self._results[event.vote.group] = event.vote
                return self._go_on(now=now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Time when late walkers are given up; None: a round waits for reports alone, and the vigil ends it."""
        if self._patience is None or self._numbers is not None:
            return None
        begun_at, num_units = self._patience.begun_at, len(self._step_groups.units)
        arrived_s = [at - begun_at for at in self.arrived.values()]
        if len(arrived_s) >= num_units:
            return None
        ends_s = self._patience.quorum.deadline(arrived_s, self._patience.past, num_members=num_units)
        return None if ends_s is None else begun_at + ends_s

    @property
    def late(self) -> tuple[int, ...]:
        """Units that were left out."""
        if self._numbers is None:
            return ()
        return tuple(i for i in range(len(self._step_groups.units)) if i not in self.arrived)

    def group(self, vote: Vote) -> Group | None:
        """The group that a vote is on, if it is on the attempt that was asked for last, and on the head's stage."""
        group = self._groups.get(vote.group)
        is_heads = group is not None and not self._ends.isdisjoint(group.members)
        return group if is_heads and vote.attempt == self._attempts.get(vote.group) else None

    def _ledger(self, event: LedgerHeard) -> list[RoundCommand]:
        done = event.done
        chunk = ChunkRef(stage=done.ledger.stage, worker=event.worker)
        if done.step != self.terms.step or chunk not in self._expected or chunk in self._done:
            return []
        if self._numbers is not None:
            return []  # It was left out.
        num_losses = len(self._expected[chunk]) if chunk in self._ends else 0
        is_foreign = done.ledger.microbatches != self._expected[chunk] or done.ledger.worker != event.worker
        if is_foreign or len(done.tokens) != num_losses:
            told = f"{done.ledger} with tokens of {len(done.tokens)} microbatches"
            reason = f"{event.worker} reported {told}, not what was assigned"
            return [RoundFailed(reason=reason, blamed=(event.worker,))]
        self._done[chunk] = done
        commands: list[RoundCommand] = []
        for group in self._groups_of.get(chunk, ()):
            self._missing[group.group].discard(chunk)
            if not self._missing[group.group]:
                commands.append(self._ask(group, number=0))
        return commands

    def _ask(self, group: Group, *, number: int) -> Prepare:
        attempt = Attempt(epoch=self._epoch, generation=self._generation, number=number)
        self._attempts[group.group] = attempt
        self._votes[group.group] = {}
        if group.group in self._reach:
            group = self._weighed(group)
        parts = tuple(self._done[member].ledger for member in group.members if member in self._done)
        return Prepare(
            step=self.terms.step,
            group=group,
            attempt=attempt,
            parts=parts,
            exchange=self._exchange_terms(group),
        )

    def _weighed(self, group: Group) -> Group:
        """An exchange with the weights that its members have by now."""
        before, numbers = self._step_groups.num_tokens, self._numbers
        if before is None:
            return group
        assert numbers is not None
        before = before or (0,) * len(group.members)
        now = [numbers.num_tokens_by_group.get(Local(member)) for member in group.members]
        # Who is late may be anywhere in its step: it takes what the others have come to.
        return weighed(group, [0 if b is None else a + b for a, b in zip(before, now, strict=True)])

    def _exchange_terms(self, group: Group) -> ExchangeTerms | None:
        """The numbers that members need before they know the decision, which will have the same."""
        if group.group not in self._reach:
            return None
        assert self._numbers is not None
        weights = self._numbers.weights
        return ExchangeTerms(
            reach=self._reach[group.group],
            learning_rate=self.terms.learning_rate,
            scales=tuple(weights.get(Local(member), 0.0) for member in group.members),
            due_step=self.terms.step,
            num_steps=self.terms.num_steps,
            checkers=self._checkers.get(group.group, ()),
        )

    def _vote(self, event: VoteHeard, *, now: float) -> list[RoundCommand]:
        vote = event.vote
        group = self._groups.get(vote.group)
        if group is None or vote.step != self.terms.step or vote.attempt != self._attempts.get(vote.group):
            return []
        if event.worker not in self._voters[vote.group]:
            reason = f"{event.worker} voted on {vote.group} and holds none of it"
            return [RoundFailed(reason=reason, blamed=(event.worker,))]
        votes = self._votes[vote.group]
        votes[event.worker] = vote
        if len(votes) < len(self._voters[vote.group]):
            return []
        found = ruling(group, votes, is_common=self._reach.get(vote.group) is not Reach.NEIGHBOURS)
        if found.result is None and not vote.attempt.number:
            return [self._ask(group, number=1)]
        if found.result is None:
            reason = (
                f"holders of {vote.group} disagree twice, and none has a majority: {votes_text(group, votes)}"
            )
            return [RoundFailed(reason=reason, blamed=group.workers, is_disputed=True)]
        self._results[vote.group] = found.result
        self._agreeing[vote.group] = tuple(x for x in group.workers if x not in found.outvoted)
        if self._numbers is None:
            self._arrive(now=now)
        reason = f"outvoted on {vote.group} at step {vote.step}: {votes_text(group, votes)}"
        outvoted = [Outvoted(reason=reason, blamed=found.outvoted)] if found.outvoted else []
        return [*outvoted, *self._go_on(now=now)]

    def _arrive(self, *, now: float) -> None:
        """Units whose groups all have their results are done."""
        for index, unit in enumerate(self._step_groups.units):
            if index not in self.arrived and all(group in self._results for group in unit):
                self.arrived[index] = now

    def _go_on(self, *, now: float) -> list[RoundCommand]:
        """A group has its result: ask for the exchanges, decide, or wait for the others."""
        if self._numbers is None and self._is_reduced(now=now):
            self._leave_out_late()
            found = self._incredible()
            self._numbers = self._weigh()
            if not self._numbers.reason:
                asked = [self._ask(group, number=0) for group in self._step_groups.exchanged]
                if asked:
                    return [*found, *asked]
            return [*found, *self._end()]
        return self._end()

    def _end(self) -> list[RoundCommand]:
        """The decision, unless something is still asked for."""
        num_exchanged = sum(group in self._reach for group in self._results)
        if self._numbers is None or (not self._numbers.reason and num_exchanged < len(self._reach)):
            return []
        if not self._sketches and (seed := self._seed_of(tuple(self._results.values()))) is not None:
            self._sketches = {group: {} for group in self._results}
            return [
                TakeSketch(step=self.terms.step, group=group, attempt=self._attempts[group], seed=seed)
                for group in sorted(self._results, key=str)
            ]
        return [] if self.unsketched else [self._decide(self._numbers)]

    # --- sketches, in a step that is checked ---

    @property
    def sketch(self) -> Sketch:
        """Sketch of the whole gradient, once all holders have told theirs; empty in a step that is not checked."""
        return added(told[largest_camp(told)[0]] for told in self._sketches.values())

    @property
    def unsketched(self) -> tuple[WorkerId, ...]:
        """Workers whose sketch is waited for."""
        lacking = (set(self.holders(group)) - told.keys() for group, told in self._sketches.items())
        return tuple(sorted(set[WorkerId]().union(*lacking)))

    def holders(self, group: GroupId) -> tuple[WorkerId, ...]:
        """Workers that have a group's result: those that were outvoted have another."""
        return self._agreeing[group]

    def _sketched(self, event: SketchHeard) -> list[RoundCommand]:
        """A holder has sketched a result, which is the same at all: so are their sketches, or most are believed."""
        taken, group = event.taken, event.taken.group
        is_asked = group in self._sketches and event.worker in self.holders(group)
        if not is_asked or (taken.step, taken.attempt) != (self.terms.step, self._attempts.get(group)):
            return []
        told = self._sketches[group]
        told[event.worker] = taken.values
        if len(told) < len(self.holders(group)):
            return []
        camp = largest_camp(told)
        others = tuple(sorted(told.keys() - camp))
        if len(camp) <= len(others):
            reason = f"holders of {group} have one result and sketch it otherwise"
            return [RoundFailed(reason=reason, blamed=tuple(sorted(told)), is_disputed=True)]
        reason = f"sketched {group} otherwise than most at step {taken.step}"
        outvoted = [Outvoted(reason=reason, blamed=others)] if others else []
        return [*outvoted, *self._end()]

    def _incredible(self) -> list[RoundCommand]:
        """Blame the few heads that tell of a loss that is not finite, though every gradient that came of it is.

        A model that diverges may have such losses, by which nothing is learned; then it is not one head of several that
        tells of them. That is nobody's fault, and whether the job goes on is for its own rule to say.
        """
        heads = {x.worker for x, done in self._done.items() if done.tokens}
        tellers = sorted({x.worker for x, done in self._done.items() if not isfinite(done.loss_sum)})
        is_odd = tellers and 2 * len(tellers) < len(heads)
        if not is_odd or not all(vote.is_finite for vote in self._results.values()):
            return []
        reason = f"told a loss that is not finite at step {self.terms.step}, where all gradients are"
        return [Outvoted(reason=reason, blamed=tuple(tellers))]

    def _is_reduced(self, *, now: float) -> bool:
        """Whether all reductions have their results, or those without are not waited for any more."""
        if all(group.group in self._results for group in self._step_groups.reduced):
            return True
        ends_at = self.deadline()
        return ends_at is not None and now >= ends_at

    def _leave_out_late(self) -> None:
        """Forget what late walkers have told: their step is none."""
        late = {
            group
            for index in range(len(self._step_groups.units))
            if index not in self.arrived
            for group in self._step_groups.units[index]
        }
        for name in late:
            self._results.pop(name, None)
            self._attempts.pop(name, None)
            for member in self._groups[name].members:
                self._done.pop(member, None)

    def _weigh(self) -> Numbers:
        """Token counts, norms and weights from the reports, once, in a fixed order."""
        done = [self._done[chunk] for chunk in sorted(self._done)]
        reduced = [group.group for group in self._step_groups.reduced]
        votes = [self._results[group] for group in reduced if group in self._results]
        if self._array is not None:
            return weigh_array(self._array, votes)
        chunks_by_group = {v.group: self._sharing(self._groups[v.group]) for v in votes}
        return weigh(
            self._step_groups,
            votes,
            visitors_of(done, chunks_by_group, self._expected),
            loss_sum=loss_sum_of(done, may_lose_some=self._step_groups.may_lose_some),
            num_tokens=sum(sum(d.tokens) for d in done),
            clip_norm=None if self._step_groups.clips_result else self.terms.clip_norm,
        )

    @property
    def _array(self) -> ArrayRound | None:
        """Round of an array, which one chunk has told of; None: the job is none."""
        return next((done.array for done in self._done.values() if done.array is not None), None)

    def _decide(self, numbers: Numbers) -> StepRecord:
        votes = [self._results[group] for group in sorted(self._results, key=str)]
        spoilt = [v.group for v in votes if v.group in self._reach and not v.is_finite]
        reason = numbers.reason or ("result not finite in " + ", ".join(map(str, spoilt)) if spoilt else "")
        norm, clip = numbers.gradient_norm, numbers.clip
        if self._step_groups.clips_result and not reason:
            norm = sqrt(exact_sum(v.squared_norm for v in votes if v.group in self._reach))
            clip = clip_of(norm, self.terms.clip_norm)
        results = tuple(
            GroupResult(
                group=v.group,
                attempt=v.attempt,
                digest=v.digest,
                squared_norm=v.squared_norm,
                weight=numbers.weights.get(v.group, 1.0),
                num_tokens=numbers.num_tokens_by_group.get(v.group, 0),
            )
            for v in votes
        )
        balance = Balance.sum_of(self._done[chunk].balance for chunk in sorted(self._done))
        return StepRecord(
            step=self.terms.step,
            decision=Decision.SKIP if reason else Decision.APPLY,
            reason=reason,
            results=results,
            loss=numbers.loss,
            num_tokens=numbers.num_tokens,
            weight=1.0 / numbers.num_tokens if numbers.num_tokens else 0.0,
            gradient_norm=norm,
            clip=clip,
            learning_rate=self.terms.learning_rate,
            samples_after=(self.terms.step + 1) * self.terms.batch_samples,
            num_late_samples=self._num_late_samples(),
            balance_loss=None if balance is None else balance.mean,
            drop_ratio=None if balance is None else balance.drop_ratio,
            array=self._array,
        )

    def _num_late_samples(self) -> int:
        """Samples of microbatches that end at walkers which are left out."""
        if self._patience is None or isinstance(self._patience.quorum, Eager):
            return 0
        num_visits = {chunk: len(self._expected[chunk]) for chunk in self._ends}
        num_late = sum(count for chunk, count in num_visits.items() if chunk not in self._done)
        return self.terms.batch_samples * num_late // max(1, sum(num_visits.values()))

    def _sharing(self, group: Group) -> Collection[ChunkRef]:
        """Chunks whose gradients are summed with the group's: its members, or all holders of its stage."""
        if not self._step_groups.num_sharing:
            return group.members
        stages = {member.stage for member in group.members}
        return [chunk for chunk in self._expected if chunk.stage in stages]
