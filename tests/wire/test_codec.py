"""Domain values and messages say the same, and what a peer garbles is refused."""

import dataclasses
from typing import get_args, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from skein.errors import LocalError, RemoteError
from skein.protocol.log.records import EpochOpened
from skein.protocol.messages.directives import Start
from skein.protocol.messages.ranges import MAX_INTEGER
from skein.protocol.messages.reports import Beat, Leaving, Report
from skein.types import Epoch, Generation, JobState, Step
from skein.wire import codec, extra, views
from skein.wire.mapping import READ_TEXT, Codec
from skein.wire.v1 import checkpoint_pb2, control_pb2, ids_pb2, jobs_pb2, log_pb2, peer_pb2, relay_pb2
from tests.support.extent import examples
from tests.wire.values import members, values

CODECS: dict[str, Codec[object, Message]] = {
    name: value for name, value in sorted(vars(codec).items()) if isinstance(value, Codec)
}
MEMBERS = [(name, member) for name, pair in CODECS.items() for member in members(pair.hint)]

PLAIN_REQUESTS = {
    "SubmitRequest",
    "ListJobsRequest",
    "ListJobsReply",
    "GetJobRequest",
    "WatchRequest",
    "CancelRequest",
    "PauseRequest",
    "ResumeRequest",
    "WorkersRequest",
    "WorkersReply",
    "DrainRequest",
    "VersionRequest",
    "LinksRequest",
    "LinksReply",
    "ListIncidentsRequest",
    "MeasureRequest",
    "OpenPageRequest",
    "ListIncidentsReply",
    "ListCheckpointsRequest",
    "ListCheckpointsReply",
    "VerifyRequest",
    "DeleteCheckpointRequest",
}
"""Ids and lists of values: used without a dataclass of their own."""


@pytest.mark.parametrize(("name", "member"), MEMBERS, ids=lambda part: getattr(part, "__name__", part))
@settings(max_examples=examples(25))  # each kind of field is in several messages
@given(data=st.data())
def test_decode_gives_back_what_was_encoded(name: str, member: object, data: st.DataObject) -> None:
    value = data.draw(values(member))
    pair = CODECS[name]
    assert pair.from_bytes(pair.to_bytes(value)) == value


def _dataclasses(hint: object) -> set[type]:
    """Every dataclass that `hint` reaches; what travels as text reaches none."""
    if hint in READ_TEXT:
        return set()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        reached = [_dataclasses(inner) for inner in get_type_hints(hint).values()]
        return {hint}.union(*reached)
    return set().union(*[_dataclasses(inner) for inner in get_args(hint)])


def _messages(descriptor: Descriptor) -> set[Descriptor]:
    reached = [_messages(field.message_type) for field in descriptor.fields if field.message_type is not None]
    return {descriptor}.union(*reached)


def _root(pair: Codec[object, Message]) -> Descriptor:
    assert isinstance(pair.message.DESCRIPTOR, Descriptor)
    return pair.message.DESCRIPTOR


@pytest.mark.parametrize("name", CODECS)
def test_dataclasses_and_messages_have_the_same_fields(name: str) -> None:
    pair = CODECS[name]
    classes = {cls.__name__: cls for cls in _dataclasses(pair.hint)}
    descriptors = {descriptor.name: descriptor for descriptor in _messages(_root(pair))}
    envelope = set() if dataclasses.is_dataclass(pair.hint) else {pair.message.DESCRIPTOR.name}
    assert set(classes) == set(descriptors) - envelope
    for key, cls in classes.items():
        grouped = {
            field.name for oneof in descriptors[key].oneofs for field in oneof.fields if len(oneof.fields) > 1
        }
        oneofs = {oneof.name for oneof in descriptors[key].oneofs if not oneof.name.startswith("_")}
        names = set(descriptors[key].fields_by_name) - grouped | oneofs
        assert names == {field.name for field in dataclasses.fields(cls)}, key


def test_no_message_is_left_without_a_codec() -> None:
    files = (checkpoint_pb2, control_pb2, ids_pb2, jobs_pb2, log_pb2, peer_pb2, relay_pb2)
    declared = {name for file in files for name in file.DESCRIPTOR.message_types_by_name}
    reached = {descriptor.name for pair in CODECS.values() for descriptor in _messages(_root(pair))}
    assert declared - reached == PLAIN_REQUESTS


def test_every_report_is_a_member_of_the_oneof() -> None:
    names = {field.message_type.name for field in control_pb2.Report.DESCRIPTOR.fields if field.message_type}
    assert names == {cls.__name__ for cls in get_args(Report)} | {"LogLines"}


def test_a_group_that_cannot_be_is_refused() -> None:
    with pytest.raises(RemoteError, match=r"Vote\.group: group 's1@': must be like s2"):
        codec.REPORT.decode(control_pb2.Report(vote=control_pb2.Vote(step=1, group="s1@")))


