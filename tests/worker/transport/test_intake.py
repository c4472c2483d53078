from collections.abc import Callable
from dataclasses import replace

import pytest

from skein.errors import RemoteError
from skein.protocol.messages.tensors import Envelope, Refusal
from skein.types import Generation
from skein.wire.extra import (
    CreditGranted,
    DType,
    PartReply,
    TensorAccepted,
    TensorData,
    TensorMeta,
    TensorRefused,
    TensorStart,
)
from skein.wire.identity.names import LOCAL, Caller, worker_caller
from tests.worker.transport.loopback import A, Arrived, hop_envelope, shard_envelope, tensor_of
from worker.bundle import Limits
from worker.transport.checksum import checksum
from worker.transport.framing import FramedPart, read_part
from worker.transport.parts import outgoing
from worker.transport.receiving.intake import Inbox, Intake
from worker.transport.receiving.window import Window
from worker.transport.statistics import Statistics

Spoil = Callable[[TensorData], TensorData]


class Intaken:
    """An intake, and what it delivered."""

    def __init__(
        self, accepts: Callable[[Envelope], Refusal | None] = lambda _: None, limits: Limits | None = None
    ) -> None:
        self.delivered: list[Arrived] = []
        self.statistics = Statistics()
        self.intake = Intake(
            accepts=accepts,
            on_tensor=lambda envelope, bundle: self.delivered.append((envelope, bundle)),
            limits=limits or Limits(),
            statistics=self.statistics,
        )

    def inbox(self, caller: Caller = LOCAL) -> Inbox:
        inbox = Inbox(self.intake, Window(), caller)
        inbox.open(now=0.0)
        return inbox


def start(number: int = 1, *, num_bytes: int = 4, envelope: Envelope | None = None) -> TensorStart:
    meta = TensorMeta(name="x", dtype=DType.UINT8, shape=(num_bytes,))
    return TensorStart(
        tensor=number, envelope=envelope or hop_envelope(), tensors=(meta,), num_bytes=num_bytes
    )


def data(number: int = 1, offset: int = 0, content: bytes = b"abcd") -> TensorData:
    return TensorData(tensor=number, offset=offset, data=content, checksum=checksum(content))


def refusal(reply: PartReply) -> Refusal:
    assert isinstance(reply, TensorRefused)
    return reply.reason


def test_a_tensor_is_delivered_when_its_last_part_is_here() -> None:
    here = Intaken()
    inbox = here.inbox()
    assert inbox.take(start(), now=0.0) == []
    assert inbox.take(data(content=b"ab"), now=0.0) == []
    assert here.delivered == []
    assert inbox.take(data(offset=2, content=b"cd"), now=0.0) == [TensorAccepted(tensor=1)]
    [(envelope, (tensor,))] = here.delivered
    assert envelope == hop_envelope()
    assert bytes(tensor.data) == b"abcd"
    assert here.intake.pending_bytes == 0
    assert here.statistics.received_bytes == {A: 4}


def test_an_empty_bundle_is_delivered_by_its_announcement() -> None:
    here = Intaken()
    message = TensorStart(tensor=1, envelope=hop_envelope(), tensors=(), num_bytes=0)
    assert here.inbox().take(message, now=0.0) == [TensorAccepted(tensor=1)]
    assert here.delivered == [(hop_envelope(), ())]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda part: replace(part, data=b"abcx"),
        lambda part: replace(part, checksum=part.checksum ^ 1),
        lambda _: data(offset=1, content=b"bcd"),
        lambda _: data(content=b"abcde"),
    ],
    ids=["flipped", "wrong checksum", "gap", "too long"],
)
def test_a_part_that_does_not_fit_refuses_its_tensor_as_corrupt(spoil: Spoil) -> None:
    here = Intaken()
    inbox = here.inbox()
    inbox.take(start(), now=0.0)
    [reply] = inbox.take(spoil(data()), now=0.0)
    assert refusal(reply) is Refusal.CORRUPT
    assert here.statistics.refusals == {"corrupt": 1}
    assert here.intake.pending_bytes == 0
    assert inbox.take(data(), now=0.0) == [], "what still arrives of it is dropped"
    inbox.take(start(2), now=0.0)
    assert inbox.take(data(2), now=0.0) == [TensorAccepted(tensor=2)]
    assert len(here.delivered) == 1


def test_between_certificates_parts_have_no_checksum() -> None:
    here = Intaken()
    inbox = here.inbox(worker_caller(A))
    inbox.take(start(), now=0.0)
    [part] = outgoing((tensor_of(4),))
    framed = read_part(part.message(1, has_checksum=False))
    assert isinstance(framed, FramedPart)
    assert framed.checksum == 0 != checksum(framed.data)
    assert inbox.take(framed, now=0.0) == [TensorAccepted(tensor=1)]


