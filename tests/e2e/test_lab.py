"""A coordinator and workers over an emulated WAN, by namespaces and by proxies."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.api import Client
from client.lab import namespaces
from client.lab.control import Cut, Heal, ask
from client.lab.start import LabOptions, RunningLab, start_lab, stop_lab, wait_for_workers
from client.lab.state import Folder, Mode
from client.local import NotStarted
from skein.types import JobState
from skein.wire.views import StepFinished, WorkerState
from tests.e2e.jobs import text_job, write_text

PATIENCE_S = 60.0
POLL_S = 0.1
LATENCY_S = 0.020
"""Of the preset, one way."""


@contextmanager
def two_sites(path: Path, mode: Mode) -> Iterator[RunningLab]:
    folder = Folder(path / mode)
    try:
        lab = start_lab(folder, LabOptions(preset="two-sites", mode=mode))
        wait_for_workers(lab, lambda _joined, _of: None)
        yield lab
    finally:
        stop_lab(folder)


def wait_for_state(client: Client, worker: str, states: set[WorkerState]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not any(x.worker == worker and x.state in states for x in client.workers()):
        assert time.monotonic() < until_s, client.workers()
        time.sleep(POLL_S)


def losses_over(lab: RunningLab, text: Path) -> dict[int, float]:
    with lab.client() as client:
        job = client.submit(text_job("over-the-sea", text, steps=4, replicas=1))
        status = job.wait()
        assert status.state is JobState.FINISHED, status.reason
        return {
            e.body.record.step: e.body.record.loss for e in job.history() if isinstance(e.body, StepFinished)
        }


def test_a_job_trains_the_same_whatever_carries_it(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    modes: list[Mode] = ["proxy"] if namespaces.why_not() else ["proxy", "namespaces"]
    losses = []
    for mode in modes:
        with two_sites(tmp_path, mode) as lab:
            losses.append(losses_over(lab, text))
            with lab.client() as client:
                assert all(link.latency_s >= LATENCY_S for link in client.links())
                assert len(client.links()) == 2
    assert len(losses[0]) == 4
    # The same ops in the same order on the same machine; only who waits how long differs.
    assert losses[-1] == pytest.approx(losses[0], rel=1e-5)


def test_a_site_that_is_cut_off_is_lost_and_comes_back(tmp_path: Path) -> None:
    mode: Mode = "proxy" if namespaces.why_not() else "namespaces"
    with two_sites(tmp_path, mode) as lab, lab.client() as client:
        assert ask(lab.folder.path, Cut(a="south", b="all")).num_links == 4
        wait_for_state(client, "south-1", {WorkerState.LOST})
        assert {x.worker for x in client.workers() if x.state is not WorkerState.LOST} == {"north-1"}
        ask(lab.folder.path, Heal(a="south", b="all"))
        wait_for_state(client, "south-1", {WorkerState.IDLE})


def test_a_service_that_ends_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "lab")
    folder.path.mkdir()
    folder.coordinator_state.write_text("a file where a folder should be")
    try:
        lab = start_lab(folder, LabOptions(preset="two-sites", num_workers=1, mode="proxy"))
        with pytest.raises(NotStarted, match=r"coordinator has ended: error: .*coordinator"):
            wait_for_workers(lab, lambda _joined, _of: None)
    finally:
        stop_lab(folder)
