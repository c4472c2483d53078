"""Plans drawn with a ruler: stage s is held by workers `w{s}{a}`, `w{s}{b}`, …; paths take holders in turn."""

from collections.abc import Iterable

from skein.plan.changing.clauses import parse_clauses
from skein.plan.ops import OpKind
from skein.plan.order import ascending_schedules
from skein.plan.plan import (
    Alternates,
    ChunkPlan,
    Group,
    Path,
    Plan,
    PlannedOp,
    Schedule,
)
from skein.types import ChunkRef, Layout, MicrobatchId, StageIndex, StageSpec, WorkerId, parse_group


def holder(stage: int, replica: int) -> WorkerId:
    """
    >>> holder(1, 0)
    'w1a'
    """
    return WorkerId(f"w{stage}{'abcdefgh'[replica]}")


def chunk(stage: int, worker: str) -> ChunkRef:
    return ChunkRef(stage=StageIndex(stage), worker=WorkerId(worker))


def stage_spec(index: int, *, layers: int = 2) -> StageSpec:
    return StageSpec(index=StageIndex(index), first=layers * index, stop=layers * (index + 1))


def path(*hops: ChunkRef) -> Path:
    return Path(hops=hops)


def microbatches(*ids: int) -> tuple[MicrobatchId, ...]:
    return tuple(MicrobatchId(m) for m in ids)


def schedule(worker: str, words: str) -> Schedule:
    """A schedule from `F0.2 L1.2 B0.2`: kind, stage and microbatch of each op."""
    kinds = {kind.row.letter: kind for kind in OpKind}
    ops = []
    for word in words.split():
        stage, microbatch = (int(x) for x in word[1:].split("."))
        ops.append(
            PlannedOp(kind=kinds[word[0]], stage=StageIndex(stage), microbatch=MicrobatchId(microbatch))
        )
    return Schedule(worker=WorkerId(worker), ops=tuple(ops))


def words_of(ops: Iterable[PlannedOp]) -> str:
    """The reverse of `schedule`."""
    return " ".join(f"{op.kind.row.letter}{op.stage}.{op.microbatch}" for op in ops)


def grid_plan(
    *,
    stages: int = 2,
    replicas: int = 2,
    num_microbatches: int = 4,
    layout: Layout = Layout.LINE,
    slots: int = 2,
    is_tied: bool = False,
    num_shards: int = 2,
) -> Plan:
    """Every stage with as many holders; microbatch m takes holder (m + s) modulo `replicas` of stage s.

    In `LOOP` the head is a stage of its own on the holders of the first.
    """
    num_stages = stages + (layout is Layout.LOOP)
    seats = [[holder(s % stages, r) for r in range(replicas)] for s in range(num_stages)]
    held = [[chunk(s, w) for w in seats[s]] for s in range(num_stages)]
    paths = []
    for m in range(num_microbatches):
        hops = [held[s][(m + s) % replicas] for s in range(stages)]
        if layout is Layout.LOOP:
            hops.append(chunk(stages, hops[0].worker))
        paths.append(path(*hops))
    return plan_of(
        [c for stage in held for c in stage],
        paths,
        layout=layout,
        slots=slots,
        is_tied=is_tied,
        num_shards=num_shards,
    )


def plan_of(
    chunks: Iterable[ChunkRef],
    paths: Iterable[Path],
    *,
    full_paths: Iterable[Path] | None = None,
    schedules: tuple[Schedule, ...] | None = None,
    layout: Layout = Layout.LINE,
    slots: int = 2,
    is_tied: bool = False,
    num_shards: int = 2,
) -> Plan:
    """A plan with these chunks and paths, one group per stage, and one for tied tensors if asked.

    Schedules are ascending unless given; evaluation takes `full_paths`, by default the training's.
    """
    listed, ways = sorted(chunks), tuple(paths)
    num_stages = max(c.stage for c in listed) + 1
    members = {s: tuple(c for c in listed if c.stage == s) for s in range(num_stages)}
    groups = [
        Group(group=parse_group(f"s{s}"), members=members[s], num_shards=min(num_shards, len(members[s])))
        for s in members
    ]
    if is_tied:
        ends = (*members[0], *members[num_stages - 1])
        groups.append(Group(group=parse_group("tied"), members=ends, num_shards=num_shards))
    return Plan(
        layout=layout,
        stages=tuple(stage_spec(s) for s in range(num_stages)),
        chunks=tuple(ChunkPlan(chunk=c, slots=slots) for c in listed),
        paths=ways,
        evaluation_paths=ways if full_paths is None else tuple(full_paths),
        schedules=schedules
        or ascending_schedules(ways, dict.fromkeys(listed, slots), (c.worker for c in listed)),
        alternates=tuple(
            Alternates(chunk=c, others=tuple(other for other in members[c.stage] if other != c))
            for c in listed
        ),
        groups=tuple(groups),
        predicted_step_s=1.0,
        lower_bound_s=0.5,
        reason=parse_clauses("drawn"),
    )
