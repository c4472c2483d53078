"""Profile of a mesh, made of what its devices have measured."""

from collections.abc import Sequence

from skein.errors import UserError
from skein.topology.fleet import Profile


def mesh_profile(devices: Sequence[str], each: Sequence[Profile], *, host_bytes: int) -> Profile:
    """Profile of a worker with these devices; one alone is what it measured itself.

    Raises:
        UserError: devices are unlike: routers would not come to the same choices on all of them.

    Args:
        devices: as they are named, `cpu` for each process on the processors.
        each: what each has measured, while the others did.
        host_bytes: free in the memory of the worker's own process.

    >>> one = Profile(device="cuda:0", device_name="A", flops_per_s=2.0, memory_bytes=30)
    >>> both = mesh_profile(("cuda:0", "cuda:1"), (one, one), host_bytes=50)
    >>> both.device, both.flops_per_s, both.memory_bytes, mesh_profile(("cuda:0",), (one,), host_bytes=50) == one
    ('cuda:0,cuda:1', 4.0, 50, True)
    """
    if len(devices) == 1:
        return each[0]
    for device, found in zip(devices, each, strict=True):
        if found.device_name != each[0].device_name:
            hint = f"{devices[0]} is a {each[0].device_name}: devices that share each layer must be alike: name others"
            raise UserError("devices", f"{device} ({found.device_name})", hint)
    # The worker keeps parameters, sums and the optimizer's state in the host's memory, and devices the first two
    # once more: half as much again, where the host's memory is theirs too.
    own_bytes = sum(x.memory_bytes for x in each)
    is_host = devices[0] == "cpu"
    return Profile(
        device=f"cpu:{len(devices)}" if is_host else ",".join(devices),
        device_name=each[0].device_name,
        flops_per_s=sum(x.flops_per_s for x in each),
        memory_bytes=host_bytes * 2 // 3 if is_host else min(own_bytes, host_bytes),
        spread=max(x.spread for x in each),
    )
