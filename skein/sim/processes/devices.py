"""Devices of one simulated worker that is a mesh: what they owe, and what is left of the worker without one.

Whom a worker waits for and how long, whom it has lost, what is left of it, and in which form the devices share a stage
is decided by the code of real workers.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from skein.config.job import JobSpec
from skein.plan.mesh.devices import chosen_form
from skein.plan.mesh.profile import mesh_profile
from skein.protocol.messages.directives import ChunkAssignment
from skein.protocol.worker.mesh.losing import HUNG, DeviceLoss, loss_of
from skein.protocol.worker.mesh.patience import DevicePatience
from skein.protocol.worker.ops import ComputeOp, Op, PackOp
from skein.sim.compute.executor import StageTimes
from skein.topology.fleet import Profile

HOST_BYTES = 256 * 2**30


def simulated_mesh(num_devices: int, *, flops_per_s: float, memory_bytes: int) -> Profile:
    """Profile of a worker with devices that have so much together."""
    devices = tuple(f"cuda:{index}" for index in range(num_devices))
    whole = Profile(device="", device_name="simulated", flops_per_s=flops_per_s, memory_bytes=memory_bytes)
    return _profile_of(devices, whole, num_devices)


def left_of(profile: Profile, devices: tuple[str, ...]) -> Profile:
    """Profile of a mesh once it has these of its devices."""
    return _profile_of(devices, profile, profile.num_devices)


def share_of(profile: Profile, share: float) -> Profile:
    """Profile of a worker once it has a share of its devices, or of the only one."""
    if profile.num_devices > 1:
        return left_of(profile, profile.devices[: max(1, int(profile.num_devices * share))])
    memory_bytes = int(profile.memory_bytes * share)
    return replace(profile, flops_per_s=profile.flops_per_s * share, memory_bytes=memory_bytes)


def _profile_of(devices: tuple[str, ...], whole: Profile, num_devices: int) -> Profile:
    each = [
        replace(
            whole,
            device=device,
            flops_per_s=whole.flops_per_s / num_devices,
            memory_bytes=whole.memory_bytes // num_devices,
        )
        for device in devices
    ]
    return mesh_profile(devices, each, host_bytes=HOST_BYTES)


@dataclass(slots=True, kw_only=True)
class SimMesh:
    """Devices of one simulated process."""

    devices: tuple[str, ...]
    patience: DevicePatience = field(default_factory=DevicePatience)
    hung: int | None = None
    """Device that answers nothing any more."""
    asked: tuple[Op, float] | None = None
    """Op that the devices carry out, and since when."""

    @staticmethod
    def of(profile: Profile) -> "SimMesh | None":
        """Mesh of a worker with this profile; None: it has a single device."""
        return SimMesh(devices=profile.devices) if profile.num_devices > 1 else None

    @property
    def hangs(self) -> bool:
        """Whether the running op never ends: the devices have a part in it, and one of them hangs."""
        return self.hung is not None and self.asked is not None

    def begins(self, op: Op, *, now: float) -> float | None:
        """Seconds for which the devices are waited for; None: they have no part in this op."""
        if not isinstance(op, ComputeOp | PackOp):
            return None
        self.asked = op, now
        return self.patience.bound_s(_kind_of(op))

    def ended(self, seconds: float) -> None:
        """The running op has ended after so long."""
        if self.asked is not None:
            self.patience.took(_kind_of(self.asked[0]), seconds)
        self.asked = None

    def loss(self) -> DeviceLoss:
        """Loss of the device that is waited for in vain: the one that hangs, or else the first."""
        return loss_of(self.devices, {}, blamed=(self.hung or 0, HUNG))

    def times(
        self, times: StageTimes, job: JobSpec, chunk: ChunkAssignment, *, memory_bytes: int
    ) -> StageTimes:
        """Costs of a stage by the speed of all devices, where it has those of its form alone."""
        num_devices = len(self.devices)
        form = chosen_form(
            job,
            chunk.stage,
            num_devices=num_devices,
            slots=chunk.slots,
            memory_bytes=memory_bytes // num_devices,
        )
        longer = num_devices / form.size
        return replace(times, forward=times.forward * longer, backward=times.backward * longer)


def _kind_of(op: Op) -> Hashable:
    return (op.kind, op.chunk, op.phase) if isinstance(op, ComputeOp) else type(op).__name__
