"""Where walkers come from when a plan is put into place: no walker is made of two, and none of a stranger's."""

from collections.abc import Collection
from dataclasses import replace

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.placing.sources import Sources
from skein.protocol.coordinator.runs.placing.walking import held_walkers, walker_sources, whole_walkers
from skein.protocol.log.records import CheckpointCommitted
from skein.protocol.messages.directives import ChunkVersion, SourceKind
from skein.protocol.messages.reports import Ack
from skein.types import ChunkRef, Generation, JobId, Step, WorkerId
from tests.support.desk import checkpoint
from tests.support.plans import chunk, path, plan_of, stage_spec

A = (chunk(0, "a0"), chunk(1, "a1"))
B = (chunk(0, "b0"), chunk(1, "b1"))
C = (chunk(0, "c0"), chunk(1, "c1"))


def plan_with(*walkers: tuple[ChunkRef, ...]) -> Plan:
    """Walkers in the order of their first holders' names."""
    plan = plan_of([x for walker in walkers for x in walker], [path(*walker) for walker in walkers])
    by_stage = [[walker[s] for walker in walkers] for s in range(2)]
    chunks = tuple(next(x for x in plan.chunks if x.chunk == at) for stage in by_stage for at in stage)
    return replace(plan, chunks=chunks)


def acks(*walkers: tuple[ChunkRef, ...], version: int = 5) -> dict[WorkerId, Ack]:
    return {
        at.worker: Ack(
            generation=Generation(2),
            chunks=(ChunkVersion(stage=stage_spec(at.stage), version=Step(version)),),
            progress=(),
            backups=(),
        )
        for walker in walkers
        for at in walker
    }


def sources(
    plan: Plan,
    before: Plan | None,
    here: dict[WorkerId, Ack],
    *,
    version: int = 5,
    saved: CheckpointCommitted | None = None,
    given: Collection[ChunkRef] = (),
) -> Sources:
    return walker_sources(plan, before, here, version=Step(version), checkpoint=saved, given=given)


def told(found: Sources) -> dict[str, str]:
    """For each worker what it does, and of whom it gets what it has."""
    return {
        at.worker: source.kind.value + (f" {source.peer}" if source.peer else "")
        for at, source in found.by_chunk.items()
    }


def test_walkers_that_are_whole_keep_what_they_have() -> None:
    plan = plan_with(A, B)
    assert set(told(sources(plan, plan, acks(A, B))).values()) == {"keep"}


def test_a_newcomer_gets_all_of_one_walker() -> None:
    found = sources(plan_with(A, B, C), plan_with(A, B), acks(A, B))
    assert told(found) == {
        "a0": "keep",
        "b0": "keep",
        "c0": "peer a0",
        "a1": "keep",
        "b1": "keep",
        "c1": "peer a1",
    }


def test_who_is_left_of_a_broken_walker_begins_as_a_copy_too() -> None:
    mended = (chunk(0, "b0"), chunk(1, "c1"))
    found = sources(plan_with(A, mended), plan_with(A, B), acks(A, (B[0],)))
    assert told(found) == {"a0": "keep", "a1": "keep", "b0": "peer a0", "c1": "peer a1"}


def test_two_halves_of_walkers_make_none() -> None:
    halves = (chunk(0, "b0"), chunk(1, "c1"))
    found = sources(plan_with(A, halves), plan_with(A, B, C), acks(A, (B[0],), (C[1],)))
    assert told(found)["b0"] == "peer a0"
    assert told(found)["c1"] == "peer a1"


def test_who_may_have_been_given_something_since_is_not_believed() -> None:
    # The plan before gave b0 a copy; whether it has it by now nobody knows, and b1 has what it had.
    plan = plan_with(A, B)
    found = sources(plan, plan, acks(A, B), given={B[0]})
    assert told(found) == {"a0": "keep", "a1": "keep", "b0": "peer a0", "b1": "peer a1"}


def test_who_is_at_another_version_holds_nothing() -> None:
    plan = plan_with(A, B)
    found = sources(plan, plan, acks(A) | acks(B, version=4))
    assert told(found)["b0"] == "peer a0"


def test_without_a_whole_walker_all_go_back_to_the_checkpoint() -> None:
    plan = plan_with(A, B)
    found = sources(plan, plan, acks((A[0],), (B[1],)), saved=checkpoint(JobId("small-1"), 3))
    assert found.version == 3
    assert {source.kind for source in found.by_chunk.values()} == {SourceKind.CHECKPOINT}
    assert found.unheld


def test_without_a_checkpoint_either_all_begin_again() -> None:
    plan = plan_with(A, B)
    found = sources(plan, plan, {})
    assert found.version == 0
    assert {source.kind for source in found.by_chunk.values()} == {SourceKind.INITIAL}


def test_copies_are_taken_from_all_who_go_on_in_turn() -> None:
    new = [(chunk(0, f"n{i}"), chunk(1, f"m{i}")) for i in range(2)]
    found = sources(plan_with(A, B, *new), plan_with(A, B), acks(A, B))
    assert (told(found)["n0"], told(found)["m0"]) == ("peer a0", "peer a1")
    assert (told(found)["n1"], told(found)["m1"]) == ("peer b0", "peer b1")


def test_nobody_copies_a_chunk_that_its_holder_gives_up() -> None:
    """Who fetches it later than its holder has taken another walker's gets that one's."""
    new, newer = (chunk(0, "n0"), B[1]), (chunk(0, "m0"), C[1])
    found = sources(plan_with(new, newer), plan_with(A, B, C), acks(A, B, C))
    assert told(found) == {"n0": "peer b0", "b1": "keep", "m0": "peer c0", "c1": "keep"}


def test_of_two_that_swap_halves_one_gives_both_and_keeps_its_own() -> None:
    found = sources(plan_with((A[0], B[1]), (B[0], A[1])), plan_with(A, B), acks(A, B))
    assert told(found) == {"a0": "keep", "b1": "peer a1", "b0": "peer a0", "a1": "keep"}


def test_what_is_held_is_whole_walkers_in_order() -> None:
    before = plan_with(A, B, C)
    here = acks(C, A, (B[1],))
    assert whole_walkers(before, here, version=Step(5)) == [A, C]
    held = held_walkers(before, here, version=Step(5))
    assert held is not None
    assert [x.chunk for x in held.chunks] == [A[0], C[0], A[1], C[1]]
    assert held_walkers(before, here, version=Step(5), given={A[0], C[1]}) is None
