"""Traces of what jobs do, by OpenTelemetry: made of what the run log keeps, once it is durable.

On where `OTEL_EXPORTER_OTLP_ENDPOINT` says whom to send them to, and where the extra `tracing` is installed; the other
variables of OpenTelemetry's SDK hold too. What is replayed is not traced again. Nobody waits for a collector: spans
wait in a bounded queue, on a thread of the SDK, and what does not fit is dropped.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coordinator.driver import AppendLog
from skein.protocol.log.records import (
    Evaluated,
    GenerationOpened,
    Incident,
    JobEnded,
    JobHeld,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.types import JobId

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

_ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_log = logging.getLogger("coordinator")


def traced(log: AppendLog) -> AppendLog:
    """The log, whose appends are traced where the environment asks for it."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return log
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        _log.warning(
            "no traces, in spite of %s: %s; pip install 'skein-train[tracing]'", _ENDPOINTS[0], missing
        )
        return log
    name = os.environ.get("OTEL_SERVICE_NAME", "skein-coordinator")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return TracedLog(log, provider)


class TracedLog:
    """A run log, and a span for each step, evaluation and failure that becomes durable in it.

    Each span is a trace of its own, found by its attributes `skein.job` and `skein.step`; the parts of a failure are
    below it. A step has a span where it is known when it began: not the first one of a generation that waited.

    Args:
        log: the log.
        provider: of spans; whoever made it ends it (the SDK does at the end of the process).
    """

    def __init__(self, log: AppendLog, provider: "TracerProvider") -> None:
        self._log = log
        self.provider = provider
        self._tracer = provider.get_tracer("skein")
        self._began: dict[JobId, float] = {}
        """Wall-clock time of the end of what a job did last, while it goes on."""

    def append(self, records: Sequence[Record]) -> None:
        """Append, and trace what is durable then."""
        self._log.append(records)
        for record in records:
            self._trace(record)

    def read(self, job: JobId | None = None) -> Iterator[Record]:
        """All records, oldest first, or those of one job."""
        return self._log.read(job)

    def _trace(self, record: Record) -> None:
        match record:
            case StepCommitted(job=job, record=step, wall_s=wall_s):
                about: dict[str, AttributeValue] = {
                    "skein.step": step.step,
                    "skein.decision": step.decision.value,
                    "skein.loss": step.loss,
                    "skein.tokens": step.num_tokens,
                    "skein.gradient_norm": step.gradient_norm,
                }
                self._went_on("step", job, wall_s, about)
            case Evaluated(job=job, wall_s=wall_s):
                about = {"skein.step": record.version, "skein.loss": record.loss}
                self._went_on("evaluation", job, wall_s, about)
            case Incident():
                self._failed(record)
            case GenerationOpened(job=job) | RolledBack(job=job) | JobHeld(job=job) | JobEnded(job=job):
                self._began.pop(job, None)
            case _:
                pass

    def _went_on(self, name: str, job: JobId, wall_s: float, about: "dict[str, AttributeValue]") -> None:
        """Trace what a job did from the end of what it did before until now."""
        began_s = self._began.get(job)
        self._began[job] = wall_s
        if began_s is not None:
            self._begin(name, job, began_s, about).end(_ns(wall_s))

    def _failed(self, incident: Incident) -> None:
        """Trace a failure from the last sign of life, and its parts until work went on."""
        noticed_s = incident.wall_s
        fenced_s, over_s = noticed_s + incident.fenced_s, noticed_s + incident.seconds
        whole = self._begin(
            "incident",
            incident.job,
            noticed_s - incident.silent_s,
            {
                "skein.step": incident.step,
                "skein.kind": incident.kind.value,
                "skein.remedy": incident.remedy.value,
                "skein.reason": incident.reason,
                "skein.workers": tuple(incident.workers),
                "skein.steps_lost": incident.num_steps_lost,
            },
        )
        parts = (
            ("silence", noticed_s - incident.silent_s, noticed_s),
            ("fence", noticed_s, fenced_s),
            ("recovery", fenced_s, over_s),
        )
        for name, began_s, ended_s in parts:
            if ended_s > began_s:
                self._begin(name, incident.job, began_s, {}, within=whole).end(_ns(ended_s))
        whole.end(_ns(over_s))
        self._began.pop(incident.job, None)

    def _begin(
        self,
        name: str,
        job: JobId,
        wall_s: float,
        about: "dict[str, AttributeValue]",
        *,
        within: "Span | None" = None,
    ) -> "Span":
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = Context() if within is None else set_span_in_context(within, Context())
        return self._tracer.start_span(
            name, context, attributes={"skein.job": job, **about}, start_time=_ns(wall_s)
        )


def _ns(wall_s: float) -> int:
    """Unix nanoseconds."""
    return round(wall_s * 1e9)
