"""Sinks for tests: one that records its events, and one that blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from jaxckpt_train.metrics.events import Feeds

LONGEST_S = 60  # a limit for events that come at once


class Recorder:
    """Records its events, and the thread of each call."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.threads: list[threading.Thread] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.threads.append(threading.current_thread())
        self.events.append(event)

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.events]


class Held(Recorder):
    """Blocks until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.reached.set()
        assert self.go.wait(LONGEST_S)
        super().__call__(event)


@pytest.fixture
def held() -> Iterator[Held]:
    """A sink that blocks until the end of the test."""
    sink = Held()
    yield sink
    sink.go.set()


def line(step: int) -> bytes:
    return msgspec.json.encode({"event": "save", "step": step})


def put(feeds: Feeds, *steps: int) -> None:
    for step in steps:
        feeds.put(line(step))


class Closable(Recorder):
    """Records its close as step -1."""

    def close(self) -> None:
        self({"step": -1})
