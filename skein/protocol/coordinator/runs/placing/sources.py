"""Sources of each chunk's state when a plan is put into place, and what each worker is told."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skein.plan.plan import Path, Plan
from skein.protocol.coordinator.runs.placing.averaging import Beside, besides
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import CheckpointCommitted
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.directives import (
    Assign,
    Beginning,
    ChunkAssignment,
    Neighbour,
    Origin,
    Resumption,
    SourceKind,
    StateSource,
)
from skein.protocol.messages.reports import Ack
from skein.types import ChunkRef, JobId, MicrobatchId, StageSpec, Step, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The version everybody starts from and each chunk's source.

    `unheld` are stages that nobody had any more, `averaged` those of them that are made of their neighbours: all or
    none. `walkers` has the number of each chunk's walker where there are many.
    """

    version: Step
    by_chunk: Mapping[ChunkRef, StateSource]
    unheld: tuple[StageSpec, ...]
    averaged: tuple[StageSpec, ...] = ()
    walkers: Mapping[ChunkRef, int] = field(default_factory=dict)


def choose_sources(
    plan: Plan,
    acks: Mapping[WorkerId, Ack],
    *,
    version: Step,
    checkpoint: CheckpointCommitted | None,
    job: JobHistory,
) -> Sources:
    """Sources at `version` if each stage is held at it, else at the newest version that can be had.

    That is one of which every stage has a copy in somebody's memory, or the newest checkpoint, or what the seed draws.
    If that is older than `version`, lost stages are made of their neighbours instead, where the job allows it.
    A chunk stays where it is; otherwise a peer gives it, donors taking turns, one in quarantine only if nobody else has
    it; a checkpoint is read last.
    """
    held: Mapping[StageSpec, Sequence[WorkerId]] = holders_by_stage(acks, version)
    unheld = tuple(stage for stage in plan.stages if stage not in held) if version > 0 else ()
    near: Mapping[StageSpec, Beside] = {}
    if unheld:
        backup, kept = newest_whole(plan.stages, acks, at_most=version, averaged=job.averaged.values())
        saved = Step(0) if checkpoint is None else checkpoint.version
        if max(backup, saved) < version:
            near = besides(job, plan.stages, held)
        if not near and backup > saved:
            version, held = backup, kept
        elif not near:
            version, held = saved, holders_by_stage(acks, saved)
    num_given: dict[WorkerId, int] = {}
    by_chunk: dict[ChunkRef, StateSource] = {}

    def donor_of(stage: StageSpec) -> WorkerId:
        donor = min(held[stage], key=lambda x: (x in job.quarantined, num_given.get(x, 0), x))
        num_given[donor] = num_given.get(donor, 0) + 1
        return donor

    stages = {stage.index: stage for stage in plan.stages}
    for placed in plan.chunks:
        stage = stages[placed.chunk.stage]
        holders = held.get(stage, ())
        if placed.chunk.worker in holders:
            by_chunk[placed.chunk] = StateSource(kind=SourceKind.KEEP, version=version)
        elif version == 0:
            by_chunk[placed.chunk] = StateSource(kind=SourceKind.INITIAL, version=version)
        elif holders:
            by_chunk[placed.chunk] = StateSource(
                kind=SourceKind.PEER,
                version=version,
                peer=donor_of(stage),
                was_averaged=job.averaged.get(stage) == version,
            )
        elif stage in near:
            by_chunk[placed.chunk] = StateSource(
                kind=SourceKind.NEIGHBOURS,
                version=version,
                neighbours=tuple(
                    Neighbour(stage=beside, peer=donor_of(beside), weight=weight)
                    for beside, weight in near[stage]
                ),
            )
        else:
            assert checkpoint is not None and checkpoint.version == version
            source = StateSource(kind=SourceKind.CHECKPOINT, version=version, url=checkpoint.url)
            by_chunk[placed.chunk] = source
    return Sources(version=version, by_chunk=by_chunk, unheld=unheld, averaged=tuple(near))


