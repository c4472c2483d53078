"""A client that is given a coordinator and its standby, or only one of them, talks to the one that leads."""

import asyncio
from pathlib import Path

import pytest

from client.aio import AsyncClient
from client.errors import NotReachable
from coordinator.records.logfile import LogBusy
from coordinator.records.store import RunLog
from skein.errors import UserError
from tests.coordinator.builders import WAIT_S, eventually, job_spec
from tests.coordinator.test_standby import leading, standing_by

DEAD = "127.0.0.1:1"


async def test_a_client_of_a_standby_is_led_on(tmp_path: Path) -> None:
    async with leading(tmp_path) as leader, standing_by(tmp_path) as (waits, _):
        address = leader.where().address
        await eventually(lambda: waits.leader == address)
        async with AsyncClient(waits.address) as client, asyncio.timeout(WAIT_S):
            assert (await client.version()).epoch == 1


async def test_a_client_passes_over_the_dead(tmp_path: Path) -> None:
    async with leading(tmp_path) as leader:
        both = f"{DEAD},{leader.where().address}"
        async with AsyncClient(both) as client, asyncio.timeout(WAIT_S):
            assert (await client.version()).epoch == 1


async def test_a_client_follows_a_takeover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(tmp_path) as leader, standing_by(tmp_path) as (waits, leads):
        before = leader.where().address
        async with AsyncClient(f"{before},{waits.address}") as client, asyncio.timeout(WAIT_S):
            job = await client.submit(job_spec(), key="a")
            renew = RunLog.renew

            def renew_unless_stuck(log: RunLog, address: str) -> None:
                if address == before and not leads.done():
                    raise LogBusy("stuck")
                renew(log, address)

            monkeypatch.setattr(RunLog, "renew", renew_unless_stuck)
            await leads
            assert "epoch 1 is over" in await leader.ended()
            assert (await client.submit(job_spec(), key="a")).id == job.id
            assert (await client.version()).epoch == 2


async def test_nobody_at_all_is_told_with_all_addresses() -> None:
    async with AsyncClient(f"{DEAD},localhost:1") as client:
        with pytest.raises(NotReachable, match=f"{DEAD},localhost:1"):
            await client.version()


async def test_an_address_among_several_is_checked() -> None:
    with pytest.raises(UserError, match="coordinator: 'b': give host:port"):
        AsyncClient("a:1,b")
