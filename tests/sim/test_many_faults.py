"""Drawn schedules of faults over several shapes: whatever strikes, the curve is the undisturbed one."""

import pytest

from skein.protocol.log.records import RolledBack
from skein.sim.faults import FAULTS, GENTLE
from skein.sim.scenario import disturbed, judge
from skein.sim.shapes import PIPELINES, SHAPES, SimShape, shape_of
from tests.support.extent import part
from tests.support.worlds import of_kind

NUM_FAULTS = 8
SEEDS = range(26)


def judged(
    shape: SimShape, seed: int, *, num_faults: int = NUM_FAULTS, kinds: tuple[str, ...] | None = tuple(FAULTS)
) -> int:
    """How often committed steps were lost; `kinds`: None for those that the command draws."""
    world = disturbed(shape, seed=seed, num_faults=num_faults, kinds=kinds)
    try:
        judge(shape, world)
    except Exception as error:
        about = f"python -m skein.sim --shape '{shape.text}' --faults {num_faults} --seed {seed} --trace"
        raise AssertionError(f"{about}: {error!r}\n" + "\n".join(world.lines[-30:])) from error
    return len(of_kind(world.log, RolledBack))


@pytest.mark.parametrize("shape", part(SHAPES, every=3, start=1), ids=lambda shape: shape.text)
def test_no_schedule_of_faults_bends_the_loss_curve(shape: SimShape) -> None:
    for seed in part(SEEDS, every=26, start=SHAPES.index(shape)):
        judged(shape, seed)


@pytest.mark.parametrize("shape", part(PIPELINES, every=3), ids=lambda shape: shape.text)
def test_nor_does_one_over_chunks_split_backwards_shards_and_tied_ends(shape: SimShape) -> None:
    for seed in part(SEEDS, every=26, start=PIPELINES.index(shape)):
        judged(shape, seed)


@pytest.mark.parametrize("shape", part(SHAPES, every=6), ids=lambda shape: shape.text)
def test_faults_that_kill_nobody_cost_no_committed_step(shape: SimShape) -> None:
    for seed in part(SEEDS[:8], every=8, start=SHAPES.index(shape)):
        assert judged(shape, seed, kinds=GENTLE) == 0, f"seed={seed}"


@pytest.mark.parametrize("kind", part(list(FAULTS), every=4))
def test_each_kind_of_fault_alone_leaves_the_curve_as_it_was(kind: str) -> None:
    for seed in part(range(3), every=3, start=list(FAULTS).index(kind)):
        judged(shape_of("line 2x2"), seed, num_faults=4, kinds=(kind,))


def test_a_storm_of_faults_ends_when_it_stops() -> None:
    for seed in part(range(4), every=4):
        judged(shape_of("line 3x2"), seed, num_faults=60)
