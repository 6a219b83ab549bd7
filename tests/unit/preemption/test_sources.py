"""Notice sources in a watch: which notice counts, its times, and which sources are notified at the end."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.preemption import sources as sources_module
from jaxckpt_train.preemption.shutdown import GracefulShutdown
from jaxckpt_train.preemption.sources import WatchedSources
from jaxckpt_train.preemption.watch import PreemptionWatch
from tests.support.fake_backends import HoldingBackend, RefusingBackend, callback_on
from tests.support.in_time import in_time
from tests.support.metadata_servers import until
from tests.support.runs import made_run, state_of
from tests.support.signal_handlers import WATCHED, handlers_put_back


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


class Time:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeSource:
    """A source with a settable notice, which records the calls."""

    def __init__(self, found: Any = None) -> None:
        self.found, self.calls = found, list[Any]()

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def notice(self) -> Any:
        return self.found

    def left(self, step: int | None) -> None:
        self.calls.append(("left", step))


class Silent:
    """A source without a `left` method, which is not notified."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def notice(self) -> None: ...


class Broken(FakeSource):
    """A source of the user that fails at the end of a run."""

    def stop(self) -> None:
        raise ValueError("stop")

    def left(self, step: int | None) -> None:
        raise ValueError("left")


class Second(Coordinator):
    """The coordinator of process 1 of a job."""

    process = 1


def watch_of(*sources: Any, job: Coordinator | None = None, **options: Any) -> tuple[PreemptionWatch, Time]:
    clock = Time()
    return PreemptionWatch(job or Coordinator(), sources=sources, monotonic=clock, **options), clock


