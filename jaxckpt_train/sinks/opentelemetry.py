"""OpenTelemetrySink: the events of a run as metrics, and a span for each save and restore, through OpenTelemetry."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.sinks.measures import BUCKETS_S, Measure, Sample, figures, moment_s, samples
from jaxckpt_train.store.per_process import free_in_child
from jaxckpt_train.value_checks import refuse

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

_NAME = "jaxckpt_train"
_TOOK = {"save": "save_s", "restore": "restore_s"}
_NS = 1_000_000_000


class OpenTelemetrySink:
    """Metrics of checkpointing (`jaxckpt.saves`, `jaxckpt.save.blocked`) and spans (`checkpoint.save`).

    Needs `pip install jaxckpt-train[opentelemetry]`, and a program that has set OpenTelemetry up: what is recorded goes
    wherever its providers send it, and nowhere if there are none.

    Args:
        meter: for the metrics; None: that of the global provider.
        tracer: for the spans; None: that of the global provider.

    Raises:
        SettingsError: an argument is wrong, or opentelemetry-api is not installed.
    """

    def __init__(self, meter: Meter | None = None, tracer: Tracer | None = None) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise SettingsError(
                "OpenTelemetrySink: needs the package opentelemetry-api: pip install jaxckpt-train[opentelemetry]"
            ) from error
        if meter is not None and not isinstance(meter, metrics.Meter):
            refuse("OpenTelemetrySink.meter", "an opentelemetry.metrics.Meter", meter)
        if tracer is not None and not isinstance(tracer, trace.Tracer):
            refuse("OpenTelemetrySink.tracer", "an opentelemetry.trace.Tracer", tracer)
        self._meter = metrics.get_meter(_NAME) if meter is None else meter
        self._tracer = trace.get_tracer(_NAME) if tracer is None else tracer
        self._instruments: dict[str, Any] = {}
        self._guard = threading.RLock()
        free_in_child(self)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Record an event."""
        with self._guard:  # two runs may share it
            for sample in samples(event):
                self._record(sample)
        if event["event"] in _TOOK:
            self._add_span(event)

    def _record(self, sample: Sample) -> None:
        measure = sample.measure
        labels = {} if measure.label is None else {measure.label: str(sample.series)}
        instrument = self._instruments.get(measure.name)
        if instrument is None:
            instrument = self._instruments[measure.name] = self._instrument(measure)
        match measure.kind:
            case "counter":
                instrument.add(sample.value, labels)
            case "gauge":
                instrument.set(sample.value, labels)
            case "histogram":
                instrument.record(sample.value, labels)

    def _instrument(self, measure: Measure) -> Any:
        name, unit, about = f"jaxckpt.{measure.name}", measure.unit or "1", measure.about
        match measure.kind:
            case "counter":
                return self._meter.create_counter(name, unit, about)
            case "gauge":
                return self._meter.create_gauge(name, unit, about)
            case "histogram":
                return self._meter.create_histogram(name, unit, about, explicit_bucket_boundaries_advisory=BUCKETS_S)

    def _add_span(self, event: Mapping[str, Any]) -> None:
        """It ends when the event was noted, and began as much earlier as it took."""
        from opentelemetry.context import Context
        from opentelemetry.trace import StatusCode

        kind, end_ns = str(event["event"]), round(moment_s(event) * _NS)
        start_ns = end_ns - round(figures(event).get(_TOOK[kind], 0.0) * _NS)
        fields = {name: value for name, value in event.items() if name not in ("event", "time")}
        attributes = {f"checkpoint.{name}": value for name, value in _flat(fields) if value is not None}
        # With a context of its own: what else this thread does is no part of the training.
        span = self._tracer.start_span(f"checkpoint.{kind}", Context(), attributes=attributes, start_time=start_ns)
        if event.get("ok") is False:
            span.set_status(StatusCode.ERROR, str(event.get("error", "")))
        span.end(end_ns)


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is within a field, such as the metrics of a step, by both names: an attribute has one value."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value
