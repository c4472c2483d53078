"""The Round machine: one step, from the first finished ledger to the decision that will be recorded.

Rules of this file
- A group is reduced as soon as its members' ledgers are complete, while other stages still compute.
- A step is decided when every holder of every group has voted the same attempt and digest.
- All numbers of the decision come from what was reported; members compute with these, never with their own.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import assert_never

from skein.plan.plan import Group, Plan
from skein.protocol.messages import Decision, GroupResult, Ledger, StageDone, StepRecord, Vote
from skein.protocol.ops import exact_sum
from skein.protocol.story import Story
from skein.types import Attempt, ChunkRef, Epoch, Generation, GroupId, MicrobatchId, Step, WorkerId

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


RoundEvent = LedgerHeard | VoteHeard

# --- commands ---


@dataclass(frozen=True, slots=True, kw_only=True)
class AskReduction:
    """All members of the group shall reduce these parts."""

    group: Group
    attempt: Attempt
    parts: tuple[Ledger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecided:
    """The step's decision, to be recorded before it is announced."""

    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed:
    """The step cannot be decided under this generation; it is to be tried again from its start."""

    reason: str
    blamed: tuple[WorkerId, ...]


RoundCommand = AskReduction | StepDecided | RoundFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """What a decision needs beside the votes: learning rate, clipping norm (None: none), samples per step."""

    step: Step
    learning_rate: float
    clip_norm: float | None
    batch_samples: int


class Round:
    """Collects one step under one generation."""

    def __init__(
        self,
        terms: StepTerms,
        plan: Plan,
        *,
        expected: Mapping[ChunkRef, tuple[MicrobatchId, ...]],
        epoch: Epoch,
        generation: Generation,
    ) -> None:
        self.terms = terms
        self._epoch = epoch
        self._generation = generation
        self._groups = {group.group: group for group in plan.groups}
        self._voters = {group.group: frozenset(group.workers) for group in plan.groups}
        self._groups_of: dict[ChunkRef, list[Group]] = {}
        for group in plan.groups:
            for member in group.members:
                self._groups_of.setdefault(member, []).append(group)
        self._expected = expected
        self._missing = {g.group: set(g.members) for g in plan.groups}
        self._done: dict[ChunkRef, StageDone] = {}
        self._attempts: dict[GroupId, Attempt] = {}
        self._votes: dict[GroupId, dict[WorkerId, Vote]] = {}
        self._results: dict[GroupId, Vote] = {}
        self._story = Story(num_ids=256)

    def handle(self, event: RoundEvent, *, now: float) -> list[RoundCommand]:
        """Take one event at time `now` (seconds)."""
        match event:
            case LedgerHeard():
                return self._ledger(event, now=now)
            case VoteHeard():
                return self._vote(event, now=now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """A round waits for reports alone; leases and the watchdog end what never comes."""
        return None

    def story(self, group: GroupId) -> tuple[str, ...]:
        """The last lines about a group."""
        return self._story.of(group)

    @property
    def num_done(self) -> int:
        """Chunks whose ledger is complete."""
        return len(self._done)

    def _ledger(self, event: LedgerHeard, *, now: float) -> list[RoundCommand]:
        done = event.done
        chunk = ChunkRef(stage=done.ledger.stage, worker=event.worker)
        if done.step != self.terms.step or chunk not in self._expected or chunk in self._done:
            return []
        if done.ledger.microbatches != self._expected[chunk] or done.ledger.worker != event.worker:
            reason = f"{event.worker} reported {done.ledger}, not what was assigned"
            return [RoundFailed(reason=reason, blamed=(event.worker,))]
        self._done[chunk] = done
        commands: list[RoundCommand] = []
        for group in self._groups_of.get(chunk, ()):
            self._missing[group.group].discard(chunk)
            if not self._missing[group.group]:
                commands.append(self._ask(group, number=0, now=now))
        return commands

    def _ask(self, group: Group, *, number: int, now: float) -> AskReduction:
        attempt = Attempt(epoch=self._epoch, generation=self._generation, number=number)
        self._attempts[group.group] = attempt
        self._votes[group.group] = {}
        self._story.tell(group.group, f"attempt {number}", now=now)
        parts = tuple(self._done[member].ledger for member in group.members)
        return AskReduction(group=group, attempt=attempt, parts=parts)

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
        if len({v.digest for v in votes.values()}) > 1:
            if vote.attempt.number >= 1:
                reason = f"holders of {vote.group} disagree on its result twice"
                return [RoundFailed(reason=reason, blamed=_minority(group, votes))]
            return [self._ask(group, number=1, now=now)]
        self._results[vote.group] = votes[group.members[0].worker]
        if len(self._results) < len(self._groups):
            return []
        return [StepDecided(record=self._decide())]

    def _decide(self) -> StepRecord:
        """Token count, norm and clip from the votes, once, in a fixed order."""
        done = [self._done[chunk] for chunk in sorted(self._done)]
        num_tokens = sum(d.num_tokens for d in done)
        loss_sum = exact_sum(d.loss_sum for d in done)
        weight = 1.0 / num_tokens if num_tokens else 0.0
        votes = [self._results[group] for group in sorted(self._results)]
        spoilt = [v.group for v in votes if not v.is_finite or not 0.0 <= v.squared_norm < inf]
        squared_norm = inf if spoilt else exact_sum(v.squared_norm for v in votes)
        norm = weight * sqrt(squared_norm) if squared_norm < inf else 0.0
        reason = ""
        if not num_tokens:
            reason = "no valid token in the batch"
        elif not isfinite(loss_sum):
            reason = "loss not finite"
        elif spoilt:
            reason = "gradient not finite in " + ", ".join(spoilt)
        elif squared_norm == inf:
            reason = "gradient norm not finite"
        clip = 1.0
        if self.terms.clip_norm is not None and not reason:
            clip = min(1.0, self.terms.clip_norm / (norm + 1e-6))
        results = tuple(
            GroupResult(group=v.group, attempt=v.attempt, digest=v.digest, squared_norm=v.squared_norm)
            for v in votes
        )
        return StepRecord(
            step=self.terms.step,
            decision=Decision.SKIP if reason else Decision.APPLY,
            reason=reason,
            results=results,
            loss=loss_sum * weight,
            num_tokens=num_tokens,
            weight=weight,
            gradient_norm=norm,
            clip=clip,
            learning_rate=self.terms.learning_rate,
            samples_after=(self.terms.step + 1) * self.terms.batch_samples,
        )


def _minority(group: Group, votes: Mapping[WorkerId, Vote]) -> tuple[WorkerId, ...]:
    """Who voted another digest than most, or than the first of the equally many."""
    counts = Counter(votes[worker].digest for worker in group.workers)
    [(accepted, _)] = counts.most_common(1)
    return tuple(worker for worker in group.workers if votes[worker].digest != accepted)
