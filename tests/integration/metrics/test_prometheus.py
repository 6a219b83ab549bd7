"""PrometheusSink: what Prometheus' own parser reads back from the file, the page and a registry."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import jaxckpt_train as jct
from tests.support.metric_events import DELETED, FAILED, PREEMPTED, RESTORED, SAVED, TIME_S

Read = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Read:
    """Return each sample by its name and labels, without the creation times that the library adds."""
    families = list(text_string_to_metric_families(text))
    read = {
        (each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples
    }
    return {key: value for key, value in read.items() if not key[0].endswith("_created")}


def page(port: int | None) -> Read:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read().decode())


def check(read: Read, *labels: tuple[str, str]) -> None:
    """Check the samples that SAVED, FAILED, RESTORED, DELETED and PREEMPTED make."""
    wanted = {
        ("saves_total", ("outcome", "committed")): 1,
        ("saves_total", ("outcome", "failed")): 1,
        ("save_blocked_seconds_count",): 2,
        ("save_blocked_seconds_sum",): 1.0,
        ("save_blocked_seconds_bucket", ("le", "0.25")): 0,
        ("save_blocked_seconds_bucket", ("le", "0.5")): 2,
        ("save_duration_seconds_sum",): 2.0,
        ("save_write_seconds_count",): 1,
        ("saved_bytes_total",): 4096,
        ("last_saved_step",): 100,
        ("last_save_size_bytes",): 4096,
        ("last_save_rate_bytes_per_second",): 3277,
        ("last_save_timestamp_seconds",): TIME_S,
        ("restores_total",): 1,
        ("restore_skipped_steps_total",): 2,
        ("restore_duration_seconds_sum",): 4.0,
        ("restored_bytes_total",): 8192,
        ("last_restored_step",): 90,
        ("events_total", ("event", "save")): 2,
        ("events_total", ("event", "delete")): 1,
        ("events_total", ("event", "preempted")): 1,
        ("events_total", ("event", "take_over")): 0,
    }
    assert {
        (name, *more): read.get((f"jaxckpt_{name}", tuple(sorted((*labels, *more))))) for name, *more in wanted
    } == wanted


def send_all(sink: jct.PrometheusSink) -> None:
    for event in (SAVED, FAILED, RESTORED, DELETED, PREEMPTED):
        sink(event)


def test_file_holds_all_metrics_and_is_replaced_whole(tmp_path: Path) -> None:
    sink = jct.PrometheusSink(tmp_path / "a.prom")
    assert list(tmp_path.iterdir()) == []
    sink(SAVED)
    with (tmp_path / "a.prom").open() as before:
        for event in (FAILED, RESTORED, DELETED, PREEMPTED):
            sink(event)
        assert parsed(before.read())["jaxckpt_saves_total", (("outcome", "failed"),)] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["a.prom"]
    check(parsed((tmp_path / "a.prom").read_text()))


def test_each_metric_says_what_it_is() -> None:
    sink = jct.PrometheusSink(registry=prometheus_client.CollectorRegistry())
    send_all(sink)
    families = {family.name: family for family in sink.registry.collect()}
    assert families["jaxckpt_save_blocked_seconds"].type == "histogram"
    assert families["jaxckpt_saves"].type == "counter"
    assert families["jaxckpt_last_saved_step"].type == "gauge"
    assert all(family.documentation for family in families.values())


@pytest.fixture
def served() -> Iterator[jct.PrometheusSink]:
    """A sink with a page at a free port."""
    with closing(jct.PrometheusSink(port=0, address="127.0.0.1")) as sink:
        yield sink


def test_page_is_there_from_first_event_on(served: jct.PrometheusSink) -> None:
    assert served.port is None
    send_all(served)
    check(page(served.port))
    served(SAVED)
    assert page(served.port)["jaxckpt_saved_bytes_total", ()] == 8192


def test_closed_sink_frees_port_and_still_counts(served: jct.PrometheusSink) -> None:
    served(SAVED)
    port = served.port
    served.close()
    assert served.port is None
    with closing(jct.PrometheusSink(port=port, address="127.0.0.1")) as again:
        again(FAILED)
        assert page(port)["jaxckpt_saves_total", (("outcome", "failed"),)] == 1
    served(SAVED)
    assert served.registry.get_sample_value("jaxckpt_saved_bytes_total") == 8192


def test_counters_start_at_zero_and_gauges_absent() -> None:
    registry = prometheus_client.CollectorRegistry()
    jct.PrometheusSink(registry=registry)
    read = parsed(prometheus_client.generate_latest(registry).decode())
    assert read["jaxckpt_saves_total", (("outcome", "failed"),)] == 0
    assert read["jaxckpt_save_blocked_seconds_count", ()] == 0
    assert [name for name, _ in read if "last" in name] == []


def test_labels_are_on_every_metric(tmp_path: Path) -> None:
    sink = jct.PrometheusSink(tmp_path / "a.prom", labels={"run": "a", "user": "b"})
    send_all(sink)
    read = parsed((tmp_path / "a.prom").read_text())
    check(read, ("run", "a"), ("user", "b"))
    assert all({"run": "a", "user": "b"}.items() <= dict(labels).items() for _, labels in read)


def test_figures_of_other_events_become_gauges() -> None:
    sink = jct.PrometheusSink(registry=prometheus_client.CollectorRegistry())
    for goodput in (0.5, 0.75):
        sink({"event": "end", "time": SAVED["time"], "goodput": goodput, "lost_s": 3.0})
    assert sink.registry.get_sample_value("jaxckpt_end_goodput") == 0.75
    assert sink.registry.get_sample_value("jaxckpt_end_lost_seconds") == 3.0
    assert sink.registry.get_sample_value("jaxckpt_events_total", {"event": "end"}) == 2


def test_own_registry_is_not_the_global_one() -> None:
    sink = jct.PrometheusSink(port=0)
    assert sink.registry is not prometheus_client.REGISTRY
    assert prometheus_client.REGISTRY.get_sample_value("jaxckpt_restores_total") is None


def test_event_counts_when_file_cannot_be_written(tmp_path: Path) -> None:
    sink = jct.PrometheusSink(tmp_path / "none" / "a.prom")
    with pytest.raises(FileNotFoundError):
        sink(SAVED)
    (tmp_path / "none").mkdir()
    sink(SAVED)
    assert parsed((tmp_path / "none" / "a.prom").read_text())["jaxckpt_saved_bytes_total", ()] == 8192


def test_taken_port_does_not_stop_the_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sink = jct.PrometheusSink(tmp_path / "a.prom", port=taken.getsockname()[1], address="127.0.0.1")
        with pytest.raises(OSError, match="in use"):
            sink(SAVED)
    assert parsed((tmp_path / "a.prom").read_text())["jaxckpt_saved_bytes_total", ()] == 4096
    with closing(sink):
        sink(SAVED)
        assert page(sink.port)["jaxckpt_saved_bytes_total", ()] == 8192


def test_two_sinks_cannot_have_one_registry() -> None:
    registry = prometheus_client.CollectorRegistry()
    jct.PrometheusSink(registry=registry)
    with pytest.raises(jct.SettingsError, match="Duplicated"):
        jct.PrometheusSink(registry=registry)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "expected a path.*, found none"),
        ({"path": "a.txt"}, r"PrometheusSink.path: expected .*[.]prom"),
        ({"path": 3}, "PrometheusSink.path: expected a path"),
        ({"port": 70000}, "PrometheusSink.port: expected .* 65535"),
        ({"port": 0, "address": ""}, "PrometheusSink.address: expected text"),
        ({"port": 0, "labels": ["run"]}, "PrometheusSink.labels: expected a mapping"),
        ({"port": 0, "labels": {"le": "a"}}, "PrometheusSink: Reserved label"),
        ({"port": 0, "labels": {"event": "a"}}, "PrometheusSink.labels: expected names such as run"),
        ({"port": 0, "labels": {"a-b": "a"}}, "found 'a-b'"),
        ({"port": 0, "labels": {3: "a"}}, "found 3"),
        ({"port": 0, "labels": {"run": 3}}, "PrometheusSink.labels.run: expected text"),
        ({"port": 0, "labels": {"run": "\udce9"}}, "PrometheusSink.labels.run: expected valid Unicode"),
        ({"port": 0, "labels": {"__a": "a"}}, "PrometheusSink: .*__a"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: Any, said: str) -> None:
    with pytest.raises(jct.SettingsError, match=said):
        jct.PrometheusSink(**arguments)


def test_relative_path_is_where_sink_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sink = jct.PrometheusSink("a.prom")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sink(SAVED)
    assert (tmp_path / "a.prom").is_file()
