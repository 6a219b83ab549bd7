"""Notice sources in a watch: which notice counts, its times, and which sources are notified at the end."""

from __future__ import annotations

import logging
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
from tests.support.fake_backends import HoldingBackend, RefusingBackend, callback_on
from tests.support.in_time import in_time
from tests.support.metadata_servers import until
from tests.support.runs import made_run, state_of
from tests.support.shutdowns import Time, shutdown_of
from tests.support.signal_handlers import WATCHED, handlers_put_back


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED, may_end=True):
        yield


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


def watched(*sources: Any, job: Coordinator | None = None, **options: Any) -> tuple[GracefulShutdown, Time]:
    clock = Time()
    return shutdown_of(job, sources=sources, monotonic=clock, **options), clock


def leave(shutdown: GracefulShutdown, source: FakeSource) -> None:
    """Leave because of a notice of this source."""
    shutdown.start()
    source.found = "the cluster"
    assert shutdown.must_leave()
    shutdown.decide()


@pytest.mark.parametrize("found", ["the cluster", jct.Notice("the cluster")])
def test_notice_of_source_requests_shutdown(found: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    shutdown, _ = watched(Silent(), source, grace_period_s=30)
    shutdown.start()
    assert (shutdown.must_leave(), shutdown.is_asked(), shutdown.left_s()) == (False, False, None)
    source.found = found
    assert (shutdown.is_asked(), shutdown.must_leave(), shutdown.reason) == (True, True, "the cluster")
    assert shutdown.left_s() == 28
    assert caplog.text.count("shutdown requested: the cluster") == 1
    shutdown.stop()
    assert source.calls == ["start", "stop"]


def test_grace_period_counts_from_earliest_request_time() -> None:
    source = FakeSource()
    shutdown, clock = watched(source, grace_period_s=30)
    source.found = jct.Notice("a", asked_at=clock.now)
    clock.now += 12
    assert shutdown.must_leave()
    assert shutdown.left_s() == 16
    late, _ = watched(FakeSource(jct.Notice("a", asked_at=960.0)), grace_period_s=30)
    assert late.must_leave()
    assert late.left_s() is None


def test_leave_by_bounds_the_grace_period() -> None:
    source = FakeSource()
    for grace_period_s, left_s in ((30, 18), (10, 8), (None, 18)):
        source.found = None
        shutdown, clock = watched(source, signals=["SIGUSR1"], grace_period_s=grace_period_s)
        shutdown.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert shutdown.must_leave()
        assert shutdown.left_s() == (None if grace_period_s is None else grace_period_s - 2)
        source.found = jct.Notice("a", leave_by=1020.0)  # during the save
        assert shutdown.left_s() == left_s
        clock.now += 25
        assert shutdown.left_s() == 0
        shutdown.stop()


@pytest.mark.parametrize(("leave_by", "left_s"), [(None, None), (1020.0, 18.0)])
def test_leave_by_is_deadline_without_grace_period(leave_by: float | None, left_s: float | None) -> None:
    shutdown, _ = watched(FakeSource(jct.Notice("a", leave_by=leave_by)))
    assert shutdown.left_s() is None
    assert shutdown.must_leave()
    assert shutdown.left_s() == left_s


@pytest.mark.parametrize(("grace_period_s", "left_s"), [(30, 28), (None, None)])
def test_past_leave_by_is_ignored(grace_period_s: float | None, left_s: float | None) -> None:
    shutdown, _ = watched(FakeSource(jct.Notice("a", leave_by=990.0)), grace_period_s=grace_period_s)
    assert shutdown.must_leave()
    assert shutdown.left_s() == left_s


def test_late_notice_uses_its_leave_by() -> None:
    shutdown, _ = watched(FakeSource(jct.Notice("a", asked_at=900.0, leave_by=1040.0)), grace_period_s=30)
    assert shutdown.must_leave()
    assert shutdown.left_s() == 38


def test_sources_are_notified_before_stop() -> None:
    source = FakeSource()
    shutdown, _ = watched(source, Silent())
    leave(shutdown, source)
    assert source.calls == ["start"]
    shutdown.stop()
    shutdown.stop()
    assert source.calls == ["start", ("left", 7), "stop", "stop"]


def test_only_the_primary_notifies_sources() -> None:
    source = FakeSource()
    shutdown, _ = watched(source, job=Second())
    leave(shutdown, source)
    shutdown.stop()
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
    ("limit_s", "grace_period_s", "limit_text"),
    [(0.3, None, "0.3"), (0.3, 1e6, "0.3"), (60.0, 1.0, "0.5"), (60.0, 1e-9, "0.1")],
)
def test_slow_source_does_not_delay_others(
    limit_s: float,
    grace_period_s: float | None,
    limit_text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own time limit applies, within the remaining time; a little of that is kept for the other sources."""
    monkeypatch.setattr(sources_module, "LEAST_S", 0.1)
    hanging, other = Hanging(limit_s), FakeSource()
    shutdown, _ = watched(hanging, other, grace_period_s=grace_period_s)
    leave(shutdown, other)
    caplog.clear()
    shutdown.stop()
    assert other.calls == ["start", ("left", 7), "stop"]
    assert hanging.calls == ["start", "stop"]
    assert f"not finished after {limit_text} s" in caplog.text
    assert len(caplog.messages) == 1
    hanging.go.set()
    until(lambda: hanging.calls == ["start", "stop", ("left", 7)])


def test_left_timeout_must_be_seconds() -> None:
    with pytest.raises(jct.SettingsError, match=r"Hanging\.left_timeout_s: .* above 0"):
        watched(Hanging(-1))


def test_failing_source_does_not_disturb_the_end(caplog: pytest.LogCaptureFixture) -> None:
    good = FakeSource()
    shutdown, _ = watched(Broken(), good)
    leave(shutdown, good)
    caplog.clear()
    shutdown.stop()
    assert good.calls == ["start", ("left", 7), "stop"]
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
    shutdown, _ = watched(jct.GceNotice(), jct.AwsNotice(), jct.SlurmNotice(), jct.KubernetesNotice())
    with in_time(1.0):
        for _ in range(100_000):
            shutdown.must_leave()
