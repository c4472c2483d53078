"""What a worker counts, for Prometheus and for its beats."""

import asyncio
import socket
import urllib.request
from dataclasses import replace

import pytest

from skein.config.job import JobSpec
from skein.errors import UserError
from skein.model.rows import VocabularySpec, VocabularySplit
from skein.plan.changing.traffic import TrafficKind, traffic_of
from skein.plan.clock.holding import StageForm
from skein.plan.cut import cut_job
from skein.plan.ops import Direction
from skein.plan.pieces.collectives import CollectiveTimes, LaneKind
from skein.plan.pieces.line import TimeLine
from skein.protocol.messages.tensors import HopTensor, Phase, Refusal
from skein.types import JobId, MicrobatchId, StageIndex, Step, WorkerId
from tests.support.hands import envelope
from tests.support.jobs import small_job
from tests.support.plans import chunk, path
from worker.telling.aggregating import Gauges
from worker.telling.metrics import WorkerMetrics
from worker.transport.statistics import Statistics


def values(metrics: WorkerMetrics) -> dict[tuple[str, str], float]:
    return {(count.name, count.label): count.value for count in metrics.counts()}


def test_ops_are_counted_by_kind() -> None:
    metrics = WorkerMetrics(Statistics())
    metrics.op_ended("forward", 0.25, is_failed=False)
    metrics.op_ended("forward", 0.5, is_failed=True)
    found = values(metrics)
    assert found["skein_worker_op_seconds_sum", "forward"] == 0.75
    assert found["skein_worker_op_seconds_count", "forward"] == 2
    assert found["skein_worker_op_failures_total", "forward"] == 1


def test_tokens_of_experts_are_told_of_the_newest_step_and_of_many_the_extremes() -> None:
    gauges = Gauges()
    metrics = WorkerMetrics(Statistics(), gauges)
    name = "skein_worker_expert_tokens"

    def told() -> dict[str, float]:
        return {label: value for (found, label), value in values(metrics).items() if found == name}

    gauges.routed(2, [(3, 1), (0, 4)])
    gauges.routed(2, [(1, 3), (1, 3)])
    assert told() == {}
    gauges.step_ended()
    assert told() == {"2/0": 4, "2/1": 4, "3/0": 1, "3/1": 7}
    gauges.routed(0, [tuple(range(65))])
    gauges.step_ended()
    gauges.step_ended()
    assert told() == {"0/most": 64, "0/least": 0, "0/mean": 32}


def test_the_bubble_is_the_share_of_a_step_without_an_op() -> None:
    metrics = WorkerMetrics(Statistics())
    metrics.step_ended(now=10.0)
    metrics.op_ended("forward", 3.0, is_failed=False)
    metrics.step_ended(now=14.0)
    found = values(metrics)
    assert found["skein_worker_bubble_ratio", ""] == 0.25
    assert found["skein_worker_step_seconds_sum", ""] == 4.0


def test_the_time_of_a_step_that_was_given_up_is_no_steps() -> None:
    metrics = WorkerMetrics(Statistics())
    metrics.step_ended(now=10.0)
    metrics.step_abandoned()
    metrics.step_ended(now=99.0)
    assert values(metrics)["skein_worker_step_seconds_count", ""] == 0


def test_what_the_transport_counts_is_read_when_asked() -> None:
    statistics = Statistics()
    metrics = WorkerMetrics(statistics)
    statistics.sent_bytes[WorkerId("w1")] += 5
    statistics.refusals[Refusal.STALE] += 1
    found = values(metrics)
    assert found["skein_worker_sent_bytes_total", "w1"] == 5
    assert found["skein_worker_refusals_total", "stale"] == 1


def test_labels_stay_bounded_however_many_peers_come() -> None:
    statistics = Statistics()
    for number in range(200):
        statistics.sent_bytes[WorkerId(f"w{number}")] += 1
    found = {key: value for key, value in values(WorkerMetrics(statistics)).items() if "sent_bytes" in key[0]}
    assert len(found) == 65
    assert found["skein_worker_sent_bytes_total", "other"] == 136


