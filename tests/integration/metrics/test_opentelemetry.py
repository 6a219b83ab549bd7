"""OpenTelemetrySink: the metrics and spans that the real SDK collects in memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import jaxckpt_train as jct
from tests.support.metric_events import DELETED, FAILED, PREEMPTED, RESTORED, SAVED, TIME_S


class Collected:
    """A sink with its own providers, and what these have collected."""

    def __init__(self) -> None:
        self._reader, self._spans = InMemoryMetricReader(), InMemorySpanExporter()
        self._metrics: dict[str, Any] = {}
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = tracers.get_tracer("test")
        self.sink = jct.OpenTelemetrySink(
            MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test"), self.tracer
        )

    def metrics(self) -> dict[str, Any]:
        """Each metric by its name; some versions report a gauge only if it was set since the last report."""
        data = self._reader.get_metrics_data()
        assert data is not None
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        self._metrics |= {metric.name: metric for metric in scope.metrics}
        return self._metrics

    def values(self, name: str) -> dict[str, float]:
        """Return the series of a metric, by the value of their only label."""
        points = self.metrics()[name].data.data_points
        assert all(isinstance(point, NumberDataPoint) for point in points)
        return {"".join(str(each) for each in point.attributes.values()): point.value for point in points}

    def spans(self) -> list[ReadableSpan]:
        """Return all spans that have ended."""
        return list(self._spans.get_finished_spans())


@pytest.fixture
def collected() -> Collected:
    """A sink that has received no event yet."""
    return Collected()


def test_counters_and_gauges_have_their_values_and_units(collected: Collected) -> None:
    for event in (SAVED, FAILED, RESTORED, DELETED, PREEMPTED):
        collected.sink(event)
    assert collected.values("jaxckpt.saves") == {"committed": 1, "failed": 1}
    assert collected.values("jaxckpt.events") == {"save": 2, "restore": 1, "delete": 1, "preempted": 1}
    assert collected.values("jaxckpt.saved") == {"": 4096}
    assert collected.values("jaxckpt.last_saved_step") == {"": 100}
    assert collected.values("jaxckpt.last_save.timestamp") == {"": TIME_S}
    assert collected.values("jaxckpt.restore.skipped_steps") == {"": 2}
    units = {name: metric.unit for name, metric in collected.metrics().items()}
    assert (units["jaxckpt.saved"], units["jaxckpt.save.blocked"], units["jaxckpt.last_restore.rate"]) == (
        "By",
        "s",
        "By/s",
    )
    assert units["jaxckpt.saves"] == "1"
    assert all(metric.description for metric in collected.metrics().values())


def test_durations_are_histograms_of_seconds(collected: Collected) -> None:
    collected.sink(SAVED)
    collected.sink(FAILED)
    (point,) = collected.metrics()["jaxckpt.save.blocked"].data.data_points
    assert isinstance(point, HistogramDataPoint)
    assert (point.count, point.sum) == (2, 1.0)
    assert list(point.bucket_counts)[list(point.explicit_bounds).index(0.5)] == 2


def test_save_is_span_from_call_to_commit(collected: Collected) -> None:
    collected.sink(SAVED)
    (span,) = collected.spans()
    assert span.name == "checkpoint.save"
    assert (span.start_time, span.end_time) == ((TIME_S - 2.0) * 1e9, TIME_S * 1e9)
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes is not None
    wanted = {f"checkpoint.{name}": value for name, value in SAVED.items() if name not in ("event", "time")}
    assert dict(span.attributes) == wanted


def test_metrics_of_save_are_attributes_of_its_span(collected: Collected) -> None:
    collected.sink({**SAVED, "metrics": {"loss": 0.5, "accuracy": "nan"}})
    (span,) = collected.spans()
    assert span.attributes is not None
    found = {name: value for name, value in span.attributes.items() if "metrics" in name}
    assert found == {"checkpoint.metrics.loss": 0.5, "checkpoint.metrics.accuracy": "nan"}


def test_failed_save_is_span_with_its_error(collected: Collected) -> None:
    collected.sink(FAILED)
    (span,) = collected.spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no space left")


def test_restore_is_the_only_other_span(collected: Collected) -> None:
    for event in (DELETED, RESTORED, PREEMPTED):
        collected.sink(event)
    (span,) = collected.spans()
    assert (span.name, span.start_time, span.end_time) == ("checkpoint.restore", (TIME_S - 4.0) * 1e9, TIME_S * 1e9)
    assert span.attributes is not None
    assert span.attributes["checkpoint.skipped"] == ("step_100", "step_95")


def test_save_span_has_no_parent(collected: Collected) -> None:
    with collected.tracer.start_as_current_span("the program's own"):
        collected.sink(SAVED)
    span = collected.spans()[0]
    assert (span.name, span.parent) == ("checkpoint.save", None)


def test_figures_of_other_events_become_gauges(collected: Collected) -> None:
    for goodput in (0.5, 0.75):
        collected.sink({"event": "end", "time": SAVED["time"], "goodput": goodput})
    assert collected.values("jaxckpt.end.goodput") == {"": 0.75}


PROGRAM = """
import json
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from jaxckpt_train.metrics.exporters import OpenTelemetrySink
from tests.support.metric_events import SAVED

sink = OpenTelemetrySink()  # before the program sets OpenTelemetry up
reader, spans, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(spans))
metrics.set_meter_provider(MeterProvider([reader]))
trace.set_tracer_provider(tracers)
sink(SAVED)
scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0]
print(json.dumps([scope.scope.name, len(scope.metrics), [span.name for span in spans.get_finished_spans()]]))
"""


def test_global_providers_may_be_set_later(run_python: Any) -> None:
    name, count, spans = json.loads(run_python(PROGRAM, check=True).stdout)
    assert (name, spans) == ("jaxckpt_train", ["checkpoint.save"])
    assert count > 8


def test_noop_providers_are_accepted() -> None:
    sink = jct.OpenTelemetrySink(metrics.NoOpMeter("none"), trace.NoOpTracer())
    for event in (SAVED, FAILED, RESTORED):
        sink(event)


@pytest.mark.parametrize("name", ["meter", "tracer"])
def test_wrong_arguments_are_refused_by_name(name: str) -> None:
    with pytest.raises(jct.SettingsError, match=rf"OpenTelemetrySink.{name}: expected an opentelemetry\."):
        jct.OpenTelemetrySink(**{name: 3})
