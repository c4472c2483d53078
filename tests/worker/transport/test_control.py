"""A worker's control stream goes to whoever leads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator import serving
from coordinator.records.logfile import LogBusy
from coordinator.records.store import RunLog
from skein.errors import UserError
from skein.protocol.messages.directives import Directive, Welcome
from tests.coordinator.builders import WAIT_S, eventually, hello
from tests.coordinator.test_standby import dial, leading, standing_by
from worker.transport.coordinator import ControlStream, Explain, Whereabouts

DEAD = "127.0.0.1:1"


class Greeter:
    """Says Hello on each stream, and keeps what it hears."""

    def __init__(self, *addresses: str, explain: Explain | None = None) -> None:
        where = Whereabouts(addresses, dial=dial)
        self.control = ControlStream(where, dial=dial, listener=self, explain=explain)
        self.epochs: list[int] = []
        self.reasons: list[str] = []

    def opened(self) -> None:
        self.control.send(hello())

    def heard(self, directive: Directive) -> None:
        if isinstance(directive, Welcome):
            self.epochs.append(directive.epoch)

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)


@asynccontextmanager
async def greeting(*addresses: str, explain: Explain | None = None) -> AsyncIterator[Greeter]:
    greeter = Greeter(*addresses, explain=explain)
    running = asyncio.create_task(greeter.control.run())
    try:
        yield greeter
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_worker_of_a_standby_joins_the_leader(tmp_path: Path) -> None:
    async with leading(tmp_path) as leader, standing_by(tmp_path) as (waits, _):
        address = leader.where().address
        await eventually(lambda: waits.leader == address)
        async with greeting(waits.address) as greeter:
            await eventually(lambda: greeter.epochs == [1])
        assert any(f"the leader is {address}" in reason for reason in greeter.reasons)


async def test_a_worker_passes_over_the_dead(tmp_path: Path) -> None:
    async with leading(tmp_path) as leader, greeting(DEAD, leader.where().address) as greeter:
        await eventually(lambda: greeter.epochs == [1])


async def test_where_no_connection_comes_up_a_clock_or_a_certificate_is_named() -> None:
    async with greeting(DEAD, explain=lambda address: f"the clock of {address} is off") as greeter:
        await eventually(lambda: f"{DEAD}: the clock of {DEAD} is off" in greeter.reasons)
    async with greeting(DEAD, explain=lambda _: None) as greeter:
        await eventually(lambda: any("nothing listens there" in reason for reason in greeter.reasons))


async def test_a_worker_learns_of_a_standby_that_comes_later_and_follows_a_takeover_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SAMPLE_S", 0.02)
    async with leading(tmp_path) as leader, greeting(leader.where().address) as greeter:
        await eventually(lambda: greeter.epochs == [1])
        async with standing_by(tmp_path) as (waits, _):
            await eventually(
                lambda: greeter.control._where._addresses == (leader.where().address, waits.address)
            )
            await leader.stop()
            await eventually(lambda: greeter.epochs == [1, 2])


async def test_a_worker_that_was_there_first_joins_whoever_comes(tmp_path: Path) -> None:
    async with standing_by(tmp_path) as (waits, leads), greeting(DEAD, waits.address) as greeter:
        await eventually(lambda: greeter.epochs == [1])
        assert leads.done()


async def test_a_worker_follows_a_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(tmp_path) as leader, standing_by(tmp_path) as (waits, leads):
        before = leader.where().address
        async with greeting(before, waits.address) as greeter:
            await eventually(lambda: greeter.epochs == [1])
            renew = RunLog.renew

            def renew_unless_stuck(log: RunLog, address: str) -> None:
                if address == before and not leads.done():
                    raise LogBusy("stuck")
                renew(log, address)

            monkeypatch.setattr(RunLog, "renew", renew_unless_stuck)
            async with asyncio.timeout(WAIT_S):
                await leads
                await leader.ended()
            await eventually(lambda: greeter.epochs[-1] == 2)


async def test_what_will_not_change_by_waiting_ends_a_worker_that_was_never_welcome(tmp_path: Path) -> None:
    async with leading(tmp_path) as leader:
        greeter = Greeter(leader.where().address)
        greeter.opened = lambda: greeter.control.send(hello(worker="no name"))  # type: ignore[method-assign]
        with pytest.raises(UserError, match=r"join: .*no name"):
            async with asyncio.timeout(WAIT_S):
                await greeter.control.run()
