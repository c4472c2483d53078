"""Fixtures of tests that compute."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.lab import Lab, write_text


@pytest.fixture(autouse=True)
def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of gRPC leave a call that never ends: where a worker ends within a test, nobody waits for it."""
    monkeypatch.setattr("worker.process._SETTLE_S", 0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders that are lost together are given up after a moment: in these tests none of them comes back."""
    monkeypatch.setattr("skein.protocol.coordinator.runs.placing.giving_up.LEAST_S", 0.5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def labs() -> Iterator[list[Lab]]:
    """Labs to be closed after the test."""
    opened: list[Lab] = []
    yield opened
    for lab in opened:
        lab.close()
