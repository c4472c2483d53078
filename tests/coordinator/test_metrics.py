"""What Prometheus reads: counted from records, bounded in labels, and in its own format."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.telling.exporting import MAX_LABELS, MAX_WORKERS
from coordinator.telling.exposition import Exposition, targets
from coordinator.telling.metrics import MAX_JOBS, CoordinatorMetrics
from coordinator.telling.status import Roster
from skein.config.quota import QuotaSpec, QuotasSpec
from skein.plan.plan import Infeasible
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import ReportArrived
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import Diverged, IncidentKind, Record, Remedy, RolledBack
from skein.protocol.messages.directives import CheckpointFile
from skein.protocol.messages.reports import Beat, Count, EvaluationDone
from skein.protocol.messages.tensors import Phase
from skein.types import Generation, JobId, MicrobatchId, Step, WorkerId
from skein.wire.relay.switchboard import Switchboard
from skein.wire.serving.pages import Page, PageRequest
from skein.wire.views import WorkerState
from tests.coordinator.builders import checkpointed, committed, hello, opened, submitted
from tests.support.incidents import incident, replayed

JOB = "digits-1"
LOG: tuple[Record, ...] = (
    opened(1),
    submitted(JOB),
    *(committed(JOB, step, wall_s=10.0 + step) for step in range(5)),
    checkpointed(JOB, 5),
)


def samples(metrics: CoordinatorMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples by name and labels' values, parsed as Prometheus would; worker comes before kind, src before dst."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items(), reverse=True))): sample.value
        for family in families
        for sample in family.samples
    }


def with_workers(*names: str) -> Coordinator:
    """A machine that these workers have joined at time 100, for 3 s each."""
    machine = Coordinator(lease_s=3.0)
    machine.replay(LOG)
    for name in names:
        report = hello(name)
        event = ReportArrived(worker=report.worker, incarnation=report.incarnation, report=report)
        machine.handle(event, now=100.0)
    return machine


def sampled(metrics: CoordinatorMetrics, machine: Coordinator, *, now: float = 101.0) -> None:
    workers = Roster(machine).workers(now=now)
    metrics.sample(
        machine.view,
        workers,
        relay=Switchboard(is_offered=True),
        num_streams=len(workers),
        num_unaware=1,
        lag_s=0.0,
        now=now,
    )


def beat(metrics: CoordinatorMetrics, worker: str, counts: Sequence[Count]) -> None:
    metrics.heard(WorkerId(worker), Beat(progress=1, running_s=0.0, statistics=tuple(counts)))


def test_numbers_of_a_job_follow_from_its_records() -> None:
    metrics = CoordinatorMetrics()
    metrics.appended(LOG, 0.002)
    found = samples(metrics)
    assert found["skein_committed_steps_total", (JOB,)] == 5
    assert found["skein_trained_tokens_total", (JOB,)] == 500
    assert found["skein_loss_nats", (JOB,)] == pytest.approx(4.6)
    assert found["skein_throughput_tokens_per_second", (JOB,)] == 100
    assert found["skein_step_seconds_count", (JOB,)] == 4
    assert found["skein_checkpoints_total", (JOB,)] == 1
    assert found["skein_rollbacks_total", (JOB,)] == 0
    assert found["skein_run_log_append_seconds_count", ()] == 1


def test_the_balance_of_experts_is_told_of_jobs_that_have_them() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded(LOG)
    assert ("skein_balance_loss", (JOB,)) not in samples(metrics)
    told = committed(JOB, 5, wall_s=16.0)
    metrics.recorded([replace(told, record=replace(told.record, balance_loss=1.25, drop_ratio=0.125))])
    assert samples(metrics)["skein_balance_loss", (JOB,)] == 1.25
    assert samples(metrics)["skein_dropped_choices_ratio", (JOB,)] == 0.125


def test_replay_gives_the_numbers_that_were_before() -> None:
    live, replayed = CoordinatorMetrics(), CoordinatorMetrics()
    for record in LOG:
        live.appended([record], 0.001)
    replayed.recorded(LOG)
    of_job = [key for key in samples(live) if JOB in key[1]]
    assert of_job
    assert {key: samples(live)[key] for key in of_job} == {key: samples(replayed)[key] for key in of_job}


def test_steps_that_are_rolled_back_are_counted_as_lost() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded(LOG)
    back = RolledBack(job=JobId(JOB), from_version=Step(5), to_version=Step(2), reason="", wall_s=60.0)
    metrics.recorded([back])
    found = samples(metrics)
    assert found["skein_rollbacks_total", (JOB,)] == 1
    assert found["skein_rolled_back_steps_total", (JOB,)] == 3
    assert found["skein_version_steps", (JOB,)] == 2


def test_divergences_are_counted_from_none_on() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded(LOG)
    assert samples(metrics)["skein_divergences_total", (JOB,)] == 0
    diverged = Diverged(
        job=JobId(JOB), step=Step(3), last_good=Step(2), reason="loss not finite", wall_s=60.0
    )
    metrics.recorded([diverged])
    assert samples(metrics)["skein_divergences_total", (JOB,)] == 1


def test_incidents_are_counted_with_what_they_cost() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded(
        [
            *LOG,
            incident(JOB, replayed=(replayed(0, 1), replayed(1, 1, 2)), seconds=0.6),
            incident(JOB, remedy=Remedy.ROLLED_BACK, num_steps_lost=3, seconds=4.0, num_samples_repeated=12),
            submitted("digits-2"),
            incident("digits-2", kind=IncidentKind.STALLED, seconds=700.0),
        ]
    )
    found = samples(metrics)
    assert found["skein_incidents_total", ("resumed", "worker_lost")] == 1
    assert found["skein_incidents_total", ("rolled_back", "worker_lost")] == 1
    assert found["skein_incidents_total", ("resumed", "stalled")] == 1
    assert found["skein_incident_seconds_sum", ("worker_lost",)] == pytest.approx(4.6)
    assert found["skein_incident_seconds_bucket", ("1.0", "worker_lost")] == 1
    assert found["skein_incident_seconds_bucket", ("300.0", "stalled")] == 0
    assert found["skein_incident_seconds_count", ("stalled",)] == 1
    assert found["skein_incident_steps_lost_total", ()] == 3
    assert found["skein_samples_repeated_total", ()] == 8 + 12 + 8
    assert found["skein_contributions_replayed_total", ()] == 3
    assert found["skein_hops_rerouted_total", ()] == 12


def test_no_incident_is_a_number_for_every_kind_and_remedy() -> None:
    found = samples(CoordinatorMetrics())
    counts = {labels: value for (name, labels), value in found.items() if name == "skein_incidents_total"}
    assert counts == {(remedy.value, kind.value): 0 for kind in IncidentKind for remedy in Remedy}
    numbers = [value for (name, _), value in found.items() if name == "skein_incident_seconds_count"]
    assert numbers == [0] * len(IncidentKind)
    assert found["skein_incident_steps_lost_total", ()] == found["skein_samples_repeated_total", ()] == 0


def test_only_the_newest_jobs_have_series() -> None:
    metrics = CoordinatorMetrics()
    for number in range(MAX_JOBS + 5):
        metrics.recorded([submitted(f"job-{number}"), committed(f"job-{number}", 0, wall_s=1.0)])
    jobs = {labels[0] for name, labels in samples(metrics) if name == "skein_trained_tokens_total"}
    assert jobs == {f"job-{number}" for number in range(5, MAX_JOBS + 5)}


def test_workers_leases_and_checkpoint_age_are_sampled() -> None:
    metrics, machine = CoordinatorMetrics(), with_workers("w1", "w2")
    metrics.recorded(LOG)
    sampled(metrics, machine)
    found = samples(metrics)
    assert found["skein_workers", ("idle",)] == 2
    assert found["skein_workers", ("lost",)] == 0
    assert found["skein_lease_remaining_seconds", ("w1",)] == pytest.approx(2.0)
    assert found["skein_checkpoint_age_seconds", (JOB,)] == pytest.approx(51.0)
    assert found["skein_epoch_number", ()] == 1


def test_workers_that_are_gone_leave_no_series() -> None:
    metrics = CoordinatorMetrics()
    beat(metrics, "w1", [Count(name="skein_worker_bubble_ratio", label="", value=0.5)])
    sampled(metrics, with_workers("w1"))
    assert ("skein_worker_bubble_ratio", ("w1",)) in samples(metrics)
    sampled(metrics, with_workers())
    assert not [key for key in samples(metrics) if "w1" in key[1]]


def test_statistics_of_workers_are_re_exported_under_their_names() -> None:
    metrics = CoordinatorMetrics()
    beat(
        metrics,
        "w1",
        [
            Count(name="skein_worker_op_seconds_sum", label="forward", value=2.5),
            Count(name="skein_worker_op_seconds_count", label="forward", value=10),
            Count(name="skein_worker_queued_ops", label="backward", value=3),
            Count(name="skein_worker_in_flight_microbatches", label="", value=2),
            Count(name="skein_worker_rpc_errors_total", label="probe", value=1),
            Count(name="skein_worker_sent_bytes_total", label="w2", value=1e6),
        ],
    )
    sampled(metrics, with_workers("w1"))
    found = samples(metrics)
    assert found["skein_worker_op_seconds_sum", ("w1", "forward")] == 2.5
    assert found["skein_worker_op_seconds_count", ("w1", "forward")] == 10
    assert found["skein_worker_queued_ops", ("w1", "backward")] == 3
    assert found["skein_worker_in_flight_microbatches", ("w1",)] == 2
    assert found["skein_worker_rpc_errors_total", ("w1", "probe")] == 1
    assert found["skein_link_bytes_total", ("w1", "w2")] == 1e6


def test_what_workers_tell_of_aggregation_has_names_of_its_own() -> None:
    metrics = CoordinatorMetrics()
    long = "w" * 64
    beat(
        metrics,
        "w1",
        [
            Count(name="skein_worker_aggregation_bytes_total", label="lsgd/w2", value=5e6),
            Count(name="skein_worker_aggregation_bytes_total", label=f"one_bit_adam/{long}", value=7e6),
            Count(name="skein_worker_consensus_distance", label="0", value=0.25),
            Count(name="skein_worker_error_feedback_norm", label="0", value=1.5),
            Count(name="skein_worker_compression_ratio", label="", value=31.9),
            Count(name="skein_worker_leader_changes_total", label="", value=4),
        ],
    )
    sampled(metrics, with_workers("w1"))
    found = samples(metrics)
    # Labels by name backwards: src, rule, dst.
    assert found["skein_aggregation_bytes_total", ("w1", "lsgd", "w2")] == 5e6
    assert found["skein_aggregation_bytes_total", ("w1", "one_bit_adam", long)] == 7e6
    assert found["skein_consensus_distance", ("w1", "0")] == 0.25
    assert found["skein_error_feedback_norm", ("w1", "0")] == 1.5
    assert found["skein_compression_ratio", ("w1",)] == 31.9
    assert found["skein_leader_changes_total", ("w1",)] == 4
    assert not any(name.startswith("skein_worker_") for name, labels in found if "w1" in labels)


def test_scores_of_walkers_are_those_of_the_newest_probe_while_they_live() -> None:
    def done(loss_sum: float, *, phase: Phase = Phase.PROBE, num_tokens: int = 10) -> EvaluationDone:
        return EvaluationDone(
            generation=Generation(1),
            version=Step(4),
            microbatches=(MicrobatchId(0),),
            loss_sum=loss_sum,
            num_tokens=num_tokens,
            phase=phase,
        )

    metrics = CoordinatorMetrics()
    for worker, loss_sum in (("w1", 30.0), ("w2", 25.0), ("w1", 20.0), ("gone", 1.0)):
        metrics.heard(WorkerId(worker), done(loss_sum))
    metrics.heard(WorkerId("w2"), done(90.0, phase=Phase.EVALUATE))
    metrics.heard(WorkerId("w2"), done(0.0, num_tokens=0))
    sampled(metrics, with_workers("w1", "w2"))
    found = {key: x for (name, key), x in samples(metrics).items() if name == "skein_probe_score_nats"}
    assert found == {("w1",): 2.0, ("w2",): 2.5}


def test_rules_and_peers_beyond_the_bound_are_summed() -> None:
    metrics = CoordinatorMetrics()
    counts = [
        Count(name="skein_worker_aggregation_bytes_total", label=f"lsgd/p{n:04d}", value=1)
        for n in range(MAX_LABELS + 9)
    ]
    beat(metrics, "w1", counts)
    sampled(metrics, with_workers("w1"))
    found = {key: x for (name, key), x in samples(metrics).items() if name == "skein_aggregation_bytes_total"}
    assert found["w1", "other", "other"] == 9
    assert sum(found.values()) == MAX_LABELS + 9


def test_what_a_worker_makes_up_is_not_re_exported() -> None:
    metrics = CoordinatorMetrics()
    beat(
        metrics,
        "w1",
        [
            Count(name="skein_loss_nats", label="", value=0),
            Count(name='evil{x="', label="", value=1),
            Count(name="skein_worker_bubble_ratio", label="", value=math.nan),
            Count(name="skein_worker_queued_ops", label='"} 1\nx', value=1),
        ],
    )
    sampled(metrics, with_workers("w1"))
    of_worker = {key: value for key, value in samples(metrics).items() if "w1" in key[1]}
    assert set(of_worker) == {
        ("skein_lease_remaining_seconds", ("w1",)),
        ("skein_worker_queued_ops", ("w1", '"} 1\nx')),
    }


def test_labels_of_a_worker_are_bounded_and_none_of_their_values_is_lost() -> None:
    metrics = CoordinatorMetrics()
    peers = [
        Count(name="skein_worker_sent_bytes_total", label=f"p{n:04d}", value=1) for n in range(MAX_LABELS + 9)
    ]
    beat(metrics, "w1", peers)
    sampled(metrics, with_workers("w1"))
    links = {
        labels: value
        for (name, labels), value in samples(metrics).items()
        if name == "skein_link_bytes_total"
    }
    assert len(links) == MAX_LABELS + 1
    assert links["w1", "other"] == 9
    assert sum(links.values()) == MAX_LABELS + 9


def test_a_label_of_a_worker_that_is_empty_is_no_sum_of_others() -> None:
    metrics, name = CoordinatorMetrics(), "skein_worker_op_failures_total"
    beat(metrics, "w1", [Count(name=name, label=label, value=1) for label in ("", "other")])
    sampled(metrics, with_workers("w1"))
    shown = [labels for found, labels in samples(metrics) if found == name]
    assert sorted(shown) == [("w1", ""), ("w1", "other")]


def test_workers_with_statistics_are_bounded() -> None:
    metrics, names = CoordinatorMetrics(), [f"w{number:04d}" for number in range(MAX_WORKERS + 7)]
    for name in names:
        beat(metrics, name, [Count(name="skein_worker_bubble_ratio", label="", value=0.5)])
    sampled(metrics, with_workers(*names))
    found = [labels[0] for name, labels in samples(metrics) if name == "skein_worker_bubble_ratio"]
    assert sorted(found) == names[:MAX_WORKERS]


def test_answers_of_the_planner_and_refusals_are_counted() -> None:
    metrics = CoordinatorMetrics()
    metrics.planned(Infeasible(reason="no"), 0.1)
    metrics.refused("Submit", "invalid_argument")
    found = samples(metrics)
    assert found["skein_plans_total", ("infeasible",)] == 1
    assert found["skein_rpc_errors_total", ("invalid_argument", "Submit")] == 1


def test_every_name_has_the_prefix_and_counters_end_in_total() -> None:
    metrics = CoordinatorMetrics()
    metrics.recorded(LOG)
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert family.name.startswith("skein_")
        assert not family.name.endswith(("_created", "_ms", "_milliseconds"))
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)


def test_discovery_lists_the_coordinator_and_each_worker() -> None:
    machine = with_workers("w1", "w2")
    workers = {worker.worker: worker for worker in Roster(machine).workers(now=101.0)}
    found = json.loads(json.dumps(targets("lab:7412", workers)))
    assert [entry["targets"] for entry in found] == [["lab:7412"]] * 3
    assert [entry["labels"].get("__metrics_path__") for entry in found] == [
        None,
        "/metrics/worker/w1",
        "/metrics/worker/w2",
    ]


def test_a_lost_worker_is_down_and_an_unknown_path_is_not_found() -> None:
    machine = with_workers("w1")
    roster = Roster(machine)
    roster.look()
    # Looked at late, a lease is forgiven once: the coordinator itself may have stood still.
    machine.handle(TimePassed(), now=200.0)
    machine.handle(TimePassed(), now=machine.deadline() or 0.0)
    workers = {worker.worker: worker for worker in roster.workers(now=210.0)}
    assert workers[WorkerId("w1")].state is WorkerState.LOST
    page = Exposition(lambda: b"all")

    def answered(path: str, host: str = "") -> Page:
        return page.answer(PageRequest(path=path, query={}, fields={"host": host}))

    page.show(workers)
    assert answered("/metrics/worker/w1")[0] is HTTPStatus.SERVICE_UNAVAILABLE
    assert answered("/metrics/worker/w9")[0] is HTTPStatus.NOT_FOUND
    assert answered("/")[0] is HTTPStatus.NOT_FOUND
    assert answered("/metrics")[2] == b"all"
    page.address = "10.0.0.1:7412"
    assert page.address.encode() in answered("/sd", 'evil"host/')[2]
    assert b"lab:1" in answered("/sd", "lab:1")[2]


def test_room_on_the_disk_of_the_state_directory_is_shown(tmp_path: Path) -> None:
    metrics = CoordinatorMetrics()
    metrics.watch_disk(tmp_path)
    page = metrics.render().decode()
    free, size = (
        float(re.findall(rf"^skein_state_{x}_bytes (\S+)$", page, re.MULTILINE)[0]) for x in ("free", "size")
    )
    assert 0 < free <= size
    metrics.watch_disk(tmp_path / "gone")
    assert "skein_state_free_bytes NaN" in metrics.render().decode()


def test_stored_bytes_and_use_of_quotas_are_shown_by_namespace() -> None:
    machine = Coordinator(quotas=QuotasSpec(default=QuotaSpec(stored_bytes=1000, queued_jobs=4)))
    file = CheckpointFile(name="stage-000.model.safetensors", num_bytes=250, sha256="", tensors=())
    machine.replay((*LOG[:-1], checkpointed(JOB, 5, file)))
    metrics = CoordinatorMetrics()
    sampled(metrics, machine)
    found = samples(metrics)
    assert found["skein_stored_bytes", ("default",)] == 250
    assert found["skein_quota_used_ratio", ("stored_bytes", "default")] == 0.25
    assert found["skein_quota_used_ratio", ("queued_jobs", "default")] == 0.25