@pytest.mark.parametrize("reason", list(Refusal))
def test_an_unwanted_tensor_is_refused_before_its_bytes_come(reason: Refusal) -> None:
    here = Intaken(accepts=lambda _: reason)
    inbox = here.inbox()
    [reply] = inbox.take(start(), now=0.0)
    assert refusal(reply) is reason
    assert here.statistics.refusals == {reason: 1}
    assert inbox.take(data(), now=0.0) == []
    assert here.delivered == []
    assert here.statistics.received_bytes == {}, "peers are counted by name only once they are known"


def test_a_tensor_whose_generation_ended_while_it_came_is_refused() -> None:
    answers: list[Refusal | None] = [None, Refusal.STALE]
    here = Intaken(accepts=lambda _: answers.pop(0))
    inbox = here.inbox()
    inbox.take(start(), now=0.0)
    [reply] = inbox.take(data(), now=0.0)
    assert refusal(reply) is Refusal.STALE
    assert here.delivered == []


def test_a_tensor_that_came_before_is_accepted_but_not_delivered_again() -> None:
    here = Intaken()
    first, second = here.inbox(), here.inbox()
    first.take(start(), now=0.0)
    second.take(start(), now=0.0)
    first.take(data(), now=0.0)
    assert second.take(data(), now=0.0) == [TensorAccepted(tensor=1)]
    assert here.inbox().take(start(), now=0.0) == [TensorAccepted(tensor=1)]
    assert len(here.delivered) == 1
    assert here.statistics.duplicates == 2


def test_equal_keys_of_another_generation_or_shard_are_other_tensors() -> None:
    here = Intaken()
    envelopes = [
        hop_envelope(),
        hop_envelope(generation=2),
        hop_envelope(1),
        shard_envelope(),
        shard_envelope(1),
    ]
    for envelope in envelopes:
        inbox = here.inbox()
        inbox.take(start(envelope=envelope), now=0.0)
        inbox.take(data(), now=0.0)
    assert [envelope for envelope, _ in here.delivered] == envelopes


def test_what_came_of_forgotten_generations_takes_no_memory() -> None:
    here = Intaken()
    inbox = here.inbox()
    inbox.take(start(), now=0.0)
    inbox.take(data(), now=0.0)
    assert here.intake.is_known(hop_envelope())
    here.intake.forget(Generation(2))
    assert not here.intake.is_known(hop_envelope())


def test_tensors_beyond_the_memory_budget_are_refused_for_now() -> None:
    here = Intaken(limits=Limits(max_pending_bytes=7))
    first, second = here.inbox(), here.inbox()
    first.take(start(), now=0.0)
    [reply] = second.take(start(envelope=hop_envelope(1)), now=0.0)
    assert refusal(reply) is Refusal.NOT_YET
    first.close()
    assert second.take(start(2, envelope=hop_envelope(1)), now=0.0) == []


def test_a_new_tensor_abandons_the_unfinished_one() -> None:
    here = Intaken()
    inbox = here.inbox()
    inbox.take(start(1, envelope=hop_envelope(1)), now=0.0)
    inbox.take(start(2), now=0.0)
    assert here.intake.pending_bytes == 4
    assert inbox.take(data(1), now=0.0) == []
    assert inbox.take(data(2), now=0.0) == [TensorAccepted(tensor=2)]
    assert [envelope for envelope, _ in here.delivered] == [hop_envelope()]


def test_refused_bytes_count_for_credit_too() -> None:
    here = Intaken(accepts=lambda _: Refusal.STALE)
    inbox = here.inbox()
    inbox.take(start(num_bytes=1 << 22), now=0.0)
    replies = inbox.take(data(content=bytes(1 << 20)), now=0.0)
    assert replies == [CreditGranted(num_bytes=1 << 20)]


@pytest.mark.parametrize(
    "parts",
    [
        [data()],
        [start(), data(2)],
        [start(2), start(2)],
        [start(2), start(1)],
        [start(), data(content=b"")],
        [start(num_bytes=3 << 20), data(content=bytes((2 << 20) + 1))],
    ],
    ids=["not announced", "unknown", "repeated", "descending", "empty part", "huge part"],
)
def test_what_no_honest_peer_sends_is_the_peers_fault(parts: list[TensorStart | TensorData]) -> None:
    inbox = Intaken().inbox()
    for part in parts[:-1]:
        inbox.take(part, now=0.0)
    with pytest.raises(RemoteError):
        inbox.take(parts[-1], now=0.0)
