"""Workers that nobody can dial: the router of one forwards nothing, the other's firewall drops all that comes in."""

from pathlib import Path

import pytest

from bench.cluster import Cluster
from bench.relay import closed_homes, relayed_links
from client.lab.network import namespaces
from skein.protocol.messages.ways import COORDINATOR_RELAY
from tests.e2e.test_lab import trained_over


def test_a_job_of_workers_that_nobody_can_dial_trains_as_without(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    if namespaces.why_not() is not None:
        return
    with closed_homes(tmp_path / "lab", data_roots=(text,)) as lab:
        assert {link.via for link in relayed_links(lab)} == {COORDINATOR_RELAY}
        trained = trained_over(lab, text)
        with lab.client() as client:
            assert {status.reached_by for status in client.workers()} == {(COORDINATOR_RELAY,)}
    # The same ops in the same order on the same machine; only who waits how long differs.
    assert trained.losses == pytest.approx(trained_over(cluster, text).losses, rel=1e-5)
