"""Where walkers come from when a plan is put into place: each has all of its own chunks, or all of another's.

Rules of this file
- A walker goes on if every chunk of it is where the plan before had it. So no walker is made of two.
- Any other begins as a copy of one that goes on. If none does, all go back to the newest checkpoint.
"""

from collections.abc import Iterable, Mapping

from skein.plan.plan import Plan
from skein.plan.walkers import walkers_of
from skein.protocol.messages import SourceKind, StateSource
from skein.protocol.records import CheckpointCommitted
from skein.protocol.reports import Ack
from skein.protocol.runs.sources import Sources
from skein.types import ChunkRef, Step, WorkerId

Walker = tuple[ChunkRef, ...]


def walker_sources(
    plan: Plan,
    before: Plan | None,
    acks: Mapping[WorkerId, Ack],
    *,
    version: Step,
    checkpoint: CheckpointCommitted | None,
) -> Sources:
    """Sources of all chunks of `plan`, a plan of many walkers.

    Args:
        plan: to be put into place.
        before: the plan that was in place when what `acks` tell of was computed.
        acks: what members hold.
        version: the job's.
        checkpoint: the newest.
    """
    held = {
        (chunk.stage, worker)
        for worker, ack in acks.items()
        for chunk in ack.chunks
        if chunk.version == version
    }
    stages = {stage.index: stage for stage in plan.stages}

    def is_whole(walker: Walker) -> bool:
        return all((stages[chunk.stage], chunk.worker) in held for chunk in walker)

    is_same_cut = before is not None and before.stages == plan.stages
    earlier = [x for x in walkers_of(before) if is_whole(x)] if before is not None and is_same_cut else []
    wanted = walkers_of(plan)
    if version == 0:
        return _all(wanted, StateSource(kind=SourceKind.INITIAL, version=version), version)
    if earlier:
        return Sources(version=version, by_chunk=_copied(wanted, earlier, version), unheld=())
    unheld = tuple(x for x in plan.stages if not any((x, worker) in held for worker in acks)) or plan.stages
    saved = Step(0) if checkpoint is None else checkpoint.version
    if checkpoint is None:
        source = StateSource(kind=SourceKind.INITIAL, version=saved)
    else:
        source = StateSource(kind=SourceKind.CHECKPOINT, version=saved, url=checkpoint.url)
    sources = _all(wanted, source, saved)
    return Sources(version=saved, by_chunk=sources.by_chunk, unheld=unheld)


def _all(walkers: Iterable[Walker], source: StateSource, version: Step) -> Sources:
    by_chunk = {chunk: source for walker in walkers for chunk in walker}
    return Sources(version=version, by_chunk=by_chunk, unheld=())


def _copied(wanted: Iterable[Walker], earlier: list[Walker], version: Step) -> dict[ChunkRef, StateSource]:
    """Whoever goes on keeps what it has; the others copy the donors in turn."""
    by_chunk: dict[ChunkRef, StateSource] = {}
    num_copies = 0
    for walker in wanted:
        if walker in earlier:
            by_chunk |= {chunk: StateSource(kind=SourceKind.KEEP, version=version) for chunk in walker}
            continue
        donor = earlier[num_copies % len(earlier)]
        num_copies += 1
        for chunk, given in zip(walker, donor, strict=True):
            # Who has this very chunk already, as another walker's, needs the donor's all the same.
            kind = SourceKind.KEEP if given == chunk else SourceKind.PEER
            peer = None if kind is SourceKind.KEEP else given.worker
            by_chunk[chunk] = StateSource(kind=kind, version=version, peer=peer)
    return by_chunk
