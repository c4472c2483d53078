import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import grpc
import pytest
import torch
from grpc import aio

from skein.errors import RemoteError
from skein.types import StageIndex, Step
from skein.wire.extra import (
    DType,
    StateData,
    StateEnd,
    StatePart,
    StateTensor,
    StateTensorEnd,
    TensorMeta,
)
from skein.wire.v1 import peer_pb2
from tests.worker.transport.loopback import JOB, Receiver, sending, serving, tensor_of
from worker.bundle import Limits, WireTensor, to_torch, to_wire
from worker.service import PeerService
from worker.transport.fetching import fetch
from worker.transport.fetching.fetch import MAX_FRUITLESS
from worker.transport.fetching.state import StateAssembly, state_parts

WAIT_S = 120.0
"""Far above what anything here takes; reached only when something hangs."""
STAGE, VERSION = StageIndex(1), Step(7)
STATE = {
    "weight": to_wire("weight", torch.arange(400_000, dtype=torch.float32)),
    "bias": to_wire("bias", torch.tensor(1.5, dtype=torch.bfloat16)),
    "empty": to_wire("empty", torch.zeros(0, 3)),
    "moment": tensor_of(3 << 20, name="moment"),
}

Context = aio.ServicerContext[object, object]
Parts = AsyncGenerator[peer_pb2.StatePart, None]


def holder(limits: Limits | None = None) -> Receiver:
    return Receiver(
        state=lambda stage, version: STATE if (stage, version) == (STAGE, VERSION) else None,
        limits=limits or Limits(),
    )


def bytes_of(state: Mapping[str, WireTensor]) -> dict[str, tuple[TensorMeta, bytes]]:
    return {name: (tensor.meta, bytes(tensor.data)) for name, tensor in state.items()}


# --- one stream, without a network ---


@pytest.mark.parametrize("names", [(), ("weight",), tuple(sorted(STATE))])
def test_parts_put_together_are_the_state(names: tuple[str, ...]) -> None:
    assembly = StateAssembly(names, Limits())
    for part in state_parts(STATE, names or STATE):
        assert not assembly.is_complete
        assembly.take(part)
    assert assembly.is_complete
    assert bytes_of(assembly.tensors) == bytes_of({name: STATE[name] for name in names or STATE})


META = TensorMeta(name="x", dtype=DType.UINT8, shape=(2,))
BEGIN, TWO = StateTensor(meta=META, num_bytes=2), StateData(data=b"ab")


@pytest.mark.parametrize(
    "parts",
    [
        [TWO],
        [StateTensorEnd(sha256="")],
        [StateTensor(meta=META, num_bytes=3)],
        [StateTensor(meta=TensorMeta(name="y", dtype=DType.UINT8, shape=(2,)), num_bytes=2)],
        [StateTensor(meta=TensorMeta(name="x", dtype=DType.UINT8, shape=(99,)), num_bytes=99)],
        [BEGIN, BEGIN],
        [BEGIN, StateData(data=b"abc")],
        [BEGIN, StateData(data=b"")],
        [BEGIN, StateData(data=b"a"), StateTensorEnd(sha256="")],
        [BEGIN, TWO, StateEnd(num_tensors=0)],
        [BEGIN, TWO, StateTensorEnd(sha256=""), BEGIN],
        [StateEnd(num_tensors=0)],
    ],
)
def test_state_that_was_not_asked_for_or_does_not_fit_is_the_peers_fault(parts: list[StatePart]) -> None:
    assembly = StateAssembly(("x",), Limits(max_state_bytes=50))
    for part in parts[:-1]:
        assembly.take(part)
    with pytest.raises(RemoteError):
        assembly.take(parts[-1])


# --- over the wire ---


async def test_state_is_fetched_whole_or_by_name() -> None:
    async with serving(holder().service()) as member, sending() as sender:
        whole = await sender.peers.fetch_state(member, JOB, STAGE, VERSION)
        some = await sender.peers.fetch_state(member, JOB, STAGE, VERSION, ["moment", "bias"])
        none = await sender.peers.fetch_state(member, JOB, STAGE, VERSION, [])
    assert bytes_of(whole) == bytes_of(STATE)
    assert bytes_of(some) == bytes_of({name: STATE[name] for name in ("moment", "bias")})
    assert none == {}
    assert torch.equal(to_torch(whole["weight"]), to_torch(STATE["weight"]))


@pytest.mark.parametrize(("version", "names"), [(8, None), (7, ["absent"])])
async def test_state_that_is_not_there_is_a_remote_error(version: int, names: list[str] | None) -> None:
    async with serving(holder().service()) as member, sending() as sender:
        with pytest.raises(RemoteError, match="is not here"):
            await sender.peers.fetch_state(member, JOB, STAGE, Step(version), names)


