"""Where state comes from, and what each worker is told."""

from dataclasses import replace

import pytest

from skein.config.job import BackupSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.sources import Sources, assignments, choose_sources
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import CheckpointCommitted, Quarantined
from skein.protocol.messages.directives import ChunkVersion, GroupResult, SourceKind
from skein.protocol.messages.reports import Ack
from skein.types import (
    Attempt,
    Epoch,
    Generation,
    JobId,
    Layout,
    StageSpec,
    Step,
    WorkerId,
    parse_group,
)
from tests.support.desk import checkpoint
from tests.support.hands import record
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, path, plan_of, stage_spec

PLAN = grid_plan(stages=2, replicas=2)
JOB = JobId("small-1")


def acks(held: dict[str, list[tuple[StageSpec, int]]]) -> dict[WorkerId, Ack]:
    return {
        WorkerId(worker): Ack(
            generation=Generation(1),
            chunks=tuple(ChunkVersion(stage=stage, version=Step(version)) for stage, version in chunks),
            progress=(),
            backups=(),
        )
        for worker, chunks in held.items()
    }


def sources(
    held: dict[str, list[tuple[StageSpec, int]]],
    *,
    version: int,
    saved: CheckpointCommitted | None = None,
    plan: Plan = PLAN,
    job: JobHistory | None = None,
) -> Sources:
    return choose_sources(
        plan, acks(held), version=Step(version), checkpoint=saved, job=job or averaging(False)
    )


def kinds(found: Sources) -> dict[str, SourceKind]:
    return {f"{at.worker}:{at.stage}": source.kind for at, source in found.by_chunk.items()}


def test_at_first_everything_is_drawn_but_what_is_there() -> None:
    found = sources({"w0a": [(stage_spec(0), 0)]}, version=0)
    assert (found.version, found.unheld) == (0, ())
    assert kinds(found) == {
        "w0a:0": SourceKind.KEEP,
        "w0b:0": SourceKind.INITIAL,
        "w1a:1": SourceKind.INITIAL,
        "w1b:1": SourceKind.INITIAL,
    }


def test_chunks_stay_where_they_are_and_donors_take_turns() -> None:
    plan = grid_plan(stages=1, replicas=4)
    held = {"w0a": [(stage_spec(0), 3)], "w0b": [(stage_spec(0), 3)]}
    found = sources(held, version=3, plan=plan)
    assert found.by_chunk[chunk(0, "w0a")].kind is SourceKind.KEEP
    assert [found.by_chunk[chunk(0, worker)].peer for worker in ("w0c", "w0d")] == ["w0a", "w0b"]


def test_a_chunk_at_another_version_is_worth_nothing() -> None:
    held = {"w0a": [(stage_spec(0), 3)], "w0b": [(stage_spec(0), 2)], "w1a": [(stage_spec(1), 3)]}
    found = sources(held, version=3)
    assert found.by_chunk[chunk(0, "w0b")].kind is SourceKind.PEER
    assert found.by_chunk[chunk(0, "w0b")].peer == "w0a"


def test_a_chunk_of_another_cut_is_worth_nothing() -> None:
    other = StageSpec(index=stage_spec(0).index, first=0, stop=3)
    found = sources({"w0a": [(other, 3)], "w1a": [(stage_spec(1), 3)]}, version=3, saved=checkpoint(JOB, 2))
    assert found.unheld == (stage_spec(0),)
    assert found.version == 2


def test_a_donor_may_have_no_place_in_the_plan() -> None:
    plan = grid_plan(stages=1, replicas=1)
    found = sources({"leaving": [(stage_spec(0), 3)]}, version=3, plan=plan)
    assert found.by_chunk[chunk(0, "w0a")].peer == "leaving"


def test_a_worker_in_quarantine_gives_only_what_nobody_else_has() -> None:
    job = averaging(False)
    job.quarantined[WorkerId("w0a")] = Quarantined(
        job=JOB, worker=WorkerId("w0a"), step=Step(2), reason="lied", wall_s=0.0
    )
    held = {"w0a": [(stage_spec(0), 3)], "w0c": [(stage_spec(0), 3)]}
    plan = grid_plan(stages=1, replicas=4)
    found = sources(held, version=3, plan=plan, job=job)
    assert [found.by_chunk[chunk(0, worker)].peer for worker in ("w0b", "w0d")] == ["w0c", "w0c"]
    alone = sources({"w0a": held["w0a"]}, version=3, plan=plan, job=job)
    assert alone.by_chunk[chunk(0, "w0b")].peer == "w0a"


def test_what_nobody_holds_takes_everybody_to_the_checkpoint() -> None:
    held = {"w0a": [(stage_spec(0), 3)], "w0b": [(stage_spec(0), 2)]}
    found = sources(held, version=3, saved=checkpoint(JOB, 2, url="s3://b"))
    assert (found.version, found.unheld) == (2, (stage_spec(1),))
    # Who is at the checkpoint's version by chance keeps its chunk, and gives it.
    assert kinds(found) == {
        "w0a:0": SourceKind.PEER,
        "w0b:0": SourceKind.KEEP,
        "w1a:1": SourceKind.CHECKPOINT,
        "w1b:1": SourceKind.CHECKPOINT,
    }
    assert found.by_chunk[chunk(1, "w1a")].url == "s3://b"


