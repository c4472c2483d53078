"""Workers that are meshes of devices, in real processes, beside workers with one device."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import psutil
import pytest

from bench.cluster import ROOTS, START_S
from bench.devices import StruckCluster
from bench.reference import run_reference
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, ParallelSpec
from skein.config.mesh.tensor import TensorSpec
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.sparse.experts import ExpertPlacement
from skein.model.sparse.routing import RoutingSpec
from skein.types import JobState, Layout, Precision
from skein.wire.views import StepFinished, WentBack
from tests.e2e import test_parity
from tests.e2e.jobs import NUM_STEPS, losses_of, text_job, wait_for_step
from tests.e2e.test_parity import SIZES, TOLERANCES, check, cut_job, make_job, train
from tests.support.extent import part

SQUARE = "q0"
"""A mesh of four."""
MESHES, SINGLES = ("m0", "m1"), ("s0", "s1")


class GatheredCluster(StruckCluster):
    """Meshes and single devices, as a test wants them."""

    def gather(self, names: tuple[str, ...]) -> None:
        """Exactly these, whole."""
        for name in set(self.workers) - set(names):
            assert self.stop_worker(name) == 0
        for name in names:
            if name in self.workers and name in MESHES and len(self.device_processes(name)) < 2:
                assert self.stop_worker(name) == 0
            if name not in self.workers:
                self.start_one(name)
        self.wait_for_workers(len(names))

    def start_one(self, name: str) -> None:
        if name == SQUARE:
            arguments = ["--join", self.target, "--name", name, "--devices", "cpu:4", *ROOTS]
            self.run(name, "worker", [*arguments, "--state-dir", str(self.directory / name)])
        elif name in MESHES:
            self.start_mesh(name)
        else:
            self.start_worker(name)


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatheredCluster]:
    with GatheredCluster(tmp_path_factory.mktemp("meshes")) as cluster:
        cluster.start_coordinator()
        yield cluster


CASES = list(product((1, 2), Layout, (True, False), (True, False), (Precision.FP64, Precision.FP32)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "layout", "is_tied", "in_sequence", "precision"), part(CASES, every=9), ids=str
)
def test_a_mesh_and_a_single_device_train_like_one_torch_process(
    meshes: GatheredCluster,
    text: Path,
    replicas: int,
    layout: Layout,
    is_tied: bool,
    in_sequence: bool,
    precision: Precision,
) -> None:
    meshes.gather((*MESHES[:replicas], *SINGLES[:replicas]))
    tensor = TensorSpec(sequence_parallel=in_sequence)
    parallel = ParallelSpec(stages=2, replicas=replicas, layout=layout, tensor=tensor)
    job = cut_job(text, precision, parallel, is_tied=is_tied)
    check(train(meshes, job), run_reference(job, test_parity.NUM_STEPS), TOLERANCES[precision])
    assert all(len(meshes.device_processes(name)) == 2 for name in meshes.workers if name in MESHES)


@pytest.mark.long
def test_a_mesh_in_blocks_and_a_single_device_train_like_one_torch_process(
    meshes: GatheredCluster, text: Path
) -> None:
    meshes.gather((SQUARE, SINGLES[0]))
    job = cut_job(text, Precision.FP64, ParallelSpec(stages=2), is_tied=True)
    parallel = job.parallel.model_copy(update={"tensor": TensorSpec(form="2d", size=4)})
    batch = BatchSpec(samples=job.batch.samples, microbatch_samples=2)
    job = job.model_copy(update={"parallel": parallel, "batch": batch})
    check(train(meshes, job), run_reference(job, test_parity.NUM_STEPS), TOLERANCES[Precision.FP64])
    assert len(meshes.device_processes(SQUARE)) == 4


@pytest.mark.long
def test_experts_over_a_mesh_beside_a_single_device_train_like_one_torch_process(
    meshes: GatheredCluster, text: Path
) -> None:
    meshes.gather((MESHES[0], SINGLES[0]))
    shape = MixtralShape.model_validate(SIZES | {"num_local_experts": 5})
    routing = RoutingSpec(balance_coefficient=0.1, capacity=1.0)
    model = MixtralModel(shape=shape, routing=routing, placement=ExpertPlacement.MESH)
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    job = make_job("experts-over-a-mesh", model, data, ParallelSpec(stages=2), Precision.FP64)
    check(train(meshes, job), run_reference(job, test_parity.NUM_STEPS), TOLERANCES[Precision.FP64])


def check_lost(meshes: GatheredCluster, text: Path, how: str, reason: str, *, amid_step: int = 4) -> None:
    """A device of a mesh is lost amid a backward, or before all: that costs nothing, and its worker comes back."""
    meshes.gather((*MESHES, *SINGLES))
    job = text_job(f"a-device-{how}", text, steps=NUM_STEPS).model_copy(update={"precision": Precision.FP64})
    devices = meshes.device_processes("m0")
    with meshes.client() as client:
        submitted = client.submit(job)
        if amid_step:
            wait_for_step(submitted, amid_step)
            meshes.strike("m0", how)
        else:
            devices[1].suspend()
        status = submitted.wait()
        events = submitted.history()
        assert status.state is JobState.FINISHED, status.reason
        assert not [e for e in events if isinstance(e.body, WentBack)]
        steps = [e.body.record.step for e in events if isinstance(e.body, StepFinished)]
        assert steps == list(range(NUM_STEPS))
        assert status.num_steps_lost == 0
        wanted = {step: x.loss for step, x in enumerate(run_reference(job, NUM_STEPS))}
        assert losses_of(events) == pytest.approx(wanted, rel=TOLERANCES[Precision.FP64])
        meshes.wait_for_workers(4)
        shown = {worker.worker: worker.profile.device for worker in client.workers()}
    assert shown == {"m0": "cpu", "m1": "cpu:2", "s0": "cpu", "s1": "cpu"}
    assert f"the process of device 1 (cpu) {reason}; incarnation=" in meshes.log_of("m0")
    assert psutil.wait_procs(devices, timeout=START_S)[1] == []


def test_a_device_process_that_dies_costs_no_step_and_its_worker_comes_back_smaller(
    meshes: GatheredCluster, text: Path
) -> None:
    check_lost(meshes, text, "kill", "was killed by signal 9")
    others = meshes.device_processes("m1")
    assert meshes.stop_worker("m1") == 0
    assert psutil.wait_procs(others, timeout=START_S)[1] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "amid_step", "reason"),
    [
        ("freeze", 4, "hung"),
        # Never asked for before, so it is the coordinator that notices: either way the worker comes back.
        ("freeze", 0, "hung"),
        ("fill", 4, "is out of memory"),
    ],
    ids=["frozen", "frozen-from-the-first", "out-of-memory"],
)
def test_a_device_that_is_frozen_or_full_costs_no_step_and_its_worker_comes_back_smaller(
    meshes: GatheredCluster, text: Path, how: str, amid_step: int, reason: str
) -> None:
    check_lost(meshes, text, how, reason, amid_step=amid_step)
