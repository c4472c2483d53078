"""Every number in every message has a range, and one that is outside is refused by name, wherever it comes in."""

import dataclasses
from collections.abc import Iterator
from math import inf, isfinite, nan

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from skein.errors import OutOfRangeError
from skein.protocol.messages.ranges import RANGES, Range, check_numbers, range_of
from skein.protocol.messages.reports import Beat, Report
from skein.wire import codec
from skein.wire.mapping import Codec, check_request
from skein.wire.v1 import checkpoint_pb2, control_pb2, identity_pb2, ids_pb2, jobs_pb2, log_pb2, peer_pb2
from tests.support.extent import examples
from tests.wire.values import members, values

FILES = (checkpoint_pb2, control_pb2, identity_pb2, ids_pb2, jobs_pb2, log_pb2, peer_pb2)
NUMERIC = {
    FieldDescriptor.CPPTYPE_DOUBLE,
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
OURS = {"RECORD"}
"""What this process alone has written."""


def _numbers() -> Iterator[tuple[str, FieldDescriptor]]:
    for file in FILES:
        for name, descriptor in sorted(file.DESCRIPTOR.message_types_by_name.items()):
            yield from ((name, field) for field in descriptor.fields if field.cpp_type in NUMERIC)


def test_every_number_of_every_message_has_a_row() -> None:
    without = [f"{name}.{field.name}" for name, field in _numbers() if range_of(name, field.name) is None]
    assert not without, "give each a row in skein/protocol/messages/ranges.py"


def test_every_row_is_of_some_field() -> None:
    names = {field.name for _, field in _numbers()} | {f"{name}.{field.name}" for name, field in _numbers()}
    assert RANGES.keys() <= names


@pytest.mark.parametrize("field", sorted(RANGES))
def test_a_range_says_in_words_what_would_be_right(field: str) -> None:
    row = RANGES[field]
    with pytest.raises(OutOfRangeError) as refused:
        row.check(field, row.least - 1 if row.least > -1e30 else 10 * row.least)
    assert refused.value.field == field
    assert str(refused.value).endswith(f"give {row.hint}")


@pytest.mark.parametrize("message", ["StageDone.loss_sum", "RowNumbers.loss", "EvaluationDone.loss_sum"])
def test_a_loss_on_its_way_to_infinity_is_honest(message: str) -> None:
    row = range_of(*message.split("."))
    assert row is not None
    for loss in (1e31, 3.4e38, 1e200, 1.1e300, 1.79e308, inf, nan):
        row.check(message, loss)


def _wrong(row: Range, field: FieldDescriptor) -> list[float | int]:
    """Numbers that the field's type holds and its range does not."""
    if field.cpp_type != FieldDescriptor.CPPTYPE_DOUBLE:
        most = 2**64 - 1 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 else 2**32 - 1
        return [int(row.most) + 1] if row.most < most else []
    return [x for x in (nan, inf, -inf, -1e31, -1e301, 1e301) if not row.least <= x <= row.most and not (
        row.may_be_not_finite and not isfinite(x)
    )]  # fmt: skip


def _paths(
    descriptor: Descriptor, above: tuple[str, ...] = ()
) -> Iterator[tuple[Descriptor, tuple[str, ...]]]:
    """Every message within one, and by which fields it is reached."""
    yield descriptor, above
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from _paths(field.message_type, (*above, field.name))


def _reached(message: Message, path: tuple[str, ...]) -> Message | None:
    """The message at the end of a path; None where `message` has nothing there."""
    found: Message = message
    for name in path:
        field = found.DESCRIPTOR.fields_by_name[name]
        child = getattr(found, name)
        if field.is_repeated:
            if not child:
                return None
            found = child[0]
        elif not found.HasField(name):
            return None
        else:
            found = child
    return found


CODECS: dict[str, Codec[object, Message]] = {
    name: value
    for name, value in sorted(vars(codec).items())
    if isinstance(value, Codec) and name not in OURS
}


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=examples(25))  # a field is in several messages
@given(data=st.data())
def test_a_number_outside_its_range_is_refused_wherever_it_stands(name: str, data: st.DataObject) -> None:
    pair = CODECS[name]
    message = pair.encode(data.draw(values(data.draw(st.sampled_from(members(pair.hint))))))
    assert isinstance(message.DESCRIPTOR, Descriptor)
    places = [
        (where, descriptor.name, field)
        for descriptor, path in _paths(message.DESCRIPTOR)
        if (where := _reached(message, path)) is not None
        for field in descriptor.fields
        if field.cpp_type in NUMERIC and _wrong(range_of(descriptor.name, field.name), field)  # type: ignore[arg-type]
    ]
    if not places:
        return
    where, kind, field = data.draw(st.sampled_from(places))
    row = range_of(kind, field.name)
    assert row is not None
    wrong = data.draw(st.sampled_from(_wrong(row, field)))
    if field.is_repeated:
        getattr(where, field.name).append(wrong)
    else:
        setattr(where, field.name, wrong)
    with pytest.raises(OutOfRangeError, match=rf"{kind}\.{field.name}"):
        pair.decode(message)


@settings(max_examples=examples(25))
@given(data=st.data())
def test_numbers_of_a_report_are_looked_at_without_a_message_as_well(data: st.DataObject) -> None:
    report = data.draw(values(Report))
    check_numbers(report)
    assert codec.REPORT.decode(codec.REPORT.encode(report)) == report  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-1.0, nan, inf, 1e10])
def test_a_beat_of_impossible_seconds_is_refused_by_name(seconds: float) -> None:
    beat = Beat(progress=1, running_s=seconds, statistics=())
    with pytest.raises(OutOfRangeError, match=r"Beat\.running_s: .*: give seconds, from 0 to 1e9"):
        check_numbers(beat)
    with pytest.raises(OutOfRangeError, match=r"Beat\.running_s"):
        codec.REPORT.decode(codec.REPORT.encode(beat))


def test_a_request_without_a_dataclass_is_looked_at_too() -> None:
    check_request(jobs_pb2.WatchRequest(job="a", since=3))
    with pytest.raises(OutOfRangeError, match=r"WatchRequest\.since"):
        check_request(jobs_pb2.WatchRequest(job="a", since=2**63))


def test_what_a_log_of_an_older_release_holds_is_read_whatever_it_is() -> None:
    message = log_pb2.Record(epoch_opened=log_pb2.EpochOpened(epoch=1, wall_s=-5.0))
    assert dataclasses.asdict(codec.RECORD.decode(message))["wall_s"] == -5.0
