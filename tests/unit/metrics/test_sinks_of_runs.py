"""Sinks of real runs: they get the events of the history, and cannot change what is trained and saved."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import prometheus_client
import pytest

import jaxckpt_train as jct
from jaxckpt_train.metrics import events as feed
from jaxckpt_train.run.history import HISTORY_NAME, History
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import START, Counter, save_steps, state_of
from tests.support.signal_handlers import WATCHED, handlers_put_back
from tests.support.sinks import LONGEST_S, Held, Recorder
from tests.unit.metrics.test_events import warnings


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


@jax.jit
def train_step(state: dict[str, Any], batch: jax.Array) -> dict[str, Any]:
    return {"w": state["w"] * 0.9 + batch, "step": state["step"] + 1}


def train(directory: Path, steps: int, *sinks: Any, asked_at: int | None = None, **options: Any) -> dict[str, Any]:
    """Train, saving every other step, and send SIGTERM to this process in the update `asked_at`."""
    more = {"save_interval_steps": 2, "keep_latest": 2, **options}
    with jct.CheckpointCallback(directory, sinks=sinks, **more) as ckpt:
        state, data = ckpt.resume(state_of(0), Counter())
        for step in ckpt.steps(steps):
            state = train_step(state, jnp.float32(next(data)))
            if step == asked_at:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt(state)
    return state


def history(directory: Path) -> list[dict[str, Any]]:
    return jct.StepManager(directory).history.events()


def kinds(events: list[Any]) -> list[str]:
    return [event["event"] for event in events]


def test_sinks_get_same_events_as_history(tmp_path: Path) -> None:
    first, second, third = Recorder(), Recorder(), Recorder()
    with pytest.raises(SystemExit):
        train(tmp_path / "run", 20, first, asked_at=6)
    assert first.events == history(tmp_path / "run")
    assert kinds(first.events).count("save") == 4
    assert {"delete", "preempted"} < set(kinds(first.events))
    state = train(tmp_path / "run", 10, second, third)
    assert second.events == third.events == history(tmp_path / "run")[len(first.events) :]
    assert [event["step"] for event in second.events if event["event"] == "restore"] == [7]
    straight = train(tmp_path / "straight", 10)
    assert np.asarray(state["w"]).tobytes() == np.asarray(straight["w"]).tobytes()


def test_save_that_failed_is_reported(tmp_path: Path) -> None:
    sink = Recorder()
    backend = RefusingBackend("create", "safetensors", errno.ENOSPC, 1)
    with jct.StepManager(tmp_path, sinks=[sink], backend=backend) as manager:
        manager.save(1, {"state": state_of(1)})
        with pytest.raises(jct.StorageError):
            manager.wait()
    (event,) = (each for each in sink.events if each["event"] == "save")
    assert (event["ok"], event["step"]) == (False, 1)
    assert "refused to create" in event["error"]


def test_metrics_of_run_are_those_of_its_history(tmp_path: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    train(tmp_path / "run", 7, jct.PrometheusSink(tmp_path / "a.prom", registry=registry))
    saves = [event for event in history(tmp_path / "run") if event["event"] == "save"]
    assert len(saves) == 4
    assert registry.get_sample_value("jaxckpt_saves_total", {"outcome": "committed"}) == 4
    assert registry.get_sample_value("jaxckpt_saved_bytes_total") == sum(event["bytes"] for event in saves)
    assert registry.get_sample_value("jaxckpt_last_saved_step") == 7
    blocked = sum(event["blocked_s"] for event in saves)
    assert registry.get_sample_value("jaxckpt_save_blocked_seconds_sum") == pytest.approx(blocked)
    assert (tmp_path / "a.prom").read_bytes() == prometheus_client.generate_latest(registry)


def test_event_that_disk_refuses_reaches_sinks(tmp_path: Path) -> None:
    sink = Recorder()
    history = History(RefusingBackend("append", HISTORY_NAME, errno.ENOSPC, 1), str(tmp_path))
    history.send_to([sink])
    history.add("save", START, step=1, error=None)
    history.add("save", START, step=2, error="no \udcff")
    history.finish(LONGEST_S, lambda: False)
    assert history.events() == sink.events[1:]
    assert sink.events[0] == {"event": "save", "time": "2026-03-01T00:00:00.000+00:00", "step": 1}


def test_unresponsive_disk_does_not_hold_back_events(tmp_path: Path) -> None:
    received = threading.Event()

    class Waiting(LocalBackend):
        def append(self, path: str, data: bytes) -> None:
            assert received.wait(LONGEST_S)
            super().append(path, data)

    history = History(Waiting(), str(tmp_path))
    history.send_to([lambda event: received.set()])
    history.add("save", START, step=1)
    assert len(history.events()) == 1


def test_events_of_threads_keep_history_order(tmp_path: Path) -> None:
    sink = Recorder()
    history = History(LocalBackend(), str(tmp_path))
    history.send_to([sink])

    def add(first: int) -> None:
        for step in range(first, first + 100):
            history.add("save", START, step=step)

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history.finish(LONGEST_S, lambda: False)
    assert len(sink.events) == 400
    assert sink.events == history.events()


def test_a_sink_that_raises_breaks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Mapping[str, Any]) -> None:
        raise RuntimeError("no")

    after = Recorder()
    train(tmp_path / "run", 5, broken, after)
    assert jct.StepManager(tmp_path / "run").steps == [4, 5]
    assert after.events == history(tmp_path / "run")
    (warning,) = warnings(caplog)
    assert warning.startswith("sink 0 (broken) failed")


def test_slow_sink_does_not_hold_up_loop(tmp_path: Path, held: Held) -> None:
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1, sinks=[held]) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(5):
            ckpt(state_of(step + 1))
        ckpt.wait_until_finished()
        assert held.reached.wait(LONGEST_S)
        assert held.events == []
        held.go.set()
    assert held.events == history(tmp_path / "run")
    assert [event["step"] for event in held.events if event["event"] == "save"] == [1, 2, 3, 4, 5]


def test_hanging_sink_does_not_block_the_end(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feed, "DRAIN_S", 0.05)
    train(tmp_path / "run", 2, held)
    (warning,) = warnings(caplog)
    assert re.match(r"sink 0 \(Held\): \d+ events were not delivered", warning)
    with jct.StepManager(tmp_path / "run") as manager:
        manager.own()
        assert manager.latest == 2


def test_close_without_time_waits_for_no_sink(tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture) -> None:
    manager = jct.StepManager(tmp_path, sinks=[held])
    save_steps(manager, 1)
    manager.close(0.0)
    (warning,) = warnings(caplog)
    assert "events were not delivered" in warning


def test_runs_share_a_sink_and_leave_it_open(tmp_path: Path) -> None:
    with closing(jct.PrometheusSink(port=0, address="127.0.0.1")) as sink:
        for name in ("a", "b"):
            train(tmp_path / name, 2, sink)
        assert sink.port is not None
        assert sink.registry.get_sample_value("jaxckpt_saves_total", {"outcome": "committed"}) == 2
    assert sink.port is None


def test_run_without_sinks_starts_no_sink_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, start = list[str](), threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    train(tmp_path / "run", 2)
    assert "jaxckpt-sink" not in names
    train(tmp_path / "other", 2, Recorder())
    assert "jaxckpt-sink" in names


def test_invalid_sinks_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(jct.SettingsError, match=r"StepManager.sinks\[0\]: expected an object"):
        jct.StepManager(tmp_path, sinks=[{"_target_": "jaxckpt_train.PrometheusSink"}])  # type: ignore[list-item]
    with pytest.raises(jct.SettingsError, match=r"checkpoint.sinks: expected a list of sinks"):
        jct.CheckpointCallback(tmp_path, sinks=print)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("PrometheusSink", "prometheus_client", "prometheus"),
        ("OpenTelemetrySink", "opentelemetry", "opentelemetry"),
    ],
)
def test_missing_library_error_says_what_to_install(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(jct.SettingsError, match=rf"{name}: .*jaxckpt-train\[{extra}\]"):
        getattr(jct, name)()
