"""Workers that nobody can dial: the router of one forwards nothing, the other's firewall drops all that comes in."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.cluster import Cluster
from bench.relay import PRESET, closed_homes, relayed_links
from client.lab.network import namespaces
from skein.config.resources import ResourcesSpec
from skein.protocol.messages.ways import COORDINATOR_RELAY
from skein.topology.fleet import Link
from skein.types import JobState, WorkerId
from skein.wire.views import WentBack
from tests.e2e.jobs import losses_of, text_job, wait_for_step
from tests.e2e.test_lab import trained_over

HUB = WorkerId("hub-1")
HOMES = {("cable-1", "office-1"), ("office-1", "cable-1")}
STEPS = 12


def pairs(links: Sequence[Link]) -> set[tuple[str, str]]:
    return {(link.sender, link.receiver) for link in links}


@pytest.mark.long
def test_a_job_of_workers_that_nobody_can_dial_trains_as_without(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    if namespaces.why_not() is not None:
        return
    with closed_homes(tmp_path / "lab", data_roots=(text,)) as lab:
        assert len(relayed_links(lab)) == 2
        trained = trained_over(lab, text)
        with lab.client() as client:
            assert {status.reached_by for status in client.workers()} == {(COORDINATOR_RELAY,)}
    # The same ops in the same order on the same machine; only who waits how long differs.
    assert trained.losses == pytest.approx(trained_over(cluster, text).losses, rel=1e-5)


@pytest.mark.long
def test_a_worker_that_offers_it_relays_until_it_dies_and_the_coordinator_does_from_then_on(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    if namespaces.why_not() is not None:
        return
    job = text_job("beside-a-hub", text, steps=STEPS, replicas=1)
    at_homes = job.model_copy(update={"resources": ResourcesSpec(sites=("cable", "office"))})
    with closed_homes(
        tmp_path / "lab", preset=PRESET.with_name("relay-beside.yaml"), data_roots=(text,)
    ) as lab:
        assert pairs(relayed_links(lab, HUB)) == HOMES
        with lab.client() as client:
            training = client.submit(at_homes)
            wait_for_step(training, 4)
            [hub] = (x.process for x in lab.status.endpoints if x.name == HUB)
            assert hub is not None
            os.kill(hub, signal.SIGKILL)
            status = training.wait()
            events = training.history()
            assert status.state is JobState.FINISHED, status.reason
            assert not [event for event in events if isinstance(event.body, WentBack)]
        assert pairs(relayed_links(lab)) == HOMES
    with cluster.client() as client:
        alone = client.submit(job)
        assert alone.wait().state is JobState.FINISHED
        assert losses_of(events) == pytest.approx(losses_of(alone.history()), rel=1e-5)
