"""One peer of a gossip, a process that sends by the worker's transport, as its file says.

It listens, says so, and then runs one gossip for each line on its standard input: from its own drawn vector so many
rounds of mixing with the neighbours of that line's matrix. It says how long that took, and writes what it came to.
"""

import asyncio
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from grpc import aio
from pydantic import BaseModel, ConfigDict

from bench.emulated.fleet import WORKER_HOST
from skein.plan.ops import Direction
from skein.plan.plan import Path as HopPath
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import Envelope, HopTensor, Phase
from skein.rng import stream
from skein.types import (
    ChunkRef,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
)
from skein.wire.channel import bind, open_channel_to, open_server, split_address
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.extra import DType, FetchStateRequest
from worker.bundle import Bundle, WireTensor
from worker.service import PeerService
from worker.transport.memory import keep_message_buffers
from worker.transport.peers import Peers
from worker.transport.statistics import Statistics

F32 = npt.NDArray[np.float32]


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PeerFile(_Told):
    """Who a peer is; `ways` says where to dial in order to reach whoever advertises an address."""

    me: int
    addresses: tuple[str, ...]
    ways: dict[str, str]
    num_elements: int


class GossipRun(_Told):
    """One gossip: numbered, with the matrix by rows, and where to write the vector in the end."""

    run: int
    rows: tuple[tuple[float, ...], ...]
    num_rounds: int
    out: Path


def start_of(peer: int, num_elements: int) -> F32:
    """The vector that a peer begins with."""
    return stream(0, "gossip start", peer).standard_normal(num_elements).astype(np.float32)


class GossipPeer:
    """Sends its vector to neighbours and waits for theirs, round by round."""

    def __init__(self, file: PeerFile, group: asyncio.TaskGroup) -> None:
        self._file = file
        self._start = start_of(file.me, file.num_elements)
        self._arrived: dict[tuple[int, int], dict[int, F32]] = defaultdict(dict)
        self._news = asyncio.Event()
        statistics = Statistics()
        self.peers = Peers(
            _name(file.me),
            group=group,
            dial=partial(open_channel_to, credentials=NO_CREDENTIALS, way_to=file.ways.__getitem__),
            on_failed=self._failed,
            statistics=statistics,
        )
        self.service = PeerService(
            accepts=lambda _: None, on_tensor=self._take, state_of=_no_state, statistics=statistics
        )

    async def gossip(self, wanted: GossipRun) -> float:
        """Seconds of all rounds of one run."""
        row, mine = wanted.rows[self._file.me], self._start
        neighbours = [j for j, weight in enumerate(row) if weight and j != self._file.me]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for round_ in range(wanted.num_rounds):
            for j in neighbours:
                self._send(j, wanted.run, round_, mine)
            theirs = await self._all(wanted.run, round_, len(neighbours))
            everyone = sorted({**theirs, self._file.me: mine}.items())
            mine = np.sum([np.float32(row[j]) * x for j, x in everyone], axis=0, dtype=np.float32)
        took_s = loop.time() - began_s
        np.save(wanted.out, mine)
        return took_s

    def _send(self, to: int, run: int, round_: int, vector: F32) -> None:
        member = Member(worker=_name(to), incarnation=Incarnation("1"), address=self._file.addresses[to])
        data = vector.view(np.uint8).data
        tensor = WireTensor(name="x", dtype=DType.FLOAT32, shape=vector.shape, data=data)
        # A receiver takes a microbatch's hop once, whoever sends it: so each sender has microbatches of its own.
        number = run * len(self._file.addresses) + self._file.me
        self.peers.send(member, _envelope(self._file.me, to, number, round_), (tensor,))

    def _take(self, envelope: Envelope, bundle: Bundle) -> None:
        header = envelope.header
        assert isinstance(header, HopTensor)
        vector = np.frombuffer(bundle[0].data, dtype=np.float32)
        run, sender = divmod(header.microbatch, len(self._file.addresses))
        self._arrived[run, header.step][sender] = vector
        self._news.set()

    async def _all(self, run: int, round_: int, count: int) -> dict[int, F32]:
        while len(self._arrived[run, round_]) < count:
            self._news.clear()
            await self._news.wait()
        return self._arrived.pop((run, round_))

    def _failed(self, to: WorkerId, generation: Generation, reason: str) -> None:
        raise RuntimeError(f"{to} did not take generation {generation}: {reason}")


def _name(peer: int) -> WorkerId:
    return WorkerId(f"p{peer}")


async def _no_state(_: FetchStateRequest) -> None:
    return None


def _envelope(me: int, to: int, number: int, round_: int) -> Envelope:
    hops = tuple(ChunkRef(stage=StageIndex(i), worker=_name(peer)) for i, peer in enumerate((me, to)))
    header = HopTensor(
        direction=Direction.FORWARD,
        phase=Phase.TRAIN,
        step=Step(round_),
        microbatch=MicrobatchId(number),
        hop=1,
        path=HopPath(hops=hops),
    )
    return Envelope(
        job=JobId("gossip"),
        epoch=Epoch(1),
        generation=Generation(1),
        sender=_name(me),
        incarnation=Incarnation("1"),
        header=header,
    )


# --- the process ---


async def _serve(file: PeerFile) -> None:
    async with asyncio.TaskGroup() as group:
        peer = GossipPeer(file, group)
        server = await _listen(peer.service, file.addresses[file.me])
        print("listening", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(await peer.gossip(GossipRun.model_validate_json(line)), flush=True)
        await peer.peers.close()
        await server.stop(None)


async def _listen(service: PeerService, address: str) -> aio.Server:
    server = open_server(credentials=NO_CREDENTIALS)
    service.attach(server)
    bind(server, WORKER_HOST, split_address("addresses", address)[1])
    await server.start()
    return server


def main() -> int:
    """Be the peer that the file describes until the standard input ends."""
    keep_message_buffers()
    asyncio.run(_serve(PeerFile.model_validate_json(Path(sys.argv[1]).read_bytes())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
