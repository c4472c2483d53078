"""Room on the devices of meshes: what a plan needs of the fullest one, and fleets that are taken for smaller by that.

A planner places whole stages by a worker's whole memory. Of a mesh some of a stage is on each device in part, and some
on each whole; so a plan is held against the devices, and where one lacks room its worker counts as that much smaller.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from skein.config.job import JobSpec
from skein.errors import UserError
from skein.plan.mesh.devices import chosen_form, device_load
from skein.plan.plan import ChunkPlan, Infeasible, Plan
from skein.topology.fleet import Fleet, FleetWorker
from skein.types import StageSpec, WorkerId
from skein.units import format_bytes

_MOST_TRIES = 6
_SMALLER = 0.99
"""Share of what would just fit that a mesh counts as: sizes are of whole layers."""


def has_mesh(fleet: Fleet) -> bool:
    """Whether any worker has several devices."""
    return any(x.profile.num_devices > 1 for x in fleet.workers)


def refused_without_mesh(job: JobSpec, fleet: Fleet) -> Infeasible | None:
    """Refusal of a job that would begin on single devices though it wants its experts on several.

    A mesh that came back with one device goes on; it is the beginning that must not be what nobody meant.
    """
    if not job.model.is_spread or has_mesh(fleet):
        return None
    hint = "no worker has several devices: start one with --devices, or give stage"
    return Infeasible(reason=str(UserError("model.placement", "mesh", hint)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestDevice:
    """Memory that a plan needs of the fullest device of a mesh, and what it has; most devices that share a stage."""

    worker: WorkerId
    num_devices: int
    num_used: int
    needed_bytes: int
    room_bytes: int

    @property
    def is_short(self) -> bool:
        """Whether it has less than it needs."""
        return self.needed_bytes > self.room_bytes

    def __str__(self) -> str:
        return (
            f"{self.worker} needs {format_bytes(self.needed_bytes)} ({self.needed_bytes} bytes) on the fullest of "
            f"{self.num_devices} devices, which has {format_bytes(self.room_bytes)} ({self.room_bytes} bytes)"
        )


def fullest_devices(
    job: JobSpec, fleet: Fleet, stages: tuple[StageSpec, ...], chunks: Iterable[ChunkPlan]
) -> Iterator[FullestDevice]:
    """The fullest device of each mesh that holds any of these chunks."""
    held: defaultdict[WorkerId, list[ChunkPlan]] = defaultdict(list)
    for chunk in chunks:
        held[chunk.chunk.worker].append(chunk)
    for worker in fleet.workers:
        if worker.profile.num_devices > 1 and held[worker.worker]:
            yield _fullest(job, worker, stages, held[worker.worker])


def _fullest(
    job: JobSpec, worker: FleetWorker, stages: tuple[StageSpec, ...], held: Iterable[ChunkPlan]
) -> FullestDevice:
    profile, needed, num_used = worker.profile, 0, 1
    for chunk in held:
        stage = stages[chunk.chunk.stage]
        form = chosen_form(
            job,
            stage,
            num_devices=profile.num_devices,
            slots=chunk.slots,
            memory_bytes=profile.memory_bytes // profile.num_devices,
        )
        needed += device_load(job, stage, form).memory_bytes(chunk.slots)
        num_used = max(num_used, form.size)
    # Processes on the processors share the host's memory, so those that rest leave theirs to the others.
    num_sharing = num_used if profile.device.startswith("cpu") else profile.num_devices
    return FullestDevice(
        worker=worker.worker,
        num_devices=profile.num_devices,
        num_used=num_used,
        needed_bytes=needed,
        room_bytes=profile.memory_bytes // num_sharing,
    )


def within_devices(
    job: JobSpec, fleet: Fleet, plan_on: Callable[[Fleet], Plan | Infeasible]
) -> tuple[Fleet, Plan | Infeasible]:
    """A plan whose meshes have room on each device, and the fleet that it was made for: meshes may count as smaller.

    Args:
        job: what is planned, with nothing left open.
        fleet: as it is.
        plan_on: makes a plan for a fleet.
    """
    counted, plan = fleet, plan_on(fleet)
    short: list[FullestDevice] = []
    for _ in range(_MOST_TRIES):
        if isinstance(plan, Infeasible):
            return counted, _refused(short) if short else plan
        found = [x for x in fullest_devices(job, fleet, plan.stages, plan.chunks) if x.is_short]
        if not found:
            return counted, plan
        short = found
        counted = _smaller(counted, short)
        plan = plan_on(counted)
    return counted, _refused(short)


def _refused(short: Sequence[FullestDevice]) -> Infeasible:
    missing_bytes = sum(x.needed_bytes - x.room_bytes for x in short)
    return Infeasible(reason=" and ".join(map(str, short)), missing_bytes=missing_bytes)


def _smaller(fleet: Fleet, short: Iterable[FullestDevice]) -> Fleet:
    share = {x.worker: _SMALLER * x.room_bytes / x.needed_bytes for x in short}
    return replace(
        fleet,
        workers=tuple(
            replace(
                x,
                profile=replace(
                    x.profile, memory_bytes=int(x.profile.memory_bytes * share.get(x.worker, 1.0))
                ),
            )
            for x in fleet.workers
        ),
    )
