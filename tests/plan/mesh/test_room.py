"""Memory of the devices of meshes: what plans need of the fullest one, and what is refused for that."""

from dataclasses import replace

import pytest

from skein.config.job import JobSpec
from skein.config.mesh.tensor import TensorSpec
from skein.model.families.mixtral import MixtralModel
from skein.model.sparse.experts import ExpertPlacement
from skein.plan.balanced import make_balanced_plan
from skein.plan.check import violations
from skein.plan.load import stage_loads
from skein.plan.mesh.devices import device_load
from skein.plan.mesh.room import fullest_devices
from skein.plan.plan import Infeasible, Plan
from skein.topology.fleet import Fleet
from skein.units import format_bytes
from tests.plan.builders import fleet, job

TWO_GPUS = "cuda:0,cuda:1"


def sparse(placement: ExpertPlacement, *, stages: int = 1) -> JobSpec:
    """A small sparse model on long samples, whose activations are most of it."""
    spec = job(stages=stages, replicas=1, num_microbatches=2)
    model = MixtralModel(preset="mixtral-1m", placement=placement)
    data = spec.data.model_copy(update={"sequence_tokens": 1024})
    return spec.model_copy(update={"model": model, "data": data})


def whole_bytes(spec: JobSpec) -> int:
    """Memory of all of a model on one worker, with one microbatch."""
    plan = make_balanced_plan(spec, meshes(2**40), None, 0)
    assert isinstance(plan, Plan)
    (load,) = stage_loads(spec, plan.stages)
    return load.memory_bytes(1)


def meshes(*memory_bytes: int, device: str = TWO_GPUS) -> Fleet:
    """Workers of two devices, with so much memory each."""
    single = fleet([1e10] * len(memory_bytes), memory_bytes=memory_bytes)
    workers = (replace(x, profile=replace(x.profile, device=device)) for x in single.workers)
    return replace(single, workers=tuple(workers))


def test_experts_in_parts_fit_where_those_on_one_device_do_not() -> None:
    # More than all copies of the worker take, half of it on each device: too little for a device alone.
    memory = whole_bytes(sparse(ExpertPlacement.MESH)) * 3 // 2
    spread = make_balanced_plan(sparse(ExpertPlacement.MESH), meshes(memory), None, 0)
    assert isinstance(spread, Plan)
    refused = make_balanced_plan(sparse(ExpertPlacement.STAGE), meshes(memory), None, 0)
    assert isinstance(refused, Infeasible)
    assert refused.reason.startswith("w0 needs ")
    assert (
        f"on the fullest of 2 devices, which has {format_bytes(memory // 2)} ({memory // 2} bytes)"
        in refused.reason
    )


def test_the_fullest_device_is_counted_as_its_worker_shares_a_stage() -> None:
    spec = sparse(ExpertPlacement.MESH)
    on = meshes(2**40)
    plan = make_balanced_plan(spec, on, None, 0)
    assert isinstance(plan, Plan)
    (device,) = fullest_devices(spec, on, plan.stages, plan.chunks)
    form = next(spec.parallel.tensor.forms_on(2, spec.model, num_samples=2))
    [chunk] = plan.chunks
    assert device.needed_bytes == device_load(spec, plan.stages[0], form).memory_bytes(chunk.slots)
    assert (device.room_bytes, device.is_short) == (2**39, False)
    assert not list(fullest_devices(spec, fleet([1e10]), plan.stages, plan.chunks)), "no mesh"


def test_processes_that_rest_leave_the_hosts_memory_to_others() -> None:
    spec = sparse(ExpertPlacement.STAGE)
    plan = make_balanced_plan(spec, meshes(2**40), None, 0)
    assert isinstance(plan, Plan)
    rooms = [
        x.room_bytes
        for device in (TWO_GPUS, "cpu:2")
        for x in fullest_devices(spec, meshes(2**40, device=device), plan.stages, plan.chunks)
    ]
    assert rooms == [2**39, 2**40]


def test_a_plan_that_overfills_a_device_is_not_adopted() -> None:
    spec = sparse(ExpertPlacement.STAGE)
    whole = whole_bytes(spec)
    plan = make_balanced_plan(spec, meshes(2**40), None, 0)
    assert isinstance(plan, Plan)
    assert not violations(plan, spec, meshes(4 * whole))
    (found,) = violations(plan, spec, meshes(3 * whole // 2))
    assert found.startswith("w0 needs ")
    assert "on the fullest of 2 devices" in found


@pytest.mark.parametrize("size", ["auto", 1])
def test_what_one_device_cannot_hold_goes_to_another_worker(size: int) -> None:
    spec = sparse(ExpertPlacement.STAGE, stages=2)
    spec = spec.model_copy(
        update={"parallel": spec.parallel.model_copy(update={"tensor": TensorSpec(size=size)})}
    )
    whole = whole_bytes(sparse(ExpertPlacement.STAGE))
    both = meshes(whole, whole)
    plan = make_balanced_plan(spec, both, None, 0)
    assert isinstance(plan, Plan)
    assert {chunk.chunk.worker for chunk in plan.chunks} == {"w0", "w1"}
    assert not any(x.is_short for x in fullest_devices(spec, both, plan.stages, plan.chunks))
