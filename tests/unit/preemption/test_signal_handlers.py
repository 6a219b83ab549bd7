"""Handlers of several notices and of the user, removed in any order: no signal is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxckpt_train.preemption.sources import SignalNotice
from tests.support.signal_handlers import handlers_put_back, reason_of

TERM = signal.SIGTERM


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    with handlers_put_back(signal.SIGTERM, signal.SIGUSR1, signal.SIGABRT):
        yield


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """The signals that the user's own handler received; it is installed first."""
    came: list[int] = []
    before = signal.signal(TERM, lambda number, frame: came.append(number))
    yield came
    signal.signal(TERM, before)


def send(number: int = TERM) -> None:
    os.kill(os.getpid(), number)


def installed(*names: str) -> SignalNotice:
    notice = SignalNotice(names or ["SIGTERM"])
    notice.install()
    return notice


@pytest.mark.parametrize(("names", "number"), [(("SIGTERM", "SIGTERM"), TERM), (("SIGABRT", "SIGIOT"), signal.SIGABRT)])
def test_signal_that_is_named_twice_is_watched_once(names: tuple[str, ...], number: int) -> None:
    before = signal.getsignal(number)
    notice = installed(*names)
    send(number)
    assert reason_of(notice) == f"signal {names[0]}"
    notice.restore()
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_notices_stopped_in_any_order_restore_handler(seen: list[int], order: Any) -> None:
    own = signal.getsignal(TERM)
    notices = [installed() for _ in range(3)]
    for stopped in order:
        send()
        notices[stopped].restore()
        live = notices[order[-1]]
        assert reason_of(live) == "signal SIGTERM"
    assert seen == [TERM] * 3
    assert signal.getsignal(TERM) is own


def test_stopped_handler_gets_no_signal(seen: list[int]) -> None:
    below, above = installed(), installed()
    below.restore()
    send()
    assert (reason_of(below), reason_of(above)) == (None, "signal SIGTERM")
    assert seen == [TERM]
    above.restore()


def test_stopped_handler_forwards_to_earlier_handler(seen: list[int]) -> None:
    own, notice = signal.getsignal(TERM), installed()
    below: Any = signal.getsignal(TERM)
    signal.signal(TERM, lambda number, frame: below(number, frame))
    notice.restore()
    send()
    assert seen == [TERM]
    signal.signal(TERM, own)


def test_ignored_signal_is_ignored_again() -> None:
    before = signal.signal(TERM, signal.SIG_IGN)
    below, above = installed(), installed()
    below.restore()
    above.restore()
    send()
    assert signal.getsignal(TERM) == signal.SIG_IGN
    signal.signal(TERM, before)


def test_dropped_notice_removes_its_handler(seen: list[int]) -> None:
    own, dropped = signal.getsignal(TERM), installed()
    above = installed()
    del dropped
    send()
    above.restore()
    assert signal.getsignal(TERM) is own
    assert seen == [TERM]


def test_notice_stopped_by_thread_forwards_signals(seen: list[int]) -> None:
    own, notice = signal.getsignal(TERM), installed()
    thread = threading.Thread(target=notice.restore)
    thread.start()
    thread.join()
    send()
    assert (seen, notice.notice()) == ([TERM], None)
    signal.signal(TERM, own)


def test_leaving_notice_does_not_silence_others() -> None:
    before, outer, inner = signal.getsignal(TERM), installed(), installed()
    inner.restore(leaving=True)
    send()
    assert reason_of(outer) == "signal SIGTERM"
    outer.restore()
    assert signal.getsignal(TERM) == before


def test_unknown_handler_becomes_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)  # as for a handler set before Python started
        notice = installed()
    send()
    assert reason_of(notice) == "signal SIGTERM"
    notice.restore()
    assert signal.getsignal(TERM) == signal.SIG_DFL


def test_unknown_handler_of_other_signal_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        notice = installed("SIGUSR1", "SIGTERM")
    assert notice.watched() == [TERM]
    assert caplog.text.count("SIGUSR1 is not watched") == 1
    notice.restore()


def test_repeated_interrupt_is_ignored() -> None:
    before, notice = signal.getsignal(signal.SIGINT), installed("SIGINT")
    send(signal.SIGINT)
    notice.restore(leaving=True)
    send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) != before
    signal.signal(signal.SIGINT, before)


def test_user_handler_is_restored_when_leaving(seen: list[int]) -> None:
    own, notice = signal.getsignal(TERM), installed()
    send()
    notice.restore(leaving=True)
    assert signal.getsignal(TERM) is own
    send()
    assert seen == [TERM] * 2


def test_leaving_process_ignores_all_watched_signals() -> None:
    before, notice = signal.getsignal(signal.SIGUSR1), installed("SIGTERM", "SIGUSR1")
    own = notice._handlers[TERM]._before
    send()
    notice.restore(leaving=True)
    for number in (TERM, signal.SIGUSR1):
        send(number)
    signal.signal(TERM, own)
    signal.signal(signal.SIGUSR1, before)
