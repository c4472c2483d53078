"""What is emulated: lines in virtual time, bytes through a relay, the table of ten cities, and the time of ops."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.emulated import worker as emulated_worker
from bench.emulated.fleet import (
    TABLE_ACTIVATION_BYTES,
    WORKER_HOST,
    EmulatedWorker,
    Links,
    OpTimes,
    cities_of,
    load_cities,
    memory_for,
    op_times,
    ten_cities,
)
from bench.emulated.job import make_job
from bench.emulated.lines import SMALL_BYTES, Lines
from bench.emulated.links import Relay
from bench.emulated.worker import EmulatedCompute, adapted, seconds_of
from skein.plan.plan import Path as Hops
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import BackwardOp, ForwardOp, LossOp, SaveOp
from skein.types import ChunkRef, Generation, MicrobatchId, StageIndex, Step, WorkerId
from skein.wire.channel import join_address, split_address
from tests.worker.puppet import setting
from worker.compute.ops import Done

NUM_WORKERS = 4
EVEN = [[1000.0] * NUM_WORKERS] * NUM_WORKERS
NONE = [[0.0] * NUM_WORKERS] * NUM_WORKERS
BULK = 4000
"""Bytes that take 4 s on an even link."""


# --- lines ---


def test_a_transfer_alone_takes_its_bytes_and_the_latency() -> None:
    lines = Lines([[0.0, 0.5], [2.0, 0.0]], [[1.0, 1000.0], [4000.0, 1.0]])
    assert lines.arrival_s(0, 1, BULK, now=10.0) == 14.5
    assert lines.arrival_s(1, 0, BULK, now=10.0) == 13.0


def test_an_uplink_carries_one_transfer_at_a_time() -> None:
    lines = Lines(NONE, EVEN)
    assert [lines.arrival_s(0, to, BULK, now=1.0) for to in (1, 2, 3)] == [5.0, 9.0, 13.0]


def test_a_downlink_carries_one_transfer_at_a_time() -> None:
    lines = Lines(NONE, EVEN)
    assert [lines.arrival_s(sender, 0, BULK, now=1.0) for sender in (1, 2, 3)] == [5.0, 9.0, 13.0]


def test_pairs_that_share_no_line_do_not_wait_for_each_other() -> None:
    lines = Lines(NONE, EVEN)
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert {lines.arrival_s(a, b, BULK, now=1.0) for a, b in pairs} == {5.0}


def test_latency_holds_no_line() -> None:
    lines = Lines([[100.0] * NUM_WORKERS] * NUM_WORKERS, EVEN)
    assert [lines.arrival_s(0, 1, BULK, now=0.0) for _ in range(2)] == [104.0, 108.0]


def test_small_messages_pass_transfers_and_hold_nothing() -> None:
    lines = Lines(NONE, EVEN)
    assert lines.arrival_s(0, 1, BULK, now=0.0) == 4.0
    assert lines.arrival_s(0, 1, SMALL_BYTES, now=0.0) == SMALL_BYTES / 1000
    assert lines.arrival_s(0, 2, BULK, now=0.0) == 8.0


@given(
    st.lists(
        st.tuples(st.permutations(range(NUM_WORKERS)), st.integers(SMALL_BYTES + 1, 9000), st.integers(0, 5)),
        max_size=30,
    )
)
def test_no_line_ever_carries_two_transfers_and_none_idles_without_need(
    sent: list[tuple[list[int], int, int]],
) -> None:
    """Against a record of who held what: a transfer begins when it is sent, or when a line that it needs falls free."""
    lines = Lines(NONE, EVEN)
    held: dict[tuple[str, int], list[tuple[float, float]]] = {}
    now = 0.0
    for (sender, receiver, *_), num_bytes, pause in sent:
        now += pause
        end = lines.arrival_s(sender, receiver, num_bytes, now=now)
        begin = end - num_bytes / 1000
        mine = [held.setdefault(("up", sender), []), held.setdefault(("down", receiver), [])]
        ends = [interval[1] for line in mine for interval in line]
        assert begin == pytest.approx(max([now, *ends]))
        for line in mine:
            line.append((begin, end))


# --- the relay ---


async def test_workers_reach_each_other_through_the_relay_both_ways() -> None:
    """Real sockets; the links are quick, for only what arrives is looked at."""

    data = b"".join(f"{i} bottles\n".encode() for i in range(20_000))

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(len(data))).upper())
        writer.close()

    servers = [await asyncio.start_server(shout, WORKER_HOST, 0) for _ in range(2)]
    addresses = tuple(join_address(WORKER_HOST, x.sockets[0].getsockname()[1]) for x in servers)
    quick = ((0.0, 1e-3), (1e-3, 0.0))
    relay = Relay(Links(addresses=addresses, latency_s=quick, bytes_per_s=((1e9, 1e9),) * 2))
    relays = await relay.listen()
    assert [set(ways) for ways in relays.ways] == [{addresses[1]}, {addresses[0]}]
    reader, writer = await asyncio.open_connection(*split_address("way", relays.ways[0][addresses[1]]))
    writer.write(data)
    async with asyncio.timeout(60.0):
        assert await reader.readexactly(len(data)) == data.upper()
    writer.close()
    await writer.wait_closed()
    relay.close()
    for server in servers:
        server.close()
        await server.wait_closed()


# --- the cities ---


def test_every_pair_of_the_ten_cities_is_in_the_table_once() -> None:
    table = load_cities()
    pairs = [frozenset((link.a, link.b)) for link in table.links]
    assert len(table.cities) == 10
    assert len(pairs) == len(set(pairs)) == 45
    assert frozenset().union(*pairs) == set(table.cities)


def test_transfers_take_what_the_reference_computes_times_the_scale() -> None:
    """Against `comm_s` of the reference's own instance of 20 workers, of which the first ten are in these cities."""
    reference_s = {(0, 1): 3.6591242236024843, (0, 9): 1.4471803278688524, (1, 3): 0.48286597938144327}
    links = ten_cities([f"w:{i}" for i in range(12)], scale=1 / 16, activation_bytes=4096)
    for pair, seconds in reference_s.items():
        for a, b in (pair, pair[::-1]):
            assert links.transfer_s(a, b, 4096) == pytest.approx(seconds / 16)
    assert cities_of(12)[10] == cities_of(12)[0]
    assert links.transfer_s(0, 10, 4096) == pytest.approx(0.366625 / 16)
    assert TABLE_ACTIVATION_BYTES == 33554432


