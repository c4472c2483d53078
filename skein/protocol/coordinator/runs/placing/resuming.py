"""A step that was stopped in the middle, taken up again: what of it counts still, and who does what is left of it.

Rules of this file
- What a chunk has accumulated counts whole or not at all: sums cannot be split. Chunks of the plan are believed in its
  order; one whose ledger overlaps what is believed already is dropped.
- Nothing is computed again but what nobody has any more.
- What is left takes its input from a boundary log. If one lacks it, the step begins anew: a log is a cache.
- Who may lose contributions loses those that nobody waits for, and says so; never a loss, for that has the token count
  by which all others of the microbatch are weighed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from skein.plan.changing.reroute import rerouted, usable
from skein.plan.changing.unfinished import Contribution, Need, Rest, rest_of
from skein.plan.ops import Direction, Kept
from skein.plan.plan import Path, Plan
from skein.protocol.coordinator.runs.placing.sources import holders_by_stage
from skein.protocol.messages.directives import Origin, Resumption
from skein.protocol.messages.progress import ChunkProgress, ResumedChunk
from skein.protocol.messages.reports import Ack
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.types import ChunkRef, MicrobatchId, StageIndex, Step, WorkerId

_Progress = Mapping[ChunkRef, ChunkProgress]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A step in progress under a plan without those who are gone.

    `expected` is the ledger that each chunk will have at the step's end. `replayed` are contributions that had been
    made, as far as anybody knows, and are made again, `dropped` those that are not; `num_rerouted` counts hops with
    another worker than before. `is_begun`: something of the step had been done.
    """

    plan: Plan
    resumptions: Mapping[WorkerId, Resumption]
    expected: Mapping[ChunkRef, tuple[MicrobatchId, ...]]
    replayed: tuple[Contribution, ...]
    dropped: tuple[Contribution, ...]
    num_rerouted: int
    is_begun: bool


def resume(
    plan: Plan,
    acks: Mapping[WorkerId, Ack],
    *,
    version: Step,
    may_drop: bool = False,
    present: Plan | None = None,
) -> Resumed | None:
    """The step that begins at `version`, as far as these workers have come, on the chunks of `plan` that they hold.

    None if a stage has no holder left, or if something that is needed is in no boundary log.

    Args:
        plan: whose chunks may hold something of the step; each microbatch visits the stages that it names.
        acks: by worker.
        version: of the parameters.
        may_drop: give up lost contributions that nobody waits for.
        present: the plan that was in place, if that is another: hops are compared with it.
    """
    holders = _holders(plan, acks, version)
    progress = _progress(holders, acks)
    owners = _owners(plan, progress)
    activated = {(m, chunk.stage): chunk.worker for chunk, done in progress.items() for _, m in done.held}
    after = rerouted(plan, holders, owners, preferred=activated)
    if after is None:
        return None
    counted = {chunk for chunk in progress if _counts(chunk, progress[chunk], owners)}
    slots = {x.chunk: x.slots for x in after.chunks}
    hop_of = {(MicrobatchId(m), hop.stage): hop for m, path in enumerate(after.paths) for hop in path.hops}
    ledger = frozenset(owners)
    lost = _lost(plan, progress, ledger)
    dropped = _droppable(plan, ledger) if may_drop else frozenset()
    held = frozenset(
        (m, chunk.stage, kept)
        for chunk, done in progress.items()
        for kept, m in done.held
        if hop_of.get((m, chunk.stage)) == chunk
        and (m, chunk.stage) not in ledger | dropped
        # Gradients that were put aside go with the sum that they were to be added to.
        and (kept is not Kept.PENDING or chunk in counted)
    )
    rest = rest_of(after.paths, slots, after.workers, ledger=ledger | dropped, held=held)
    if not all(_is_logged(need, progress) for need in rest.needs):
        return None
    return Resumed(
        plan=after,
        resumptions=_resumptions(after, rest, progress, counted, version),
        expected=_expected(after, rest, progress, counted),
        replayed=tuple(sorted(lost - dropped)),
        dropped=tuple(sorted(dropped)),
        num_rerouted=_num_rerouted((present or plan).paths, after.paths),
        is_begun=bool(ledger or any(done.held for done in progress.values())),
    )


def _holders(plan: Plan, acks: Mapping[WorkerId, Ack], version: Step) -> frozenset[ChunkRef]:
    """The plan's chunks that are alive, as the plan cuts the stages, at this version."""
    held, stages = holders_by_stage(acks, version), {stage.index: stage for stage in plan.stages}
    chunks = (x.chunk for x in plan.chunks)
    return frozenset(usable(plan, [x for x in chunks if x.worker in held.get(stages[x.stage], ())]))


def _progress(holders: frozenset[ChunkRef], acks: Mapping[WorkerId, Ack]) -> dict[ChunkRef, ChunkProgress]:
    told = {
        ChunkRef(stage=done.stage, worker=worker): done
        for worker, ack in acks.items()
        for done in ack.progress
    }
    return {chunk: told[chunk] for chunk in sorted(holders) if chunk in told}


def _owners(plan: Plan, progress: _Progress) -> dict[Contribution, WorkerId]:
    """Worker that has accumulated each contribution that counts."""
    owners: dict[Contribution, WorkerId] = {}
    visits = {(MicrobatchId(m), hop.stage) for m, path in enumerate(plan.paths) for hop in path.hops}
    ends = _other_end(plan)
    for chunk in (x.chunk for x in plan.chunks):
        done = progress.get(chunk)
        ledger = () if done is None else done.ledger
        contributions = [(m, chunk.stage) for m in ledger]
        is_free = visits.issuperset(contributions) and owners.keys().isdisjoint(contributions)
        is_free &= len(set(ledger)) == len(ledger)
        if is_free and all(_fits(m, chunk, ends, owners) for m in ledger):
            owners.update(dict.fromkeys(contributions, chunk.worker))
    return owners


