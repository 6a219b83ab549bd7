"""Notices of a preemption: a signal, a file or the time limit; each only sets a flag."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.preemption.sources import FileNotice, SignalNotice, TimeNotice
from tests.support.shutdowns import Time, shutdown_of
from tests.support.signal_handlers import WATCHED, handlers_put_back, reason_of

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")


class Agreeing(Coordinator):
    """The coordinator of a job in which another process was asked to leave."""

    processes = 2

    def exchange(self, doing: str, *arguments: Any, **options: Any) -> bytes:
        return msgspec.msgpack.encode([True, 1])


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(*WATCHED):
        yield


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_sets_flag_and_first_one_is_named(name: str) -> None:
    notice = SignalNotice(SIGNALS)
    notice.install()
    assert notice.notice() is None
    send(name)
    assert reason_of(notice) == f"signal {name}"
    for _ in range(20):
        send("SIGTERM")
    assert reason_of(notice) == f"signal {name}"
    notice.restore()


def test_handler_of_keyboard_interrupt_is_not_called() -> None:
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    notice = SignalNotice(["SIGUSR1"])
    notice.install()
    send("SIGUSR1")
    assert reason_of(notice) == "signal SIGUSR1"
    notice.restore()
    signal.signal(signal.SIGUSR1, before)


def test_handler_set_later_is_kept() -> None:
    notice = SignalNotice(["SIGUSR2"])
    before = signal.getsignal(signal.SIGUSR2)
    notice.install()
    later = signal.Handlers.SIG_IGN
    signal.signal(signal.SIGUSR2, later)
    notice.restore()
    assert signal.getsignal(signal.SIGUSR2) == later
    signal.signal(signal.SIGUSR2, before)


def own_handler(number: int, frame: Any) -> None:
    """A handler of the user."""


@pytest.mark.parametrize("replace", [own_handler, signal.SIG_IGN, signal.SIG_DFL])
def test_replaced_handler_is_warned_about_once(replace: Any, caplog: pytest.LogCaptureFixture) -> None:
    time = Time()
    before, notice = signal.getsignal(signal.SIGUSR2), SignalNotice(["SIGUSR1", "SIGUSR2"], time)
    notice.install()
    notice.notice()
    signal.signal(signal.SIGUSR2, replace)
    for _ in range(5):
        time.now += 0.5
        assert notice.notice() is None
    (record,) = caplog.records
    assert record.args[0] == "SIGUSR2"  # type: ignore[index]
    assert "notice_file" in record.getMessage()
    notice.restore()
    signal.signal(signal.SIGUSR2, before)


def test_other_notices_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    before, time = signal.signal(signal.SIGUSR1, own_handler), Time()
    notices = [SignalNotice(["SIGUSR1"], time) for _ in range(2)]
    for notice in notices:
        notice.install()
    signal.siginterrupt(signal.SIGUSR1, False)  # changes the flags of the handler only
    for _ in range(5):
        time.now += 1
        assert [notice.notice() for notice in notices] == [None, None]
    assert not caplog.records
    for notice in reversed(notices):
        notice.restore()
    assert signal.signal(signal.SIGUSR1, before) is own_handler


def test_install_outside_main_thread_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    notice = SignalNotice(SIGNALS)
    thread = threading.Thread(target=lambda: (notice.install(), notice.restore()))
    thread.start()
    thread.join()
    assert "use notice_file instead" in caplog.text
    assert notice.notice() is None


def test_notice_file_is_polled_once_a_second(tmp_path: Path) -> None:
    time, path = Time(), tmp_path / "leave"
    notice = FileNotice(str(path), time)
    assert notice.notice() is None
    path.touch()
    time.now += 0.9
    assert notice.notice() is None
    time.now += 0.2
    assert reason_of(notice) == f"notice file {path}"
    path.unlink()
    time.now += 100
    assert reason_of(notice) == f"notice file {path}"


def test_time_limit_counts_from_start_of_run() -> None:
    time = Time()
    notice = TimeNotice(3600, time, lambda: 0.0)
    time.now += 3599
    assert notice.notice() is None
    time.now += 1
    assert reason_of(notice) == "the time limit of 3600 s"


def test_lead_time_is_measured_again() -> None:
    time, asked, early_s = Time(), list[float](), [30.0]

    def leave_early_s() -> float:
        asked.append(time.now)
        return early_s[0]

    notice = TimeNotice(100, time, leave_early_s)
    assert notice.end == 1070.0
    early_s[0] = 7.0
    for _ in range(700):
        time.now += 0.1
        assert notice.notice() is None
    assert len(asked) <= 72  # once a second
    assert notice.end == 1093.0
    early_s[0] = 20.0  # saves take longer now
    time.now = 1080.5
    assert reason_of(notice) == "the time limit of 100 s"
    early_s[0] = 0.0
    time.now += 2
    assert reason_of(notice) == "the time limit of 100 s"  # a request is never withdrawn


def test_too_short_time_limit_ends_at_once() -> None:
    notice = TimeNotice(100, Time(), lambda: 200.0)
    assert notice.end == 1000.0
    assert reason_of(notice) == "the time limit of 100 s"


def test_shutdown_logs_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "jaxckpt_train")
    time = Time()
    shutdown = shutdown_of(max_run_time_s=40, grace_period_s=30, monotonic=time)
    shutdown.start()
    assert not shutdown.must_leave()
    assert shutdown.left_s() is None
    time.now += 10
    assert shutdown.must_leave()
    time.now += 12
    assert shutdown.must_leave()
    assert (shutdown.reason, shutdown.left_s()) == ("the time limit of 40 s", 16)
    time.now += 100
    assert shutdown.left_s() == 0
    assert caplog.text.count("shutdown requested: the time limit of 40 s") == 1
    shutdown.stop()


def test_first_reason_is_kept(tmp_path: Path) -> None:
    time, path = Time(), tmp_path / "leave"
    path.touch()
    shutdown = shutdown_of(signals=["SIGUSR1"], notice_file=str(path), max_run_time_s=1, monotonic=time)
    shutdown.start()
    assert shutdown.must_leave()
    time.now += 100
    send("SIGUSR1")
    assert shutdown.must_leave()
    assert shutdown.reason is not None
    assert shutdown.reason.startswith(f"notice file {path}, ")
    shutdown.stop()


def test_notice_of_another_process_counts() -> None:
    shutdown = shutdown_of(Agreeing())
    assert shutdown.must_leave()
    assert shutdown.reason == "another process of this job"


def test_handlers_are_installed_by_start() -> None:
    before = signal.getsignal(signal.SIGTERM)
    shutdown = shutdown_of(signals=SIGNALS)
    assert signal.getsignal(signal.SIGTERM) == before
    shutdown.start()
    assert signal.getsignal(signal.SIGTERM) != before
    shutdown.stop()
    assert signal.getsignal(signal.SIGTERM) == before