def holders_by_stage(acks: Mapping[WorkerId, Ack], version: Step) -> dict[StageSpec, list[WorkerId]]:
    """Workers that have each stage at `version`, sorted, as far as any has."""
    held: dict[StageSpec, list[WorkerId]] = {}
    for worker in sorted(acks):
        for stage in dict.fromkeys(chunk.stage for chunk in acks[worker].chunks if chunk.version == version):
            held.setdefault(stage, []).append(worker)
    return held


def newest_whole(
    stages: Iterable[StageSpec],
    acks: Mapping[WorkerId, Ack],
    *,
    at_most: Step,
    averaged: Collection[Step] = (),
) -> tuple[Step, dict[StageSpec, tuple[WorkerId, ...]]]:
    """The newest version, not above `at_most`, of which somebody has each stage, chunk or copy; and who; 0: none.

    At versions that are `averaged`, a stage may be held as it was before and as it is since, so they do not count.
    """
    who: dict[tuple[Step, StageSpec], list[WorkerId]] = {}
    for worker in sorted(acks):
        for held in (*acks[worker].chunks, *acks[worker].backups):
            if 0 < held.version <= at_most and held.version not in averaged:
                who.setdefault((held.version, held.stage), []).append(worker)
    wanted = tuple(stages)
    for version in sorted({version for version, _ in who}, reverse=True):
        if all((version, stage) in who for stage in wanted):
            return version, {stage: tuple(dict.fromkeys(who[version, stage])) for stage in wanted}
    return Step(0), {}


def assignments(
    plan: Plan,
    sources: Sources,
    *,
    job: JobId,
    job_spec: str,
    resumptions: Mapping[WorkerId, Resumption],
    begins: Beginning | None = None,
    choices: tuple[ToldChoice, ...] = (),
    data_fingerprint: str = "",
) -> dict[WorkerId, Assign]:
    """Assignment of each worker of the plan; `resumptions` are of those who go on with a step in progress.

    `choices`: by which samples are drawn, which those need alone whose paths begin there. `data_fingerprint`: of the
    data that the job was trained on; "": of none yet.
    """
    stages = {stage.index: stage for stage in plan.stages}
    origins, evaluation_origins = _origins(plan.paths), _origins(plan.evaluation_paths)
    schedules = {schedule.worker: schedule for schedule in plan.schedules}
    evaluation_paths: defaultdict[ChunkRef, list[int]] = defaultdict(list)
    for index, path in enumerate(plan.evaluation_paths):
        for hop in path.hops:
            evaluation_paths[hop].append(index)
    chunks: dict[WorkerId, list[ChunkAssignment]] = {}
    for placed in plan.chunks:
        assigned = ChunkAssignment(
            stage=stages[placed.chunk.stage],
            slots=placed.slots,
            source=sources.by_chunk[placed.chunk],
            evaluation_paths=tuple(evaluation_paths[placed.chunk]),
            walker=sources.walkers.get(placed.chunk, 0),
        )
        chunks.setdefault(placed.chunk.worker, []).append(assigned)
    return {
        worker: Assign(
            job=job,
            job_spec=job_spec,
            version=sources.version,
            num_paths=len(plan.paths),
            chunks=tuple(held),
            schedule=schedules[worker],
            origins=tuple(origins[worker]),
            num_evaluation_paths=len(plan.evaluation_paths),
            evaluation_origins=tuple(evaluation_origins[worker]),
            groups=tuple(group for group in plan.groups if worker in group.workers),
            resumption=resumptions.get(worker),
            begins=begins,
            choices=choices if origins[worker] else (),
            data_fingerprint=data_fingerprint,
        )
        for worker, held in chunks.items()
    }


def _origins(paths: Sequence[Path]) -> defaultdict[WorkerId, list[Origin]]:
    """Microbatches that begin at each worker, with their paths."""
    origins: defaultdict[WorkerId, list[Origin]] = defaultdict(list)
    for index, path in enumerate(paths):
        origins[path.hops[0].worker].append(Origin(microbatch=MicrobatchId(index), path=path))
    return origins
