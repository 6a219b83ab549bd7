"""The coordinator in real multi-process jobs: results, errors that reach all, and names of missing processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from jaxckpt_train.distributed.coordinator import MOST_ENDED, ManyProcesses
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CheckpointError, StorageError
from tests.support.jobs.fixtures import JobOf
from tests.support.jobs.job import running

LIMIT_S = 3.0


def exchange_and_broadcast(name: str) -> list[str]:
    found = current().within(name, LIMIT_S)
    mine = f"p{found.process}"
    together = found.exchange("greeting", mine.encode, b",".join)
    answer = found.broadcast("answering", lambda: b"from " + mine.encode())
    found.exchange("ending", bytes)
    return [mine, together.decode(), answer.decode()]


def test_exchange_and_broadcast_reach_all_processes(job_of: JobOf) -> None:
    answers = job_of(4, 1).call(exchange_and_broadcast, "greetings")
    assert answers == [[f"p{n}", "p0,p1,p2,p3", "from p0"] for n in range(4)]


def fail_in(name: str, who: int, kind: str) -> list[Any]:
    found = current().within(name, LIMIT_S)

    def give() -> bytes:
        if found.process == who:
            raise {"os": StorageError(28, "No space left on device", "/x/y"), "user": KeyError("mine")}[kind]
        return b""

    started = time.monotonic()
    try:
        found.exchange("writing step 5", give)
    except (CheckpointError, KeyError) as error:
        took_s = time.monotonic() - started
        found.within("after").exchange("continuing", bytes)
        return [type(error).__name__, str(error), getattr(error, "errno", None), took_s < LIMIT_S]
    return ["nothing"]


@pytest.mark.parametrize("who", [0, 2])
def test_error_of_one_is_raised_in_all(job_of: JobOf, who: int) -> None:
    answers = job_of(4, 1).call(fail_in, f"os-{who}", who, "os")
    for number, (kind, message, code, soon) in enumerate(answers):
        source = "" if number == who else f"process {who}, writing step 5: "
        assert (kind, message, code, soon) == (
            "StorageError", f"[Errno 28] {source}No space left on device: '/x/y'", 28, True,
        )  # fmt: skip


def test_error_of_user_code_is_reported_by_name(job_of: JobOf) -> None:
    answers = job_of(4, 1).call(fail_in, "user", 1, "user")
    assert answers[1][0] == "KeyError"
    for number in (0, 2, 3):
        assert answers[number][:2] == ["OtherProcessError", "process 1, writing step 5: KeyError: 'mine'"]


def come_late(name: str, who: int, late_s: float) -> list[Any]:
    found = current().within(name, LIMIT_S)
    if found.process == who:
        time.sleep(late_s)
    started = time.monotonic()
    try:
        found.exchange("writing step 6", lambda: b"")
    except CheckpointError as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return ["nothing", "", time.monotonic() - started]


@pytest.mark.parametrize("who", [0, 3])
def test_missing_process_is_named_in_time(job_of: JobOf, who: int) -> None:
    answers = job_of(4, 1).call(come_late, f"late-{who}", who, LIMIT_S + 6.0)
    for number, (kind, message, took_s) in enumerate(answers):
        if number != who:
            assert kind == "CheckpointTimeoutError"
            assert f"writing step 6: process {who} of 4 " in message
            assert took_s < LIMIT_S + 5.0


def work_for(name: str, who: int, work_s: float, moves_s: float) -> list[Any]:
    """Exchange values while process `who` works for `work_s`, and reports progress for `moves_s`."""
    found = current().within(name, LIMIT_S)
    end, moves = time.monotonic() + (work_s if found.process == who else 0.0), time.monotonic() + moves_s

    def give() -> bytes:
        while time.monotonic() < end:
            time.sleep(0.05)
        return b""

    started = time.monotonic()
    try:
        found.exchange("writing step 7", give, moved=lambda: min(time.monotonic(), moves))
    except CheckpointError as error:
        return [str(error), time.monotonic() - started]
    return ["", time.monotonic() - started]


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_progressing_process_is_awaited_beyond_limit(job_of: JobOf, who: int) -> None:
    answers = job_of(2, 1).call(work_for, f"long-{who}", who, 3 * LIMIT_S, 60.0)
    assert [message for message, _ in answers] == ["", ""]
    assert min(took_s for _, took_s in answers) >= 3 * LIMIT_S - 0.5


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_stuck_process_is_not_awaited(job_of: JobOf, who: int) -> None:
    answers = job_of(2, 1).call(work_for, f"stuck-{who}", who, 4 * LIMIT_S, 1.0)
    message, took_s = answers[1 - who]
    assert f"process {who} of 2 " in message
    assert took_s < 1.0 + LIMIT_S + 5.0


def keys_left(name: str) -> int:
    found = current()
    assert isinstance(found, ManyProcesses)
    for _ in range(5):
        inner = found.within(name, LIMIT_S)
        for _ in range(10):
            inner.exchange("counting", bytes)
            inner.broadcast("answering", lambda: b"x")
        inner.end()
    found.exchange("one more", bytes)
    found.exchange("and another", bytes)
    return len(found._values.find("jaxckpt")) if found.process == 0 else 0


def keys_of_broadcasts(name: str) -> int:
    """Broadcast 300 values, and return the largest number of keys that process 0 found in the store."""
    found, most = current(), 0
    assert isinstance(found, ManyProcesses)
    inner = found.within(name, LIMIT_S)
    assert isinstance(inner, ManyProcesses)
    received = []
    for number in range(300):
        received.append(int(inner.broadcast("counting", lambda number=number: b"%d" % number)))  # type: ignore[misc]
        most = max(most, len(found._values.find(inner._name))) if found.process == 0 else 0
    assert received == list(range(300))
    return most


def test_keys_do_not_accumulate() -> None:
    with running(2) as job:
        assert job.call(keys_left, "keys")[0] <= 10
        most = job.call(keys_of_broadcasts, "counting")[0]
        assert 0 < most <= MOST_ENDED + 10  # plus keys of the exchange that deletes them


def wait_in_exchange(name: str, who: int) -> list[Any]:
    found = current().within(name, LIMIT_S)
    if found.process == who:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        found.exchange("writing step 8", lambda: b"")
    except CheckpointError as error:
        return [str(error), time.monotonic() - started]
    return ["nothing", 0.0]


def test_a_killed_process_is_named_in_time() -> None:
    with running(4) as job:
        answers = job.outcomes(wait_in_exchange, "killed", 2)
        for number in (0, 1, 3):
            message, took_s = answers[number]["value"]
            assert "process 2 of 4 " in message
            assert took_s < LIMIT_S + 5.0