# --- ops ---

TIMES = OpTimes(forward_s=(1.0, 2.0), backward_s=(3.0, 4.0), loss_s=(5.0, 6.0), weight_s=(1.0, 1.5))
HOPS = Hops(hops=tuple(ChunkRef(stage=StageIndex(s), worker=WorkerId("w0")) for s in (0, 1)))


def forward(hop: int) -> ForwardOp:
    return ForwardOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=hop, path=HOPS)


def test_each_op_takes_its_stage_s_time() -> None:
    backward = BackwardOp(step=Step(0), microbatch=MicrobatchId(0), hop=0, path=HOPS)
    loss = LossOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=1, path=HOPS)
    save = SaveOp(generation=Generation(1), version=Step(0), stage=StageIndex(0), url=None)
    ops = (forward(0), forward(1), backward, loss, save)
    assert [seconds_of(op, TIMES) for op in ops] == [1.0, 2.0, 3.0, 6.0, 0.0]


def test_a_device_takes_the_job_s_arithmetic_at_its_speed(tmp_path: Path) -> None:
    job = make_job(
        "job",
        tmp_path,
        method="full",
        num_workers=8,
        stages=4,
        microbatches=12,
        skip_ratio=0.33,
        budget_s=1.0,
        steps=1,
    )
    slow, quick = op_times(job, 1e9), op_times(job, 2e9)
    # Four blocks of one size, and the head of the loop layout.
    assert len(set(slow.forward_s[:4])) == len(set(slow.backward_s[:4])) == 1
    assert slow.loss_s[4] == pytest.approx(slow.forward_s[4] + slow.backward_s[4])
    assert slow.loss_s[4] < slow.forward_s[0]
    assert slow.forward_s == pytest.approx([2 * x for x in quick.forward_s])
    assert memory_for(job, 4) > memory_for(job, 3)


class FakeTime:
    """A clock that ops and sleep advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_an_op_lasts_as_long_as_emulated_and_a_late_one_as_long_as_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, took_s = FakeTime(), 0.25

    def run(self: object, op: object, operands: object) -> Done:
        clock.now += took_s
        return Done()

    monkeypatch.setattr(emulated_worker, "time", clock)
    monkeypatch.setattr("worker.compute.ops.Compute.run", run)
    compute = EmulatedCompute(torch.device("cpu"), times=TIMES)
    compute.run(forward(1), {})
    assert clock.now == 2.0
    took_s = 2.5
    compute.run(forward(1), {})
    assert clock.now == 4.5


def test_an_emulated_worker_says_what_it_is_told_and_dials_through_the_relay() -> None:
    worker = EmulatedWorker(
        join="127.0.0.1:1",
        name="e00",
        site="NL",
        port=2,
        flops_per_s=3e9,
        memory_bytes=4,
        times=TIMES,
        ways={"127.0.0.1:5": "127.0.0.1:6"},
    )
    assert EmulatedWorker.model_validate(json.loads(worker.model_dump_json())) == worker
    changed = adapted(worker, setting(1))
    profile = changed.measure(torch.device("cpu"))
    assert (profile.flops_per_s, profile.memory_bytes) == (3e9, 4)
    assert changed.way_to("127.0.0.1:5") == "127.0.0.1:6"
    assert isinstance(changed.compute(torch.device("cpu")), EmulatedCompute)
