"""Copies that a worker fetches: which goes on, what it lacks, and what takes it off the shelf."""

import pytest

from skein.errors import LocalError
from skein.protocol.messages.directives import Prefetch
from skein.protocol.worker.keeping.shelf import CopyShelf, ShelvedCopy
from skein.protocol.worker.worker_io import CopyKind, DropCopies
from skein.types import Epoch, JobId, StageIndex, Step
from tests.support.hands import JOB, record
from tests.support.plans import stage_spec

STAGE = stage_spec(1)


def asked(version: int, *, is_backup: bool = False) -> Prefetch:
    return Prefetch(
        epoch=Epoch(1),
        job=JOB,
        job_spec="",
        stage=STAGE,
        version=Step(version),
        donors=(),
        is_backup=is_backup,
        drops_before=Step(0),
    )


def drop(*, followed: bool = False, before: int = 0, above: int | None = None) -> DropCopies:
    return DropCopies(
        followed=(STAGE,) if followed else (),
        backups_before=Step(before),
        above=None if above is None else Step(above),
    )


def test_a_copy_that_is_asked_for_again_goes_on_and_one_of_another_version_begins() -> None:
    shelf = CopyShelf(ShelvedCopy)
    first = shelf.asked(asked(3))
    assert shelf.asked(asked(3)) is first
    assert shelf.asked(asked(4)) is not first
    assert len({id(shelf.asked(asked(version, is_backup=True))) for version in (3, 4, 3)}) == 2


def test_what_finds_no_room_is_not_on_the_shelf() -> None:
    def full(_: Prefetch) -> ShelvedCopy:
        raise LocalError("full")

    shelf = CopyShelf(full)
    with pytest.raises(LocalError):
        shelf.asked(asked(3))
    assert list(shelf) == []


def test_a_copy_takes_each_step_in_order_once_it_is_whole() -> None:
    copy = ShelvedCopy(asked(3))
    copy.records.extend(record(step) for step in (3, 4))
    assert (copy.due, copy.lacking(Step(4))) == (None, None)
    copy.is_whole = True
    assert copy.due == record(3)
    assert copy.lacking(Step(5)) == (record(3), record(4))
    assert copy.lacking(Step(3)) == ()
    assert copy.lacking(Step(6)) is None
    copy.stepped()
    assert (copy.version, copy.due, copy.lacking(Step(3))) == (4, record(4), None)
    assert (copy.ended().version, copy.ended().kind) == (4, CopyKind.FOLLOWED)


def test_only_whole_backups_of_the_job_are_given() -> None:
    shelf = CopyShelf(ShelvedCopy)
    backup = shelf.asked(asked(3, is_backup=True))
    shelf.asked(asked(3)).is_whole = True
    assert shelf.backups(JOB, STAGE.index, Step(3)) == []
    backup.is_whole = True
    assert shelf.backups(JOB, STAGE.index, Step(3)) == [backup]
    assert shelf.backups(JobId("other-1"), STAGE.index, Step(3)) == []
    assert shelf.backups(JOB, StageIndex(0), Step(3)) == []


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (drop(followed=True), [2, 4]),
        (drop(before=3), [4, 9]),
        (drop(above=3), [2, 9]),
        (drop(above=4), [2, 4, 9]),
    ],
)
def test_what_is_of_no_more_use_comes_off(command: DropCopies, left: list[int]) -> None:
    shelf = CopyShelf(ShelvedCopy)
    every = [shelf.asked(asked(version, is_backup=True)) for version in (2, 4)] + [shelf.asked(asked(9))]
    dropped = shelf.drop(command)
    assert [copy.version for copy in shelf] == left
    assert {*map(id, dropped)} == {id(copy) for copy in every if copy.version not in left}


def test_copies_that_failed_make_room_for_others_unless_they_are_asked_for_again() -> None:
    shelf = CopyShelf(ShelvedCopy)
    failed, followed, whole = (
        shelf.asked(asked(2, is_backup=True)),
        shelf.asked(asked(3)),
        shelf.asked(asked(3, is_backup=True)),
    )
    failed.has_failed = followed.has_failed = whole.is_whole = True
    shelf.make_room()
    assert list(shelf) == [whole]
    assert shelf.asked(asked(3)) is not followed
