"""The bench of hostile input misses no method, and judges by what it saw."""

from collections import Counter
from random import Random

import pytest

from bench.hostile import rows_of
from bench.hostility.fight import Tally
from bench.hostility.messages import FILLED, WAYS, Method, forged, messages, methods
from skein.wire.channel import MAX_MESSAGE_BYTES
from skein.wire.v1 import control_pb2
from tests.wire.identity.test_roles import methods as declared_methods

METHODS = {method.path: method for method in methods()}
MIB = 1 << 20


def test_no_method_of_any_service_is_missed() -> None:
    declared = {f"/skein.wire.v1.{name}" for name in declared_methods()}
    assert METHODS.keys() == declared | {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}


@pytest.mark.parametrize("path", METHODS)
def test_each_way_of_attack_sends_what_its_name_says(path: str) -> None:
    method, draw = METHODS[path], Random(1)
    sent = {way: messages(method, way, draw) for way in WAYS}
    assert not sent["silent"]
    assert all(len(message) > MAX_MESSAGE_BYTES for message in sent["oversized"])
    for way in FILLED:
        # A session begins with a Hello that is in order.
        assert len(sent[way]) >= 8
        for message in sent[way]:
            method.request.FromString(message)


def test_forged_requests_fill_all_that_a_method_takes_and_drain_nobody_who_is_there() -> None:
    session, drain = METHODS["/skein.wire.v1.Control/Session"], METHODS["/skein.wire.v1.Jobs/Drain"]
    draw = Random(2)

    def bodies(method: Method) -> set[str]:
        return {field.name for _ in range(400) for field, _ in forged(method, draw).ListFields()}

    assert bodies(session) == {field.name for field in control_pb2.Report.DESCRIPTOR.fields}
    asked = [forged(drain, draw) for _ in range(200)]
    assert "w0" not in {request.worker for request in asked}  # type: ignore[attr-defined]


def test_the_goals_are_no_death_little_growth_quick_answers_and_nothing_accepted() -> None:
    def missed(tally: Tally, before: int, after: int | None, num_changes: int = 0) -> list[str]:
        rows = rows_of(tally, {"w0": before}, {"w0": after}, num_changes)
        return [row.what for row in rows if not row.holds]

    calm = Tally(real_s=[0.1] * 200)
    assert not missed(calm, 10 * MIB, 70 * MIB)
    assert missed(calm, 10 * MIB, None) == ["processes that ended"]
    assert missed(calm, 0, 65 * MIB) == ["largest growth of a process"]
    assert missed(calm, 0, 0, 1) == ["jobs, identities and workers that changed"]
    slow = Tally(real_s=[0.1] * 90 + [2.0] * 10, num_unanswered=1)
    assert missed(slow, 0, 0) == ["real calls, p99", "real calls without an answer"]
    deceived = Tally(real_s=[0.1] * 200, accepted=Counter({"Deliver forged": 1}))
    assert missed(deceived, 0, 0) == ["tensors of attackers that were taken"]
