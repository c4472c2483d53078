"""What a program that embeds a worker is told of its course."""

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from skein.types import JobState
from tests.worker.cluster import Disk, cluster
from tests.worker.lab import write_text
from tests.worker.puppet import running, setting
from tests.worker.test_run import job_of


async def test_moments_are_told_in_the_order_in_which_a_step_is_made(tmp_path: Path) -> None:
    told: dict[str, list[str]] = {"w0": [], "w1": []}
    async with cluster(Disk()) as here, AsyncExitStack() as stack:
        for name, moments in told.items():
            mine = setting(here.port, name=name, incarnation=name)
            await stack.enter_async_context(running(replace(mine, watch=moments.append)))
        here.submit(job_of(write_text(tmp_path)))
        assert await here.finished() == JobState.FINISHED
    [first] = [moments for moments in told.values() if "after SendTensor forward" in moments]
    in_order = (
        "after DirectiveArrived NewGeneration",
        "before SendReport Ack",
        "after DirectiveArrived Assign",
        "before Build",
        "after DirectiveArrived Start",
        "before RunOp Forward",
        "after OpEnded Forward",
        "before SendTensor forward",
        "after SendTensor forward",
        "after TensorTaken forward",
        "after OpEnded Backward",
        "before SendReport StageDone",
        "after DirectiveArrived Prepare",
        "before SendReport Vote",
        "after SendReport Vote",
        "after DirectiveArrived Commit",
        "before RunOp Apply",
        "after OpEnded Apply",
    )
    begun = iter(first)
    # Each after the one before: an evaluation, which comes first, has some of the same moments.
    assert [moment for moment in in_order if moment not in begun] == []
