"""The Round machine: one step, from the first finished ledger to the decision that will be recorded.

Rules of this file
- A group is reduced as soon as its members' ledgers are complete, while other stages still compute.
- A step is decided when every holder of every group has voted the same attempt and digest.
- A stage's gradient is a sum over the microbatches that visited it, so it is divided by their tokens and no others.
- All numbers of the decision come from what was reported; members compute with these, never with their own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import assert_never

from skein.plan.plan import Group, Plan
from skein.protocol.messages import Decision, GroupResult, Ledger, StepRecord
from skein.protocol.ops import exact_sum
from skein.protocol.reports import StageDone, Vote
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
        self._ends = frozenset(path.hops[-1] for path in plan.paths)
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
        """Token counts, norm and clip from the reports, once, in a fixed order."""
        done = [self._done[chunk] for chunk in sorted(self._done)]
        tokens = _tokens_by_microbatch(done)
        num_tokens = sum(tokens.values())
        loss_sum = exact_sum(d.loss_sum for d in done)
        weight = 1.0 / num_tokens if num_tokens else 0.0
        votes = [self._results[group] for group in sorted(self._results)]
        visitors = {v.group: self._num_tokens(self._groups[v.group], tokens) for v in votes}
        spoilt = [v.group for v in votes if not v.is_finite or not 0.0 <= v.squared_norm < inf]
        squared_norm = inf
        if not spoilt:
            # The common weight stays outside: where nothing is skipped, the sum is that of the plain squares.
            squared_norm = exact_sum(
                v.squared_norm * (num_tokens / visitors[v.group]) ** 2 for v in votes if visitors[v.group]
            )
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
            GroupResult(
                group=v.group,
                attempt=v.attempt,
                digest=v.digest,
                squared_norm=v.squared_norm,
                weight=1.0 / visitors[v.group] if visitors[v.group] else 0.0,
            )
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

    def _num_tokens(self, group: Group, tokens: Mapping[MicrobatchId, int]) -> int:
        """Valid tokens of the microbatches that visited the group's stages."""
        return sum(tokens[m] for m in {m for member in group.members for m in self._expected[member]})


def _tokens_by_microbatch(done: Iterable[StageDone]) -> Counter[MicrobatchId]:
    """Valid tokens of each microbatch, from where its loss is."""
    tokens: Counter[MicrobatchId] = Counter()
    for report in done:
        if report.tokens:
            tokens.update(dict(zip(report.ledger.microbatches, report.tokens, strict=True)))
    return tokens


def _minority(group: Group, votes: Mapping[WorkerId, Vote]) -> tuple[WorkerId, ...]:
    """Who voted another digest than most, or than the first of the equally many."""
    counts = Counter(votes[worker].digest for worker in group.workers)
    [(accepted, _)] = counts.most_common(1)
    return tuple(worker for worker in group.workers if votes[worker].digest != accepted)
