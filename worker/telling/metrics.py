"""Every metric of a worker: for Prometheus, and the same numbers as counts that the coordinator re-exports."""

from collections import Counter as Counts
from collections.abc import Iterable, Mapping
from functools import partial
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skein.plan.changing.traffic import TrafficKind
from skein.plan.clock.holding import StageForm
from skein.plan.ops import OpKind
from skein.plan.pieces.collectives import CollectiveTimes, LaneKind
from skein.protocol.messages.reports import Count
from skein.protocol.worker.pipeline import Occupancy
from skein.types import WorkerId
from skein.wire.channel import Lane
from skein.wire.relay.switchboard import Switchboard
from skein.wire.serving.pages import TEXT, Page, PageRequest, Pages, on_thread
from worker.telling.aggregating import Gauges
from worker.transport.statistics import Statistics

_OP_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_STEP_BUCKETS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_COMPUTE_KINDS = tuple(kind.value for kind in OpKind)
_MAX_PEERS = 64
"""Peers beyond so many share the label `other`: labels stay bounded however many come and go."""


class _WhenAsked(Collector):
    """Counters of the transport and numbers of aggregation, as they stand when asked."""

    def __init__(self, statistics: Statistics, gauges: Gauges) -> None:
        self._statistics = statistics
        self._gauges = gauges
        self.board = Switchboard(is_offered=False)
        """Relay of this worker; until it is told, one that carries nothing."""
        self.mesh_times = CollectiveTimes()
        """Times of collectives of its mesh; none without one."""
        self.mesh_forms: Mapping[int, StageForm] = {}
        """Forms in which the devices of its mesh share chunks, by number."""

    def collect(self) -> Iterable[Metric]:
        counted, gauges = self._statistics, self._gauges
        yield _family("sent_bytes", "Tensor bytes sent, by peer", "peer", _bounded(counted.sent_bytes))
        about = "Tensor bytes received, by peer"
        yield _family("received_bytes", about, "peer", _bounded(counted.received_bytes))
        yield _family("sent_tensors", "Tensors that peers took, by lane", "lane", counted.accepted)
        yield _family("resent_tensors", "Tensors offered once more, by lane", "lane", counted.resent)
        yield _family("failed_tensors", "Tensors given up, by peer", "peer", _bounded(counted.failed))
        yield _family("refused_tensors", "What peers did not take, by reason", "reason", counted.refused)
        yield _family("refusals", "What this worker did not take, by reason", "reason", counted.refusals)
        about = "Tensor bytes of training sent to other workers, by kind"
        kinds = {kind.value: counted.tensor_bytes[kind] for kind in TrafficKind}
        yield _family("tensor_bytes", about, "kind", kinds)
        about = "Tensor bytes sent for aggregation, by rule and peer"
        sent = CounterMetricFamily("skein_worker_aggregation_bytes", about, labels=["rule", "peer"])
        for (rule, peer), num_bytes in sorted(self._sent_bytes().items()):
            sent.add_metric([rule, peer], num_bytes)
        yield sent
        about = "Norm of the difference from where the newest exchange draws a walker, by stage"
        yield _by_stage("consensus_distance", about, gauges.consensus_distance)
        about = "Norm of what was rounded away and is still to be sent, by stage"
        yield _by_stage("error_feedback_norm", about, gauges.error_feedback_norm)
        about = "Choices of experts in the newest step, by layer and expert"
        tokens = GaugeMetricFamily("skein_worker_expert_tokens", about, labels=["layer", "expert"])
        for (layer, expert), value in sorted(gauges.expert_tokens.items()):
            tokens.add_metric([str(layer), expert], value)
        yield tokens
        about = "Bytes of the newest exchange in float32, by those that it took"
        yield GaugeMetricFamily("skein_worker_compression_ratio", about, value=gauges.compression_ratio)
        about = "What weight gradients that are put aside are to be made of"
        yield GaugeMetricFamily("skein_worker_pending_bytes", about, value=gauges.pending_bytes)
        about = "Most of that at once in the newest step"
        yield GaugeMetricFamily("skein_worker_peak_pending_bytes", about, value=gauges.peak_pending_bytes)
        times = self.mesh_times
        about = "Collectives between devices of the mesh whose times are predicted, by kind"
        yield _family("collectives", about, "kind", {kind.value: times.num[kind] for kind in LaneKind})
        about = "Time that these took as far as nothing was computed beside them, by kind"
        yield _seconds("collective_seconds", about, times.measured_s)
        about = "The same as predicted, by kind"
        yield _seconds("collective_predicted_seconds", about, times.predicted_s)
        about = "Devices of the mesh that share a stage, by form"
        devices = GaugeMetricFamily("skein_worker_stage_devices", about, labels=["stage", "form"])
        # Of two chunks of a stage the newer one: the older is about to go.
        for stage, told in {x.stage: x for x in dict(self.mesh_forms).values()}.items():
            devices.add_metric([str(stage), told.form], told.num_devices)
        yield devices
        about = "How often lines were fitted by which these are predicted, by kind"
        yield _family(
            "collective_fits", about, "kind", {kind.value: times.num_fits[kind] for kind in LaneKind}
        )
        about = "Least R2 of the lines that were fitted last, by kind"
        fit = GaugeMetricFamily("skein_worker_collective_fit_r_squared", about, labels=["kind"])
        for kind, value in sorted(dict(times.r_squared).items()):
            fit.add_metric([kind.value], value)
        yield fit
        about = "How often other walkers began to lead this one"
        yield CounterMetricFamily("skein_worker_leader_changes", about, value=gauges.num_leader_changes)
        about = "Bytes carried for workers that do not dial each other"
        yield CounterMetricFamily("skein_worker_relay_bytes", about, value=self.board.num_bytes)
        about = "Connections of workers that are carried now"
        yield GaugeMetricFamily("skein_worker_relay_connections", about, value=self.board.num_connections)

    def _sent_bytes(self) -> dict[tuple[str, str], int]:
        by_rule: dict[str, Counts[WorkerId]] = {}
        for (job, peer), value in dict(self._statistics.shard_bytes).items():
            by_rule.setdefault(self._gauges.rule_of(job), Counts())[peer] += value
        return {(rule, peer): x for rule, values in by_rule.items() for peer, x in _bounded(values).items()}


