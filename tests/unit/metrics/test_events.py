"""Feeds: events reach every sink in order, whatever a sink does, and no sink delays its callers."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.metrics.events import MOST_WAITING, Feed, Feeds, Owned, Sink, checked_sinks
from tests.support.sinks import LONGEST_S, Closable, Held, Recorder, line, put


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_every_sink_gets_all_events_in_order(caplog: pytest.LogCaptureFixture) -> None:
    sinks = Recorder(), Recorder()
    feeds = Feeds(sinks)
    put(feeds, *range(100))
    feeds.finish()
    for sink in sinks:
        assert sink.steps == list(range(100))
        assert threading.current_thread() not in sink.threads
    assert not set(sinks[0].threads) & set(sinks[1].threads)
    assert warnings(caplog) == []


def test_sink_cannot_change_events_of_other_sinks() -> None:
    def spoil(event: Any) -> None:
        event["skipped"].append("mine")
        event.clear()

    after, before = Recorder(), Recorder()
    feeds = Feeds([before, spoil, after])
    feeds.put(b'{"event":"restore","skipped":["a"]}')
    feeds.finish()
    assert before.events == after.events == [{"event": "restore", "skipped": ["a"]}]
    assert type(after.events[0]) is dict


def test_failing_sink_is_logged_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    seen, other = [], Recorder()

    def broken(event: Mapping[str, Any]) -> None:
        seen.append(event["step"])
        raise SystemExit("no") if event["step"] == 1 else ValueError("no number")

    feeds = Feeds([broken, other])
    put(feeds, 1, 2, 3)
    feeds.finish()
    assert seen == other.steps == [1, 2, 3]
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert logged.getMessage().startswith("sink 0 (broken) failed")
    assert logged.exc_info is not None
    assert isinstance(logged.exc_info[1], SystemExit)
    assert logged.exc_info[2] is not None
    assert len(warnings(caplog)) == 1


def test_hanging_sink_delays_neither_others_nor_close(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    other = Recorder()
    feeds = Feeds([held, other])
    put(feeds, 1, 2, 3)
    assert held.reached.wait(LONGEST_S)
    feeds.finish(0.05)
    assert (held.steps, other.steps) == ([], [1, 2, 3])
    (warning,) = warnings(caplog)
    assert warning.startswith("sink 0 (Held): 3 events")
    held.go.set()
    feeds.finish()
    assert held.steps == [1, 2, 3]
    assert len(warnings(caplog)) == 1


def test_finish_stops_waiting_when_time_is_up(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    feeds = Feeds([held])
    put(feeds, 1)
    asked = []

    def is_time_up() -> bool:
        asked.append(True)
        return len(asked) == 2

    feeds.finish(until=is_time_up)
    assert len(asked) == 2
    assert [": 1 events were not delivered" in each for each in warnings(caplog)] == [True]


def test_slow_sink_drops_oldest_events(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    feeds = Feeds([held])
    put(feeds, 0)
    assert held.reached.wait(LONGEST_S)
    put(feeds, *range(1, MOST_WAITING + 8))
    assert warnings(caplog) == []
    held.go.set()
    feeds.finish()
    assert held.steps == [0, *range(8, MOST_WAITING + 8)]
    (warning,) = warnings(caplog)
    assert warning.startswith("sink 0 (Held) cannot keep up")
    assert "oldest 7 " in warning


def test_undelivered_count_includes_dropped_events(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    feeds = Feeds([held])
    put(feeds, 0)
    assert held.reached.wait(LONGEST_S)
    put(feeds, *range(1, MOST_WAITING + 8))
    feeds.finish(0.0)
    assert f": {MOST_WAITING + 8} events were not delivered" in warnings(caplog)[0]


def test_thread_lives_only_while_events_wait() -> None:
    sink = Recorder()
    feeds = Feeds([sink])
    for step in range(3):
        put(feeds, step)
        feeds.finish()
        sink.threads[-1].join(LONGEST_S)
        assert not sink.threads[-1].is_alive()
    assert sink.steps == [0, 1, 2]
    gone = weakref.ref(feeds._feeds[0])
    del feeds
    gc.collect()
    assert gone() is None


def test_feed_without_events_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    Feeds([Recorder()]).finish()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_next_event_retries_after_failed_thread_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Recorder()
    feeds = Feeds([sink])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        put(feeds, 1)
        feeds.finish()
    assert sink.steps == []
    assert warnings(caplog)[0].startswith("sink 0 (Recorder): 1 events were not delivered")
    put(feeds, 2)
    feeds.finish()
    assert sink.steps == [1, 2]


def test_event_during_thread_exit_is_delivered() -> None:
    steps, received = list[int](), threading.Event()

    def sink(event: Mapping[str, Any]) -> None:
        steps.append(event["step"])
        if event["step"] == 3:
            received.set()

    class Ending(Feed):
        def _next(self, here: threading.Thread) -> Callable[[], object] | None:
            job = super()._next(here)
            if job is None and steps == [1]:
                self.put(line(2))
                self.put(line(3))
            return job

    feed = Ending(sink, "sink")
    feed.put(line(1))
    assert received.wait(LONGEST_S)  # without another call of put
    assert steps == [1, 2, 3]


def test_failing_log_does_not_stop_a_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, ended = list[int](), threading.Event()

    def broken(event: Mapping[str, Any]) -> None:
        seen.append(event["step"])
        raise ValueError("no number")

    def fail(record: logging.LogRecord) -> bool:
        raise OSError("no log")

    logger = logging.getLogger("jaxckpt_train")
    monkeypatch.setattr(logger, "filters", [fail])
    monkeypatch.setattr(threading, "excepthook", lambda arguments: ended.set())
    feeds = Feeds([broken])
    put(feeds, 1)
    assert ended.wait(LONGEST_S)
    put(feeds, 2)
    feeds.finish()
    assert seen == [1, 2]


def test_owned_sink_is_closed_last() -> None:
    mine, given, plain = Closable(), Closable(), Recorder()
    feeds = Feeds([Owned(mine), given, Owned(plain)])
    put(feeds, 1, 2)
    feeds.finish()
    assert (mine.steps, given.steps, plain.steps) == ([1, 2, -1], [1, 2], [1, 2])


def test_close_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def close(self) -> None:
            raise OSError("no")

    Feeds([Owned(Broken())]).finish()
    assert [message.startswith("sink 0 (Broken) failed") for message in warnings(caplog)] == [True]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (print, r"^here: expected a list of sinks"),
        ("print", r"^here: expected a list of sinks"),
        ({"a": print}, r"^here: expected a list of sinks"),
        ([print, 3], r"^here\[1\]: expected an object.*, found 3"),
        ([Recorder], r"^here\[0\]: expected an object"),
    ],
)
def test_invalid_sinks_are_refused(wrong: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        checked_sinks("here", wrong)


def test_sinks_keep_their_order() -> None:
    sinks: list[Sink] = [print, Recorder()]
    assert checked_sinks("here", sinks) == tuple(sinks)


def test_events_of_several_threads_all_arrive() -> None:
    sink = Recorder()
    feeds = Feeds([sink])

    def work(first: int) -> Callable[[], None]:
        return lambda: put(feeds, *range(first, first + 200))

    threads = [threading.Thread(target=work(first)) for first in (0, 200, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    feeds.finish()
    assert sorted(sink.steps) == list(range(600))
    for first in (0, 200, 400):
        assert [step for step in sink.steps if first <= step < first + 200] == list(range(first, first + 200))
