"""Traces of jobs: sent to a collector over OTLP, of what is durable, and of nothing else."""

import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import SimpleQueue
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from coordinator.driver import AppendLog
from coordinator.telling.tracing import TracedLog, traced
from tests.coordinator.builders import WAIT_S, MemoryLog, committed, submitted
from tests.support.incidents import incident

JOB = "digits-1"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator["SimpleQueue[Span]"]:
    """Spans that reach a collector, which the environment names."""
    arrived: SimpleQueue[Span] = SimpleQueue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        arrived.put(span)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield arrived
        server.shutdown()
        thread.join()


def named(arrived: "SimpleQueue[Span]", num: int) -> dict[str, Span]:
    found = [arrived.get(timeout=WAIT_S) for _ in range(num)]
    return {span.name: span for span in found}


def attributes(span: Span) -> dict[str, object]:
    return {x.key: getattr(x.value, x.value.WhichOneof("value") or "string_value") for x in span.attributes}


def test_steps_and_failures_reach_a_collector(spans: "SimpleQueue[Span]") -> None:
    log = traced(MemoryLog())
    log.append((submitted(JOB), committed(JOB, 0, wall_s=10.0)))
    log.append((committed(JOB, 1, wall_s=12.5), incident(JOB, wall_s=20.0)))
    assert len(list(log.read())) == 4
    found = named(spans, 5)
    step, whole = found["step"], found["incident"]
    assert (step.start_time_unix_nano, step.end_time_unix_nano) == (10_000_000_000, 12_500_000_000)
    assert attributes(step)["skein.job"] == JOB
    assert attributes(step)["skein.step"] == 1
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (19_700_000_000, 20_620_000_000)
    for name, began_s, ended_s in (
        ("silence", 19.7, 20.0),
        ("fence", 20.0, 20.41),
        ("recovery", 20.41, 20.62),
    ):
        part = found[name]
        assert (part.trace_id, part.parent_span_id) == (whole.trace_id, whole.span_id)
        assert (part.start_time_unix_nano, part.end_time_unix_nano) == (
            round(began_s * 1e9),
            round(ended_s * 1e9),
        )
    assert isinstance(log, TracedLog)
    log.provider.shutdown()


def test_what_is_not_durable_is_not_traced(spans: "SimpleQueue[Span]") -> None:
    kept = MemoryLog()
    log = traced(kept)
    log.append((committed(JOB, 0, wall_s=10.0),))
    kept.error = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        log.append((committed(JOB, 1, wall_s=11.0),))
    kept.error = None
    log.append((committed(JOB, 1, wall_s=12.0),))
    assert isinstance(log, TracedLog)
    log.provider.shutdown()
    assert named(spans, 1)["step"].end_time_unix_nano == 12_000_000_000
    assert spans.empty()


def test_without_a_collector_the_log_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    log: AppendLog = MemoryLog()
    assert traced(log) is log


def test_a_collector_without_the_extra_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    log: AppendLog = MemoryLog()
    assert traced(log) is log
    assert "skein-train[tracing]" in caplog.text
