"""Statistics that workers report with their beats, re-exported under own names: a value for each worker and label.

Rules of this file
- What is not in the table is dropped: a worker makes no series by inventing names.
- Labels of one statistic are bounded; the rest is summed under "other", and none of their values is lost.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from skein.protocol.messages.reports import Count
from skein.types import WorkerId

MAX_WORKERS = 256
"""Statistics of workers beyond so many, by id, are not re-exported."""
MAX_LABELS = 64
"""Labels of one statistic of one worker; the rest is summed under "other"."""
_MAX_LABEL_CHARACTERS = 96
"""A worker's name has 64 at most, and a rule's goes before it."""
_Counts = Mapping[str, Mapping[str, float]]
"""Values of one worker, by name and label."""


@dataclass(frozen=True, slots=True)
class ReExport:
    """A statistic of workers: its name there, its kind to Prometheus, what it says, and its labels here.

    One label is the worker; the others are the parts of the worker's own label, which slashes join. `shown` is the name
    here, where that is another.
    """

    name: str
    family: type[SummaryMetricFamily | CounterMetricFamily | GaugeMetricFamily]
    about: str
    labels: tuple[str, ...] = ("worker",)
    shown: str = ""

    def new_metric(self) -> SummaryMetricFamily | CounterMetricFamily | GaugeMetricFamily:
        """The metric without a value."""
        about = f"{self.about}, by worker" if "worker" in self.labels else self.about
        return self.family(self.shown or self.name, about, labels=self.labels)

    def values_of(self, worker: WorkerId, label: str) -> list[str]:
        """Values of the labels, for one label of a worker; "other" is each of the parts that it lacks."""
        parts = iter(label.split("/", len(self.labels) - 2))
        return [worker if x in ("worker", "src") else next(parts, "other") for x in self.labels]


_BY_KIND, _BY_REASON, _BY_STAGE = ("worker", "kind"), ("worker", "reason"), ("worker", "stage")
RE_EXPORTED = (
    ReExport("skein_worker_op_seconds", SummaryMetricFamily, "Time that ops took", _BY_KIND),
    ReExport("skein_worker_op_failures", CounterMetricFamily, "Ops that failed", _BY_KIND),
    ReExport("skein_worker_step_seconds", SummaryMetricFamily, "From one update to the next"),
    ReExport("skein_worker_bubble_ratio", GaugeMetricFamily, "Share of the last step without an op"),
    ReExport("skein_worker_in_flight_microbatches", GaugeMetricFamily, "Microbatches that hold a slot"),
    ReExport(
        "skein_worker_peak_in_flight_microbatches",
        GaugeMetricFamily,
        "Most microbatches that held a slot at once in the newest step",
    ),
    ReExport("skein_worker_slots", GaugeMetricFamily, "Microbatches that may hold a slot, as planned"),
    ReExport(
        "skein_worker_pending_microbatches",
        GaugeMetricFamily,
        "Microbatches whose weight gradients are put aside",
    ),
    ReExport(
        "skein_worker_stage_peak_microbatches",
        GaugeMetricFamily,
        "Most microbatches that held a slot of a stage at once in the newest step",
        _BY_STAGE,
    ),
    ReExport(
        "skein_worker_pending_bytes",
        GaugeMetricFamily,
        "What weight gradients that are put aside are to be made of",
    ),
    ReExport("skein_worker_peak_pending_bytes", GaugeMetricFamily, "Most of that at once in the newest step"),
    ReExport(
        "skein_worker_tensor_bytes", CounterMetricFamily, "Tensor bytes of training sent to others", _BY_KIND
    ),
    ReExport(
        "skein_worker_collectives",
        CounterMetricFamily,
        "Collectives between devices of a mesh whose times are predicted",
        _BY_KIND,
    ),
    ReExport(
        "skein_worker_collective_seconds",
        CounterMetricFamily,
        "Time that these took as far as nothing was computed beside them",
        _BY_KIND,
    ),
    ReExport(
        "skein_worker_collective_predicted_seconds", CounterMetricFamily, "The same as predicted", _BY_KIND
    ),
    ReExport(
        "skein_worker_stage_devices",
        GaugeMetricFamily,
        "Devices of a mesh that share a stage, by form",
        ("worker", "stage", "form"),
    ),
    ReExport(
        "skein_worker_collective_fits",
        CounterMetricFamily,
        "How often lines were fitted by which these are predicted",
        _BY_KIND,
    ),
    ReExport(
        "skein_worker_collective_fit_r_squared",
        GaugeMetricFamily,
        "Least R2 of the lines that were fitted last",
        _BY_KIND,
    ),
    ReExport("skein_worker_queued_ops", GaugeMetricFamily, "Ops that could run", _BY_KIND),
    ReExport("skein_worker_payload_bytes", GaugeMetricFamily, "Tensors that are filed"),
    ReExport("skein_worker_refusals", CounterMetricFamily, "Tensors that were refused", _BY_REASON),
    ReExport("skein_worker_rpc_errors", CounterMetricFamily, "Calls that failed", _BY_REASON),
    ReExport("skein_worker_checkpoint_seconds", SummaryMetricFamily, "Time that writing a stage took"),
    ReExport("skein_worker_checkpoint_bytes", CounterMetricFamily, "Checkpoint bytes written"),
    ReExport("skein_worker_relay_bytes", CounterMetricFamily, "Bytes carried for other workers"),
    ReExport("skein_worker_relay_connections", GaugeMetricFamily, "Connections carried for other workers"),
    ReExport(
        "skein_worker_expert_tokens",
        GaugeMetricFamily,
        "Choices of experts in the newest step, by layer",
        ("worker", "layer", "expert"),
        "skein_expert_tokens",
    ),
    ReExport(
        "skein_worker_consensus_distance",
        GaugeMetricFamily,
        "Norm of the difference from where the newest exchange draws a walker",
        _BY_STAGE,
        "skein_consensus_distance",
    ),
    ReExport(
        "skein_worker_error_feedback_norm",
        GaugeMetricFamily,
        "Norm of what was rounded away and is still to be sent",
        _BY_STAGE,
        "skein_error_feedback_norm",
    ),
    ReExport(
        "skein_worker_compression_ratio",
        GaugeMetricFamily,
        "Bytes of the newest exchange in float32, by those that it took",
        shown="skein_compression_ratio",
    ),
    ReExport(
        "skein_worker_leader_changes",
        CounterMetricFamily,
        "How often other walkers began to lead",
        shown="skein_leader_changes",
    ),
    ReExport(
        "skein_worker_sent_bytes",
        CounterMetricFamily,
        "Tensor bytes by directed link",
        ("src", "dst"),
        "skein_link_bytes",
    ),
    ReExport(
        "skein_worker_aggregation_bytes",
        CounterMetricFamily,
        "Of those the bytes of aggregation, by rule",
        ("rule", "src", "dst"),
        "skein_aggregation_bytes",
    ),
)
_NAMES = {f"{export.name}{end}" for export in RE_EXPORTED for end in ("", "_sum", "_count", "_total")}


class StatisticsCollector(Collector):
    """The newest statistics of each live worker."""

    def __init__(self) -> None:
        self.counts_by_worker: Mapping[WorkerId, _Counts] = {}

    def collect(self) -> Iterator[Metric]:
        counts_by_worker = self.counts_by_worker
        for export in RE_EXPORTED:
            metric = export.new_metric()
            for worker in sorted(counts_by_worker)[:MAX_WORKERS]:
                _add(metric, export, worker, counts_by_worker[worker])
            yield metric


def _add(metric: Metric, export: ReExport, worker: WorkerId, counts: _Counts) -> None:
    match metric:
        case SummaryMetricFamily():
            sums = bounded_labels(counts.get(f"{export.name}_sum", {}))
            numbers = bounded_labels(counts.get(f"{export.name}_count", {}))
            for label in sums.keys() & numbers.keys():
                metric.add_metric(export.values_of(worker, label), int(numbers[label]), sums[label])
        case CounterMetricFamily() | GaugeMetricFamily():
            name = f"{export.name}_total" if isinstance(metric, CounterMetricFamily) else export.name
            for label, value in bounded_labels(counts.get(name, {})).items():
                metric.add_metric(export.values_of(worker, label), value)


def bounded_labels(values: Mapping[str, float]) -> dict[str, float]:
    """Values of the first labels under them, those of the rest together."""
    kept = sorted(values)[:MAX_LABELS]
    found = {label: values[label] for label in kept}
    if len(values) > len(kept):
        found["other"] = math.fsum(values[label] for label in values.keys() - found.keys())
    return found


def counts_by_name(counts: Iterable[Count]) -> _Counts:
    """Finite values of known statistics."""
    found: dict[str, dict[str, float]] = {}
    for count in counts:
        if count.name in _NAMES and math.isfinite(count.value):
            found.setdefault(count.name, {})[count.label[:_MAX_LABEL_CHARACTERS]] = count.value
    return found
