"""Sources of walkers when a plan is put into place: each has all of its own chunks, or all of another's.

Rules of this file
- A walker goes on if every chunk of it is where the plan before had it. So no walker is made of two.
- The plan before is the last that everybody had built, and chunks that a later one has given count for nothing: some
  workers may have them by now, and others of the same walker not yet.
- Any other begins as a copy of one that goes on. If none does, all go back to the newest checkpoint, each to the walker
  there that has its number.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from skein.plan.agreeing.walkers import walkers_of
from skein.plan.changing.clauses import parse_clauses
from skein.plan.plan import ChunkPlan, Plan
from skein.protocol.coordinator.runs.placing.sources import Sources, holders_by_stage
from skein.protocol.log.records import CheckpointCommitted
from skein.protocol.messages.directives import SourceKind, StateSource
from skein.protocol.messages.reports import Ack
from skein.types import ChunkRef, Step, WorkerId

Walker = tuple[ChunkRef, ...]


def walker_sources(
    plan: Plan,
    before: Plan | None,
    acks: Mapping[WorkerId, Ack],
    *,
    version: Step,
    checkpoint: CheckpointCommitted | None,
    given: Collection[ChunkRef] = (),
) -> Sources:
    """Sources of all chunks of `plan`, a plan of many walkers.

    Args:
        plan: to be put into place.
        before: the last plan that everybody had built.
        acks: what members hold.
        version: the job's.
        checkpoint: the newest.
        given: chunks that plans since then have given somebody, who may have them by now.
    """
    held = holders_by_stage(acks, version)
    is_same_cut = before is not None and before.stages == plan.stages
    earlier = whole_walkers(before, acks, version=version, given=given) if before is not None else []
    earlier = earlier if is_same_cut else []
    wanted = walkers_of(plan)
    numbers = {chunk: number for number, walker in enumerate(wanted) for chunk in walker}
    if version == 0:
        return _all(wanted, StateSource(kind=SourceKind.INITIAL, version=version), version)
    if earlier:
        by_chunk = _copied(wanted, earlier, version)
        return Sources(version=version, by_chunk=by_chunk, unheld=(), walkers=numbers)
    unheld = tuple(x for x in plan.stages if x not in held) or plan.stages
    saved = Step(0) if checkpoint is None else checkpoint.version
    if checkpoint is None:
        source = StateSource(kind=SourceKind.INITIAL, version=saved)
    else:
        source = StateSource(kind=SourceKind.CHECKPOINT, version=saved, url=checkpoint.url)
    sources = _all(wanted, source, saved)
    return Sources(version=saved, by_chunk=sources.by_chunk, unheld=unheld, walkers=numbers)


def whole_walkers(
    before: Plan, acks: Mapping[WorkerId, Ack], *, version: Step, given: Collection[ChunkRef] = ()
) -> list[Walker]:
    """Walkers of `before` of which every chunk is here at `version`, and nobody has given it anything since."""
    held, stages = holders_by_stage(acks, version), {stage.index: stage for stage in before.stages}
    return [
        walker
        for walker in walkers_of(before)
        if all(x.worker in held.get(stages[x.stage], ()) and x not in given for x in walker)
    ]


def held_walkers(
    before: Plan, acks: Mapping[WorkerId, Ack], *, version: Step, given: Collection[ChunkRef] = ()
) -> Plan | None:
    """Walkers that are left of `before`, as a plan without paths; None if no walker is whole."""
    walkers = whole_walkers(before, acks, version=version, given=given)
    if not walkers:
        return None
    chunks = tuple(
        ChunkPlan(chunk=chunk, slots=1) for of_stage in zip(*walkers, strict=True) for chunk in of_stage
    )
    return replace(
        before,
        chunks=chunks,
        paths=(),
        evaluation_paths=(),
        schedules=(),
        alternates=(),
        groups=(),
        reason=parse_clauses("held"),
    )


def _all(walkers: Iterable[Walker], source: StateSource, version: Step) -> Sources:
    by_chunk = {chunk: source for walker in walkers for chunk in walker}
    return Sources(version=version, by_chunk=by_chunk, unheld=())


def _copied(wanted: Iterable[Walker], earlier: list[Walker], version: Step) -> dict[ChunkRef, StateSource]:
    """Sources by chunk: walkers that go on keep their chunks; others copy donors with most of theirs, in turn.

    A worker that is given another's chunk may not be asked for the one that it gives up: it may have given it up by
    then. If that cannot be had otherwise, all copy one donor.
    """
    walkers = list(wanted)
    new = [walker for walker in walkers if walker not in earlier]
    donors = {walker: _nearest(walker, earlier, place) for place, walker in enumerate(new)}
    replaced = {chunk for walker in new for chunk in walker if chunk not in donors[walker]}
    if any(not replaced.isdisjoint(donor) for donor in donors.values()):
        donors = dict.fromkeys(new, earlier[0])
    by_chunk: dict[ChunkRef, StateSource] = {}
    for walker in walkers:
        for chunk, given in zip(walker, donors.get(walker, walker), strict=True):
            # Who has this very chunk already, as another walker's, needs the donor's all the same.
            kind = SourceKind.KEEP if given == chunk else SourceKind.PEER
            peer = None if kind is SourceKind.KEEP else given.worker
            by_chunk[chunk] = StateSource(kind=kind, version=version, peer=peer)
    return by_chunk


def _nearest(walker: Walker, earlier: list[Walker], turn: int) -> Walker:
    """Donor whose turn it is, of those with most of the walker's chunks."""
    num_shared = [len(set(walker) & set(donor)) for donor in earlier]
    nearest = [donor for donor, n in zip(earlier, num_shared, strict=True) if n == max(num_shared)]
    return nearest[turn % len(nearest)]
