"""A coordinator and workers over an emulated WAN, by namespaces and by proxies."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.cluster import Cluster
from client.api import Client
from client.lab.control import Cut, Heal, ask
from client.lab.network import namespaces
from client.lab.start import LabOptions, RunningLab, start_lab, stop_lab, wait_for_workers
from client.lab.state import LabFolder, Mode
from client.local import NotStarted
from skein.topology.fleet import Link
from skein.types import JobState
from skein.wire.views import StepFinished, WorkerState
from tests.e2e.jobs import text_job

PATIENCE_S = 300.0
POLL_S = 0.1
LATENCY_S = 0.020
"""Of the preset, one way."""


@contextmanager
def two_sites(path: Path, text: Path, mode: Mode) -> Iterator[RunningLab]:
    folder = LabFolder(path / mode)
    try:
        lab = start_lab(folder, LabOptions(preset="two-sites", mode=mode, data_roots=(text,)))
        wait_for_workers(lab, lambda _joined, _of: None)
        yield lab
    finally:
        stop_lab(folder)


def wait_for_state(client: Client, worker: str, states: set[WorkerState]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not any(x.worker == worker and x.state in states for x in client.workers()):
        assert time.monotonic() < until_s, client.workers()
        time.sleep(POLL_S)


@dataclass(frozen=True)
class Trained:
    """The loss of each step, and the links as workers measured them."""

    losses: dict[int, float]
    links: tuple[Link, ...]


def trained_over(lab: RunningLab | Cluster, text: Path) -> Trained:
    with lab.client() as client:
        job = client.submit(text_job("over-the-sea", text, steps=4, replicas=1))
        status = job.wait()
        assert status.state is JobState.FINISHED, status.reason
        steps = (e.body.record for e in job.history() if isinstance(e.body, StepFinished))
        return Trained({record.step: record.loss for record in steps}, tuple(client.links()))


@pytest.mark.long
def test_a_job_trains_over_proxies_as_without(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    with two_sites(tmp_path, text, "proxy") as lab:
        trained = trained_over(lab, text)
    # The same ops in the same order on the same machine; only who waits how long differs.
    assert trained.losses == pytest.approx(trained_over(cluster, text).losses, rel=1e-5)
    assert {(x.sender, x.receiver) for x in trained.links} == {("north-1", "south-1"), ("south-1", "north-1")}
    assert all(link.latency_s >= LATENCY_S for link in trained.links)


@pytest.mark.long
def test_a_job_trains_over_namespaces_and_a_site_that_is_cut_off_comes_back(
    tmp_path: Path, text: Path
) -> None:
    mode: Mode = "proxy" if namespaces.why_not() else "namespaces"
    with two_sites(tmp_path, text, mode) as lab:
        trained = trained_over(lab, text)
        assert len(trained.losses) == 4
        assert trained.losses[3] < trained.losses[0]
        assert all(link.latency_s >= LATENCY_S for link in trained.links)
        with lab.client() as client:
            assert ask(lab.folder.path, Cut(a="south", b="all")).num_links == 4
            wait_for_state(client, "south-1", {WorkerState.LOST})
            assert {x.worker for x in client.workers() if x.state is not WorkerState.LOST} == {"north-1"}
            ask(lab.folder.path, Heal(a="south", b="all"))
            wait_for_state(client, "south-1", {WorkerState.IDLE})


def test_a_service_that_ends_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    folder = LabFolder(tmp_path / "lab")
    folder.path.mkdir()
    folder.coordinator_state.write_text("a file where a folder should be")
    try:
        with pytest.raises(NotStarted, match=r"coordinator ended .*: error: .*coordinator"):
            start_lab(folder, LabOptions(preset="two-sites", num_workers=1, mode="proxy"))
    finally:
        stop_lab(folder)
