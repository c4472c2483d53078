"""Fixtures of tests that compute."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.lab import Lab, write_text


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
