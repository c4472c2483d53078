"""GPUs that a mesh has, and no other on its machine."""

import os
from pathlib import Path

import pytest

from skein.errors import UserError
from worker.mesh.devices import claimed, parse_devices

BOTH = ("cuda:0", "cuda:1")


def test_a_gpu_is_one_meshs_until_that_ends(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    with claimed(BOTH, folder, {}):
        with (
            pytest.raises(
                UserError, match=f"devices: .*cuda:1.*: the mesh of process {os.getpid()} on this machine"
            ),
            claimed(("cuda:2", "cuda:1"), folder, {}),
        ):
            pass
        with claimed(("cuda:2",), folder, {}):
            pass
    with claimed(BOTH, folder, {}):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_gpus_are_known_by_what_they_are_called_outside(tmp_path: Path) -> None:
    with claimed(BOTH, tmp_path, {"CUDA_VISIBLE_DEVICES": "2,3"}):
        with (
            claimed(BOTH, tmp_path, {}),
            claimed(("cuda:0",), tmp_path, {"CUDA_VISIBLE_DEVICES": "GPU-1b/2"}),
        ):
            pass
        with (
            pytest.raises(UserError, match="cuda:0"),
            claimed(("cuda:0",), tmp_path, {"CUDA_VISIBLE_DEVICES": "3"}),
        ):
            pass


def test_processors_may_be_several_meshes(tmp_path: Path) -> None:
    with claimed(("cpu", "cpu"), tmp_path, {}), claimed(("cpu", "cpu"), tmp_path, {}):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["cpu:65", "cpu:64,cpu", "cpu:200", "cpu:999999999"])
def test_a_mesh_of_more_devices_than_jobs_may_ask_for_is_refused(text: str) -> None:
    assert len(parse_devices("cpu:64")) == 64
    with pytest.raises(UserError, match=r"devices: .*: too many for one mesh: give at most 64"):
        parse_devices(text)