def test_without_a_checkpoint_it_begins_anew() -> None:
    found = sources({}, version=3)
    assert (found.version, found.unheld) == (0, PLAN.stages)
    assert set(kinds(found).values()) == {SourceKind.INITIAL}


def test_each_worker_is_told_its_chunks_origins_and_groups() -> None:
    plan = grid_plan(stages=2, replicas=2, layout=Layout.LOOP)
    told = assignments(
        plan,
        sources({}, version=0, plan=plan),
        job=JOB,
        job_spec="{}",
        resumptions={},
    )
    assert set(told) == set(plan.workers)
    first, middle = told[WorkerId("w0a")], told[WorkerId("w1b")]
    assert (first.version, first.num_paths) == (0, 4)
    assert [(held.stage.index, held.evaluation_paths) for held in first.chunks] == [(0, (0, 2)), (2, (0, 2))]
    assert first.schedule == next(x for x in plan.schedules if x.worker == "w0a")
    assert [origin.microbatch for origin in first.origins] == [0, 2]
    assert first.evaluation_origins == first.origins
    assert first.num_evaluation_paths == 4
    assert [str(group.group) for group in first.groups] == ["s0", "s2"]
    assert middle.origins == middle.evaluation_origins == ()
    assert [str(group.group) for group in middle.groups] == ["s1"]


def test_evaluation_begins_where_its_own_paths_do() -> None:
    first, second = chunk(0, "a"), chunk(0, "b")
    last = chunk(1, "c")
    plan = plan_of(
        [first, second, last], [path(first, last)] * 3, full_paths=[path(second, last), path(first, last)]
    )
    told = assignments(
        plan,
        sources({}, version=0, plan=plan),
        job=JOB,
        job_spec="{}",
        resumptions={},
    )
    origins = {
        w: ([o.microbatch for o in x.origins], [o.microbatch for o in x.evaluation_origins])
        for w, x in told.items()
    }
    assert origins == {"a": ([0, 1, 2], [1]), "b": ([], [0]), "c": ([], [])}
    assert [x.evaluation_paths for w in "abc" for x in told[WorkerId(w)].chunks] == [(1,), (0,), (0, 1)]
    assert told[WorkerId("b")].schedule.ops == ()


# --- averages ---

# Two layers to a stage, and blocks are layers 1 to 8: all but the ends of the first and the last stage.
DEEP = grid_plan(stages=5, replicas=2)
EQUAL = tuple(
    replace(stage, first=first, stop=stop)
    for stage, (first, stop) in zip(DEEP.stages, ((0, 3), (3, 5), (5, 7), (7, 9), (9, 12)), strict=True)
)
DEEP = replace(DEEP, stages=EQUAL)
MODEL = LlamaModel(
    shape=LlamaShape(hidden_size=16, intermediate_size=32, num_hidden_layers=10, num_attention_heads=4)
)


def averaging(is_allowed: bool) -> JobHistory:
    spec = small_job().model_copy(update={"model": MODEL, "backup": BackupSpec(neighbour_average=is_allowed)})
    return JobHistory(job=JOB, key="k", spec=spec, submitted_wall_s=0.0)


def average(*, norms: dict[int, float] | None = None, made: dict[int, int] | None = None) -> JobHistory:
    """Of the last step: squared norms of summed gradients over half a token each."""
    results = tuple(
        GroupResult(
            group=parse_group(f"s{stage}"),
            attempt=Attempt(epoch=Epoch(1), generation=Generation(1), number=0),
            digest="",
            squared_norm=norm,
            weight=2.0,
            num_tokens=1,
        )
        for stage, norm in (norms or {}).items()
    )
    return replace(
        averaging(True),
        last_commit=replace(record(2), results=results),
        averaged={EQUAL[stage]: Step(version) for stage, version in (made or {}).items()},
    )


def without(*lost: int, version: int = 3) -> dict[str, list[tuple[StageSpec, int]]]:
    kept = [stage for stage in EQUAL if stage.index not in lost]
    return {f"w{stage.index}{x}": [(stage, version)] for stage in kept for x in "ab"}


def averaged(lost: tuple[int, ...], *, saved: int | None = None, job: JobHistory | None = None) -> Sources:
    kept = None if saved is None else checkpoint(JOB, saved, num_stages=5)
    return sources(
        without(*lost),
        version=3,
        saved=kept,
        plan=DEEP,
        job=job or average(norms={1: 1.0, 3: 3.0}),
    )