def test_bytes_of_aggregation_are_told_by_the_rule_of_their_job() -> None:
    statistics, gauges = Statistics(), Gauges()
    gauges.began(JobId("first"), "lsgd")
    gauges.began(JobId("second"), "lsgd")
    gauges.began(JobId("third"), "diloco")
    for job, peer, num_bytes in (
        ("first", "w1", 5),
        ("second", "w1", 6),
        ("third", "w1", 7),
        ("third", "w2", 8),
    ):
        statistics.shard_bytes[JobId(job), WorkerId(peer)] += num_bytes
    found = values(WorkerMetrics(statistics, gauges))
    assert found["skein_worker_aggregation_bytes_total", "lsgd/w1"] == 11
    assert found["skein_worker_aggregation_bytes_total", "diloco/w1"] == 7
    assert found["skein_worker_aggregation_bytes_total", "diloco/w2"] == 8


def test_what_compute_tells_of_aggregation_is_read_when_asked() -> None:
    gauges = Gauges()
    metrics = WorkerMetrics(Statistics(), gauges)
    assert "skein_worker_compression_ratio" not in {name for name, _ in values(metrics)}
    gauges.consensus_distance[2] = 0.25
    gauges.error_feedback_norm[2] = 1.5
    gauges.exchanged(plain_bytes=3200, sent_bytes=100)
    found = values(metrics)
    assert found["skein_worker_consensus_distance", "2"] == 0.25
    assert found["skein_worker_error_feedback_norm", "2"] == 1.5
    assert found["skein_worker_compression_ratio", ""] == 32.0


def test_a_first_leader_is_no_change_and_each_group_has_its_own() -> None:
    gauges = Gauges()
    led = (("w0", "all"), ("w1", "oslo"), ("w1", "oslo"), ("w2", "all"), ("w2", "all"), ("w0", "all"))
    for leader, group in led:
        gauges.led(leader, of=group)
    assert values(WorkerMetrics(Statistics(), gauges))["skein_worker_leader_changes_total", ""] == 2


def test_a_new_job_begins_without_what_the_last_one_told() -> None:
    gauges = Gauges()
    gauges.began(JobId("b"), "lsgd")
    gauges.consensus_distance[0] = 3.0
    gauges.began(JobId("b"), "lsgd")
    assert values(WorkerMetrics(Statistics(), gauges))["skein_worker_consensus_distance", "0"] == 3.0
    gauges.began(JobId("c"), "lsgd")
    assert ("skein_worker_consensus_distance", "0") not in values(WorkerMetrics(Statistics(), gauges))


def test_every_name_begins_as_the_rules_say() -> None:
    assert all(count.name.startswith("skein_worker_") for count in WorkerMetrics(Statistics()).counts())


async def test_metrics_are_served_until_stopped() -> None:
    pages = await WorkerMetrics(Statistics()).serve("127.0.0.1", 0)
    url = f"http://{pages.address}/metrics"
    try:
        assert b"skein_worker_op_seconds" in await asyncio.to_thread(read, url)
    finally:
        await pages.close()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read, url)


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as answer:
        found: bytes = answer.read()
        return found


async def test_a_port_in_use_is_named_with_a_cure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="another port") as failure:
            await WorkerMetrics(Statistics()).serve("127.0.0.1", taken.getsockname()[1])
    assert failure.value.field == "metrics_port"


def test_what_is_put_aside_is_told_as_it_is_and_at_most_in_the_newest_step() -> None:
    gauges = Gauges()
    metrics = WorkerMetrics(Statistics(), gauges)

    def told() -> tuple[float, float]:
        found = values(metrics)
        return found["skein_worker_pending_bytes", ""], found["skein_worker_peak_pending_bytes", ""]

    for num_bytes in (100, 300, 200):
        gauges.put_aside(num_bytes)
    assert told() == (200, 300)
    gauges.step_ended()
    assert told() == (0, 300)
    gauges.put_aside(50)
    assert told() == (50, 300)
    gauges.step_ended()
    assert told() == (0, 50)


