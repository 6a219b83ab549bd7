"""Sinks that export the events of a run as metrics.

`WriterSink` writes scalars to TensorBoard, clu or Weights & Biases, `OpenTelemetrySink` records metrics and spans, and
`PrometheusSink` writes a file or serves a page. `samples` defines the metrics that the last two have in common.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxckpt_train._validation import absolute_path, named, optional, refuse, text, unicode_text, whole
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.store.threads import free_in_child

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry

SECONDS, BYTES, BYTES_PER_S, PLAIN = "s", "By", "By/s", ""  # in the notation of UCUM
BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""The upper bounds of the histograms: from a call that only takes views to a save that is about to be given up."""
_WITHOUT_FIGURES = ("delete", "preempted", "set_aside", "take_over")
_UNITS = (("_bytes_per_s", BYTES_PER_S), ("_bytes", BYTES), ("_s", SECONDS))
_NAME = "jaxckpt_train"
_TOOK = {"save": "save_s", "restore": "restore_s"}
_NS = 1_000_000_000
_OF_OPENTELEMETRY = {"counter": "add", "gauge": "set", "histogram": "record"}
_OF_PROMETHEUS = {"counter": "inc", "gauge": "set", "histogram": "observe"}
_LABEL = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_SUFFIXES = {SECONDS: "_seconds", BYTES: "_bytes", BYTES_PER_S: "_bytes_per_second", PLAIN: ""}


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric."""

    name: str  # words separated by dots, without the unit: "save.blocked"
    # A counter only grows; a gauge is the last value; a histogram counts values by their size.
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # one of `SECONDS`, `BYTES`, `BYTES_PER_S`, `PLAIN`
    about: str  # a description for users
    label: str | None = None  # the label that distinguishes its series; None: there is one series
    series: tuple[str, ...] = ()  # the values of the label that are known beforehand


class Sample(NamedTuple):
    """A value of a metric in an event, and its series."""

    measure: Measure
    value: float
    series: str | None = None


def _histogram(name: str, about: str) -> Measure:
    return Measure(name, "histogram", SECONDS, about)


_KINDS = ("drain", "restore", "save", *_WITHOUT_FIGURES)
EVENTS = Measure("events", "counter", PLAIN, "Events of the run, as in its history", "event", _KINDS)
SAVES = Measure("saves", "counter", PLAIN, "Saves that have ended", "outcome", ("committed", "failed"))
RESTORES = Measure("restores", "counter", PLAIN, "Restores")
SKIPPED = Measure("restore.skipped_steps", "counter", PLAIN, "Steps that could not be restored and were skipped")
SAVE_TIME = Measure("last_save.timestamp", "gauge", SECONDS, "When the last save was committed, since 1970")
RESTORE_TIME = Measure("last_restore.timestamp", "gauge", SECONDS, "When the last restore ended, since 1970")
# By the field of the event.
_OF_ALL_SAVES = {
    "blocked_s": _histogram("save.blocked", "How long a save blocked the loop"),
    "wait_s": _histogram("save.wait", "Of that, how long it waited for the previous save"),
    "snapshot_s": _histogram("save.snapshot", "Of that, how long it took to copy the state"),
    "device_wait_s": _histogram("save.device_wait", "How long it waited for queued updates; not blocked"),
}
_OF_COMMITTED = {
    "save_s": _histogram("save.duration", "From the call that saves to the commit, including waits for devices"),
    "write_s": _histogram("save.write", "Of that, how long it took to write the data"),
    "commit_s": _histogram("save.commit", "Of that, how long it took to sync and publish the data"),
    "bytes": Measure("saved", "counter", BYTES, "Data of committed saves"),
}
_LAST_SAVE = {
    "step": Measure("last_saved_step", "gauge", PLAIN, "The step that was committed last"),
    "bytes": Measure("last_save.size", "gauge", BYTES, "Data of the last committed save"),
    "bytes_per_s": Measure("last_save.rate", "gauge", BYTES_PER_S, "How fast it was written and committed"),
}
_OF_RESTORES = {
    "restore_s": _histogram("restore.duration", "How long a restore took"),
    "bytes": Measure("restored", "counter", BYTES, "Data that restores have read"),
}
_LAST_RESTORE = {
    "step": Measure("last_restored_step", "gauge", PLAIN, "The step that was restored last"),
    "bytes_per_s": Measure("last_restore.rate", "gauge", BYTES_PER_S, "How fast it was read"),
    "ahead_steps": Measure("last_restore.ahead_steps", "gauge", PLAIN, "How much newer than the run directory it was"),
}
RESTORED_FAST = Measure("last_restore.from_fast_tier", "gauge", PLAIN, "1: it came from the fast tier; 0: it did not")
DRAINS = Measure("drains", "counter", PLAIN, "Copies of steps of the fast tier to the run directory")
DRAIN_TIME = Measure("last_drain.timestamp", "gauge", SECONDS, "When the last copy was committed, since 1970")
_OF_DRAINS = {
    "drain_s": _histogram("drain.duration", "How long a copy to the run directory took"),
    "lag_s": _histogram("drain.lag", "From the call that saved a step until its copy was in the run directory"),
    "bytes": Measure("drained", "counter", BYTES, "Data of copies to the run directory"),
}
_LAST_DRAIN = {
    "step": Measure("last_drained_step", "gauge", PLAIN, "The step that was copied last"),
    "lag_steps": Measure("last_drain.lag_steps", "gauge", PLAIN, "How much older than the fast tier it was by then"),
}
# Counters with known labels start at 0; a gauge does not exist before its first value.
_FIGURES = (_OF_ALL_SAVES, _OF_COMMITTED, _OF_RESTORES, _OF_DRAINS)
KNOWN = (EVENTS, SAVES, RESTORES, SKIPPED, DRAINS, *(measure for each in _FIGURES for measure in each.values()))


def figures(event: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of an event that are finite and measure something; true and false count as 1 and 0."""
    fields = {name: value for name, value in event.items() if name != "pid" and not name.endswith("_id")}
    numbers = {name: float(value) for name, value in fields.items() if isinstance(value, bool | int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def samples(event: Mapping[str, Any]) -> Iterator[Sample]:
    """The values of all metrics in an event."""
    kind, numbers = str(event["event"]), figures(event)
    yield Sample(EVENTS, 1, kind)
    if kind == "save":
        yield Sample(SAVES, 1, "committed" if numbers.get("ok") else "failed")
        yield from _named(_OF_ALL_SAVES, numbers)
        if numbers.get("ok"):
            yield from _named(_OF_COMMITTED, numbers)
            yield from _named(_LAST_SAVE, numbers)
            yield Sample(SAVE_TIME, moment_s(event))
    elif kind == "restore":
        yield Sample(RESTORES, 1)
        yield Sample(SKIPPED, len(event.get("skipped", ())))
        yield from _named(_OF_RESTORES, numbers)
        yield from _named(_LAST_RESTORE, numbers)
        yield Sample(RESTORED_FAST, float(event.get("tier") == "fast"))
        yield Sample(RESTORE_TIME, moment_s(event))
    elif kind == "drain":
        yield Sample(DRAINS, 1)
        yield from _named(_OF_DRAINS, numbers)
        yield from _named(_LAST_DRAIN, numbers)
        yield Sample(DRAIN_TIME, moment_s(event))
    elif kind not in _WITHOUT_FIGURES:
        for field, value in numbers.items():
            yield Sample(_gauge_of(kind, field), value)


def _named(measures: Mapping[str, Measure], numbers: Mapping[str, float]) -> Iterator[Sample]:
    return (Sample(measure, numbers[field]) for field, measure in measures.items() if field in numbers)


def _gauge_of(kind: str, field: str) -> Measure:
    """Make a gauge for a field of an unknown event; the suffix of its name is the unit."""
    stem, unit = next(((field.removesuffix(end), unit) for end, unit in _UNITS if field.endswith(end)), (field, PLAIN))
    name = ".".join(re.sub(r"\W", "_", part, flags=re.ASCII) for part in (kind, stem))
    return Measure(name, "gauge", unit, f"{field} of the last event {kind!r}")


def moment_s(event: Mapping[str, Any]) -> float:
    """The time of an event, in seconds since 1970."""
    return datetime.datetime.fromisoformat(event["time"]).timestamp()


class WriterSink:
    """Writes scalars such as `checkpoint/save/blocked_s`, `checkpoint/restore/bytes_per_s`, `checkpoint/save/count`.

    For each event, it writes the numeric fields and the count of events of this kind in this process. The step is that
    of the event, or the last known step. TensorBoard's writer is flushed after each event, because a preempted job may
    not get to that; clu's is not, because the loop cannot write while an `AsyncWriter` flushes.

    In Weights & Biases, each kind of event has its own axis, such as `checkpoint/save/step`, and its values are added
    to the row that the loop logs next, since rows with a lower step are dropped. Of several events of one kind in one
    row, the last one is kept.

    Args:
        writer: an object with `write_scalars(step, scalars)`, such as clu's `MetricWriter`, or with
            `add_scalar(tag, value, global_step)`, such as the `SummaryWriter` of PyTorch and tensorboardX, or with
            `log(data, commit=...)` and `define_metric(name, step_metric=...)`, such as a `wandb.Run`. It is called on a
            background thread. Close it after the end of the run.

    Raises:
        SettingsError: the writer has none of these methods.
    """

    def __init__(self, writer: Any) -> None:
        self._writer, self._step, self._counts = writer, 0, collections.Counter[str]()
        self._axes = set[str]()  # the axes defined in Weights & Biases
        if callable(getattr(writer, "write_scalars", None)):
            self._write: Callable[[int, Mapping[str, float]], object] = writer.write_scalars
        elif callable(getattr(writer, "add_scalar", None)):
            self._write = self._add_each
        elif callable(getattr(writer, "log", None)) and callable(getattr(writer, "define_metric", None)):
            self._write = self._log_row
        else:
            refuse("WriterSink.writer", "a writer of clu or TensorBoard, or a wandb.Run", writer)

    def _add_each(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._done("flush")

    def _log_row(self, step: int, scalars: Mapping[str, float]) -> None:
        kind = next(iter(scalars)).rpartition("/")[0]
        axis = f"{kind}/step"
        if axis not in self._axes:
            self._writer.define_metric(axis)
            self._writer.define_metric(f"{kind}/*", step_metric=axis)
            self._axes.add(axis)
        self._writer.log({**scalars, axis: step}, commit=False)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write an event."""
        kind, numbers = str(event["event"]), figures(event)
        self._step = int(numbers.get("step", self._step))
        self._counts[kind] += 1
        shown = {name: value for name, value in numbers.items() if name != "step"}
        shown["count"] = float(self._counts[kind])
        self._write(self._step, {f"checkpoint/{kind}/{name}": value for name, value in shown.items()})

    def close(self) -> None:
        """Close the writer. A run of Weights & Biases stays open for what the program logs after the training."""
        self._done("close")

    def _done(self, method: str) -> None:
        call = getattr(self._writer, method, None)
        if callable(call):
            call()


class OpenTelemetrySink:
    """Records metrics (`jaxckpt.saves`, `jaxckpt.save.blocked`) and spans (`checkpoint.save`) through OpenTelemetry.

    It needs `pip install jaxckpt-train[opentelemetry]`, and a program that has configured OpenTelemetry: its providers
    decide where the data goes. Without them, nothing is recorded.

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
        with self._guard:  # two runs may share the sink
            for sample in samples(event):
                self._record(sample)
        if event["event"] in _TOOK:
            self._add_span(event)

    def _record(self, sample: Sample) -> None:
        measure = sample.measure
        if measure.name not in self._instruments:
            options: Any = {}
            if measure.kind == "histogram":
                options["explicit_bucket_boundaries_advisory"] = BUCKETS_S
            create = getattr(self._meter, f"create_{measure.kind}")
            unit = measure.unit or "1"
            self._instruments[measure.name] = create(f"jaxckpt.{measure.name}", unit, measure.about, **options)
        record = getattr(self._instruments[measure.name], _OF_OPENTELEMETRY[measure.kind])
        record(sample.value, {} if measure.label is None else {measure.label: str(sample.series)})

    def _add_span(self, event: Mapping[str, Any]) -> None:
        """Add a span that ends at the time of the event."""
        from opentelemetry.context import Context
        from opentelemetry.trace import StatusCode

        kind, end_ns = str(event["event"]), round(moment_s(event) * _NS)
        start_ns = end_ns - round(figures(event).get(_TOOK[kind], 0.0) * _NS)
        attributes = {
            f"checkpoint.{name}": value
            for name, value in _flat(event)
            if value is not None and name not in ("event", "time")
        }
        # An empty context: other spans of this thread do not belong to the training.
        span = self._tracer.start_span(f"checkpoint.{kind}", Context(), attributes=attributes, start_time=start_ns)
        if event.get("ok") is False:
            span.set_status(StatusCode.ERROR, str(event.get("error", "")))
        span.end(end_ns)


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten nested fields, such as the metrics of a step: an attribute has a single value."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


class PrometheusSink:
    """Exports metrics for Prometheus, such as `jaxckpt_saves_total` and `jaxckpt_save_blocked_seconds`.

    It needs `pip install jaxckpt-train[prometheus]`. The file and the page exist from the first event on. In a
    multi-process job only the primary has events, so all processes may use the same arguments.

    Args:
        path: a file that is replaced atomically at each event, for the textfile collector of node_exporter. It must end
            in ".prom", and its directory must exist. None: no file.
        port: the port of the page, at /metrics; 0: any free port. None: no page.
        address: the address of the page; "0.0.0.0": all interfaces of this machine.
        registry: the registry of the metrics; None: a new one.
        labels: labels of all metrics, by name. Two runs whose files one node_exporter reads need different ones.

    Attributes:
        registry: the registry of the metrics.

    Raises:
        SettingsError: an argument is wrong, path, port and registry are all None, the registry has these metrics
            already, or prometheus_client is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        port: int | None = None,
        address: str = "0.0.0.0",
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise SettingsError(
                "PrometheusSink: needs the package prometheus_client: pip install jaxckpt-train[prometheus]"
            ) from error
        if path is None and port is None and registry is None:
            raise SettingsError("PrometheusSink: expected a path, a port or a registry, found none")
        self._library: Any = prometheus_client
        self._path = None if path is None else absolute_path("PrometheusSink.path", path)
        if self._path is not None and not self._path.endswith(".prom"):
            refuse("PrometheusSink.path", "a path that ends in .prom, as node_exporter requires", path)
        self.registry: CollectorRegistry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._port = optional(whole(0, 65535))("PrometheusSink.port", port)
        self._address = text("PrometheusSink.address", address)
        self._page: tuple[WSGIServer, threading.Thread] | None = None
        self._labels = dict(named("PrometheusSink.labels", labels or {}))
        for name, value in self._labels.items():
            if not _LABEL.fullmatch(str(name)) or name in {measure.label for measure in KNOWN}:
                refuse("PrometheusSink.labels", "names such as run that the metrics do not have", name)
            unicode_text(f"PrometheusSink.labels.{name}", value)
        self._metrics: dict[str, Any] = {}
        self._guard = threading.RLock()
        free_in_child(self)
        try:
            for measure in KNOWN:
                for series in measure.series if measure.label else (None,):
                    self._series(measure, series)
        except ValueError as error:
            raise SettingsError(f"PrometheusSink: {error}") from error

    @property
    def port(self) -> int | None:
        """The port of the page; None: there is no page, or it is not open yet."""
        return None if self._page is None else self._page[0].server_port

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Count an event, and update the file and the page.

        Raises:
            OSError: the file cannot be written, or the port is in use; the event is counted nevertheless.
        """
        with self._guard:  # two runs that share the sink must not replace a newer file by an older one
            for measure, value, series in samples(event):
                getattr(self._series(measure, series), _OF_PROMETHEUS[measure.kind])(value)
            try:
                if self._page is None and self._port is not None:
                    self._page = self._library.start_http_server(self._port, self._address, self.registry)
            finally:
                if self._path is not None:
                    self._library.write_to_textfile(self._path, self.registry)

    def close(self) -> None:
        """Close the page. Later events are counted, and written to the file."""
        with self._guard:
            page, self._page, self._port = self._page, None, None
            if page is not None:
                page[0].shutdown()
                page[0].server_close()
                page[1].join()

    def _series(self, measure: Measure, series: str | None) -> Any:
        """The series of a metric, which is created when it is first needed."""
        labels = self._labels if measure.label is None else {**self._labels, measure.label: series}
        if measure.name not in self._metrics:
            options = {"buckets": BUCKETS_S} if measure.kind == "histogram" else {}
            name = f"jaxckpt_{measure.name.replace('.', '_')}{_SUFFIXES[measure.unit]}"
            make = getattr(self._library, measure.kind.capitalize())
            self._metrics[measure.name] = make(name, measure.about, list(labels), registry=self.registry, **options)
        metric = self._metrics[measure.name]
        return metric.labels(**labels) if labels else metric
