"""The worker's driver between what the machine commands and what the metrics tell."""

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from skein.protocol.deadline import TimePassed
from skein.protocol.messages.reports import CheckpointWritten
from skein.protocol.worker.ops import Op, SaveOp
from skein.protocol.worker.worker import Worker
from skein.protocol.worker.worker_io import Exit, ForgetJob, RunOp, WorkerCommand, WorkerEvent
from skein.storage.places import ANYWHERE
from skein.types import Generation, JobId, StageIndex, Step, WorkerId
from tests.support.device import DEVICE
from worker.chunks.build import Builder, Files
from worker.chunks.copies import ChunkCopies
from worker.compute.ops import Done
from worker.compute.state import Saved
from worker.driver import WorkerDriver
from worker.executor import Executor, Ran
from worker.inbox import WorkerInbox
from worker.probe import measure_device
from worker.telling.metrics import WorkerMetrics
from worker.transport.coordinator import ControlStream
from worker.transport.peers import Peers
from worker.transport.reach.explorer import Explorer
from worker.transport.statistics import Statistics

END = Exit(is_clean=True, reason="done")


class Commanding:
    """A machine that commands, at each event, what stands next in a list."""

    generation, pipeline, job = Generation(0), None, None
    peers: frozenset[WorkerId] = frozenset()

    def __init__(self, *answers: list[WorkerCommand]) -> None:
        self._answers = iter(answers)
        self.heard: list[WorkerEvent] = []

    def handle(self, event: WorkerEvent, *, now: float) -> list[WorkerCommand]:
        self.heard.append(event)
        return next(self._answers)

    def deadline(self) -> float | None:
        return None


async def driven(
    machine: Commanding, metrics: WorkerMetrics, done: Done | None = None, *, is_overtaken: bool = False
) -> WorkerDriver:
    """A driver that has carried out what `machine` commands after one event; its only op comes to `done`.

    `is_overtaken`: another event waits for the machine already when the op ends.
    """
    nothing = SimpleNamespace(
        forget=lambda: None, places=ANYWHERE, take=lambda *_: ({}, ()), ended=lambda *_: ()
    )
    events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
    inbox = SimpleNamespace(desk=nothing, post=events.put_nowait, get=events.get)
    op_done = [] if done is None else [done]
    del done

    def run(op: Op, _operands: object, on_ran: Callable[[Ran], None]) -> None:
        if is_overtaken:
            asyncio.get_running_loop().call_soon(inbox.post, TimePassed())
        on_ran(Ran(op=op, done=op_done.pop(), seconds=1.0))

    executor = SimpleNamespace(compute=nothing, tell=lambda function: function(), run=run)
    async with asyncio.TaskGroup() as group:
        driver = WorkerDriver(
            cast(Worker, machine),
            cast(WorkerInbox, inbox),
            group=group,
            control=cast(ControlStream, nothing),
            peers=cast(Peers, nothing),
            explorer=cast(Explorer, nothing),
            take_ways=lambda _: None,
            executor=cast(Executor, executor),
            builder=cast(Builder, nothing),
            copies=cast(ChunkCopies, nothing),
            files=cast(Files, nothing),
            metrics=metrics,
            measure=partial(measure_device, DEVICE),
            take_log_lines=tuple,
            on_generation=lambda _: None,
        )
        inbox.post(TimePassed())
        assert (await driver.run()).is_clean
    return driver


async def test_the_pause_after_a_job_is_no_time_of_a_step() -> None:
    metrics = WorkerMetrics(Statistics())
    metrics.step_ended(now=10.0)
    await driven(Commanding([ForgetJob(), END]), metrics)
    metrics.step_ended(now=99.0)
    found = {count.name: count.value for count in metrics.counts()}
    assert found["skein_worker_step_seconds_count"] == 0


async def test_what_was_saved_for_a_job_that_is_over_does_not_stay_in_memory() -> None:
    op = SaveOp(generation=Generation(0), version=Step(1), stage=StageIndex(0), url=None)
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    machine = Commanding([RunOp(generation=Generation(0), op=op), ForgetJob()], [END])
    driver = await driven(machine, WorkerMetrics(Statistics()), saved_of(op, {"x": tensor}))
    del tensor
    assert alive() is None, f"{driver} holds it"


async def test_what_was_copied_before_a_job_was_forgotten_is_written(tmp_path: Path) -> None:
    op = SaveOp(generation=Generation(0), version=Step(1), stage=StageIndex(0), url=str(tmp_path))
    machine = Commanding([RunOp(generation=Generation(0), op=op)], [ForgetJob()], [END], [])
    saved = saved_of(op, {"x": torch.zeros(3)})
    await driven(machine, WorkerMetrics(Statistics()), saved, is_overtaken=True)
    [written] = [event for event in machine.heard if isinstance(event, CheckpointWritten)]
    assert written.files


def saved_of(op: SaveOp, params: dict[str, torch.Tensor]) -> Done:
    saved = Saved(
        job_id=JobId("job"),
        generation=op.generation,
        version=op.version,
        stage=op.stage,
        walker=op.walker,
        url=op.url,
        params=params,
        state={},
    )
    return Done(saved=saved)