def test_a_lost_inner_stage_is_made_of_its_neighbours_at_the_present_version() -> None:
    found = averaged((2,), saved=2)
    assert (found.version, found.averaged) == (3, (EQUAL[2],))
    first, second = (found.by_chunk[chunk(2, worker)] for worker in ("w2a", "w2b"))
    assert first.kind is second.kind is SourceKind.NEIGHBOURS
    # Squared norms of mean gradients: the weight of a sum enters squared.
    assert [(x.stage, x.peer, x.weight) for x in first.neighbours] == [
        (EQUAL[1], "w1a", 4.0),
        (EQUAL[3], "w3a", 12.0),
    ]
    assert [x.peer for x in second.neighbours] == ["w1b", "w3b"]
    others = {source.kind for at, source in found.by_chunk.items() if at.stage != 2}
    assert others == {SourceKind.KEEP}


@pytest.mark.parametrize("lost", [(1,), (1, 3)])
def test_ends_of_the_model_do_not_count_in_a_neighbour(lost: tuple[int, ...]) -> None:
    assert averaged(lost).averaged == tuple(EQUAL[stage] for stage in lost)


@pytest.mark.parametrize("lost", [(0,), (4,), (1, 2), (0, 2), (0, 1, 2, 3, 4)])
def test_ends_and_neighbours_of_each_other_are_not_averaged(lost: tuple[int, ...]) -> None:
    found = averaged(lost, saved=2)
    assert (found.version, found.averaged) == (2, ())
    assert found.by_chunk[chunk(lost[0], f"w{lost[0]}a")].kind is SourceKind.CHECKPOINT


def test_stages_that_are_not_alike_are_not_averaged() -> None:
    cut = (*EQUAL[:3], replace(EQUAL[3], stop=8), replace(EQUAL[4], first=8))
    held = {f"w{stage.index}a": [(stage, 3)] for stage in cut if stage.index != 2}
    found = sources(held, version=3, plan=replace(DEEP, stages=cut), job=average())
    assert (found.version, found.averaged) == (0, ())


@pytest.mark.parametrize("norms", [{}, {1: 1.0}, {1: 1.0, 3: 0.0}, {1: 1.0, 3: float("inf")}])
def test_where_a_norm_is_unknown_both_neighbours_count_the_same(norms: dict[int, float]) -> None:
    source = averaged((2,), job=average(norms=norms)).by_chunk[chunk(2, "w2a")]
    assert [neighbour.weight for neighbour in source.neighbours] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("where", "version", "expected"),
    [
        ("backup", 3, SourceKind.PEER),
        ("backup", 2, SourceKind.NEIGHBOURS),
        ("saved", 3, SourceKind.CHECKPOINT),
    ],
)
def test_what_is_as_new_goes_before_an_average_and_what_is_older_after(
    where: str, version: int, expected: SourceKind
) -> None:
    said = acks(without(2))
    if where == "backup":
        copy = tuple(ChunkVersion(stage=stage, version=Step(version)) for stage in EQUAL)
        said[WorkerId("w0a")] = replace(said[WorkerId("w0a")], backups=copy)
    saved = checkpoint(JOB, version, num_stages=5) if where == "saved" else None
    found = choose_sources(DEEP, said, version=Step(3), checkpoint=saved, job=average())
    assert found.version == 3
    assert found.by_chunk[chunk(2, "w2a")].kind is expected


def test_a_job_that_does_not_allow_it_goes_back_to_the_newer_of_backup_and_checkpoint() -> None:
    held = acks(without(2))
    copy = tuple(ChunkVersion(stage=stage, version=Step(1)) for stage in EQUAL)
    held[WorkerId("w0a")] = replace(held[WorkerId("w0a")], backups=copy)
    never = averaging(False)
    saved = checkpoint(JOB, 2, num_stages=5)
    assert choose_sources(DEEP, held, version=Step(3), checkpoint=None, job=never).version == 1
    assert choose_sources(DEEP, held, version=Step(3), checkpoint=saved, job=never).version == 2


def test_a_peer_is_asked_anew_for_a_version_that_was_averaged() -> None:
    held = {**without(2), "w2a": [(EQUAL[2], 3)]}
    for version, expected in ((3, True), (2, False)):
        found = sources(held, version=3, plan=DEEP, job=average(made={2: version}))
        assert found.by_chunk[chunk(2, "w2b")].was_averaged is expected
        assert found.by_chunk[chunk(2, "w2b")].kind is SourceKind.PEER


def test_copies_at_a_version_that_was_averaged_do_not_count_for_some_may_be_of_before() -> None:
    held = acks(without(2))
    for worker, version in (("w0a", 3), ("w1a", 2)):
        copies = tuple(ChunkVersion(stage=stage, version=Step(version)) for stage in EQUAL)
        held[WorkerId(worker)] = replace(held[WorkerId(worker)], backups=copies)
    again = average(made={2: 3})
    found = choose_sources(DEEP, held, version=Step(3), checkpoint=None, job=again)
    assert (found.version, found.averaged) == (3, (EQUAL[2],))
    never = replace(again, spec=averaging(False).spec)
    assert choose_sources(DEEP, held, version=Step(3), checkpoint=None, job=never).version == 2
