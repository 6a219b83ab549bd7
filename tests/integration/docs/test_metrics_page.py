"""The Python and the YAML of docs/how-to/metrics.md run unchanged, and its tables name every metric and field."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import tensorboardX
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import jaxckpt_train as jct
from jaxckpt_train.metrics import exporters as measures
from tests.integration.docs.test_readme import code_blocks, names
from tests.support.metric_events import DRAINED, RESTORED_FAST, SAVED
from tests.unit.metrics.test_sinks_of_runs import train

PAGE = "docs/how-to/metrics.md"


@pytest.fixture
def used(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page has defined, once all of its Python has run in order."""
    monkeypatch.chdir(tmp_path)
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    defined = names(
        contextlib=contextlib, prometheus_client=prometheus_client, tensorboardX=tensorboardX,
        InMemoryMetricReader=InMemoryMetricReader, InMemorySpanExporter=InMemorySpanExporter,
        MeterProvider=MeterProvider, SimpleSpanProcessor=SimpleSpanProcessor, TracerProvider=TracerProvider,
    )  # fmt: skip
    defined["made"] = []
    for block in code_blocks(repo_root, PAGE):
        exec(block, defined)
        defined["made"] += defined.pop("sinks", [])
    return defined


def test_the_python_of_the_page_runs(used: dict[str, Any], tmp_path: Path) -> None:
    assert jct.StepManager(tmp_path / "runs/a").steps == [2, 4]
    assert used["page"].registry.get_sample_value("jaxckpt_last_saved_step") == 1
    assert used["page"].port is None
    assert [span.name for span in used["spans"].get_finished_spans()] == ["checkpoint.save"]
    assert len(used["reader"].get_metrics_data().resource_metrics) == 1
    assert [type(sink) for sink in used["made"]] == [jct.WriterSink, jct.PrometheusSink, jct.PrometheusSink]
    for sink in used["made"]:
        sink(SAVED)
    used["writer"].close()
    assert 'jaxckpt_last_saved_step{run="a"} 100.0' in (tmp_path / "run-a.prom").read_text()
    assert prometheus_client.REGISTRY.get_sample_value("jaxckpt_last_saved_step") == 100


def test_documented_values_match_the_function(used: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert capsys.readouterr().out == ""
    used["print_failed_saves"]({"event": "save", "ok": False, "step": 3, "error": "full"})
    assert capsys.readouterr().out == "step 3 was not saved: full\n"


def test_the_yaml_of_the_page_makes_the_sinks(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```yaml\n(.*?)```", (repo_root / PAGE).read_text(), re.DOTALL)
    nodes = yaml.safe_load(block)["checkpoint"]["sinks"]
    assert nodes.pop()["_target_"] == "my_package.MySink"
    ckpt = jct.CheckpointCallback.from_config({"directory": str(tmp_path / "run"), "sinks": nodes})
    assert ckpt.manager.latest is None
    assert (tmp_path / "logs").is_dir()


def test_the_page_names_every_metric_and_every_field(repo_root: Path, tmp_path: Path) -> None:
    page = (repo_root / PAGE).read_text()
    documented = re.findall(r"`(?:jaxckpt)?(_[a-z_]+)", page)
    sink = jct.PrometheusSink(registry=prometheus_client.CollectorRegistry())
    for event in (SAVED, RESTORED_FAST, DRAINED):
        sink(event)
    suffix = re.compile("_total$")
    names_on_page = {f"jaxckpt{suffix.sub('', each)}" for each in documented}
    assert {family.name for family in sink.registry.collect()} - names_on_page == set()
    assert len(measures.KNOWN) > 10
    events = list[dict[str, Any]]()
    train(tmp_path / "run", 7, lambda event: events.append(dict(event)))
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", page, re.MULTILINE))
    assert {"delete", "preempted", "restore", "save", "set_aside", "take_over"} <= set(rows)
    for event in [each for each in events if each["event"] in rows]:
        assert [
            name for name in event if name not in ("event", "time") and f"`{name}`" not in rows[event["event"]]
        ] == []
