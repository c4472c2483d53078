"""Contributions to a simulated worker's updates, judged against the recorded plan and not by what machines believe."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skein.plan.agreeing.exchange import Broadcast, Neighbours
from skein.plan.agreeing.rounds import exchanged_stage
from skein.plan.plan import Group
from skein.protocol.messages.directives import GroupResult
from skein.sim.judging.invariants import Violated, Visits
from skein.types import (
    Attempt,
    ChunkRef,
    Exchanged,
    GroupId,
    Local,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)

Contributions = dict[tuple[Step, int, StageIndex], int]
"""Number of times that each microbatch of each step was added up for each stage."""


@dataclass(slots=True)
class SimChunk:
    """A stage as the cost model holds it: `lineage` stands for parameters and optimizer state.

    `begun_at` is the step in which it began to add up: an older one where steps were decided without it, and it kept
    what it had.
    """

    stage: StageSpec
    lineage: str
    version: Step
    begun_at: Step
    accumulated: Contributions = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptJoin:
    """Result of a join, as the coordinator asked for it, until the record of `step` applies it."""

    step: Step
    group: Group
    contributions: Contributions
    taken_at: Step | None = None
    """Version that an exchange beside steps takes: contributions are whole members then, as in `taken_by`."""


def taken_by(place: int, taken_at: Step, stage: StageIndex) -> Contributions:
    """A member, by its place in the group, as it is at a version."""
    return {(taken_at, -1 - place, stage): 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Compares what one worker applies with its visits in the recorded plan; raises Violated where they differ."""

    worker: WorkerId
    visits: Visits
    members: Mapping[GroupId, tuple[ChunkRef, ...]]
    chunks: Mapping[StageIndex, SimChunk]
    joined: Mapping[tuple[GroupId, Attempt], KeptJoin]
    is_resumed: bool
    is_told_true: bool
    """Whether no worker has lied about tokens, so that weights are what they must be."""

    def check_order(self, chunk: SimChunk, step: Step) -> None:
        """The chunk has added up what visits it, in the order of its worker's schedule."""
        stage = chunk.stage.index
        planned = self.visits.by_chunk[ChunkRef(stage=stage, worker=self.worker)]
        if not is_ledger(chunk, step, planned):
            raise Violated(
                f"{self.worker} adds {list(chunk.accumulated)} at step {step}, planned was {planned}"
            )

    def check_results(self, chunk: ChunkRef, step: Step, results: Mapping[GroupId, GroupResult]) -> None:
        """Check what a chunk is updated with: its groups' sums, or its own, and what is exchanged for these."""
        alone = Local(chunk)
        if alone in results:
            self._check_own(results[alone], step, chunk)
        elif not is_late(chunk, results):
            for group, members in self.members.items():
                if chunk in members:
                    self._check(results[group], step, members)
        for result in results.values():
            if exchanged_stage(result.group) == chunk.stage:
                self._check_exchange(result, step, chunk)

    def _check_own(self, result: GroupResult, step: Step, chunk: ChunkRef) -> None:
        """All that the chunk itself has accumulated."""
        found = self.joined[result.group, result.attempt].contributions
        if found != self.chunks[chunk.stage].accumulated or bool(result.weight) != bool(found):
            raise Violated(f"{result.group} at step {step} takes {sorted(found)}, weight {result.weight}")

    def _check_exchange(self, result: GroupResult, step: Step, chunk: ChunkRef) -> None:
        """Check that each shard that came back has the contributions of the members whose parts make it, each once."""
        kept = self.joined.get((result.group, result.attempt))
        if kept is None and result.group == Exchanged(stage=chunk.stage):
            raise Violated(f"{chunk} takes part in {result.group} at step {step}, and has no result")
        if kept is None or (self.is_resumed and kept.taken_at is None):
            return  # Another leader's; or who has added up what is not the plan's any more.
        group, found = kept.group, kept.contributions
        shard = group.workers.index(self.worker) if isinstance(group.pattern, Neighbours) else 0
        makers = group.contributors(shard)
        weights = group.weights[shard].weights if group.weights else (1.0,) * len(makers)
        # Who counts for nothing may have come to anything.
        planned: dict[tuple[int, StageIndex], bool] = {}
        for maker, weight in zip(makers, weights, strict=True):
            planned |= dict.fromkeys(self._given_by(maker, kept), bool(weight))
        needed = {contribution for contribution, counts in planned.items() if counts}
        told = {(microbatch, stage) for _, microbatch, stage in found}
        is_wrong = not needed <= told <= planned.keys() or len(told) < len(found)
        if is_wrong or set(found.values()) > {1} or not self._are_of(found, step, kept):
            raise Violated(f"{result.group} at step {step} is made of {sorted(found)}, not of {planned}")

    def _given_by(self, maker: ChunkRef, kept: KeptJoin) -> Iterable[tuple[int, StageIndex]]:
        if kept.taken_at is None:
            return [(microbatch, maker.stage) for microbatch in self.visits.by_chunk[maker]]
        return [(-1 - kept.group.members.index(maker), maker.stage)]

    def _are_of(self, found: Contributions, step: Step, kept: KeptJoin) -> bool:
        """Whether contributions are of the step; a leader may have begun its own before others ended some."""
        if isinstance(kept.group.pattern, Broadcast):
            return all(at <= step for at, _, _ in found)
        return all(at == (step if kept.taken_at is None else kept.taken_at) for at, _, _ in found)

    def _check(self, result: GroupResult, step: Step, members: tuple[ChunkRef, ...]) -> None:
        """Each visit to a stage of the group once, nothing else, and weighted by the visitors' tokens: one each."""
        found = self.joined[result.group, result.attempt].contributions
        stages = {member.stage for member in members}
        visitors = {stage: self.visits.by_stage[stage] for stage in stages}
        if found != {(step, m, stage): 1 for stage in stages for m in visitors[stage]}:
            raise Violated(f"{result.group} at step {step} sums {sorted(found.items())}")
        num_tokens = len(frozenset().union(*visitors.values()))
        if self.is_told_true and result.weight != (1 / num_tokens if num_tokens else 0.0):
            raise Violated(f"{result.group} at step {step} weighs {result.weight} for {num_tokens} tokens")


def is_ledger(chunk: SimChunk, step: Step, microbatches: Sequence[MicrobatchId]) -> bool:
    """Whether a chunk has added up these in this order, in `step` or since it began before."""
    at = [step for step, _, _ in chunk.accumulated]
    told = [(microbatch, stage) for _, microbatch, stage in chunk.accumulated]
    is_told = told == [(microbatch, chunk.stage.index) for microbatch in microbatches]
    return is_told and at == sorted(at) and all(chunk.begun_at <= x <= step for x in at)


def is_late(chunk: ChunkRef, results: Mapping[GroupId, GroupResult]) -> bool:
    """Whether a step was closed without a chunk's part, where each chunk has its own."""
    return Local(chunk) not in results and any(isinstance(group, Local) for group in results)
