"""The bench of hostile input misses no method, and judges by what it saw."""

from random import Random

import pytest

from bench.hostile import WAYS, Method, Tally, forged, messages, methods, rows_of
from skein.wire.channel import MAX_MESSAGE_BYTES
from skein.wire.v1 import checkpoint_pb2, control_pb2, ids_pb2, jobs_pb2, log_pb2, peer_pb2

METHODS = {method.path: method for method in methods()}
MIB = 1 << 20


def test_no_method_of_any_service_is_missed() -> None:
    files = (checkpoint_pb2, control_pb2, ids_pb2, jobs_pb2, log_pb2, peer_pb2)
    declared = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert METHODS.keys() == declared | {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}


@pytest.mark.parametrize("path", METHODS)
def test_each_way_of_attack_sends_what_its_name_says(path: str) -> None:
    method, draw = METHODS[path], Random(1)
    sent = {way: messages(method, way, draw) for way in WAYS}
    assert not sent["silent"]
    assert all(len(message) > MAX_MESSAGE_BYTES for message in sent["oversized"])
    for message in sent["forged"]:
        method.request.FromString(message)


def test_forged_requests_fill_all_that_a_method_takes_and_drain_nobody_who_is_there() -> None:
    session, drain = METHODS["/skein.wire.v1.Control/Session"], METHODS["/skein.wire.v1.Jobs/Drain"]
    draw = Random(2)

    def bodies(method: Method) -> set[str]:
        return {field.name for _ in range(400) for field, _ in forged(method, draw).ListFields()}

    assert bodies(session) == {field.name for field in control_pb2.Report.DESCRIPTOR.fields}
    asked = [forged(drain, draw) for _ in range(200)]
    assert "w0" not in {request.worker for request in asked}  # type: ignore[attr-defined]


def test_the_goals_are_no_death_little_growth_and_quick_answers() -> None:
    calm = Tally(real_s=[0.1] * 200)
    assert all(row.holds for row in rows_of(calm, {"w0": 10 * MIB}, {"w0": 70 * MIB}))
    assert [row.holds for row in rows_of(calm, {"w0": 10 * MIB}, {"w0": None})] == [False, True, True, True]
    assert [row.holds for row in rows_of(calm, {"w0": 0}, {"w0": 65 * MIB})] == [True, False, True, True]
    slow = Tally(real_s=[0.1] * 90 + [2.0] * 10, num_unanswered=1)
    assert [row.holds for row in rows_of(slow, {}, {})] == [True, True, False, False]
