"""Steps of workers that are meshes beside workers with one device, against the same steps without a mesh."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from skein.config.job import JobSpec
from skein.config.mesh.tensor import TensorSpec
from skein.model.sparse.experts import ExpertPlacement
from skein.model.sparse.routing import RoutingSpec
from skein.plan.pieces.lanes import Pieces
from skein.types import Layout
from tests.support.device import mesh_of
from tests.worker.lab import Lab, sparse_job, tiny_job
from tests.worker.mesh.test_stage import counted
from worker.mesh.mesh import Mesh
from worker.mesh.traffic import Collective

NUM_STEPS = 4


@pytest.fixture(scope="module")
def two() -> Iterator[Mesh]:
    mesh = Mesh(mesh_of(2))
    yield mesh
    mesh.close()


NUM_SPARSE_STEPS = 12


def curve(lab: Lab) -> list[float]:
    """Loss and norm of each step, and the loss of an evaluation."""
    steps = [lab.step(step) for step in range(NUM_STEPS)]
    return [x for step in steps for x in (step.loss, step.gradient_norm)] + [lab.evaluate(NUM_STEPS, 2)]


def test_a_mesh_in_blocks_and_single_devices_step_alike(four: Mesh, labs: list[Lab], text: Path) -> None:
    job = tiny_job(text, replicas=2, is_tied=True)
    tensor = TensorSpec(form="2d", size=4)
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"tensor": tensor})})
    labs += [Lab(job, meshes=meshes) for meshes in ({}, {"w00": four})]
    before = four.traffic.counts[Collective.SPREAD]
    wanted, found = [curve(lab) for lab in labs]
    assert four.traffic.counts[Collective.SPREAD] > before
    assert found == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    ("layout", "replicas", "num_holders", "is_tied", "meshed"),
    [
        (Layout.LINE, 1, None, True, ["w00"]),
        (Layout.LINE, 1, 1, True, ["w00"]),
        (Layout.LOOP, 1, None, True, ["w00", "w01"]),
        (Layout.LOOP, 2, None, False, ["w00", "w11"]),
        (Layout.LINE, 2, None, True, ["w10"]),
    ],
    ids=["one end", "both ends", "loop", "beside single devices", "replica of a single device"],
)
def test_meshes_and_single_devices_step_alike(
    two: Mesh,
    labs: list[Lab],
    text: Path,
    layout: Layout,
    replicas: int,
    num_holders: int | None,
    is_tied: bool,
    meshed: list[str],
) -> None:
    job: JobSpec = tiny_job(text, layout=layout, replicas=replicas, is_tied=is_tied)
    labs += [Lab(job, num_holders=num_holders, meshes=meshes) for meshes in ({}, dict.fromkeys(meshed, two))]
    before = two.traffic.counts.total()
    wanted, found = [curve(lab) for lab in labs]
    assert two.traffic.counts.total() > before
    # Float64 sums in another order, over so few steps.
    assert found == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("in_sequence", [False, True])
def test_one_boundary_tensor_crosses_a_link_between_two_meshes(
    two: Mesh, labs: list[Lab], text: Path, in_sequence: bool
) -> None:
    job = tiny_job(text, layout=Layout.LOOP, is_tied=False)
    tensor = TensorSpec(sequence_parallel=in_sequence)
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"tensor": tensor})})
    labs += [Lab(job, meshes=meshes) for meshes in ({}, {"w00": two, "w01": two})]
    before = counted(two)
    for lab in labs:
        lab.step(0)
    assert (Collective.SCATTER in counted(two, before)) == in_sequence
    # Two samples of twelve tokens of width 16 in float64; from the first stage to the second and back to the head, and
    # a gradient for each.
    boundary_bytes = 2 * 12 * 16 * 8
    each_way = {("w00", "w01"): 2, ("w01", "w00"): 2}
    for lab in labs:
        assert lab.sent_bytes.keys() == each_way.keys()
        for link, num in each_way.items():
            wanted = job.batch.num_microbatches * num * boundary_bytes
            assert lab.sent_bytes[link] == pytest.approx(wanted, rel=0.01)  # type: ignore[index]


def test_experts_on_a_device_of_a_mesh_are_balanced_as_without(
    two: Mesh, labs: list[Lab], text: Path
) -> None:
    job = sparse_job(text)
    labs += [Lab(job), Lab(job, meshes={"w00": two})]
    before = two.traffic.counts.total()
    wanted, found = [curve(lab) for lab in labs]
    assert two.traffic.counts.total() == before, "experts are on one device"
    assert found == pytest.approx(wanted, rel=1e-10)


# Devices have twelve tokens of a microbatch each, which five and seven pieces do not divide.
PIECES = [
    *(Pieces(forward=num, backward=5 - num, num_summed=20 * num) for num in (1, 2, 3, 4)),
    Pieces(forward=5, backward=7, num_summed=1000),
    None,
]


@pytest.mark.parametrize(
    ("num_chosen", "capacity", "stages"),
    [
        pytest.param(2, None, 4, id="top 2, dropless", marks=pytest.mark.long),
        pytest.param(2, 1.0, 2, id="top 2, room for 1"),
        pytest.param(1, 1.0, 4, id="top 1, room for 1", marks=pytest.mark.long),
    ],
)
def test_small_sparse_models_train_alike_on_workers_and_meshes(
    two: Mesh, labs: list[Lab], text: Path, num_chosen: int, capacity: float | None, stages: int
) -> None:
    def job(num_stages: int, *, in_sequence: bool = False) -> JobSpec:
        routing = RoutingSpec(balance_coefficient=0.1, capacity=capacity)
        made = sparse_job(
            text,
            stages=num_stages,
            num_chosen=num_chosen,
            routing=routing,
            placement=ExpertPlacement.MESH,
        )
        tensor = TensorSpec(sequence_parallel=in_sequence)
        return made.model_copy(update={"parallel": made.parallel.model_copy(update={"tensor": tensor})})

    labs += [Lab(job(num)) for num in (1, 2, 4)]
    labs += [Lab(job(1), meshes={"w00": two}), Lab(job(stages, in_sequence=True), meshes={"w00": two})]
    before, num_dropping = counted(two), 0
    for step in range(NUM_SPARSE_STEPS):
        two.pieces = PIECES[step % len(PIECES)]
        wanted, *others = (lab.step(step) for lab in labs)
        for found in others:
            # Float64 sums in another order, over twelve steps.
            assert (found.loss, found.gradient_norm, found.balance_loss) == pytest.approx(
                (wanted.loss, wanted.gradient_norm, wanted.balance_loss), rel=1e-9
            )
            # Of equally many choices, so equally many are dropped.
            assert found.drop_ratio == wanted.drop_ratio
        num_dropping += (wanted.drop_ratio or 0) > 0
    assert num_dropping == (0 if capacity is None else NUM_SPARSE_STEPS)
    since = counted(two, before)
    assert since[Collective.EXCHANGE] > 0
    assert since[Collective.GRADIENT] > 0
