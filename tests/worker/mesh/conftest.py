"""Meshes that tests of several files compute on."""

from collections.abc import Iterator

import pytest

from worker.mesh.mesh import Mesh


@pytest.fixture(scope="module")
def four() -> Iterator[Mesh]:
    mesh = Mesh(["cpu"] * 4)
    yield mesh
    mesh.close()
