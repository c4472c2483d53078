"""Tokens that each walker of a job has learned from since the last exchange, in the order of a plan."""

from collections.abc import Sequence

from skein.config.job import JobSpec
from skein.plan.plan import Plan
from skein.protocol.messages.directives import Decision, StepRecord
from skein.types import ChunkRef, Exchanged, Local


def learned_under(
    learned: Sequence[int], before: Plan, plan: Plan, standing: Sequence[Sequence[ChunkRef]]
) -> tuple[int, ...]:
    """Numbers in the order of another plan: 0 for walkers that do not go on by it, `standing` being those that do."""
    going_on = {chunk for walker in standing for chunk in walker}
    by_chunk = dict(zip(before.groups[-1].members, learned, strict=True))
    return tuple(by_chunk.get(x, 0) if x in going_on else 0 for x in plan.groups[-1].members)


def learned_after(
    learned: Sequence[int], spec: JobSpec, plan: Plan | None, record: StepRecord
) -> tuple[int, ...]:
    """Numbers after a step; none of one walker, and none after an exchange."""
    if not spec.aggregation.walkers.are_lines or plan is None:
        return ()
    if record.decision is not Decision.APPLY:
        return tuple(learned)
    num_tokens = {result.group: result.num_tokens for result in record.results}
    if any(isinstance(group, Exchanged) for group in num_tokens):
        return ()
    members = plan.groups[-1].members
    now = [num_tokens.get(Local(member), 0) for member in members]
    before = learned or (0,) * len(now)
    return tuple(a + b for a, b in zip(before, now, strict=True))
