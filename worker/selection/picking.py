"""Picks candidates among rows whose features are here, on a thread beside training's."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from skein.config.job import JobSpec
from skein.errors import SkeinError, UserError
from skein.protocol.messages.coresets import CandidatesPicked, parts_of
from skein.protocol.worker.worker_io import BytesMoved, PickCandidates, WorkerEvent
from worker.executor import Executor, one_line
from worker.selection.traits import HeadRows, picked

_log = logging.getLogger(__name__)

_MOVED_S = 1.0
"""Seconds between two signs of life while rows are picked."""


async def pick(command: PickCandidates, executor: Executor, post: Callable[[WorkerEvent], None]) -> None:
    """Answer the command by events, whatever comes."""
    compute = executor.compute
    rows = await asyncio.wrap_future(executor.call(compute.traits.take))
    holding = compute.holding
    if not rows or holding is None:
        return  # Of a generation that is over: nobody waits for it.
    work = asyncio.create_task(asyncio.to_thread(partial(_parts, command, rows, holding.job)))
    while not (await asyncio.wait({work}, timeout=_MOVED_S))[0]:
        post(BytesMoved())
    for part in work.result():
        post(part)


def _parts(
    command: PickCandidates, rows: Mapping[int, HeadRows | UserError], job: JobSpec
) -> tuple[CandidatesPicked, ...]:
    return tuple(part for row, own in rows.items() for part in _parts_of_row(command, row, own, job))


def _parts_of_row(
    command: PickCandidates, row: int, rows: HeadRows | UserError, job: JobSpec
) -> tuple[CandidatesPicked, ...]:
    try:
        if isinstance(rows, UserError):
            raise rows
        found = picked(rows, job, num_rows=command.num_rows)
    except (SkeinError, MemoryError) as error:
        _log.warning("step=%d no candidates: %s", command.version, one_line(error))
        failed = CandidatesPicked(
            generation=command.generation,
            version=command.version,
            row=row,
            part=0,
            num_parts=1,
            error=one_line(error),
        )
        return (failed,)
    _log.info("step=%d picked %d of %d rows", command.version, len(found.ids), len(rows.ids))
    return parts_of(found, command.generation, command.version, row=row)
