"""Search for the coordinator that leads. All are asked side by side, for one that is frozen would hold up a round."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, cast

import grpc
from grpc import aio

from skein.errors import UserError
from skein.wire.calling import Dial, dialled
from skein.wire.channel import Lane, join_address, split_address
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc

LEADER_KEY = "skein-leader"
"""Metadata by which a standby names the leader."""
MAX_ADDRESSES = 16
PATIENCE_S = 3.0
"""Seconds to look for a leader: longer than the slowest link needs for an answer."""
_OTHERS_S = 0.3
"""Seconds that others are heard once one has said that it leads: of two that do, the older is about to find out."""
_AGAIN_S = 0.2
"""Between two questions to one that does not lead; it may at any moment."""


def split_addresses(field: str, text: str) -> tuple[str, ...]:
    """The addresses in host:port, or in several with commas between.

    Raises:
        UserError: one is no address, or there are too many; the error names `field`.

    >>> split_addresses("join", "a:7411, [::1]:7412")
    ('a:7411', '[::1]:7412')
    """
    found = tuple(join_address(*split_address(field, part.strip())) for part in text.split(","))
    if len(found) > MAX_ADDRESSES:
        raise UserError(field, text, f"give {MAX_ADDRESSES} addresses at most")
    return found


def with_addresses(known: Sequence[str], others: Iterable[str]) -> tuple[str, ...]:
    """Addresses with others behind them; those that are no address, and those beyond `MAX_ADDRESSES`, are left out.

    >>> with_addresses(("a:1", "b:1"), ["b:1", "c:1", "nonsense"])
    ('a:1', 'b:1', 'c:1')
    """
    found = dict.fromkeys(known)
    for address in others:
        with suppress(UserError):
            found |= dict.fromkeys(split_addresses("coordinators", address))
    return tuple(found)[:MAX_ADDRESSES]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Answer of one address: its epoch if it leads, and the leader that it named if it stands by."""

    address: str
    epoch: int | None = None
    named: str | None = None


async def find_leader(addresses: Iterable[str], *, dial: Dial, patience_s: float = PATIENCE_S) -> str | None:
    """The address that leads, by its own word and in the newest epoch; None if none does for `patience_s`.

    Whom a standby names is asked as well. One that begins to lead meanwhile is found in a fraction of a second.
    """
    answers: asyncio.Queue[_Answer] = asyncio.Queue()
    asking: dict[str, asyncio.Task[NoReturn]] = {}
    epochs: dict[str, int] = {}

    def ask(address: str) -> None:
        if address not in asking and len(asking) < MAX_ADDRESSES:
            asking[address] = asyncio.create_task(_ask(address, dial, answers))

    for address in addresses:
        ask(address)
    try:
        async with asyncio.timeout(patience_s) as limit:
            while epochs.keys() != asking.keys():
                answer = await answers.get()
                if answer.named is not None:
                    ask(answer.named)
                if answer.epoch is not None:
                    epochs[answer.address] = answer.epoch
                    soon = asyncio.get_running_loop().time() + _OTHERS_S
                    limit.reschedule(min(soon, limit.when() or soon))
    except TimeoutError:
        pass  # whoever has not answered by now is out of the race
    finally:
        for question in asking.values():
            question.cancel()
    return max(((epoch, address) for address, epoch in epochs.items()), default=(0, None))[1]


async def _ask(address: str, dial: Dial, answers: asyncio.Queue[_Answer]) -> NoReturn:
    """Ask one again and again, on new connections: gRPC waits ever longer before it opens a broken one again."""
    while True:
        async with dialled(dial, address, Lane.CONTROL) as channel:
            try:
                reply = await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())
                answers.put_nowait(_Answer(address=address, epoch=reply.epoch))
            except aio.AioRpcError as error:
                answers.put_nowait(_Answer(address=address, named=named_leader(error)))
        await asyncio.sleep(_AGAIN_S)


def named_leader(error: aio.AioRpcError) -> str | None:
    """Address of the leader that a standby's refusal names; None if it names none, or this is another failure."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    entries = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    for key, value in entries:
        if key == LEADER_KEY and isinstance(value, str):
            try:
                return join_address(*split_address("leader", value))
            except UserError:
                return None
    return None
