"""Feeds in forked processes: a child has its own event thread, and closes no sink."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from jaxckpt_train.metrics.events import Feeds, Owned
from tests.support.forking import Tell, forked
from tests.support.sinks import LONGEST_S, Closable, Held, put


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_child_has_its_own_event_thread(held: Held) -> None:
    child_s: list[int] = []

    def sink(event: Mapping[str, Any]) -> None:
        if os.getpid() == parent:
            held(event)
        else:
            child_s.append(event["step"])

    def work(tell: Tell) -> None:
        feeds.finish()
        tell("after nothing", child_s)
        put(feeds, 7)
        feeds.finish()
        tell("after its own", child_s)

    parent = os.getpid()
    feeds = Feeds([sink])
    put(feeds, 1, 2)
    assert held.reached.wait(LONGEST_S)
    assert forked(work, longest_s=20) == ([("after nothing", []), ("after its own", [7])], 0)
    held.go.set()
    feeds.finish()
    assert held.steps == [1, 2]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_child_closes_no_sink() -> None:
    mine = Closable()
    feeds = Feeds([Owned(mine)])

    def work(tell: Tell) -> None:
        feeds.finish()
        tell("steps", mine.steps)

    assert forked(work, longest_s=20) == ([("steps", [])], 0)
    feeds.finish()
    assert mine.steps == [-1]
