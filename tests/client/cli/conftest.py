"""Every test here runs against a scripted coordinator, which the environment names."""

from pathlib import Path

import pytest

from tests.client.conftest import Scripted
from tests.client.scripted import GOOD


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture(autouse=True)
def at_coordinator(coordinator: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKEIN_COORDINATOR", coordinator.target)
