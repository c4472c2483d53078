"""Statistics that workers report with their beats, re-exported under own names: a value for each worker and label."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from coordinator.telling.statistics import LINK, RE_EXPORTED, SHARDS, ReExport, StatisticKind, bounded_labels
from skein.types import WorkerId

MAX_WORKERS = 256
"""Statistics of workers beyond so many, by id, are not re-exported."""

_FAMILIES: Mapping[StatisticKind, type[SummaryMetricFamily | CounterMetricFamily | GaugeMetricFamily]] = {
    StatisticKind.SUMMARY: SummaryMetricFamily,
    StatisticKind.COUNTER: CounterMetricFamily,
    StatisticKind.GAUGE: GaugeMetricFamily,
}


class StatisticsCollector(Collector):
    """The newest statistics of each live worker."""

    def __init__(self) -> None:
        self.counts_by_worker: Mapping[WorkerId, Mapping[str, Mapping[str, float]]] = {}

    def collect(self) -> Iterator[Metric]:
        counts_by_worker = self.counts_by_worker
        for export in RE_EXPORTED:
            labels = ["worker", export.label] if export.label else ["worker"]
            metric = _FAMILIES[export.kind](
                export.shown or export.name, f"{export.about}, by worker", labels=labels
            )
            for worker in sorted(counts_by_worker)[:MAX_WORKERS]:
                _add(metric, export, worker, counts_by_worker[worker])
            yield metric
        links = CounterMetricFamily("skein_link_bytes", LINK.about, labels=["src", "dst"])
        for worker in sorted(counts_by_worker)[:MAX_WORKERS]:
            for peer, value in bounded_labels(counts_by_worker[worker].get(f"{LINK.name}_total", {})).items():
                links.add_metric([worker, peer], value)
        yield links
        shards = CounterMetricFamily("skein_aggregation_bytes", SHARDS.about, labels=["rule", "src", "dst"])
        for worker in sorted(counts_by_worker)[:MAX_WORKERS]:
            for label, value in bounded_labels(
                counts_by_worker[worker].get(f"{SHARDS.name}_total", {})
            ).items():
                rule, _, peer = label.partition("/")
                shards.add_metric([rule, worker, peer or "other"], value)
        yield shards


def _add(
    metric: Metric, export: ReExport, worker: WorkerId, counts: Mapping[str, Mapping[str, float]]
) -> None:
    match metric:
        case SummaryMetricFamily():
            sums = bounded_labels(counts.get(f"{export.name}_sum", {}))
            numbers = bounded_labels(counts.get(f"{export.name}_count", {}))
            for label in sums.keys() & numbers.keys():
                metric.add_metric(_labels(export, worker, label), int(numbers[label]), sums[label])
        case CounterMetricFamily():
            for label, value in bounded_labels(counts.get(f"{export.name}_total", {})).items():
                metric.add_metric(_labels(export, worker, label), value)
        case GaugeMetricFamily():
            for label, value in bounded_labels(counts.get(export.name, {})).items():
                metric.add_metric(_labels(export, worker, label), value)


def _labels(export: ReExport, worker: WorkerId, label: str) -> list[str]:
    return [worker, label] if export.label else [worker]