def test_report_without_body_is_refused() -> None:
    with pytest.raises(RemoteError, match=r"Report\.body is missing"):
        codec.REPORT.decode(control_pb2.Report())


def test_report_of_a_newer_release_is_refused() -> None:
    unknown_member = b"\x9a\x06\x02\x08\x01"  # field 99, two bytes long
    with pytest.raises(RemoteError, match="does not know"):
        codec.REPORT.from_bytes(unknown_member)


@pytest.mark.parametrize("number", [0, 77])
def test_enum_value_that_nobody_sends_is_refused(number: int) -> None:
    message = jobs_pb2.JobEvent(ended=jobs_pb2.Ended(reason="done"))
    message.ended.ParseFromString(bytes([0x08, number]))
    with pytest.raises(RemoteError, match=rf"Ended\.state: {number} is not a JobState"):
        codec.JOB_EVENT.decode(message)


def test_missing_message_is_refused_by_name() -> None:
    with pytest.raises(RemoteError, match=r"Hello\.profile is missing"):
        codec.REPORT.decode(control_pb2.Report(hello=control_pb2.Hello(worker="w1")))


def test_missing_message_inside_a_list_is_refused() -> None:
    ack = control_pb2.Ack(generation=1, chunks=[control_pb2.ChunkVersion(version=3)])
    with pytest.raises(RemoteError, match=r"ChunkVersion\.stage is missing"):
        codec.REPORT.decode(control_pb2.Report(ack=ack))


def test_integer_above_what_databases_hold_is_refused() -> None:
    start = control_pb2.Start(epoch=1, generation=MAX_INTEGER + 1, step=0)
    with pytest.raises(RemoteError, match=r"Start\.generation"):
        codec.DIRECTIVE.decode(control_pb2.Directive(start=start))


def test_largest_integer_passes() -> None:
    start = Start(epoch=Epoch(1), generation=Generation(MAX_INTEGER), step=Step(0))
    assert codec.DIRECTIVE.decode(codec.DIRECTIVE.encode(start)) == start


def test_negative_integer_is_not_sent() -> None:
    with pytest.raises(ValueError, match="out of range"):
        codec.REPORT.encode(Beat(progress=-1, running_s=0.0, statistics=()))


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05a", b"\x0a\x02\x0a\xff"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteError):
        codec.RECORD.from_bytes(data)


def test_absent_optional_differs_from_zero() -> None:
    request = extra.ManifestRequest(job=codec.JOB_STATUS.decode(_status()).job, version=None)
    assert codec.MANIFEST_REQUEST.decode(codec.MANIFEST_REQUEST.encode(request)).version is None
    first = dataclasses.replace(request, version=Step(0))
    assert codec.MANIFEST_REQUEST.decode(codec.MANIFEST_REQUEST.encode(first)).version == 0


def _status() -> jobs_pb2.JobStatus:
    return jobs_pb2.JobStatus(
        job="j1", name="small", state=ids_pb2.JOB_STATE_RUNNING, kind=jobs_pb2.JOB_KIND_TRAINING
    )


def test_status_of_a_job_without_steps_has_no_loss() -> None:
    status = codec.JOB_STATUS.decode(_status())
    assert (status.state, status.loss, status.checkpoint_version) == (JobState.RUNNING, None, None)


def test_pair_that_does_not_fit_is_refused_when_compiled() -> None:
    with pytest.raises(LocalError, match=r"proto only \['num_bytes'\]"):
        Codec(extra.FileEnd, checkpoint_pb2.PutReply).check()
    with pytest.raises(LocalError, match="domain only"):
        Codec(views.WorkerStatus, ids_pb2.ChunkRef).check()
    with pytest.raises(LocalError, match="cannot hold"):
        Codec(_WrongKind, ids_pb2.ChunkRef).check()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _WrongKind:
    stage: str
    worker: str


def test_log_entries_of_the_first_release_are_still_read() -> None:
    assert codec.RECORD.from_bytes(bytes.fromhex("0a0b080311000000000000f83f")) == EpochOpened(
        epoch=Epoch(3), wall_s=1.5
    )
    assert (
        codec.RECORD.to_bytes(EpochOpened(epoch=Epoch(3), wall_s=1.5)).hex() == "0a0b080311000000000000f83f"
    )


def test_equal_values_have_equal_bytes() -> None:
    first, again = (Start(epoch=Epoch(1), generation=Generation(2), step=Step(3)) for _ in range(2))
    assert codec.DIRECTIVE.to_bytes(first) == codec.DIRECTIVE.to_bytes(again)


def test_a_text_with_bytes_of_no_letter_is_told_with_them_spelt_out() -> None:
    left = Leaving(reason="caf\udce9: no such file")
    assert codec.REPORT.from_bytes(codec.REPORT.to_bytes(left)) == Leaving(reason=r"caf\udce9: no such file")
