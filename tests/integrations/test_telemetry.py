"""Recovery reports as span attributes and run metadata."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentcache import RecoveryReport, Reply
from agentcache.integrations import telemetry
from agentcache.integrations.routing import Router
from tests.integrations.routed import RoutedModel

REPORT = RecoveryReport(version="v2", parent="v1", policy="edit_local", exact=False, prefix_tokens=5, reused_tokens=90)
REPLY = Reply("hi", [1], "stop", 100, 95, 12.5, version="v2", parent="v1", recovery=REPORT)


def test_a_report_is_flat_values_that_every_exporter_takes() -> None:
    values = telemetry.report_values("t1", REPLY)
    assert values["agentcache.episode"] == "t1" and values["agentcache.version"] == "v2"
    assert values["agentcache.reused_tokens"] == 90 and values["agentcache.prefix_tokens"] == 5
    assert values["agentcache.cached_tokens"] == 95 and values["agentcache.exact"] is False
    assert "agentcache.reason" not in values  # there was none
    assert all(isinstance(value, (str, int, float, bool)) for value in values.values())


def test_the_current_span_has_the_report() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("agent"):
        telemetry.annotate("t1", REPLY)
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes or {}) == telemetry.report_values("t1", REPLY)


def test_without_a_span_or_opentelemetry_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry.annotate("t1", REPLY)
    monkeypatch.setattr(telemetry, "trace", None)
    telemetry.annotate("t1", REPLY)


def test_the_run_of_each_tracer_has_the_report_as_metadata() -> None:
    class Traced(RoutedModel):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            result = super()._generate(messages, stop, run_manager, **kwargs)
            telemetry.annotate("t1", REPLY, run_manager)
            return result

    collector = RunCollectorCallbackHandler()
    Traced(router=Router()).invoke("hello", {"callbacks": [collector]})
    (run,) = collector.traced_runs
    metadata = (run.extra or {})["metadata"]
    assert metadata["agentcache.reused_tokens"] == 90 and metadata["agentcache.policy"] == "edit_local"
