"""Workers that are meshes: devices hang and end, the step goes on elsewhere, and the worker comes back smaller."""

from collections.abc import Callable
from functools import partial

import pytest

from skein.protocol.coordinator.runs.watching.detection import WARMING_S
from skein.protocol.log.records import GenerationOpened, RolledBack
from skein.protocol.worker.mesh.patience import LEAST_PATIENCE_S
from skein.protocol.worker.ops import ComputeOp
from skein.sim.faults import GENTLE
from skein.sim.processes.devices import SimMesh, left_of, share_of, simulated_mesh
from skein.sim.scenario import disturbed, judge, undisturbed_curve
from skein.sim.shapes import MESHES, SimShape, shape_of
from skein.sim.world import World
from skein.types import StageIndex, WorkerId
from tests.sim.test_many_faults import judged
from tests.support.extent import part
from tests.support.worlds import of_kind, run_until, version_of, worker

SHAPE = shape_of("line 2x2 meshes 4 devices 4")
ROUNDING_S = 0.001
"""Of times as they are told."""
NUM_STEPS = 24
"""So many that who comes back is given work again."""


def struck(strike: Callable[[World], None], shape: SimShape = SHAPE) -> World:
    """A world that is disturbed, at its end; its curve is the undisturbed one, and no step was lost."""
    world = disturbed(shape, seed=0, num_faults=0, steps=NUM_STEPS)
    strike(world)
    judge(shape, world, steps=NUM_STEPS)
    assert of_kind(world.log, RolledBack) == []
    return world


def computes(name: WorkerId, world: World) -> bool:
    """Whether a worker's devices are in the middle of a backward that they have done before."""
    mesh = world.workers[name].mesh
    if mesh is None or mesh.asked is None:
        return False
    op, _ = mesh.asked
    return version_of(world) >= 2 and isinstance(op, ComputeOp) and op.accumulates


def told(world: World, *words: str) -> float:
    """When a line with all these words was told first."""
    [line, *_] = [line for line in world.lines if all(word in line for word in words)]
    return float(line.split()[0])


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "ends"])
def test_a_device_that_is_lost_amid_a_backward_costs_no_step_and_its_worker_comes_back_smaller(
    hangs: bool,
) -> None:
    at_s = []

    def strike(world: World) -> None:
        run_until(world, partial(computes, worker(1)))
        at_s.append(world.clock.now)
        world.lose_device(worker(1), 2, 1000.0, hangs=hangs)

    world = struck(strike)
    lost_s = told(world, "w0001 the process of device 2 (cuda:2)", "devices=cuda:0,cuda:1,cuda:3")
    # The worker's own patience, with ops that take a fraction of a second; the coordinator's is longer.
    assert lost_s - at_s[0] <= LEAST_PATIENCE_S + ROUNDING_S
    assert (lost_s > at_s[0] + 1.0) is hangs
    profile = world.workers[worker(1)].machine.identity.profile
    assert profile.devices == ("cuda:0", "cuda:1", "cuda:3")
    members = [{m.worker for m in record.members} for record in of_kind(world.log, GenerationOpened)]
    assert worker(1) not in members[1]
    assert worker(1) in members[-1]


def test_what_is_left_of_four_devices_shares_a_stage_as_far_as_its_blocks_divide() -> None:
    shape, before = shape_of("line 1x2 on 2 meshes 2 devices 4"), []

    def strike(world: World) -> None:
        run_until(world, partial(computes, worker(1)))
        before.append(forward_s(world))
        world.lose_device(worker(1), 0, 1000.0, hangs=False)

    def forward_s(world: World) -> float:
        executor = world.workers[worker(1)].executor
        return executor.times[StageIndex(0)].forward / executor.nominal_flops_per_s

    world = struck(strike, shape)
    # Of three devices two compute.
    assert [forward_s(world)] == pytest.approx([2 * seconds for seconds in before])


def test_a_hang_in_what_was_never_asked_before_is_the_coordinators_to_notice_and_the_worker_comes_back() -> (
    None
):
    def strike(world: World) -> None:
        world.lose_device(worker(2), 1, 1000.0, hangs=True)

    world = struck(strike)
    turned_away_s = told(world, "w0002 exits", "start it again")
    assert turned_away_s > WARMING_S
    assert (
        told(world, "w0002 the process of device 1 (cuda:1) hung", "devices=cuda:0,cuda:2,cuda:3")
        == turned_away_s
    )
    assert world.workers[worker(2)].machine.identity.profile.num_devices == 3


def test_an_op_that_others_keep_from_the_processors_is_no_hang() -> None:
    def strike(world: World) -> None:
        run_until(world, partial(computes, worker(1)))
        world.slow_worker(worker(1), 64.0, is_starved=True)

    assert not [line for line in struck(strike).lines if "hung" in line]


def test_devices_are_lost_one_after_the_other_until_a_single_one_is_left() -> None:
    def strike(world: World) -> None:
        for number in (3, 1, 0):
            run_until(world, lambda world: worker(0) in world.workers)
            run_until(world, partial(computes, worker(0)))
            world.lose_device(worker(0), number, 1000.0, hangs=False)

    last = struck(strike).workers[worker(0)]
    assert last.machine.identity.profile.device == "cuda:2"
    assert last.mesh is None


def test_meshes_and_single_devices_have_the_curve_of_single_devices() -> None:
    assert undisturbed_curve(SHAPE, 8) == undisturbed_curve(shape_of("line 2x2 meshes 1 devices 2"), 8)


@pytest.mark.parametrize("shape", part(MESHES, every=4), ids=lambda shape: shape.text)
def test_no_schedule_of_faults_with_lost_devices_bends_the_loss_curve(shape: SimShape) -> None:
    for seed in part(range(26), every=13, start=MESHES.index(shape)):
        judge(shape, disturbed(shape, seed=seed, num_faults=8))


def test_lost_devices_and_faults_that_kill_nobody_cost_no_committed_step() -> None:
    shape = shape_of("line 2x2 on 5 meshes 5 devices 2")
    for seed in part(range(8), every=8):
        assert judged(shape, seed, kinds=GENTLE) == 0


def test_profiles_of_what_is_left() -> None:
    four = simulated_mesh(4, flops_per_s=8.0, memory_bytes=400)
    assert (four.device, four.flops_per_s, four.memory_bytes) == ("cuda:0,cuda:1,cuda:2,cuda:3", 8.0, 400)
    three = left_of(four, ("cuda:0", "cuda:1", "cuda:3"))
    assert (three.device, three.flops_per_s, three.memory_bytes) == ("cuda:0,cuda:1,cuda:3", 6.0, 300)
    assert share_of(three, 0.5) == left_of(four, ("cuda:0",))
    assert SimMesh.of(share_of(three, 0.5)) is None
    assert share_of(left_of(four, ("cuda:0",)), 0.5).flops_per_s == 1.0
