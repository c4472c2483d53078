"""Meshes that tests of several files compute on."""

from collections.abc import Iterator

import pytest

from tests.support.device import mesh_of
from worker.mesh.mesh import Mesh


@pytest.fixture(scope="session")
def four() -> Iterator[Mesh]:
    """Four devices, of which tests use two or all; each test builds its own stages on them."""
    mesh = Mesh(mesh_of(4))
    yield mesh
    mesh.close()