def _family(
    name: str, documentation: str, label: str, values: Mapping[Lane, int] | Mapping[str, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"skein_worker_{name}", documentation, labels=[label])
    # A copy: scrapes come on a thread of their own.
    for key, value in sorted(dict(values).items()):
        family.add_metric([str(key)], value)
    return family


def _seconds(name: str, documentation: str, values: Mapping[LaneKind, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"skein_worker_{name}", documentation, labels=["kind"])
    for kind, value in dict(values).items():
        family.add_metric([kind.value], value)
    return family


def _by_stage(name: str, documentation: str, values: Mapping[int, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"skein_worker_{name}", documentation, labels=["stage"])
    for stage, value in sorted(dict(values).items()):
        gauge.add_metric([str(stage)], value)
    return gauge


def _bounded(values: Mapping[WorkerId, int]) -> dict[str, int]:
    """Values of the first peers under their names, those of the rest together."""
    listed = list(values.items())
    bounded = {str(peer): value for peer, value in listed[:_MAX_PEERS]}
    if len(listed) > _MAX_PEERS:
        bounded["other"] = sum(value for _, value in listed[_MAX_PEERS:])
    return bounded


class WorkerMetrics:
    """Metrics of one worker process. Times are seconds by whatever clock the caller has.

    `gauges` are the numbers that compute tells of aggregation; None: nothing.
    """

    def __init__(self, statistics: Statistics, gauges: Gauges | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        new_gauge, new_counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        new_histogram = partial(Histogram, registry=registry)
        self._op_seconds = new_histogram(
            "skein_worker_op_seconds", "Time that ops took, by kind", ["kind"], buckets=_OP_BUCKETS
        )
        self._op_failures = new_counter(
            "skein_worker_op_failures_total", "Ops that failed, by kind", ["kind"]
        )
        self._step_seconds = new_histogram(
            "skein_worker_step_seconds", "From one update to the next", buckets=_STEP_BUCKETS
        )
        self._bubble_ratio = new_gauge(
            "skein_worker_bubble_ratio", "Share of the last step in which no op ran"
        )
        self._in_flight = new_gauge("skein_worker_in_flight_microbatches", "Microbatches that hold a slot")
        about = "Most microbatches that held a slot at once in the newest step"
        self._peak_in_flight = new_gauge("skein_worker_peak_in_flight_microbatches", about)
        self._slots = new_gauge("skein_worker_slots", "Microbatches that may hold a slot, as planned")
        about = "Most microbatches that held a slot of a stage at once in the newest step"
        self._peak_by_stage = new_gauge("skein_worker_stage_peak_microbatches", about, ["stage"])
        about = "Microbatches whose weight gradients are put aside"
        self._pending = new_gauge("skein_worker_pending_microbatches", about)
        self._queued = new_gauge("skein_worker_queued_ops", "Ops that could run, by kind", ["kind"])
        self._payload_bytes = new_gauge(
            "skein_worker_payload_bytes", "Boundary tensors and shards that are filed"
        )
        self._rpc_errors = new_counter(
            "skein_worker_rpc_errors_total", "Calls that failed, by reason", ["reason"]
        )
        self._connected = new_gauge(
            "skein_worker_control_streams", "1 while the coordinator is connected, else 0"
        )
        about = "Time that writing a stage took, in the background"
        self._checkpoint_seconds = new_histogram(
            "skein_worker_checkpoint_seconds", about, buckets=_STEP_BUCKETS
        )
        self._checkpoint_bytes = new_counter(
            "skein_worker_checkpoint_bytes_total", "Checkpoint bytes written"
        )
        self._when_asked = _WhenAsked(statistics, gauges or Gauges())
        registry.register(self._when_asked)
        self._busy_s = 0.0
        self._step_began: float | None = None

    def watch_relay(self, board: Switchboard) -> None:
        """Tell from now on what this worker carries for others."""
        self._when_asked.board = board

    def watch_mesh(self, times: CollectiveTimes, forms: Mapping[int, StageForm]) -> None:
        """Tell from now on how this worker's mesh shares chunks, and how long its collectives take."""
        self._when_asked.mesh_times, self._when_asked.mesh_forms = times, forms

    # --- what happened ---

    def op_ended(self, kind: str, seconds: float, *, is_failed: bool) -> None:
        """An op of `kind` ran for so long."""
        self._op_seconds.labels(kind).observe(seconds)
        self._busy_s += seconds
        if is_failed:
            self._op_failures.labels(kind).inc()

    def step_ended(self, *, now: float) -> None:
        """An update was made; the step before it began with the update before that."""
        if self._step_began is not None and now > self._step_began:
            elapsed = now - self._step_began
            self._step_seconds.observe(elapsed)
            self._bubble_ratio.set(max(0.0, 1.0 - self._busy_s / elapsed))
        self._busy_s, self._step_began = 0.0, now

    def step_abandoned(self) -> None:
        """The time until the next update is no step's."""
        self._step_began = None

    def queues(self, occupancy: Occupancy, depth_by_kind: Mapping[str, int], payload_bytes: int) -> None:
        """Set how much waits now; a kind that is not named has nothing."""
        self._in_flight.set(occupancy.in_flight)
        self._peak_in_flight.set(occupancy.peak)
        self._slots.set(occupancy.slots)
        self._pending.set(occupancy.pending)
        self._peak_by_stage.clear()
        for stage, peak in occupancy.peak_by_stage:
            self._peak_by_stage.labels(str(stage)).set(peak)
        for kind in _COMPUTE_KINDS:
            self._queued.labels(kind).set(depth_by_kind.get(kind, 0))
        self._payload_bytes.set(payload_bytes)

    def rpc_failed(self, reason: str) -> None:
        self._rpc_errors.labels(reason).inc()

    def connected(self, *, is_connected: bool) -> None:
        self._connected.set(is_connected)

    def checkpoint_written(self, seconds: float, num_bytes: int) -> None:
        self._checkpoint_seconds.observe(seconds)
        self._checkpoint_bytes.inc(num_bytes)

    # --- where it can be read ---

    def counts(self) -> tuple[Count, ...]:
        """All of it as counts: Prometheus' sample names, histograms without buckets.

        A sample's label is the value of its one label, values of several joined by `/`, or "".
        """
        return tuple(
            Count(name=sample.name, label="/".join(sample.labels.values()), value=float(sample.value))
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        )

    async def serve(self, host: str, port: int) -> Pages:
        """Answers scrapes at host:port until that is closed.

        Raises:
            UserError: the port is taken, or the host is not this machine's.
        """
        return await Pages.open("metrics_port", host, port, on_thread(self._page))

    def _page(self, _request: PageRequest) -> Page:
        return Page(HTTPStatus.OK, TEXT, generate_latest(self._registry))
