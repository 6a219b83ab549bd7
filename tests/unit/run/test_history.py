"""The history: lines that survive crashes, metrics without a JSON number, and a disk that refuses writes."""

from __future__ import annotations

import errno
import math
import os
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxckpt_train.errors import CorruptCheckpointError, SettingsError
from jaxckpt_train.run.history import HISTORY_NAME, RECENT_BYTES, History, metrics_to_json, plain_metrics
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.manifest import metrics_from_json
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import START

LINE = b'{"event":"save","time":"2026-03-01T00:00:00Z","step":2}\n'


def test_events_come_back_in_order_without_empty_fields(tmp_path: Path) -> None:
    history = History(LocalBackend(), str(tmp_path))
    history.add("save", START, step=1, error=None)
    history.add("delete", START, name="step-0000000001")
    time = "2026-03-01T00:00:00.000+00:00"
    assert history.events() == [
        {"event": "save", "time": time, "step": 1},
        {"event": "delete", "time": time, "name": "step-0000000001"},
    ]


def test_missing_history_has_no_events(tmp_path: Path) -> None:
    assert History(LocalBackend(), str(tmp_path / "nothing")).events() == []


def test_invalid_line_is_skipped_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / HISTORY_NAME).write_bytes(
        b'\n\n{"event":"save"}\n{"event":"sa\n[1]\n"text"\n\xff\n{"event":"restore"}\n{"ev'
    )
    events = History(LocalBackend(), str(tmp_path)).events()
    assert [event["event"] for event in events] == ["save", "restore"]
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [4, 5, 6, 7, 9]
    assert "history.jsonl: line 4" in caplog.text


def test_truncated_line_takes_no_event_along(tmp_path: Path) -> None:
    first = History(LocalBackend(), str(tmp_path))
    first.add("save", START, step=1)
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write(b'{"event":"sa')
    second = History(LocalBackend(), str(tmp_path))
    for step in (2, 3):
        second.add("save", START, step=step)
    assert [event["step"] for event in second.events()] == [1, 2, 3]
    assert b"\n\n" not in (tmp_path / HISTORY_NAME).read_bytes()


def test_disk_that_refuses_history_warns_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History(RefusingBackend("append", HISTORY_NAME, errno.ENOSPC, 1), str(tmp_path))
    history.add("save", START, step=1)
    assert "the history was not written" in caplog.text
    history.add("save", START, step=2)
    assert [event["step"] for event in history.events()] == [2]


@pytest.mark.parametrize("value", [0.1, -0.0, 1e308, 5e-324, math.inf, -math.inf])
def test_metrics_come_back_bit_for_bit(tmp_path: Path, value: float) -> None:
    history = History(LocalBackend(), str(tmp_path))
    history.add("save", START, metrics=metrics_to_json({"loss": value}))
    found = metrics_from_json(history.events()[0]["metrics"])["loss"]
    assert (found, math.copysign(1, found)) == (value, math.copysign(1, value))


def test_nan_comes_back_as_nan(tmp_path: Path) -> None:
    history = History(LocalBackend(), str(tmp_path))
    history.add("save", START, metrics=metrics_to_json({"loss": math.nan}))
    assert math.isnan(metrics_from_json(history.events()[0]["metrics"])["loss"])


def test_stored_metrics_skip_invalid_numbers() -> None:
    assert metrics_from_json({"a": 1, "b": "many", "c": None, "d": [1]}) == {"a": 1.0}
    assert metrics_from_json({"huge": 10**400, "a": 1, "inf": "inf"}) == {"a": 1.0, "inf": math.inf}


@pytest.mark.parametrize("stored", [None, [1], "loss", 3, True])
def test_stored_metrics_that_are_no_mapping_are_none(stored: object) -> None:
    assert metrics_from_json(stored) == {}


def test_numbers_of_devices_and_numpy_become_floats() -> None:
    found = plain_metrics({"a": jnp.float32(0.5), "b": np.int64(3), "c": jnp.ones((1,)), "d": 2, "e": True})
    assert found == {"a": 0.5, "b": 3.0, "c": 1.0, "d": 2.0, "e": 1.0}
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize("value", ["low", "3.0", b"3.0", np.str_("3.0"), [1.0, 2.0], np.ones(2), None, {}])
def test_metric_that_is_no_single_number_is_refused(value: object) -> None:
    with pytest.raises(SettingsError, match="metric 'loss'"):
        plain_metrics({"loss": value})


@pytest.mark.parametrize(("name", "shown"), [(3, "found 3"), ("a\udcff", r"found 'a\\udcff'")])
def test_metric_names_must_be_valid_unicode(name: Any, shown: str) -> None:
    with pytest.raises(SettingsError, match=shown):
        plain_metrics({name: 1.0})


def test_invalid_unicode_is_escaped_in_history(tmp_path: Path) -> None:
    history = History(LocalBackend(), str(tmp_path))
    history.add("save", START, error="no \udcff é", leaves=["a"])
    event = history.events()[0]
    assert (event["error"], event["leaves"]) == (r"no \udcff é", ["a"])


def test_oversized_history_is_refused_and_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    History(LocalBackend(), str(tmp_path)).add("save", START, step=1)
    os.truncate(tmp_path / HISTORY_NAME, 1 << 40)
    history = History(LocalBackend(), str(tmp_path))
    history.add("save", START, step=2)
    assert [event.step for event in history.recent()] == [2]
    assert caplog.text == ""
    with pytest.raises(CorruptCheckpointError, match=r"history\.jsonl: .*expected at most"):
        history.events()
    with pytest.raises(CorruptCheckpointError, match=r"history\.jsonl: .*expected at most"):
        list(history.each(Small))