def _other_end(plan: Plan) -> dict[StageIndex, StageIndex]:
    """In `loop`, the two ends of every path are on one worker."""
    if not plan.layout.comes_back:
        return {}
    first, last = plan.stages[0].index, plan.stages[-1].index
    return {first: last, last: first}


def _fits(
    microbatch: MicrobatchId,
    chunk: ChunkRef,
    ends: Mapping[StageIndex, StageIndex],
    owners: Mapping[Contribution, WorkerId],
) -> bool:
    other = ends.get(chunk.stage)
    return other is None or owners.get((microbatch, other), chunk.worker) == chunk.worker


def _counts(chunk: ChunkRef, done: ChunkProgress, owners: Mapping[Contribution, WorkerId]) -> bool:
    return all(owners.get((m, chunk.stage)) == chunk.worker for m in done.ledger)


def _is_logged(need: Need, progress: _Progress) -> bool:
    made = need.made_by
    done = progress.get(made.chunk)
    if done is None:
        return False
    logged = done.outputs if made.op.kind.row.gives is Direction.FORWARD else done.gradients
    return made.op.microbatch in logged


def _resumptions(
    plan: Plan, rest: Rest, progress: _Progress, counted: set[ChunkRef], version: Step
) -> dict[WorkerId, Resumption]:
    chunks: defaultdict[WorkerId, list[ResumedChunk]] = defaultdict(list)
    for x in plan.chunks:
        done = progress.get(x.chunk)
        if done is not None:
            ledger = done.ledger if x.chunk in counted else ()
            resumed = ResumedChunk(stage=x.chunk.stage, ledger=ledger, forwards=())
            held = ((kept, m) for kept, m in done.held if (m, x.chunk.stage, kept) in rest.held)
            chunks[x.chunk.worker].append(resumed.holding(held))
    repeats: defaultdict[WorkerId, list[HopTensor]] = defaultdict(list)
    for need in rest.needs:
        repeats[need.made_by.chunk.worker].append(_again(need, plan.paths[need.op.op.microbatch], version))
    return {
        schedule.worker: Resumption(
            step=version,
            schedule=schedule,
            chunks=tuple(chunks[schedule.worker]),
            origins=tuple(
                Origin(microbatch=op.microbatch, path=plan.paths[op.microbatch])
                for op in schedule.ops
                if op.stage == 0 and op.kind.row.takes is Direction.FORWARD
            ),
            repeats=tuple(repeats[schedule.worker]),
        )
        for schedule in rest.schedules
    }


def _again(need: Need, path: Path, version: Step) -> HopTensor:
    """The header under which a logged tensor is sent to who needs it now."""
    gives = need.made_by.op.kind.row.gives
    assert gives is not None, "nothing waits for what this op makes"
    return HopTensor(
        direction=gives,
        phase=Phase.TRAIN,
        step=version,
        microbatch=need.op.op.microbatch,
        hop=need.op.hop,
        path=path,
    )


def _expected(
    plan: Plan, rest: Rest, progress: _Progress, counted: set[ChunkRef]
) -> dict[ChunkRef, tuple[MicrobatchId, ...]]:
    """Ledger that each chunk is to have: what stays of it, then what is left in its order."""
    expected = {x.chunk: [*progress[x.chunk].ledger] if x.chunk in counted else [] for x in plan.chunks}
    for schedule in rest.schedules:
        for op in schedule.ops:
            if op.kind.row.is_accumulating:
                expected[ChunkRef(stage=op.stage, worker=schedule.worker)].append(op.microbatch)
    return {chunk: tuple(ids) for chunk, ids in expected.items()}


def _lost(plan: Plan, progress: _Progress, ledger: frozenset[Contribution]) -> frozenset[Contribution]:
    """Contributions that had been made and that nobody has any more.

    Known of them are those of chunks whose ledger does not count, and those that others waited for which are done. What
    a dead chunk did last and told nobody is not known to anybody.
    """
    made = {(m, chunk.stage) for chunk, done in progress.items() for m in done.ledger}
    return frozenset(made.union(*_made_before(plan, ledger)) - ledger)


def _droppable(plan: Plan, ledger: frozenset[Contribution]) -> frozenset[Contribution]:
    """Lost contributions that nothing depends on, what waited for them being done; none of a lost loss."""
    made = zip(plan.paths, _made_before(plan, ledger), strict=True)
    ended = [x for m, (path, x) in enumerate(made) if (MicrobatchId(m), path.end.stage) in ledger]
    return frozenset[Contribution]().union(*ended) - ledger


def _made_before(plan: Plan, ledger: frozenset[Contribution]) -> Iterator[set[Contribution]]:
    """Contributions of each microbatch: those in the ledger, and those of ops that must have ended before them."""
    for m, path in enumerate(plan.paths):
        made: set[Contribution] = set()
        ended: set[int] = set()
        for op in reversed(path.ops):
            at = (MicrobatchId(m), path.hops[op.hop].stage)
            is_sum = op.kind.row.is_accumulating
            if (is_sum and at in ledger) or not ended.isdisjoint(op.followers):
                ended.add(op.number)
                made.update([at] if is_sum else [])
        yield made


def _num_rerouted(before: tuple[Path, ...], after: tuple[Path, ...]) -> int:
    return sum(
        old != new
        for path, other in zip(before, after, strict=True)
        for old, new in zip(path.hops, other.hops, strict=True)
    )
