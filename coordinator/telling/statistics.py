"""Statistics that workers report with their beats: which are re-exported, under which names, and how many.

Rules of this file
- What is not in the table is dropped: a worker makes no series by inventing names.
- Labels of one statistic are bounded; the rest is summed under "other", and none of their values is lost.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from skein.protocol.messages.directives import Count

MAX_LABELS = 64
"""Labels of one statistic of one worker; the rest is summed under "other"."""
_MAX_LABEL_CHARACTERS = 96
"""A worker's name has 64 at most, and a rule's goes before it."""


class StatisticKind(StrEnum):
    """Kind of a statistic to Prometheus."""

    SUMMARY = "summary"
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class ReExport:
    """A statistic of workers: its name there, its kind, what its label says ("" for none).

    `shown` is its name here, where that is another.
    """

    name: str
    kind: StatisticKind
    label: str
    about: str
    shown: str = ""


RE_EXPORTED = (
    ReExport("skein_worker_op_seconds", StatisticKind.SUMMARY, "kind", "Time that ops took"),
    ReExport("skein_worker_op_failures", StatisticKind.COUNTER, "kind", "Ops that failed"),
    ReExport("skein_worker_step_seconds", StatisticKind.SUMMARY, "", "From one update to the next"),
    ReExport("skein_worker_bubble_ratio", StatisticKind.GAUGE, "", "Share of the last step without an op"),
    ReExport("skein_worker_in_flight_microbatches", StatisticKind.GAUGE, "", "Microbatches that hold a slot"),
    ReExport("skein_worker_queued_ops", StatisticKind.GAUGE, "kind", "Ops that could run"),
    ReExport("skein_worker_payload_bytes", StatisticKind.GAUGE, "", "Tensors that are filed"),
    ReExport("skein_worker_refusals", StatisticKind.COUNTER, "reason", "Tensors that were refused"),
    ReExport("skein_worker_rpc_errors", StatisticKind.COUNTER, "reason", "Calls that failed"),
    ReExport("skein_worker_checkpoint_seconds", StatisticKind.SUMMARY, "", "Time that writing a stage took"),
    ReExport("skein_worker_checkpoint_bytes", StatisticKind.COUNTER, "", "Checkpoint bytes written"),
    ReExport(
        "skein_worker_consensus_distance",
        StatisticKind.GAUGE,
        "stage",
        "Norm of the difference from where the newest exchange draws a walker",
        "skein_consensus_distance",
    ),
    ReExport(
        "skein_worker_error_feedback_norm",
        StatisticKind.GAUGE,
        "stage",
        "Norm of what was rounded away and is still to be sent",
        "skein_error_feedback_norm",
    ),
    ReExport(
        "skein_worker_compression_ratio",
        StatisticKind.GAUGE,
        "",
        "Bytes of the newest exchange in float32, by those that it took",
        "skein_compression_ratio",
    ),
    ReExport(
        "skein_worker_leader_changes",
        StatisticKind.COUNTER,
        "",
        "How often other walkers began to lead",
        "skein_leader_changes",
    ),
)
"""Statistics whose label stays as it is; two have labels that are told otherwise."""
LINK = ReExport("skein_worker_sent_bytes", StatisticKind.COUNTER, "peer", "Tensor bytes by directed link")
SHARDS = ReExport(
    "skein_worker_aggregation_bytes",
    StatisticKind.COUNTER,
    "rule/peer",
    "Of those the bytes of aggregation, by rule",
)


def bounded_labels(values: Mapping[str, float]) -> dict[str, float]:
    """Values of the first labels under them, those of the rest together."""
    kept = sorted(values)[:MAX_LABELS]
    found = {label: values[label] for label in kept}
    if len(values) > len(kept):
        found["other"] = math.fsum(values[label] for label in values.keys() - found.keys())
    return found


def counts_by_name(counts: Iterable[Count]) -> Mapping[str, Mapping[str, float]]:
    """Finite values of known statistics."""
    names = {
        f"{export.name}{end}"
        for export in (*RE_EXPORTED, LINK, SHARDS)
        for end in ("", "_sum", "_count", "_total")
    }
    found: dict[str, dict[str, float]] = {}
    for count in counts:
        if count.name in names and math.isfinite(count.value):
            found.setdefault(count.name, {})[count.label[:_MAX_LABEL_CHARACTERS]] = count.value
    return found
