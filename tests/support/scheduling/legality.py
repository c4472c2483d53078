"""What every op schedule must satisfy, whoever made it, and what its activations need."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from skein.units import format_bytes
from tests.support.scheduling.ops import Op, PipelineOpKind, PipelineSchedule
from tests.support.scheduling.pricing import StageCost

_SHOWN = 5
"""Sentences of one kind; a broken generator would make thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most that a worker holds at once: activations (of a chunk and a microbatch) not yet used up, and bytes.

    An activation whose weight gradient is pending counts as one, with its `kept_bytes`. What a vocabulary shard keeps
    from SCORES to TERM counts in bytes alone.
    """

    num_activations: int
    num_bytes: int


def violations(
    schedule: PipelineSchedule,
    *,
    stages: Sequence[StageCost] | None = None,
    memory_bytes: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """What is wrong with `schedule`, a sentence each that names worker and op; empty for one that may be run.

    Args:
        schedule: to be judged.
        stages: costs of its stages; with `memory_bytes` only.
        memory_bytes: what each worker has for activations, if that is to be judged.
    """
    for found in (_places(schedule), _completeness(schedule), _order(schedule)):
        if listed := tuple(found):
            return _abridged(listed)
    if stuck := deadlock(schedule):
        return (stuck,)
    if stages is None or memory_bytes is None:
        return ()
    return tuple(shortages(peaks(schedule, stages), memory_bytes))


def peaks(schedule: PipelineSchedule, stages: Sequence[StageCost]) -> tuple[Peak, ...]:
    """What each worker holds at most. Ops run in the given order, so this is no matter of time."""
    return tuple(_peak(ops, stages) for ops in schedule.ops_by_worker)


def shortages(needed: Sequence[Peak], memory_bytes: Sequence[int]) -> Iterator[str]:
    """A sentence for each worker that lacks memory for its activations."""
    for worker, (peak, available) in enumerate(zip(needed, memory_bytes, strict=True)):
        if peak.num_bytes > available:
            # Exact if all activations are of one size, which is what one thinks of as slots.
            slots = peak.num_activations * available // peak.num_bytes
            yield (
                f"needs {peak.num_activations} slots on w{worker} ({format_bytes(peak.num_bytes)}), "
                f"has {slots} ({format_bytes(available)})"
            )


def deadlock(schedule: PipelineSchedule) -> str | None:
    """Who waits for whom for ever, if anybody, in a schedule that is complete and in order on each worker."""
    left: set[_Output] = set()
    reached = [0] * schedule.num_workers
    may_go = list(range(schedule.num_workers))
    while may_go:
        worker = may_go.pop()
        ops = schedule.ops_by_worker[worker]
        while reached[worker] < len(ops):
            op = ops[reached[worker]]
            if any(_output(source) not in left for source in _sources(op, schedule)):
                break
            reached[worker] += 1
            left.add(_output(op))
            takers = {schedule.worker_by_stage[to] for to in _takers(op, schedule)}
            may_go.extend(sorted(takers - {worker}))
    stuck = {
        worker: schedule.ops_by_worker[worker][i]
        for worker, i in enumerate(reached)
        if i < len(schedule.ops_by_worker[worker])
    }
    return _circle(stuck, schedule, left) if stuck else None


_Output = tuple[bool, int, int]


def _output(op: Op) -> _Output:
    """What an op leaves for others: an activation or a gradient, which is the same from B and from I."""
    is_there = op.kind in (PipelineOpKind.FORWARD, PipelineOpKind.SCORES)
    return (is_there, op.stage, op.microbatch)


def _sources(op: Op, schedule: PipelineSchedule) -> tuple[Op, ...]:
    """The ops of other stages whose outputs `op` takes."""

    def of_shards(kind: PipelineOpKind) -> tuple[Op, ...]:
        return tuple(Op(kind, shard, op.microbatch) for shard in schedule.shards)

    match op.kind:
        case PipelineOpKind.FORWARD:
            return (Op(op.kind, op.stage - 1, op.microbatch),) if op.stage > 0 else ()
        case PipelineOpKind.SCORES:
            return (Op(PipelineOpKind.FORWARD, schedule.last_stage, op.microbatch),)
        case PipelineOpKind.TERM:
            return of_shards(PipelineOpKind.SCORES)
        case PipelineOpKind.BACKWARD_WEIGHT:
            return ()
        case PipelineOpKind.BACKWARD | PipelineOpKind.BACKWARD_INPUT:
            if op.stage < schedule.last_stage:
                return (Op(op.kind, op.stage + 1, op.microbatch),)
            return of_shards(PipelineOpKind.SCORES if schedule.num_barriers == 1 else PipelineOpKind.TERM)


def _takers(op: Op, schedule: PipelineSchedule) -> tuple[int, ...]:
    """Stages of ops that may take what `op` leaves."""
    match op.kind:
        case PipelineOpKind.FORWARD:
            return (op.stage + 1,) if op.stage < schedule.last_stage else tuple(schedule.shards)
        case PipelineOpKind.SCORES | PipelineOpKind.TERM:
            return (schedule.last_stage, *schedule.shards)
        case _:
            return (op.stage - 1,) if op.stage > 0 else ()


def _own(op: Op) -> Op | None:
    """The op of the same stage that `op` goes on from, if any."""
    before = _OWN.get(op.kind)
    return None if before is None else Op(before, op.stage, op.microbatch)


_OWN = {
    PipelineOpKind.BACKWARD: PipelineOpKind.FORWARD,
    PipelineOpKind.BACKWARD_INPUT: PipelineOpKind.FORWARD,
    PipelineOpKind.BACKWARD_WEIGHT: PipelineOpKind.BACKWARD_INPUT,
    PipelineOpKind.TERM: PipelineOpKind.SCORES,
}


def _places(schedule: PipelineSchedule) -> Iterator[str]:
    for worker, ops in enumerate(schedule.ops_by_worker):
        for op in ops:
            if not 0 <= op.stage < schedule.num_stages:
                yield f"w{worker} has {op}, which does not exist"
            elif not 0 <= op.microbatch < schedule.num_microbatches:
                yield f"w{worker} has {op}, and there are {schedule.num_microbatches} microbatches"
            elif schedule.worker_by_stage[op.stage] != worker:
                yield f"w{worker} has {op}, which w{schedule.worker_by_stage[op.stage]} holds"


def _completeness(schedule: PipelineSchedule) -> Iterator[str]:
    counts = Counter(op for ops in schedule.ops_by_worker for op in ops)
    for stage, worker in enumerate(schedule.worker_by_stage):
        for microbatch in range(schedule.num_microbatches):
            is_shard = stage in schedule.shards
            yield from (f"w{worker} {what}" for what in _visit(stage, microbatch, counts, is_shard=is_shard))


def _visit(stage: int, microbatch: int, counts: Mapping[Op, int], *, is_shard: bool) -> Iterator[str]:
    forward, backward, inputs, weights, scores, term = (
        Op(kind, stage, microbatch) for kind in PipelineOpKind
    )
    is_split = bool(counts.get(inputs) or counts.get(weights))
    if is_split and counts.get(backward):
        yield f"has {backward} beside {inputs if counts.get(inputs) else weights}"
    body = (forward, inputs, weights) if is_split else (forward, backward)
    for op in (scores, term) if is_shard else body:
        count = counts.get(op, 0)
        if count != 1:
            yield f"lacks {op}" if count == 0 else f"has {op} {count} times"


def _order(schedule: PipelineSchedule) -> Iterator[str]:
    for worker, ops in enumerate(schedule.ops_by_worker):
        done: set[_Output] = set()
        for op in ops:
            for needed in (_own(op), *_sources(op, schedule)):
                if needed is None or schedule.worker_by_stage[needed.stage] != worker:
                    continue
                if _output(needed) not in done:
                    yield f"w{worker} has {op} before {needed}, which it needs"
            if op.kind is not PipelineOpKind.BACKWARD_WEIGHT:
                done.add(_output(op))


def _circle(stuck: Mapping[int, Op], schedule: PipelineSchedule, left: Set[_Output]) -> str:
    """Follow who waits for whom from the first stuck worker until it closes."""
    seen: dict[int, str] = {}
    worker = min(stuck)
    while worker not in seen:
        missing = [op for op in _sources(stuck[worker], schedule) if _output(op) not in left]
        assert missing, f"w{worker} waits with {stuck[worker]} for nobody"
        source = missing[0]
        holder = schedule.worker_by_stage[source.stage]
        seen[worker] = f"w{worker} waits with {stuck[worker]} for {source} on w{holder}"
        worker = holder
    circle = list(seen)[list(seen).index(worker) :]
    return "deadlock: " + ", ".join(seen[worker] for worker in circle)


def _peak(ops: Sequence[Op], stages: Sequence[StageCost]) -> Peak:
    num_held = most_held = num_bytes = most_bytes = 0
    for op in ops:
        cost = stages[op.stage]
        match op.kind:
            case PipelineOpKind.FORWARD:
                num_held += 1
                num_bytes += cost.activation_bytes
            case PipelineOpKind.BACKWARD:
                num_held -= 1
                num_bytes -= cost.activation_bytes
            case PipelineOpKind.BACKWARD_INPUT:
                num_bytes -= cost.activation_bytes - cost.kept_bytes
            case PipelineOpKind.BACKWARD_WEIGHT:
                num_held -= 1
                num_bytes -= cost.kept_bytes
            case PipelineOpKind.SCORES:
                num_bytes += cost.activation_bytes
            case PipelineOpKind.TERM:
                num_bytes -= cost.activation_bytes
        most_held, most_bytes = max(most_held, num_held), max(most_bytes, num_bytes)
    return Peak(num_activations=most_held, num_bytes=most_bytes)


def _abridged(sentences: tuple[str, ...]) -> tuple[str, ...]:
    more = len(sentences) - _SHOWN
    return sentences if more <= 0 else (*sentences[:_SHOWN], f"and {more} more of the kind")
