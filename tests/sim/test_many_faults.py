"""Drawn schedules of faults over several shapes: whatever strikes, the curve is the undisturbed one."""

import pytest

from skein.config.job import JobSpec
from skein.types import Layout
from tests.support.jobs import small_job
from tests.support.worlds import simulate_faults, undisturbed


def spec(
    *,
    stages: int,
    replicas: int,
    layout: Layout = Layout.LINE,
    is_tied: bool = False,
    skip_ratio: float = 0.0,
) -> JobSpec:
    return small_job(
        stages=stages,
        replicas=replicas,
        layout=layout,
        is_tied=is_tied,
        skip_ratio=skip_ratio,
        microbatches=2 * replicas,
        steps=8,
        evaluate_every=3,
        save_every=3,
    )


SHAPES = {
    "line 2x2": (spec(stages=2, replicas=2), 4),
    "line 3x2": (spec(stages=3, replicas=2), 6),
    "loop 2x2": (spec(stages=2, replicas=2, layout=Layout.LOOP), 4),
    "loop 3x2 tied": (spec(stages=3, replicas=2, layout=Layout.LOOP, is_tied=True), 6),
    "line 3x2 tied": (spec(stages=3, replicas=2, is_tied=True), 6),
    "line 3x2 on 3": (spec(stages=3, replicas=2), 3),
    "line 1x3": (spec(stages=1, replicas=3), 3),
    "line 4x1": (spec(stages=4, replicas=1), 4),
    "line 3x3 on 12": (spec(stages=3, replicas=3), 12),
    "line 4x2 skipping a quarter": (spec(stages=4, replicas=2, skip_ratio=0.25), 8),
    "loop 4x2 skipping half, tied": (
        spec(stages=4, replicas=2, layout=Layout.LOOP, is_tied=True, skip_ratio=0.5),
        8,
    ),
    "loop 3x2 skipping a third, on 4": (spec(stages=3, replicas=2, layout=Layout.LOOP, skip_ratio=1 / 3), 4),
}
SEEDS = range(40)
GENTLE = ("stream", "cut", "drain", "coordinator")
"""Faults in which nobody dies and nobody is silent beyond its lease: no state is ever lost."""


@pytest.mark.parametrize(("job", "num_workers"), SHAPES.values(), ids=SHAPES)
def test_no_schedule_of_faults_bends_the_loss_curve(job: JobSpec, num_workers: int) -> None:
    for seed in SEEDS:
        run = simulate_faults(job, num_workers, seed=seed)
        assert run.curve == undisturbed(job, num_workers).curve, f"seed={seed}"


@pytest.mark.parametrize(("job", "num_workers"), SHAPES.values(), ids=SHAPES)
def test_faults_that_kill_nobody_cost_no_committed_step(job: JobSpec, num_workers: int) -> None:
    for seed in SEEDS[:20]:
        run = simulate_faults(job, num_workers, seed=seed, kinds=GENTLE)
        assert run.num_rollbacks == 0, f"seed={seed}"


def test_a_storm_of_faults_ends_when_it_stops() -> None:
    job, num_workers = SHAPES["line 3x2"]
    for seed in range(5):
        run = simulate_faults(job, num_workers, seed=seed, num_faults=60)
        assert run.curve == undisturbed(job, num_workers).curve, f"seed={seed}"
