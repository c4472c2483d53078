"""The worker's driver between what the machine commands and what the metrics tell."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch

from skein.protocol.deadline import TimePassed
from skein.protocol.worker.worker import Worker
from skein.protocol.worker.worker_io import Exit, ForgetJob, WorkerCommand, WorkerEvent
from skein.types import Generation
from worker.chunks.build import Builder, Files
from worker.chunks.copies import ChunkCopies
from worker.driver import WorkerDriver
from worker.executor import Executor
from worker.inbox import WorkerInbox
from worker.probe import measure_device
from worker.telling.metrics import WorkerMetrics
from worker.transport.coordinator import ControlStream
from worker.transport.peers import Peers
from worker.transport.statistics import Statistics


class OneCommand:
    """A machine that commands one thing and is done."""

    generation, pipeline, job = Generation(0), None, None

    def __init__(self, command: WorkerCommand) -> None:
        self._command = command

    def handle(self, event: WorkerEvent, *, now: float) -> list[WorkerCommand]:
        return [self._command, Exit(is_clean=True, reason="done")]

    def deadline(self) -> float | None:
        return None


async def test_the_pause_after_a_job_is_no_time_of_a_step() -> None:
    metrics, nothing = WorkerMetrics(Statistics()), SimpleNamespace(forget=lambda: None, places=None)
    events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
    inbox = SimpleNamespace(desk=nothing, post=events.put_nowait, get=events.get)
    executor = SimpleNamespace(compute=nothing, call=lambda function: function())
    async with asyncio.TaskGroup() as group:
        driver = WorkerDriver(
            cast(Worker, OneCommand(ForgetJob())),
            cast(WorkerInbox, inbox),
            group=group,
            control=cast(ControlStream, nothing),
            peers=cast(Peers, nothing),
            executor=cast(Executor, executor),
            builder=cast(Builder, nothing),
            copies=cast(ChunkCopies, nothing),
            files=cast(Files, nothing),
            metrics=metrics,
            measure=partial(measure_device, torch.device("cpu")),
            take_log_lines=tuple,
            on_generation=lambda _: None,
        )
        metrics.step_ended(now=10.0)
        inbox.post(TimePassed())
        assert (await driver.run()).is_clean
    metrics.step_ended(now=99.0)
    found = {count.name: count.value for count in metrics.counts()}
    assert found["skein_worker_step_seconds_count"] == 0