async def test_state_goes_to_those_alone_who_show_what_they_were_told() -> None:
    donor = holder()
    donor.may = "told".__eq__
    async with serving(donor.service()) as member, sending() as sender:
        assert await sender.peers.fetch_state(replace(member, door="told"), JOB, STAGE, VERSION)
        for door in ("", "made up"):
            with pytest.raises(RemoteError, match="for whom the coordinator has told to fetch it"):
                await sender.peers.fetch_state(replace(member, door=door), JOB, STAGE, VERSION)
    assert donor.statistics.refusals == {"forged": 2}


async def test_state_larger_than_the_limit_is_refused() -> None:
    async with serving(holder().service()) as member, sending(limits=Limits(max_state_bytes=100)) as sender:
        with pytest.raises(RemoteError, match="the limit is 100"):
            await sender.peers.fetch_state(member, JOB, STAGE, VERSION)


class Awaited(Counter[str]):
    """Counts, and says when one of the counts has come so far."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.reached = asyncio.Event()
        self._wanted = name, count

    def __setitem__(self, name: str, count: int) -> None:
        super().__setitem__(name, count)
        if name == self._wanted[0] and count >= self._wanted[1]:
            self.reached.set()


async def test_a_donor_with_too_many_transfers_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_BUSY_PAUSE_S", 0.0)
    receiver = holder(Limits(max_transfers=1))
    refusals = receiver.statistics.refusals = Awaited("too_many", MAX_FRUITLESS + 1)
    service = receiver.service()
    async with serving(service) as member, sending() as sender:
        with service._transfers.take("somebody"):
            fetching = asyncio.create_task(sender.peers.fetch_state(member, JOB, STAGE, VERSION))
            async with asyncio.timeout(WAIT_S):
                await refusals.reached.wait()
        assert bytes_of(await fetching) == bytes_of(STATE)


class Spoiling(PeerService):
    """Changes a byte of "moment" in the first `num_spoilt` streams, and cuts streams short after `cut_after`."""

    num_spoilt = 0
    cut_after: str | None = None

    def __init__(self, **callbacks: object) -> None:
        super().__init__(**callbacks)  # type: ignore[arg-type]
        self.asked: list[tuple[str, ...]] = []

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        self.asked.append(tuple(request.names))
        name = ""
        async for part in super().FetchState(request, context):
            name = part.state_tensor.meta.name or name
            if part.HasField("state_data") and name == "moment" and len(self.asked) <= self.num_spoilt:
                part.state_data.data = bytes(len(part.state_data.data))
            yield part
            if part.HasField("state_tensor_end") and name == self.cut_after and len(self.asked) == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")


def spoiling(
    *, times: int = 0, cut_after_tensor: str | None = None
) -> tuple[PeerService, list[tuple[str, ...]]]:
    class Spoilt(Spoiling):
        num_spoilt = times
        cut_after = cut_after_tensor

    service = holder().service_of(Spoilt)
    return service, service.asked


@pytest.mark.parametrize("names", [None, sorted(STATE)])
async def test_a_tensor_that_does_not_fit_its_hash_is_asked_for_again(names: list[str] | None) -> None:
    service, asked = spoiling(times=1)
    async with serving(service) as member, sending() as sender:
        state = await sender.peers.fetch_state(member, JOB, STAGE, VERSION, names)
        assert sender.statistics.refusals["corrupt_state"] == 1
    assert bytes_of(state) == bytes_of(STATE)
    assert asked == [tuple(names or ()), ("moment",)]


async def test_a_donor_whose_tensors_never_fit_is_given_up() -> None:
    service, asked = spoiling(times=99)
    async with serving(service) as member, sending() as sender:
        with pytest.raises(RemoteError, match="do not fit their hash"):
            await sender.peers.fetch_state(member, JOB, STAGE, VERSION)
    assert len(asked) == 1 + MAX_FRUITLESS


@pytest.mark.parametrize("names", [None, sorted(STATE)])
async def test_a_broken_stream_is_resumed_with_what_is_missing(names: list[str] | None) -> None:
    service, asked = spoiling(cut_after_tensor="empty")
    async with serving(service) as member, sending() as sender:
        state = await sender.peers.fetch_state(member, JOB, STAGE, VERSION, names)
    assert bytes_of(state) == bytes_of(STATE)
    again = () if names is None else ("moment", "weight")
    assert asked == [tuple(names or ()), again]


async def test_state_goes_on_once_training_is_through() -> None:
    answers = [True, True, True]
    service = holder().service()
    service.give_way(lambda: bool(answers) and answers.pop())
    async with serving(service) as member, sending() as sender:
        state = await sender.peers.fetch_state(member, JOB, STAGE, VERSION)
    assert bytes_of(state) == bytes_of(STATE)
    assert answers == []


async def test_state_does_not_give_way_for_ever() -> None:
    service = holder().service()
    service.give_way(lambda: True)
    async with serving(service) as member, sending() as sender:
        state = await sender.peers.fetch_state(member, JOB, STAGE, VERSION)
    assert bytes_of(state) == bytes_of(STATE)
