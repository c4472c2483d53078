"""Which places a build looks at for a chunk's state, in which order, and who is to blame where it ends."""

import pytest

from skein.errors import LocalError, RemoteError, UnfitError, UserError
from skein.plan.plan import Schedule
from skein.protocol.messages.directives import (
    Assign,
    ChunkAssignment,
    Member,
    Neighbour,
    SourceKind,
    StateSource,
)
from skein.protocol.messages.reports import CheckpointUnread, Suspected, Trouble
from skein.protocol.worker.keeping.search import StatePlace, StateSearch
from skein.types import Epoch, Generation, Incarnation, Step, WorkerId
from tests.support.hands import JOB
from tests.support.plans import stage_spec

ME, DONOR, OTHER = (WorkerId(name) for name in ("w1", "w5", "w2"))
MEMBERS = tuple(Member(worker=name, incarnation=Incarnation("i"), address="") for name in (ME, OTHER, DONOR))
AT, GENERATION = Step(7), Generation(3)


def search_of(source: StateSource) -> tuple[StateSearch[str], ChunkAssignment]:
    chunk = ChunkAssignment(stage=stage_spec(1), slots=1, source=source, evaluation_paths=())
    assign = Assign(
        epoch=Epoch(1),
        generation=GENERATION,
        job=JOB,
        job_spec="",
        version=source.version,
        num_paths=1,
        chunks=(chunk,),
        schedule=Schedule(worker=ME, ops=()),
        origins=(),
        num_evaluation_paths=0,
        evaluation_origins=(),
        groups=(),
        resumption=None,
    )
    return StateSearch(assign, ME, MEMBERS), chunk


def seen(source: StateSource, *, has: StatePlace | None = None) -> list[StatePlace]:
    """Places that are looked at, if only one of them has anything."""
    search, chunk = search_of(source)
    places = []
    try:
        for look in search.looks(chunk):
            places.append(look.place)
            look.found = "state" if look.place is has else None
    except LocalError:
        assert has not in places
    return places


PEER = StateSource(kind=SourceKind.PEER, version=AT, peer=DONOR)


@pytest.mark.parametrize(
    ("source", "places"),
    [
        (StateSource(kind=SourceKind.KEEP, version=AT), [StatePlace.CHUNK, StatePlace.COPY]),
        (PEER, [StatePlace.FOLLOWED, StatePlace.PEER]),
        (StateSource(kind=SourceKind.PEER, version=AT, peer=DONOR, was_averaged=True), [StatePlace.PEER]),
        (StateSource(kind=SourceKind.PEER, version=AT, peer=ME), [StatePlace.COPY]),
        (StateSource(kind=SourceKind.CHECKPOINT, version=AT), [StatePlace.CHECKPOINT]),
        (StateSource(kind=SourceKind.INITIAL, version=Step(0)), [StatePlace.INITIAL]),
    ],
)
def test_each_place_is_looked_at_until_one_has_the_state(
    source: StateSource, places: list[StatePlace]
) -> None:
    assert seen(source) == places
    for number, place in enumerate(places, start=1):
        assert seen(source, has=place) == places[:number]


def test_a_copy_catches_up_with_what_the_donor_has_first() -> None:
    search, chunk = search_of(PEER)
    look = next(search.looks(chunk))
    assert [member.worker for member in look.peers] == [DONOR, OTHER]


def test_a_stage_made_of_its_neighbours_takes_each_from_where_it_is() -> None:
    besides = tuple(
        Neighbour(stage=stage_spec(index), peer=peer, weight=weight)
        for index, peer, weight in ((0, ME, 0.5), (2, DONOR, 1.5))
    )
    source = StateSource(kind=SourceKind.NEIGHBOURS, version=AT, neighbours=besides)
    search, chunk = search_of(source)
    for look in search.looks(chunk):
        look.found = f"{look.place.name} {look.stage.index}"
    assert [(part.found, part.weight) for part in search.parts] == [("CHUNK 0", 0.5), ("PEER 2", 1.5)]


def test_only_a_peer_that_was_asked_is_blamed() -> None:
    search, chunk = search_of(PEER)
    late = Trouble(generation=GENERATION, is_fatal=False, reason="late")
    for look in search.looks(chunk):
        if look.place is StatePlace.PEER:
            gone = search.failed(RemoteError("gone"), "gone").report
            assert gone == Suspected(generation=GENERATION, peer=DONOR, reason="gone")
            assert search.failed(LocalError("late"), "late").report == late
            look.found = "state"
    assert search.failed(RemoteError("late"), "late").report == late


def test_a_donor_that_is_no_member_is_nobodys_fault() -> None:
    search, chunk = search_of(StateSource(kind=SourceKind.PEER, version=AT, peer=WorkerId("w8")))
    with pytest.raises(LocalError, match="w8, which should give stage 1, is not a peer") as raised:
        list(search.looks(chunk))
    assert isinstance(search.failed(raised.value, "no").report, Trouble)


def test_a_checkpoint_that_cannot_be_read_is_told_with_its_version_whatever_was_wrong() -> None:
    search, _ = search_of(StateSource(kind=SourceKind.CHECKPOINT, version=AT))
    for need in search.needs():
        assert need is StatePlace.CHECKPOINT
        unread = CheckpointUnread(generation=GENERATION, version=AT, reason="no")
        assert search.failed(UserError("a", 1, "b"), "no").report == unread
    assert isinstance(search.failed(RemoteError("no"), "no").report, Trouble)


def test_a_place_for_checkpoints_that_is_silent_is_not_the_users_fault_but_a_wrong_one_is() -> None:
    search, _ = search_of(StateSource(kind=SourceKind.INITIAL, version=Step(0)))
    assert next(search.needs()) is StatePlace.ARCHIVE
    silent = CheckpointUnread(generation=GENERATION, version=Step(0), reason="checkpoint.url: silent")
    assert search.failed(OSError("silent"), "silent").report == silent
    for error, is_fatal in (
        (UserError("checkpoint.url", "x", "another"), True),
        (UnfitError("data", "x", "y"), False),
    ):
        told = Trouble(generation=GENERATION, is_fatal=is_fatal, reason="x", is_unfit=not is_fatal)
        assert search.failed(error, "x").report == told
