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
from tests.worker.lab import Lab, sparse_job, tiny_job
from worker.mesh.mesh import Mesh
from worker.mesh.traffic import Collective

NUM_STEPS = 4


@pytest.fixture(scope="module")
def two() -> Iterator[Mesh]:
    mesh = Mesh(["cpu"] * 2)
    yield mesh
    mesh.close()


NUM_SPARSE_STEPS = 12


def curve(lab: Lab) -> list[float]:
    """Loss and norm of each step, and the loss of an evaluation."""
    steps = [lab.step(step) for step in range(NUM_STEPS)]
    return [x for step in steps for x in (step.loss, step.gradient_norm)] + [lab.evaluate(NUM_STEPS, 2)]


def test_a_mesh_in_blocks_and_single_devices_step_alike(labs: list[Lab], text: Path) -> None:
    job = tiny_job(text, replicas=2, is_tied=True)
    tensor = TensorSpec(form="2d", size=4)
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"tensor": tensor})})
    mesh = Mesh(["cpu"] * 4)
    try:
        labs += [Lab(job, meshes=meshes) for meshes in ({}, {"w00": mesh})]
        wanted, found = [curve(lab) for lab in labs]
        assert mesh.traffic.counts[Collective.SPREAD] > 0
    finally:
        mesh.close()
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


def test_experts_on_a_device_of_a_mesh_are_balanced_as_without(
    two: Mesh, labs: list[Lab], text: Path
) -> None:
    job = sparse_job(text)
    labs += [Lab(job), Lab(job, meshes={"w00": two})]
    before = two.traffic.counts.total()
    wanted, found = [curve(lab) for lab in labs]
    assert two.traffic.counts.total() == before, "experts are on one device"
    assert found == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    ("stages", "num_chosen", "capacity", "pieces", "in_sequence"),
    [
        (1, 2, None, Pieces(forward=2, backward=3), False),
        (2, 2, 1.0, Pieces(forward=4, backward=1), True),
        (4, 1, 1.0, None, True),
    ],
    ids=["alone, dropless", "of two workers, top 2, in parts", "of four, top 1, in parts"],
)
def test_experts_in_parts_over_a_mesh_train_like_those_of_one_device(
    two: Mesh,
    labs: list[Lab],
    text: Path,
    stages: int,
    num_chosen: int,
    capacity: float | None,
    pieces: Pieces | None,
    in_sequence: bool,
) -> None:
    routing = RoutingSpec(balance_coefficient=0.1, capacity=capacity)
    job = sparse_job(
        text, stages=stages, num_chosen=num_chosen, routing=routing, placement=ExpertPlacement.MESH
    )
    tensor = TensorSpec(sequence_parallel=in_sequence)
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"tensor": tensor})})
    labs += [Lab(job), Lab(job, meshes={"w00": two})]
    before, two.pieces = two.traffic.counts[Collective.EXCHANGE], pieces
    wanted, found = ([lab.step(step) for step in range(NUM_SPARSE_STEPS)] for lab in labs)
    assert two.traffic.counts[Collective.EXCHANGE] > before
    for one, other in zip(wanted, found, strict=True):
        # Float64 sums in another order, over twelve steps.
        assert (other.loss, other.gradient_norm) == pytest.approx((one.loss, one.gradient_norm), rel=1e-9)
        assert other.balance_loss == pytest.approx(one.balance_loss, rel=1e-9)
        assert other.drop_ratio == one.drop_ratio
    assert (wanted[-1].drop_ratio or 0) > 0 or capacity is None
