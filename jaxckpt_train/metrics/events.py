"""Sends the events of a run to its sinks. Each sink has its own thread, so that it cannot delay or break a training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxckpt_train._validation import list_of, refuse
from jaxckpt_train.store.threads import Latch

_log = logging.getLogger("jaxckpt_train")
Sink = Callable[[Mapping[str, Any]], object]
"""Called with each event, a dict as in the history: "event", "time", and fields with units in their names."""
MOST_WAITING = 1000  # a sink that is further behind misses the oldest events
DRAIN_S = 5.0
_SLICE_S = 0.1
_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


def checked_sinks(subject: str, sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """Check that `sinks` is a list of objects that can be called with an event."""
    checked = list_of("sinks")(subject, sinks)
    for number, sink in enumerate(checked):
        if isinstance(sink, type) or not callable(sink):
            refuse(f"{subject}[{number}]", "an object that can be called with an event", sink)
    return checked


class Owned:
    """A sink that was made for one run, and is closed with it if it has a `close` method."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Forward an event."""
        self.sink(event)

    def close(self) -> None:
        """Close the sink."""
        close = getattr(self.sink, "close", None)
        if callable(close):
            close()


class Feed:
    """The queue of events for one sink, called on a thread that exists only while the queue is not empty."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink, self._name, self._process, self._has_failed = sink, name, os.getpid(), False
        self.begin()
        _feeds.add(self)

    def begin(self) -> None:
        """Reset the queue and the thread; also used in a forked child, whose parent delivers the events."""
        self._guard = threading.RLock()
        self._events: deque[bytes] = deque()
        self._last: deque[Callable[[], object]] = deque()  # calls to make when no event is left
        self._worker: threading.Thread | None = None
        self._dropped = 0

    def put(self, line: bytes) -> None:
        """Queue an event, given as a line of the history. Never waits."""
        with self._guard:
            if len(self._events) >= MOST_WAITING:
                self._events.popleft()
                self._dropped += 1
            self._events.append(line)
        self._start_worker()

    def finish(self) -> Latch:
        """Close a sink of the run when the queue is empty; the returned latch opens then."""
        done, sink = Latch(), self._sink
        with self._guard:
            if isinstance(sink, Owned) and self._process == os.getpid():
                self._last.append(lambda: self._call(sink.close))
            elif self._worker is None and not self._events:
                done.open()
                return done
            self._last.append(done.open)
        self._start_worker()
        return done

    def log_undelivered(self, why: str) -> None:
        """Log the number of events that were not delivered."""
        with self._guard:
            left, self._dropped = len(self._events) + self._dropped + (self._worker is not None), 0
        _log.warning("%s: %d events were not delivered %s, and are lost if the process ends", self._name, left, why)

    def _start_worker(self) -> None:
        """Start a thread if there is none. If the system refuses it, the next event tries again."""
        if self._worker is None:
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._work, name="jaxckpt-sink", daemon=True).start()

    def _work(self) -> None:
        here = threading.current_thread()
        with self._guard:
            if self._worker is not None:
                return
            self._worker = here
        try:
            while (job := self._next(here)) is not None:
                job()
        finally:
            with self._guard:
                self._worker = None if self._worker is here else self._worker

    def _next(self, here: threading.Thread) -> Callable[[], object] | None:
        """Return the next call to make; None: the queue is empty, and the next event starts another thread."""
        with self._guard:
            if self._worker is not here:  # the sink has forked, and this is the child
                return None
            if self._events:
                line = self._events.popleft()
                return lambda: self._call(lambda: self._sink(msgspec.json.decode(line)))
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                text = "%s cannot keep up with the events: the oldest %d were dropped"
                return lambda: _log.warning(text, self._name, dropped)
            if self._last:
                return self._last.popleft()
            self._worker = None
            return None

    def _call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # nothing else would report an error of this thread
            if not self._has_failed:
                self._has_failed = True
                text = "%s failed; it still receives events, and further failures are not logged"
                _log.error(text, self._name, exc_info=error)


class Feeds:
    """The queues of all sinks of one run. Each sink gets every event, whether others fail or not."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._feeds = []
        for number, sink in enumerate(sinks):
            inner = sink.sink if isinstance(sink, Owned) else sink
            name = getattr(inner, "__name__", type(inner).__name__)
            self._feeds.append(Feed(sink, f"sink {number} ({name})"))

    def put(self, line: bytes) -> None:
        """Queue an event for all sinks, given as a line of the history. Never waits."""
        for feed in self._feeds:
            feed.put(line)

    def finish(self, timeout_s: float = DRAIN_S, until: Callable[[], bool] | None = None) -> None:
        """Wait until all queues are empty and the sinks of the run are closed, at most `DRAIN_S` seconds.

        A sink that needs more time continues while the process lives. The wait ends when `until` returns true.
        """
        limit_s = max(0.0, min(timeout_s, DRAIN_S))
        end_s = time.monotonic() + limit_s
        for feed, done in [(feed, feed.finish()) for feed in self._feeds]:
            while not done.wait(max(0.0, min(_SLICE_S, end_s - time.monotonic()))):
                if (is_asked := until is not None and until()) or time.monotonic() >= end_s:
                    feed.log_undelivered("before the shutdown" if is_asked else f"within {limit_s:.3g} s")
                    break


def _begin_in_child() -> None:
    for feed in list(_feeds):
        feed.begin()


os.register_at_fork(after_in_child=_begin_in_child)
