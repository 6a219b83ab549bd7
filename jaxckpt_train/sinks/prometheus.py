"""PrometheusSink: counts the events of a run for Prometheus, in a file for node_exporter or on a page of its own."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.sinks.measures import BUCKETS_S, BYTES, BYTES_PER_S, KNOWN, PLAIN, SECONDS, Measure, Sample, samples
from jaxckpt_train.store.per_process import free_in_child
from jaxckpt_train.value_checks import absolute_path, optional, refuse, text, unicode_text, whole

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SUFFIXES = {SECONDS: "_seconds", BYTES: "_bytes", BYTES_PER_S: "_bytes_per_second", PLAIN: ""}
_LABEL = re.compile("(?!__)[A-Za-z_][A-Za-z0-9_]*")


class PrometheusSink:
    """Metrics of checkpointing for Prometheus, as `jaxckpt_saves_total` and `jaxckpt_save_blocked_seconds`.

    Needs `pip install jaxckpt-train[prometheus]`. The file is written, and the page is there, from the first event on:
    in a job of many processes only process 0 has events, so all of them may have the same arguments.

    Args:
        path: of a file that is replaced atomically at each event, for the textfile collector of node_exporter; it ends
            in ".prom", in a directory that exists. None: no file.
        port: of the page, at /metrics; 0: any that is free. None: no page.
        address: where the page is served; "0.0.0.0": to all who reach this machine.
        registry: to which the metrics are added; None: one of its own.
        labels: by name, of all metrics. Two runs whose files one node_exporter reads need different ones.

    Attributes:
        registry: that has the metrics.

    Raises:
        SettingsError: an argument is wrong, nobody could read the metrics, the registry has them already, or
            prometheus_client is not installed.
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
            raise SettingsError("PrometheusSink: expected a path, a port or a registry to be read from, found none")
        self._library: Any = prometheus_client
        self._path = None if path is None else absolute_path("PrometheusSink.path", path)
        if self._path is not None and not self._path.endswith(".prom"):
            refuse("PrometheusSink.path", "a path that ends in .prom, as node_exporter reads no other file", path)
        self.registry: CollectorRegistry = prometheus_client.CollectorRegistry() if registry is None else registry
        found_port = optional(whole(0, 65535))("PrometheusSink.port", port)
        self._page = (
            None if found_port is None else _Page(found_port, text("PrometheusSink.address", address), self.registry)
        )
        self._labels = _checked_labels(labels)
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._guard = threading.RLock()
        free_in_child(self)
        self._make_known()

    def _make_known(self) -> None:
        try:
            for measure in KNOWN:
                metric = self._metric(measure)
                for series in measure.series if measure.label else (None,):
                    self._series(metric, measure, series)
        except ValueError as error:
            raise SettingsError(f"PrometheusSink: {error}; let runs that share a registry share one sink") from error

    @property
    def port(self) -> int | None:
        """Where the page is; None: there is none, or none yet."""
        return None if self._page is None else self._page.open_port

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Count an event, and have it seen.

        Raises:
            OSError: the file cannot be written, or the port is taken; the event is counted.
        """
        with self._guard:  # of two runs that share it, neither may put an older file in place of a newer one
            for sample in samples(event):
                self._count(sample)
            try:
                if self._page is not None:
                    self._page.open(self._library)
            finally:
                if self._path is not None:
                    self._library.write_to_textfile(self._path, self.registry)

    def close(self) -> None:
        """Let go of the port. What is told later is counted, and written to the file."""
        with self._guard:
            if self._page is not None:
                self._page.close()
                self._page = None

    def _count(self, sample: Sample) -> None:
        series = self._series(self._metric(sample.measure), sample.measure, sample.series)
        match sample.measure.kind:
            case "counter":
                series.inc(sample.value)
            case "gauge":
                series.set(sample.value)
            case "histogram":
                series.observe(sample.value)

    def _series(self, metric: Any, measure: Measure, series: str | None) -> Any:
        labels = self._labels if measure.label is None else {**self._labels, measure.label: series}
        return metric.labels(**labels) if labels else metric

    def _metric(self, measure: Measure) -> Counter | Gauge | Histogram:
        """The metric for a measure, made when it is first needed."""
        found = self._metrics.get(measure.name)
        if found is None:
            made: Any = {"counter": "Counter", "gauge": "Gauge", "histogram": "Histogram"}[measure.kind]
            labels = [*self._labels, *([measure.label] if measure.label else [])]
            more = {"buckets": BUCKETS_S} if measure.kind == "histogram" else {}
            name = f"jaxckpt_{measure.name.replace('.', '_')}{_SUFFIXES[measure.unit]}"
            found = getattr(self._library, made)(name, measure.about, labels, registry=self.registry, **more)
            self._metrics[measure.name] = found
        return found


def _checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    subject, taken = "PrometheusSink.labels", {"le", *(measure.label for measure in KNOWN)}
    if not isinstance(labels, Mapping | None):
        refuse(subject, "a mapping of names to texts", labels)
    for name, value in (labels or {}).items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in taken:
            refuse(subject, "names such as run: letters, digits and _, and none that its metrics have already", name)
        unicode_text(f"{subject}.{name}", value)
    return dict(labels or {})


class _Page:
    """A page with the metrics, served by a thread of its own while it is open."""

    def __init__(self, port: int, address: str, registry: CollectorRegistry) -> None:
        self._port, self._address, self._registry = port, address, registry
        self._served: tuple[WSGIServer, threading.Thread] | None = None
        _pages.add(self)

    @property
    def open_port(self) -> int | None:
        """Where it is; None: it is not open."""
        return None if self._served is None else self._served[0].server_port

    def open(self, library: Any) -> None:
        """Serve it, unless it is served already."""
        if self._served is None:
            self._served = library.start_http_server(self._port, self._address, self._registry)

    def close(self) -> None:
        """Serve it no more."""
        served, self._served = self._served, None
        if served is not None:
            served[0].shutdown()
            served[0].server_close()
            served[1].join()

    def leave_to_parent(self) -> None:
        """Let go of it in a forked child, which would keep the port from whoever wants it once the parent has ended."""
        served, self._served = self._served, None
        if served is not None:
            served[0].socket.close()


_pages: weakref.WeakSet[_Page] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for page in list(_pages):
        page.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