@pytest.mark.parametrize("split", [VocabularySplit.OFF, VocabularySplit.OUTPUT, VocabularySplit.BOTH])
def test_bytes_between_workers_are_told_by_kind(split: VocabularySplit) -> None:
    job = small_job(stages=4)
    parallel = job.parallel.model_copy(update={"vocabulary": VocabularySpec(split=split)})
    job = JobSpec.model_validate(job.model_copy(update={"parallel": parallel}).model_dump(mode="json"))
    stages = cut_job(job)
    names = [f"w{stage.index}" for stage in stages]
    way = path(*(chunk(stage.index, name) for stage, name in zip(stages, names, strict=True)))
    gauges = Gauges()
    statistics = Statistics(traffic_of=gauges.traffic_of)
    gauges.began(JobId("j"), "all_reduce", {x.index: traffic_of(job.model, x) for x in stages})
    for hop in range(1, len(stages)):
        for direction, at in ((Direction.FORWARD, hop), (Direction.BACKWARD, hop - 1)):
            header = HopTensor(
                direction=direction,
                phase=Phase.TRAIN,
                step=Step(0),
                microbatch=MicrobatchId(1),
                hop=at,
                path=way,
            )
            statistics.sent(WorkerId("x"), envelope(header, sender="w", job=JobId("j")), 1)
    found = {kind: statistics.tensor_bytes[kind] for kind in TrafficKind}
    num_inputs, num_between, num_outputs = job.parallel.shares
    expected = {
        # There and back over each: between shards of an end, and between these and the layers.
        TrafficKind.ROWS: 2 * num_inputs,
        TrafficKind.VOCABULARY_OUT: num_outputs,
        TrafficKind.VOCABULARY_BACK: num_outputs,
        TrafficKind.EDGE: 2 * (num_between - 1),
        TrafficKind.REDUCTION: 0,
    }
    assert found == expected
    shown = values(WorkerMetrics(statistics, gauges))
    assert {kind: shown["skein_worker_tensor_bytes_total", kind.value] for kind in TrafficKind} == expected


def test_of_two_chunks_of_a_stage_the_newer_ones_form_is_told() -> None:
    metrics = WorkerMetrics(Statistics())
    forms: dict[int, StageForm] = {}
    metrics.watch_mesh(CollectiveTimes(), forms)
    forms[1] = StageForm(stage=StageIndex(0), form="1d", num_devices=2)
    forms[2] = StageForm(stage=StageIndex(3), form="2d", num_devices=4)
    forms[5] = replace(forms[1], form="1d in parts")
    name = "skein_worker_stage_devices"
    found = {count.label: count.value for count in metrics.counts() if count.name == name}
    assert found == {"0/1d in parts": 2, "3/2d": 4}


def test_collectives_of_a_mesh_are_told_by_kind_predicted_beside_measured() -> None:
    times, metrics = CollectiveTimes(), WorkerMetrics(Statistics())
    metrics.watch_mesh(times, {})
    times.add(LaneKind.TP, 3, predicted_s=0.25, measured_s=0.5)
    times.add(LaneKind.TP, 1, predicted_s=0.25, measured_s=0.25)
    for r_squared in (0.5, 0.75):
        times.fitted(LaneKind.TP, *(TimeLine(alpha_s=1, beta_s=1, r_squared=x) for x in (r_squared, 0.9)))
    shown = values(metrics)
    told = {
        name: [shown[f"skein_worker_{name}_total", kind.value] for kind in LaneKind]
        for name in (
            "collectives",
            "collective_seconds",
            "collective_predicted_seconds",
            "collective_fits",
        )
    }
    assert shown["skein_worker_collective_fit_r_squared", LaneKind.TP] == 0.75
    assert ("skein_worker_collective_fit_r_squared", LaneKind.A2A) not in shown
    assert told == {
        "collective_fits": [2, 0],
        "collectives": [4, 0],
        "collective_seconds": [0.75, 0],
        "collective_predicted_seconds": [0.5, 0],
    }