@pytest.mark.parametrize("found", ["the cluster", jct.Notice("the cluster")])
def test_notice_of_source_requests_shutdown(found: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    watch, _ = watch_of(Silent(), source)
    watch.start()
    assert (watch.reached(), watch.is_asked(), watch.left_of(30)) == (False, False, 30)
    source.found = found
    assert (watch.is_asked(), watch.reached(), watch.reason) == (True, True, "the cluster")
    assert watch.left_of(30) == 30
    assert caplog.text.count("shutdown requested: the cluster") == 1
    watch.stop()
    assert source.calls == ["start", "stop"]


def test_grace_period_counts_from_earliest_request_time() -> None:
    source = FakeSource()
    watch, clock = watch_of(source)
    source.found = jct.Notice("a", asked_at=clock.now)
    clock.now += 12
    assert watch.reached()
    assert watch.left_of(30) == 18
    late, _ = watch_of(FakeSource(jct.Notice("a", asked_at=960.0)))
    assert late.reached()
    assert late.left_of(30) is None


def test_leave_by_bounds_the_grace_period() -> None:
    source = FakeSource()
    watch, clock = watch_of(source, signals=["SIGUSR1"])
    watch.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watch.reached()
    assert watch.left_of(30) == 30
    source.found = jct.Notice("a", leave_by=1020.0)  # during the save
    assert watch.left_of(30) == 20
    assert watch.left_of(10) == 10
    assert watch.left_of(math.inf) == 20
    clock.now += 25
    assert watch.left_of(30) == 0
    watch.stop()


@pytest.mark.parametrize(("leave_by", "left_s"), [(None, None), (1020.0, 18.0)])
def test_leave_by_is_deadline_without_grace_period(leave_by: float | None, left_s: float | None) -> None:
    watch, _ = watch_of(FakeSource(jct.Notice("a", leave_by=leave_by)))
    shutdown = GracefulShutdown(watch, None, 75, lambda: False)
    assert shutdown.left_s() is None
    assert watch.reached()
    assert shutdown.left_s() == left_s


def test_past_leave_by_is_ignored() -> None:
    watch, _ = watch_of(FakeSource(jct.Notice("a", leave_by=990.0)))
    assert watch.reached()
    assert watch.left_of(30) == 30
    assert watch.left_of(math.inf) is None


def test_late_notice_uses_its_leave_by() -> None:
    watch, _ = watch_of(FakeSource(jct.Notice("a", asked_at=900.0, leave_by=1040.0)))
    assert watch.reached()
    assert watch.left_of(30) == 40


def test_sources_are_notified_before_stop() -> None:
    source = FakeSource()
    watch, _ = watch_of(source, Silent())
    watch.start()
    watch.leaves(7, None)
    assert source.calls == ["start"]
    watch.stop()
    watch.stop()
    assert source.calls == ["start", ("left", 7), "stop", "stop"]


def test_only_the_primary_notifies_sources() -> None:
    source = FakeSource()
    watch, _ = watch_of(source, job=Second())
    watch.start()
    watch.leaves(7, None)
    watch.stop()
    assert source.calls == ["start", "stop"]


class Hanging(FakeSource):
    """A source whose `left` blocks until `go` is set."""

    def __init__(self, left_timeout_s: Any = None) -> None:
        super().__init__()
        self.left_timeout_s, self.go = left_timeout_s, threading.Event()

    def left(self, step: int | None) -> None:
        self.go.wait()
        super().left(step)


@pytest.mark.parametrize(
    ("limit_s", "left_s", "limit_text"), [(0.3, None, "0.3"), (0.3, 1e6, "0.3"), (60.0, 0.5, "0.4"), (60.0, 0.0, "0.1")]
)
def test_slow_source_does_not_delay_others(
    limit_s: float,
    left_s: float | None,
    limit_text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own time limit applies, within the remaining time; a little of that is kept for the other sources."""
    monkeypatch.setattr(sources_module, "LEAST_S", 0.1)
    hanging, other = Hanging(limit_s), FakeSource()
    watch, _ = watch_of(hanging, other)
    watch.start()
    watch.leaves(7, left_s)
    watch.stop()
    assert other.calls == ["start", ("left", 7), "stop"]
    assert hanging.calls == ["start", "stop"]
    assert f"not finished after {limit_text} s" in caplog.text
    assert len(caplog.messages) == 1
    hanging.go.set()
    until(lambda: hanging.calls == ["start", "stop", ("left", 7)])


def test_default_left_timeout_is_ten_seconds() -> None:
    named, plain, silent = Hanging(30), FakeSource(), Silent()
    sources = WatchedSources([named, plain, silent])
    sources.start()
    assert sources.notification() == [(named, 30.0), (plain, 10.0)]
    with pytest.raises(jct.SettingsError, match=r"Hanging\.left_timeout_s: .* above 0"):
        WatchedSources([Hanging(-1)])


def test_failing_source_does_not_disturb_the_end(caplog: pytest.LogCaptureFixture) -> None:
    good = FakeSource()
    watch, _ = watch_of(Broken(), good)
    watch.start()
    watch.leaves(3, None)
    watch.stop()
    assert good.calls == ["start", ("left", 3), "stop"]
    assert "Broken: its left() method failed" in caplog.text
    assert "Broken: stopping it failed" in caplog.text
    assert "ValueError: left" in caplog.text
    assert len(caplog.messages) == 2


def test_failed_start_of_source_leaves_nothing_behind(tmp_path: Path) -> None:
    class Unable(FakeSource):
        def start(self) -> None:
            raise RuntimeError("no")

    first = FakeSource()
    before = signal.getsignal(signal.SIGTERM)
    ckpt = jct.CheckpointCallback(tmp_path, notices=[first, Unable()])
    with pytest.raises(RuntimeError, match="no"):
        ckpt.__enter__()
    assert first.calls == ["start", "stop"]
    assert signal.getsignal(signal.SIGTERM) == before
    ckpt.close()
    with jct.StepManager(tmp_path) as other:
        other.own()


def run_until_noticed(ckpt: jct.CheckpointCallback, source: FakeSource, found: Any) -> None:
    with ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(100):
            assert step <= 3
            if step == 3:
                source.found = found
            ckpt(state_of(step + 1))


def test_run_is_released_before_exit_notice(tmp_path: Path) -> None:
    class Next(FakeSource):
        def left(self, step: int | None) -> None:
            super().left(step)
            with jct.StepManager(tmp_path) as manager:
                manager.own()
                self.calls.append(manager.steps)

    source = Next()
    with pytest.raises(SystemExit) as left:
        run_until_noticed(jct.CheckpointCallback(tmp_path, notices=[source]), source, "the cluster")
    assert left.value.code == 75
    assert source.calls == ["start", ("left", 4), [4], "stop"]
    (event,) = [each for each in jct.StepManager(tmp_path).history.events() if each["event"] == "preempted"]
    assert (event["step"], event["reason"]) == (4, "the cluster")


@pytest.mark.parametrize("steps", [0, 3])
def test_normal_end_is_not_notified(tmp_path: Path, steps: int) -> None:
    source = FakeSource()
    with jct.CheckpointCallback(tmp_path, notices=[source]) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(steps):
            ckpt(state_of(step + 1))
    assert source.calls == ["start", "stop"]


def test_failed_last_save_is_not_notified(tmp_path: Path) -> None:
    source = FakeSource()
    ckpt = callback_on(RefusingBackend("create", "step-0000000004", 28, 100), tmp_path, notices=[source])
    with pytest.raises(jct.StorageError):
        run_until_noticed(ckpt, source, "the cluster")
    assert source.calls == ["start", "stop"]


@pytest.mark.parametrize("grace_period_s", [None, 3600.0])
def test_save_is_given_up_at_leave_by(
    tmp_path: Path, grace_period_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    backend, source = HoldingBackend("rename", "step-0000000004"), FakeSource()
    ckpt = callback_on(backend, tmp_path, grace_period_s=grace_period_s, notices=[source])
    with pytest.raises(SystemExit) as left:
        run_until_noticed(ckpt, source, jct.Notice("the cloud", leave_by=time.monotonic() + 1.0))
    assert left.value.code == 75
    assert "given up: saving step 4" in caplog.text
    assert source.calls == ["start", ("left", None), "stop"]
    backend.go.set()
    given_up = ckpt.manager._save_slot.given_up
    assert given_up is not None
    given_up.wait(60)


def test_notice_ends_a_load(tmp_path: Path) -> None:
    made_run(tmp_path, 5)
    source = FakeSource("the cluster")
    with (
        pytest.raises(SystemExit) as left,
        jct.CheckpointCallback(tmp_path, notices=[source], grace_period_s=60.0) as ckpt,
    ):
        ckpt.resume(state_of(0))
    assert left.value.code == 75
    assert source.calls[:2] == ["start", ("left", 5)]
    assert source.calls.count(("left", 5)) == 1


def test_signals_are_ignored_after_a_notice(tmp_path: Path) -> None:
    """A stopping machine, and Slurm at a requeue, send SIGTERM to a process that is leaving already."""
    source = FakeSource()
    with pytest.raises(SystemExit):
        run_until_noticed(jct.CheckpointCallback(tmp_path, notices=[source]), source, "the cloud")
    for number in WATCHED:
        os.kill(os.getpid(), number)
    assert source.calls[-1] == "stop"


def test_disabled_callback_starts_no_source(tmp_path: Path) -> None:
    source = FakeSource("the cluster")
    with jct.CheckpointCallback(tmp_path, enabled=False, notices=[source]) as ckpt:
        ckpt.resume(state_of(0))
        assert list(ckpt.steps(2)) == [0, 1]
    assert source.calls == ["stop"]


def test_check_at_every_step_takes_microseconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "jaxckpt_train")
    watch, _ = watch_of(jct.GceNotice(), jct.AwsNotice(), jct.SlurmNotice(), jct.KubernetesNotice())
    with in_time(1.0):
        for _ in range(100_000):
            watch.reached()
