"""Real workers while a coordinator serves an empty state directory at their address, and once the right one is back."""

from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

from skein.config.job import BudgetSpec
from skein.protocol.coordinator.coordinator_io import Append, Send
from skein.protocol.log.records import RolledBack, StepCommitted
from skein.protocol.messages.directives import Refused
from skein.types import JobState
from tests.worker.cluster import Disk, Moment, cluster
from tests.worker.lab import tiny_job, write_text
from tests.worker.puppet import running, setting

NUM_STEPS = 6


def after_refusals(number: int) -> Moment:
    """The coordinator dies once it has refused workers so often."""
    counted = count(1)
    return lambda at: isinstance(at, Send) and isinstance(at.directive, Refused) and next(counted) == number


async def test_workers_keep_their_state_until_the_right_log_is_back(tmp_path: Path) -> None:
    job = tiny_job(write_text(tmp_path)).model_copy(update={"budget": BudgetSpec(steps=NUM_STEPS)})
    disk, other = Disk(), Disk()

    def third_step(at: object) -> bool:
        return isinstance(at, Append) and isinstance(at.record, StepCommitted) and at.record.record.step == 2

    async with AsyncExitStack() as workers:
        async with cluster(disk, dies=third_step) as right:
            port = right.port
            for name in ("w0", "w1"):
                await workers.enter_async_context(running(setting(port, name=name, incarnation=name)))
            right.submit(job)
            await right.died.wait()
        async with cluster(other, dies=after_refusals(4), port=port) as empty:
            await empty.died.wait()
        async with cluster(disk, port=port) as again:
            assert await again.finished() is JobState.FINISHED
            assert again.all(RolledBack) == []
            assert [one.record.step for one in again.all(StepCommitted)] == [*range(2, NUM_STEPS)]
