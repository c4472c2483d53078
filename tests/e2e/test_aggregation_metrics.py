"""What workers send for aggregation is what was estimated, and everything that they tell of it reaches Prometheus."""

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import Cluster, running
from client.planning.estimates import estimate_of_job
from skein.types import JobState
from tests.e2e.jobs import write_text
from tests.e2e.test_aggregation import NUM_STEPS, job_of

NUM_WORKERS = 4
PATIENCE_S, POLL_S = 30.0, 0.2
TOLD_BY_RULE = {
    "int8": {"skein_compression_ratio", "skein_error_feedback_norm"},
    "one-bit-lamb": {"skein_compression_ratio", "skein_error_feedback_norm"},
    "decentlam": {"skein_consensus_distance"},
    "lsgd": {"skein_consensus_distance", "skein_probe_score_nats", "skein_leader_changes_total"},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("metrics"), NUM_WORKERS) as cluster:
        yield cluster


def samples(cluster: Cluster) -> dict[tuple[str, str], float]:
    """Sums of samples, by name and rule, of those that have none by name alone."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics").read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = sample.name, sample.labels.get("rule", "")
            found[key] = found.get(key, 0.0) + sample.value
    return found


@pytest.mark.parametrize("name", TOLD_BY_RULE)
def test_bytes_are_those_that_were_estimated_and_the_rest_is_told(
    cluster: Cluster, tmp_path: Path, name: str
) -> None:
    spec = job_of(name, write_text(tmp_path / "text"))
    key = "skein_aggregation_bytes_total", spec.aggregation.rule
    expected_bytes = estimate_of_job(spec).step_bytes * NUM_STEPS * NUM_WORKERS
    with cluster.client() as client:
        status = client.submit(spec).wait()
    assert status.state is JobState.FINISHED, status.reason
    # The last bytes are told with the beats after the job.
    until_s = time.monotonic() + PATIENCE_S
    while (found := samples(cluster)).get(key, 0.0) < expected_bytes and time.monotonic() < until_s:
        time.sleep(POLL_S)
    # A tensor is sent again if its receiver was not ready for it, which on a busy machine happens.
    assert expected_bytes <= found[key] < 1.1 * expected_bytes
    assert {told for told in TOLD_BY_RULE[name] if (told, "") not in found} == set()
