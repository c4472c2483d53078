"""Profiles of meshes."""

import pytest

from skein.errors import UserError
from skein.plan.mesh.profile import mesh_profile
from skein.topology.fleet import Profile


def test_devices_that_are_not_alike_are_refused() -> None:
    first = Profile(device="cuda:0", device_name="A", flops_per_s=1.0, memory_bytes=10)
    second = Profile(device="cuda:1", device_name="B", flops_per_s=1.0, memory_bytes=10)
    with pytest.raises(UserError, match=r"devices: .*cuda:1 \(B\).*: cuda:0 is a A: .* must be alike"):
        mesh_profile(("cuda:0", "cuda:1"), (first, second), host_bytes=10)
