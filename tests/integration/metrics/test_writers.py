"""WriterSink: what real writers of scalars wrote, read back from TensorBoard's files and clu's log."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import struct
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorboardX
from tensorboardX.proto.event_pb2 import Event

import jaxckpt_train as jct
from tests.support.metric_events import DELETED, FAILED, PREEMPTED, RESTORED, SAVED, TAKEN_OVER

Scalars = dict[tuple[str, int], float]


def scalars_in(directory: Path) -> Scalars:
    """Return all scalars of the event files. A record is a length and an event, each with a checksum."""
    found = {}
    for file in directory.iterdir():
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
            at += 16 + length
    return found


def test_tensorboard_files_have_figures_at_their_steps(tmp_path: Path) -> None:
    writer = tensorboardX.SummaryWriter(str(tmp_path))
    sink = jct.WriterSink(writer)
    for event in (SAVED, RESTORED, DELETED, PREEMPTED, FAILED):
        sink(event)
    sink.close()
    found = scalars_in(tmp_path)
    assert {tag.removeprefix("checkpoint/save/"): value for (tag, step), value in found.items() if step == 110} == {
        "decide_s": pytest.approx(0.0001), "wait_s": 0.25, "blocked_s": 0.5, "save_s": 2.0, "snapshot_s": 0.125,
        "stage_s": 0.0, "write_s": 1.0, "commit_s": 0.25, "bytes": 17, "ok": 0.0, "count": 2,
    }  # fmt: skip
    assert found["checkpoint/save/ok", 100] == 1.0
    assert found["checkpoint/save/bytes_per_s", 100] == 3277
    assert found["checkpoint/restore/restore_s", 90] == 4.0
    assert found["checkpoint/restore/bytes_per_s", 90] == 2048
    assert found["checkpoint/delete/count", 90] == 1  # without a step: the last known one
    assert found["checkpoint/preempted/count", 100] == 1
    assert len(found) == 12 + 11 + 4 + 1 + 1


class Rows:
    """A W&B run by its rules: a row is complete once a later step is logged; an earlier step is dropped."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = [{}]
        self.dropped: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: Mapping[str, float], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < len(self.rows) - 1:
            self.dropped.append(dict(data))
            return
        while step is not None and step > len(self.rows) - 1:
            self.rows.append({})
        self.rows[-1] |= data
        if commit or (commit is None and step is None):
            self.rows.append({})


@pytest.mark.parametrize("is_explicit", [True, False])
def test_rows_of_wandb_keep_steps_of_the_loop(is_explicit: bool) -> None:
    run = Rows()
    sink = jct.WriterSink(run)
    for step in range(5):
        run.log({"loss": float(step)}, step=step if is_explicit else None)
        if step == 3:
            for event in (SAVED, RESTORED, DELETED, PREEMPTED):  # late, and for other steps
                sink(event)
        if is_explicit:
            run.log({"accuracy": 1.0}, step=step)
    sink(FAILED)
    sink.close()
    assert run.dropped == []
    assert [row["loss"] for row in run.rows if "loss" in row] == [0, 1, 2, 3, 4]
    (row,) = [each for each in run.rows if each.get("checkpoint/save/ok") == 1.0]
    assert (row["checkpoint/save/step"], row["checkpoint/save/blocked_s"]) == (100, 0.5)
    assert (row["checkpoint/restore/step"], row["checkpoint/restore/restore_s"]) == (90, 4.0)
    assert (row["checkpoint/delete/step"], row["checkpoint/delete/count"]) == (90, 1)
    assert row["checkpoint/preempted/step"] == 100
    assert run.rows[-1]["checkpoint/save/step"] == 110
    assert run.axes["checkpoint/save/*"] == "checkpoint/save/step"
    assert run.axes["checkpoint/restore/*"] == "checkpoint/restore/step"


@pytest.fixture
def clu_writers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports one of clu's writers. The whole package would import TensorFlow."""
    found = importlib.util.find_spec("clu")
    assert found is not None
    (folder,) = found.submodule_search_locations or ()
    package = types.ModuleType("clu.metric_writers")
    package.__path__ = [f"{folder}/metric_writers"]
    monkeypatch.setitem(sys.modules, "clu.metric_writers", package)
    return lambda name: importlib.import_module(f"clu.metric_writers.{name}")


def test_clu_writers_get_metrics(clu_writers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="absl"):
        writer = clu_writers("async_writer").AsyncWriter(clu_writers("logging_writer").LoggingWriter())
        sink = jct.WriterSink(writer)
        sink(SAVED)
        sink(DELETED)
        sink.close()
        logged = [record.getMessage() for record in caplog.records]
    assert [message.partition(" ")[0] for message in logged] == ["[100]", "[100]"]
    assert "checkpoint/save/blocked_s=0.5," in logged[0]
    assert "checkpoint/save/bytes_per_s=3277" in logged[0]
    assert logged[1] == "[100] checkpoint/delete/count=1"


def test_loop_can_write_while_clu_writer_works(clu_writers: Any) -> None:
    """The flush of this writer shuts its thread pool down for a while, so a sink must not call it at any time."""
    writing, go = threading.Event(), threading.Event()

    class Slow:
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
            writing.set()
            go.wait(60)

        def flush(self) -> None:
            pass

        close = flush

    writer = clu_writers("async_writer").AsyncWriter(Slow())
    sink = jct.WriterSink(writer)
    thread = threading.Thread(target=sink, args=(SAVED,))
    thread.start()
    assert writing.wait(60)
    try:
        writer.write_scalars(7, {"loss": 1.0})
    finally:
        go.set()
        thread.join()
    sink.close()


def test_each_event_is_flushed_and_only_close_closes() -> None:
    calls: list[Any] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            calls.append((global_step, {tag: scalar_value}))

        def flush(self) -> None:
            calls.append("flush")

        def close(self) -> None:
            calls.append("close")

    sink = jct.WriterSink(Writer())
    sink(TAKEN_OVER)
    sink(PREEMPTED)
    assert calls == [
        (0, {"checkpoint/take_over/count": 1.0}), "flush", (100, {"checkpoint/preempted/count": 1.0}), "flush"
    ]  # fmt: skip
    sink.close()
    assert calls[4:] == ["close"]


def test_writer_needs_only_add_scalar() -> None:
    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            calls.append((tag, scalar_value, global_step))

    calls: list[tuple[str, float, int]] = []
    sink = jct.WriterSink(Writer())
    sink(DELETED)
    sink.close()
    assert calls == [("checkpoint/delete/count", 1.0, 0)]


def test_invalid_writer_is_refused() -> None:
    with pytest.raises(jct.SettingsError, match=r"WriterSink.writer: expected a writer"):
        jct.WriterSink(print)
