"""Sinks of real runs: they get the events of the history, and their libraries are imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from tests.support.killed_saves import die, killed
from tests.support.runs import flip_a_payload_byte, save_steps, step_path
from tests.support.signal_handlers import WATCHED, handlers_put_back
from tests.support.sinks import Recorder


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


def history(directory: Path) -> list[dict[str, Any]]:
    return jct.StepManager(directory).history.events()


def kinds(events: list[Any]) -> list[str]:
    return [event["event"] for event in events]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_takeover_and_damaged_step_reach_sinks(tmp_path: Path) -> None:
    def own(patch: pytest.MonkeyPatch) -> None:
        owner = jct.StepManager(tmp_path)
        owner.own()
        die()

    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1, 2)
    killed(own)
    before = history(tmp_path)
    flip_a_payload_byte(step_path(tmp_path, 2))
    sink = Recorder()
    with jct.StepManager(tmp_path, sinks=[sink]) as manager:
        manager.own()
        manager.restore()
    received = [kind for kind in kinds(sink.events) if kind in ("take_over", "set_aside", "restore")]
    assert received == ["take_over", "set_aside", "restore"]
    assert sink.events == history(tmp_path)[len(before) :]


def test_sink_libraries_are_imported_on_first_use(run_python: Any) -> None:
    program = """
import sys, jaxckpt_train as jct
jct.PrometheusSink, jct.OpenTelemetrySink, jct.WriterSink
jct.StepManager("run", sinks=[print])
print([name for name in ("prometheus_client", "opentelemetry", "tensorboardX", "clu") if name in sys.modules])
jct.PrometheusSink(port=0), jct.OpenTelemetrySink()
print([name for name in ("prometheus_client", "opentelemetry", "tensorboardX", "clu") if name in sys.modules])
"""
    lines = run_python(program, check=True, fresh=True).stdout.splitlines()
    assert lines == ["[]", "['prometheus_client', 'opentelemetry']"]
