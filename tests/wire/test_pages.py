"""Pages by HTTP: what nobody caught while one was made is told in the service's log."""

import asyncio
import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.telling.logs import begin_coordinator_log
from skein.wire.serving.pages import Page, PageRequest, Pages
from tests.coordinator.builders import WAIT_S
from worker.telling.logs import begin_worker_log


class Torn(Exception):
    """Nobody catches it."""


async def torn(_request: PageRequest) -> Page:
    raise Torn("in the midst of a page")


async def ask() -> None:
    pages = await Pages.open("metrics_port", "127.0.0.1", 0, torn)
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(*pages.address.rsplit(":", 1))
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert not await reader.read()
        writer.close()
        await pages.close()
    # A loop tells once nothing knows of what has failed.
    gc.collect()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a service's log begins with is for a process of its own."""
    loggers = [logging.getLogger(name) for name in ("coordinator", "worker", "skein", "grpc", "asyncio")]
    before = [(x.level, x.propagate, x.handlers) for x in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


async def test_an_error_that_nobody_caught_is_in_the_coordinators_log(tmp_path: Path) -> None:
    begin_coordinator_log(tmp_path / "log", "text")
    await ask()
    assert "Torn: in the midst of a page" in (tmp_path / "log").read_text()


async def test_an_error_that_nobody_caught_is_told_by_a_worker() -> None:
    tail = begin_worker_log("text")
    await ask()
    assert any("in the midst of a page" in line.text for line in tail.take())
