"""Which of several coordinators leads: asked of all at once, for one that is frozen would hold up a round."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import grpc
from grpc import aio

from skein.errors import UserError
from skein.wire.channel import Lane, join_address, split_address
from skein.wire.v1 import jobs_pb2, jobs_pb2_grpc

LEADER_KEY = "skein-leader"
"""Metadata by which a standby names the leader."""
MAX_ADDRESSES = 16
ASK_S = 2.0
"""For an answer; who needs longer is as good as dead."""
OTHERS_S = 0.3
"""How long others are waited for once one has said that it leads: of two that do, the older is about to find out."""

Dial = Callable[[str, Lane], aio.Channel]
"""Opens a channel to an address, on a connection of its own."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one address said: its epoch if it leads, and whom it named if it stands by."""

    address: str
    epoch: int | None = None
    named: str | None = None


async def find_leader(addresses: Iterable[str], *, dial: Dial) -> str | None:
    """The address that leads, by its own word and in the newest epoch; None if none does at this moment.

    Whom a standby names is asked as well, once.
    """
    asked = set(addresses)
    answers = await _ask(asked, dial)
    named = {answer.named for answer in answers if answer.named is not None} - asked
    if named and not any(answer.epoch is not None for answer in answers):
        answers += await _ask(named, dial)
    leaders = [(answer.epoch, answer.address) for answer in answers if answer.epoch is not None]
    return max(leaders)[1] if leaders else None


async def _ask(addresses: Iterable[str], dial: Dial) -> list[_Answer]:
    """What they say, in order, as far as they are worth waiting for."""
    asking = [asyncio.create_task(_ask_one(address, dial)) for address in sorted(addresses)]
    try:
        for done in asyncio.as_completed(asking, timeout=ASK_S):
            if (await done).epoch is not None:
                break
        await asyncio.wait(asking, timeout=OTHERS_S)
    except TimeoutError:
        pass  # the rest is silent
    finally:
        for question in asking:
            question.cancel()
    return [question.result() for question in asking if question.done() and not question.cancelled()]


async def _ask_one(address: str, dial: Dial) -> _Answer:
    channel = dial(address, Lane.CONTROL)
    try:
        reply = await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest(), timeout=ASK_S)
        return _Answer(address=address, epoch=reply.epoch)
    except aio.AioRpcError as error:
        return _Answer(address=address, named=named_leader(error))
    finally:
        await channel.close(None)


def named_leader(error: aio.AioRpcError) -> str | None:
    """Whom a standby named in its refusal."""
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
