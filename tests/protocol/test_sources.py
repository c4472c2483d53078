"""Where state comes from, and what each worker is told."""

from skein.plan.plan import Plan
from skein.protocol.messages import Ack, ChunkVersion, SourceKind
from skein.protocol.records import CheckpointCommitted
from skein.protocol.runs.sources import Sources, assignments, choose_sources
from skein.types import Epoch, Generation, JobId, Layout, StageSpec, Step, WorkerId
from tests.support.desk import checkpoint
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
) -> Sources:
    return choose_sources(plan, acks(held), version=Step(version), checkpoint=saved)


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
        epoch=Epoch(3),
        generation=Generation(7),
        job=JOB,
        job_spec="{}",
        resumptions={},
    )
    assert set(told) == set(plan.workers)
    first, middle = told[WorkerId("w0a")], told[WorkerId("w1b")]
    assert (first.epoch, first.generation, first.version, first.num_paths) == (3, 7, 0, 4)
    assert [(held.stage.index, held.evaluation_paths) for held in first.chunks] == [(0, (0, 2)), (2, (0, 2))]
    assert first.schedule == next(x for x in plan.schedules if x.worker == "w0a")
    assert [origin.microbatch for origin in first.origins] == [0, 2]
    assert first.evaluation_origins == first.origins
    assert first.num_evaluation_paths == 4
    assert [group.group for group in first.groups] == ["s0", "s2"]
    assert middle.origins == middle.evaluation_origins == ()
    assert [group.group for group in middle.groups] == ["s1"]


def test_evaluation_begins_where_its_own_paths_do() -> None:
    first, second = chunk(0, "a"), chunk(0, "b")
    last = chunk(1, "c")
    plan = plan_of(
        [first, second, last], [path(first, last)] * 3, full_paths=[path(second, last), path(first, last)]
    )
    told = assignments(
        plan,
        sources({}, version=0, plan=plan),
        epoch=Epoch(1),
        generation=Generation(1),
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
