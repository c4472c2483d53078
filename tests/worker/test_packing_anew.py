"""Arrays that are packed anew in the midst of a sweep: real workers, and the real Coordinator machine.

Every trial comes to what it comes to where nothing is packed anew, to 1e-12.
"""

from collections.abc import Mapping, Sequence

import pytest
import torch
from pydantic import JsonValue
from torch import Tensor

from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import ArrayJob, BatchSpec, BudgetSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.config.optimizer import AdamWSpec
from skein.config.sweep.spec import SweepSpec
from skein.model.families.mlp import MlpModel
from skein.protocol.coordinator.sweeping.standing import TrialStand, stands_of
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import CheckpointCommitted, JobEnded, StepCommitted
from skein.types import JobId, JobState, Precision
from tests.worker.cluster import Cluster, Disk, cluster
from tests.worker.test_array_run import saved
from worker.compute.state import FATE

SWEEP = JobId("rates-1")
SAME = 1e-12
RATES = (3e-3, 1e-2, 3e-2, 1e-3, 2e-3, 5e-3)
WILD: Mapping[str, JsonValue] = {
    "optimizer.learning_rate": 10.0,
    "optimizer.weight_decay": 10.0,
    "optimizer.schedule": "constant",
}
"""Parameters grow a hundred times with every step."""


def sweep(num_trials: int, *, num_wild: int = 0, steps: int = 200, per_array: int = 16) -> JobSpec:
    """So many trials, of which the first few diverge."""
    calm: tuple[Mapping[str, JsonValue], ...] = tuple(
        {"optimizer.learning_rate": RATES[number % len(RATES)], "seed": number}
        for number in range(num_trials)
    )
    return JobSpec(
        name="rates",
        model=MlpModel(family="mlp", widths=(16,)),
        data=DataSpec(sources=(DigitsSource(format="digits"),)),
        batch=BatchSpec(samples=16, microbatch_samples=16),
        parallel=ParallelSpec(stages=1),
        optimizer=AdamWSpec(warmup_steps=1),
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(samples=32),
        precision=Precision.FP64,
        sweep=SweepSpec(
            trials=tuple({**x, **WILD} if number < num_wild else x for number, x in enumerate(calm)),
            fuse="always",
            round_steps=5,
            per_array=per_array,
        ),
    )


async def ended(here: Cluster) -> JobState:
    """The state that the sweep comes to."""
    number = 1
    while (record := await here.first(JobEnded, number)).job != SWEEP:
        number += 1
    return record.state


def replayed(disk: Disk) -> History:
    history = History()
    for record in disk.records:
        history.apply(record)
    return history


def arrays_of(history: History) -> list[JobHistory]:
    return [history.jobs[job] for job in history.jobs[SWEEP].arrays]


def outcomes(disk: Disk) -> list[tuple[TrialStand, dict[str, Tensor]]]:
    """Each trial with its row as it was saved last."""
    history = replayed(disk)
    found = []
    for stand in stands_of(history.jobs[SWEEP], history):
        assert stand.array is not None
        newest = [x for x in disk.records if isinstance(x, CheckpointCommitted) and x.job == stand.array.job][
            -1
        ]
        found.append((stand, saved(disk, newest, stand.row)))
    return found


def assert_same(disk: Disk, other: Disk) -> None:
    for (one, state), (undisturbed, expected) in zip(outcomes(disk), outcomes(other), strict=True):
        assert one.num_steps == undisturbed.num_steps
        assert one.failure == undisturbed.failure
        for name, tensor in expected.items():
            assert torch.allclose(state[name], tensor, rtol=SAME, atol=SAME), name


async def undisturbed(job: JobSpec) -> Disk:
    """The sweep on one worker that has all rows in one array."""
    disk = Disk()
    async with cluster(disk) as here:
        here.submit(job)
        async with here.workers("only"):
            assert await ended(here) is JobState.FINISHED
    assert len(arrays_of(replayed(disk))) == 1
    return disk


def trials(arrays: Sequence[JobHistory]) -> list[tuple[int, ...]]:
    return [array.trials for array in arrays]


async def test_a_worker_that_comes_while_an_array_is_at_work_gets_its_share_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nobody else comes, so the array need not be so long that it outlasts the wait for others.
    monkeypatch.setattr("skein.protocol.coordinator.sweeping.sweeps._SETTLE_S", 0.1)
    disk, job = Disk(), sweep(4)
    async with cluster(disk) as here:
        here.submit(job)
        async with here.workers("w0"):
            await here.first(StepCommitted)
            async with here.workers("w1"):
                assert await ended(here) is JobState.FINISHED
    first, *parts = arrays_of(replayed(disk))
    assert 0 < first.version < first.total_steps
    assert trials([first, *parts[:2]]) == [(0, 1, 2, 3), (0, 1), (2, 3)]
    for part in parts[:2]:
        assert isinstance(part.spec, ArrayJob)
        # Not a round of the first array was given up.
        assert part.spec.array.first_step == first.version * 5
    workers = {member.worker for part in parts[:2] for member in part.worked_by}
    assert workers == {"w0", "w1"}
    assert_same(disk, await undisturbed(job))


async def test_rows_that_are_left_of_an_array_are_joined_with_those_that_wait() -> None:
    disk, job = Disk(), sweep(8, num_wild=3, per_array=6)
    async with cluster(disk) as here:
        here.submit(job)
        async with here.workers("w0"):
            assert await ended(here) is JobState.FINISHED
    first, second, joined = arrays_of(replayed(disk))
    assert trials([first, second, joined]) == [(0, 1, 2, 3), (4, 5, 6, 7), (3, 4, 5, 6, 7)]
    assert 0 < first.version < first.total_steps
    assert second.version == 0
    stands = outcomes(disk)
    assert [bool(stand.failure) for stand, _ in stands] == [True] * 3 + [False] * 5
    assert [int(state[FATE][1]) > 0 for _, state in stands] == [True] * 3 + [False] * 5
    assert_same(disk, await undisturbed(sweep(8, num_wild=3)))
