"""A coordinator that dies amid a choice beside training: its successor has real workers choose, and train, the same."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path as FilePath

import pytest

from skein.config.job import JobSpec
from skein.protocol.coordinator.coordinator_io import (
    Append,
    ChooseRows,
    CoordinatorCommand,
    CoordinatorEvent,
    ReportArrived,
    RowsChosen,
    Send,
)
from skein.protocol.log.records import CoresetChosen, StepCommitted
from skein.protocol.messages.coresets import CandidatesPicked
from skein.protocol.messages.directives import UseChoice
from skein.types import JobState, Step
from tests.worker.cluster import Disk, Moment, cluster
from tests.worker.puppet import running, setting
from tests.worker.test_selection import job_of

NAMES = ("w0", "w1")
DUE, LOOKED_AT = 15, 12
"""Steps from which samples are drawn by the second choice, and by whose parameters it is made."""
_At = CoordinatorEvent | CoordinatorCommand


def beside_a_step(at: _At) -> bool:
    """Rows are being looked at while steps go on."""
    match at:
        case Append(record=StepCommitted(record=step)):
            return step.step == LOOKED_AT
        case _:
            return False


def candidates_told(at: _At) -> bool:
    """Some have picked, others may not have."""
    match at:
        case ReportArrived(report=CandidatesPicked(version=version)):
            return version == LOOKED_AT
        case _:
            return False


def second(kind: type[_At], at: type[_At] | None = None) -> Moment:
    """The second one of a kind has come in a run, and then one of kind `at`; None: it is that itself."""
    count = 0

    def is_it(now: _At) -> bool:
        nonlocal count
        count += isinstance(now, kind)
        return count > 1 and isinstance(now, at or kind)

    return is_it


def unused(at: _At) -> bool:
    """It is recorded, and nobody was told."""
    match at:
        case Send(directive=UseChoice(choice=choice)):
            return choice.version == DUE
        case _:
            return False


MOMENTS: dict[str, Callable[[], Moment]] = {
    "beside a step": lambda: beside_a_step,
    "candidates": lambda: candidates_told,
    "second stage, whose answer is on its way": lambda: second(ChooseRows),
    "made, not recorded": lambda: second(RowsChosen, Append),
    "recorded, unused": lambda: unused,
}


async def trained(
    job: JobSpec, dies: Moment | None = None
) -> tuple[dict[Step, float], list[tuple[Step, int, str]]]:
    """Losses by step, and choices: from when on, beside how many steps, which."""
    disk = Disk()
    async with AsyncExitStack() as workers:
        async with cluster(disk, dies=dies or (lambda _: False)) as first:
            port = first.port
            for name in NAMES:
                await workers.enter_async_context(running(setting(port, name=name, incarnation=name)))
            first.submit(job)
            if dies is None:
                assert await first.finished() == JobState.FINISHED
            else:
                await first.died.wait()
        if dies is not None:
            async with cluster(disk, port=port) as second:
                assert await second.finished() == JobState.FINISHED
    steps = {x.record.step: x.record.loss for x in disk.records if isinstance(x, StepCommitted)}
    chosen = [x for x in disk.records if isinstance(x, CoresetChosen)]
    return steps, [(x.version, x.num_steps_beside, x.digest) for x in chosen]


async def test_losses_are_as_undisturbed_whenever_the_coordinator_dies(tmp_path: FilePath) -> None:
    # Of one worker's rows: where several end, who is here again has a part in what is chosen.
    job = job_of(tmp_path, stages=2, refresh_epochs=2)
    losses, choices = await trained(job)
    assert [x[:2] for x in choices] == [(0, 0), (DUE, DUE - LOOKED_AT)]
    for name, moment in MOMENTS.items():
        disturbed, chosen = await trained(job, moment())
        assert chosen == choices, name
        assert disturbed == pytest.approx(losses, rel=1e-9), name