class Small(msgspec.Struct):
    event: str
    step: int


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 4096])
def test_events_may_span_blocks(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxckpt_train.run.history.BLOCK_BYTES", block_bytes)
    history = History(LocalBackend(), str(tmp_path))
    for step in range(20):
        history.add("save", START, step=step, reason="é" * step)
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write(b'\n{"event":"save"}\n[3]\n{"event":"save","step":"x"}\n{"event":"save","step":20}')
    assert [event.get("step") for event in history.events()] == [*range(20), None, "x", 20]
    assert caplog.text.count("is left out") == 1
    assert [each.step for each in history.each(Small)] == [*range(21)]
    assert caplog.text.count("is left out") == 2


def test_overlong_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.run.history.BLOCK_BYTES", 64)
    monkeypatch.setattr("jaxckpt_train.run.history.MOST_LINE_BYTES", 512)
    history = History(LocalBackend(), str(tmp_path))
    history.add("save", START, step=1)
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write(b"[" * 5000 + b"\n")
    history.add("save", START, step=2)
    assert [event["step"] for event in history.events()] == [1, 2]


def test_recent_events_of_small_and_missing_history(tmp_path: Path) -> None:
    history = History(LocalBackend(), str(tmp_path))
    assert history.recent() == []
    for step in range(3):
        history.add("save", START, step=step)
    assert [event.step for event in history.recent()] == [0, 1, 2]


def test_recent_events_of_huge_history_are_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / HISTORY_NAME).write_bytes(b'{"event":"save","step":1}\n')
    os.truncate(tmp_path / HISTORY_NAME, 1 << 40)
    filling = LINE.replace(b"save", b"x" * 100)
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write(b"\n" + filling * (RECENT_BYTES // len(filling)) + LINE)
    history = History(LocalBackend(), str(tmp_path))
    recent = history.recent()
    assert (recent[-1].event, recent[-1].step) == ("save", 2)
    assert {event.event for event in recent[:-1]} == {"x" * 100}  # and no truncated line
    assert (len(recent) - 1) * len(filling) <= RECENT_BYTES < (len(recent) + 1) * len(filling)
    assert caplog.text == ""  # only a complete read logs a warning


def test_recent_events_are_bounded_in_bytes(tmp_path: Path) -> None:
    (tmp_path / HISTORY_NAME).write_bytes(LINE * (RECENT_BYTES // len(LINE) + 10))
    assert len(History(LocalBackend(), str(tmp_path)).recent()) == RECENT_BYTES // len(LINE)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\x00" * 1000,
        b"[" * (1 << 20),
        b'{"event":' * (1 << 16),
        b"\n" * 1000,
        b'{"event":"save","step":1e999}\n',
        b'"text"\n17\nnull\n',
    ],
)
def test_damaged_history_yields_intact_recent_events(tmp_path: Path, data: bytes) -> None:
    (tmp_path / HISTORY_NAME).write_bytes(data)
    history = History(LocalBackend(), str(tmp_path))
    assert history.recent() == []
    history.add("save", START, step=7)
    assert [event.step for event in history.recent()] == [7]


def test_unreadable_history_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    History(LocalBackend(), str(tmp_path)).add("save", START, step=7)
    history = History(RefusingBackend("open", HISTORY_NAME, errno.EIO, 1), str(tmp_path))
    assert history.recent() == []
    assert "history of earlier processes" in caplog.text
    assert [event.step for event in history.recent()] == [7]


def test_concurrent_threads_lose_no_event(tmp_path: Path) -> None:
    history = History(LocalBackend(), str(tmp_path))
    threads = [
        threading.Thread(target=lambda: [history.add("progress", START, step=step) for step in range(200)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event["step"] for event in history.events()) == sorted([*range(200)] * 3)


def test_only_seconds_are_rounded_to_microseconds(tmp_path: Path) -> None:
    history = History(LocalBackend(), str(tmp_path))
    history.add("save", START, write_s=0.1234567891, share=0.1234567891, bytes_per_s=12, blocked_s=math.inf)
    (event,) = history.events()
    assert (event["write_s"], event["share"], event["bytes_per_s"]) == (0.123457, 0.1234567891, 12)
    assert event["blocked_s"] is None  # JSON has no infinity


def test_damaged_lines_are_listed_up_to_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History(LocalBackend(), str(tmp_path))
    history.add("a", START)
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write(b"\xff\n" * 1000)
    history.add("b", START)
    assert [event["event"] for event in history.events()] == ["a", "b"]
    logged = [message.partition("history.jsonl: ")[2] for message in caplog.messages]
    assert [text.partition(" is left out")[0] for text in logged] == [
        *[f"line {number}" for number in range(2, 7)],
        "and 995 more lines are left out",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(np.ma.masked, "masked"), (10**400, "1000*[.]{3}$"), (10**5000, "an object of int")],
    ids=["masked", "400 digits", "5000 digits"],
)
def test_non_numeric_metric_is_shortened(value: object, shown: str) -> None:
    with pytest.raises(SettingsError, match=f"found {shown}") as caught:
        plain_metrics({"loss": value})
    assert len(str(caught.value)) < 300
