"""What tests of real processes share: one cluster, a text, and the curve of a job that nobody disturbs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from skein.types import JobState
from tests.e2e.jobs import NUM_STEPS, losses_of, text_job, write_text
from tests.e2e.shared import SharedCluster


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """Nobody is there before a test gathers whom it needs."""
    with SharedCluster(tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: SharedCluster) -> SharedCluster:
    """Four workers."""
    shared.gather(4)
    return shared


@pytest.fixture(scope="session")
def undisturbed(shared: SharedCluster, text: Path) -> dict[int, float]:
    """Loss per step of a `text_job` that nobody disturbs."""
    shared.gather(4)
    with shared.client() as client:
        job = client.submit(text_job("calm", text, steps=NUM_STEPS))
        losses = losses_of(job.events())
        assert job.status().state is JobState.FINISHED, job.status().reason
    return losses
