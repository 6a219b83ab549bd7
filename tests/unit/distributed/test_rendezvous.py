"""Rendezvous of many processes: values in order, each large value read once, and few calls of the store."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.counted_values import CountedValues, ValuesOfProcess
from jaxckpt_train.distributed import rendezvous
from jaxckpt_train.distributed.coordinator import ManyProcesses
from jaxckpt_train.distributed.rendezvous import PACK, SMALL_BYTES, Contributions
from jaxckpt_train.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    OtherProcessError,
    StorageError,
)

LIMIT_S = 60.0


def in_all(processes: int, act: Callable[[ManyProcesses], object], limit_s: float = LIMIT_S) -> list[ValuesOfProcess]:
    """Run a job of threads, one for each process, and return what each asked of the store."""
    values = CountedValues(waits=True)
    views = [values.of(number) for number in range(processes)]
    jobs = [ManyProcesses(view, number, processes, limit_s) for number, view in enumerate(views)]
    with ThreadPoolExecutor(processes) as pool:
        for done in [pool.submit(act, job) for job in jobs]:
            done.result()
    return views


def value_of(process: int, size: int) -> bytes:
    return process.to_bytes(4, "big") * (size // 4)


@pytest.mark.parametrize("processes", [2, PACK, PACK + 1, 2 * PACK + 7])
@pytest.mark.parametrize("size", [8, SMALL_BYTES - 64, 4 * SMALL_BYTES])
def test_values_come_in_order_however_large(processes: int, size: int) -> None:
    def size_of(process: int) -> int:
        return size if process % 3 else 8

    def act(job: ManyProcesses) -> None:
        received: list[bytes] = []
        for turn in range(2):
            mine = value_of(job.process + turn, size_of(job.process))
            assert job.exchange("meeting", functools.partial(bytes, mine), collect_in(received)) == b"!"
        if job.process == 0:
            assert received == [value_of(n + turn, size_of(n)) for turn in range(2) for n in range(processes)]

    views = in_all(processes, act)
    sets = 0
    for number, view in enumerate(views[1:], 1):
        is_apart = size_of(number) > SMALL_BYTES
        assert view.asked.operations["increment"] == 2
        assert view.asked.operations.keys() == {"set", "get", "increment"}
        sets += view.asked.operations["set"] - 2 - 2 * is_apart
    assert sets == 2  # the last one wakes process 0


def collect_in(received: list[bytes]) -> Callable[[Sequence[bytes]], bytes]:
    """Return a function that records the values that it merges, and merges them to `!`."""

    def merge(values: Sequence[bytes]) -> bytes:
        received.extend(values)
        return b"!"

    return merge


def test_contributions_are_read_only_once() -> None:
    values, processes, size = CountedValues(waits=True), 3 * PACK, 100 * SMALL_BYTES
    mine = values.of(0)
    given = Contributions(mine, "x", processes)
    for process in [n for n in range(1, processes) if n != PACK]:  # the second pack lacks one
        Contributions(values.of(process), "x", processes).give(process, value_of(process, size))
    for _ in range(5):
        before = mine.asked.copy()
        assert sorted(given.look()) == [n for n in range(1, processes) if n != PACK]
        asked = mine.asked - before
        assert asked.operations == {"find": 1}
        assert asked.received_bytes < processes * 10
    given.give(PACK, b"late")
    assert list(given.of(given.look())) == [b"late" if n == PACK else value_of(n, size) for n in range(1, processes)]
    assert not any("/large/" in key for key in values.stored())
    given.forget()
    assert values.stored() == {}
    assert mine.asked.received_bytes < processes * (size + 200)


def test_error_reaches_all_at_once() -> None:
    text = "x" * 10 * SMALL_BYTES
    failed: list[str] = []

    def act(job: ManyProcesses) -> None:
        def give() -> bytes:
            if job.process == 5:
                raise StorageError(28, text, "/a")
            return value_of(job.process, 4 * SMALL_BYTES)

        with pytest.raises(StorageError) as caught:
            job.exchange("writing", give)
        failed.append(str(caught.value.strerror))

    in_all(PACK + 3, act)
    assert len(failed) == PACK + 3
    assert all(text in each for each in failed)


class _Loaded:
    """What a process has loaded when it learns that another one has failed."""


@pytest.mark.parametrize("who", [0, 1], ids=["the primary", "another"])
def test_failure_elsewhere_keeps_nothing_in_memory(who: int) -> None:
    kept: list[weakref.ref[_Loaded]] = []

    def load(job: ManyProcesses) -> None:
        loaded = _Loaded()
        kept.append(weakref.ref(loaded))

        def give() -> bytes:
            if job.process == who:
                raise StorageError(5, "unreadable", "/a")
            while not job.has_failed_elsewhere():
                time.sleep(0.01)
            raise CheckpointError("stopped")

        job.exchange("loading", give, moved=time.monotonic)

    def act(job: ManyProcesses) -> None:
        with contextlib.suppress(StorageError):
            load(job)

    gc.disable()  # what is only in a cycle stays until a collection, which may come much later
    try:
        in_all(2, act, 8.0)
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


class HearsAtOnce(ValuesOfProcess):
    """The store of a process that learns the outcome of its error while it still reports it."""

    job: ManyProcesses

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        while key.endswith("/here") and not self.job.has_failed_elsewhere():
            self.get("nothing", 0.01)


def test_failing_process_raises_its_own_error() -> None:
    values = CountedValues(waits=True)
    mine = HearsAtOnce(values)
    mine.job = job = ManyProcesses(mine, 1, 2, 2.0)
    own = StorageError(28, "full", "/a")

    def give() -> bytes:
        raise own

    def lead() -> None:
        ManyProcesses(values.of(0), 0, 2, LIMIT_S).exchange("writing", lambda: b"", moved=time.monotonic)

    with ThreadPoolExecutor(1) as pool:
        led = pool.submit(lead)
        with pytest.raises(StorageError) as caught:
            job.exchange("writing", give, moved=time.monotonic)
        assert caught.value is own
        with pytest.raises(StorageError, match="process 1, writing: full"):
            led.result()


def test_primary_raises_the_error_that_came_first() -> None:
    """Its own one may follow from it: another process removes its files after it has failed."""
    values, has_failed = CountedValues(waits=True), threading.Event()
    other = values.of(1)

    def fail() -> None:
        def give() -> bytes:
            raise StorageError(28, "full", "/a")

        with pytest.raises(StorageError):
            ManyProcesses(other, 1, 2, LIMIT_S).exchange("writing", give)
        has_failed.set()

    def give() -> bytes:
        assert has_failed.wait(LIMIT_S)
        raise CorruptCheckpointError("the file is gone")

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        with pytest.raises(StorageError, match="process 1, writing: full"):
            ManyProcesses(values.of(0), 0, 2, LIMIT_S).exchange("writing", give)
        failing.result()


def test_missing_process_among_many_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SLICE_S", 0.05)
    messages: list[str] = []

    def act(job: ManyProcesses) -> None:
        if job.process == PACK + 1:
            return
        with pytest.raises(CheckpointTimeoutError) as caught:
            job.exchange("meeting", lambda: value_of(job.process, 4 * SMALL_BYTES))
        messages.append(str(caught.value))

    in_all(PACK + 4, act, limit_s=0.5)
    assert len(messages) == PACK + 3
    assert all(f"process {PACK + 1} of {PACK + 4}" in message for message in messages)


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("is_nested", [False, True])
def test_processes_do_not_wait_for_one_that_left(monkeypatch: pytest.MonkeyPatch, who: int, is_nested: bool) -> None:
    monkeypatch.setattr(rendezvous, "PERIOD_S", 0.1)
    monkeypatch.setattr(rendezvous, "SLICE_S", 0.05)
    messages: list[str] = []

    def act(job: ManyProcesses) -> None:
        run = job.within("run")
        save = run.within("save") if is_nested else run
        run.exchange("beginning", lambda: b"")
        if job.process == who:
            run.leave()
            return
        with pytest.raises(OtherProcessError) as caught:
            save.exchange("writing", lambda: b"")
        messages.append(str(caught.value))

    in_all(3, act)
    assert len(messages) == 2
    assert all(f"process {who} of 3 left" in message for message in messages), messages


def test_broadcast_is_received_after_sender_left() -> None:
    values = CountedValues(waits=True)
    runs = [ManyProcesses(values.of(number), number, 2, LIMIT_S).within("run") for number in range(2)]
    assert runs[0].broadcast("outcome", lambda: b"all") == b"all"
    runs[0].leave()
    assert runs[1].broadcast("outcome", lambda: b"") == b"all"


class NeverAnswers(ValuesOfProcess):
    """The store of a process whose process 0 is stopped: a call without a time limit would never return."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        assert timeout_s > 0, key
        return super().get(key, timeout_s)


def test_no_look_waits_for_a_stopped_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SLICE_S", 0.05)
    run = ManyProcesses(NeverAnswers(CountedValues(waits=True)), 1, 2, 0.5).within("run")
    with pytest.raises(CheckpointTimeoutError, match="process 0 of 2"):
        run.within("save").broadcast("outcome", lambda: b"")


def test_group_can_be_left_and_joined_again() -> None:
    def act(job: ManyProcesses) -> None:
        for _ in range(3):
            run = job.within("run")
            run.exchange("beginning", lambda: b"")
            run.leave()

    views = in_all(3, act)
    assert not any("/run-1/" in key for key in views[0]._all.stored())


def test_group_is_joined_again_after_one_left_early() -> None:
    def act(job: ManyProcesses) -> None:
        run = job.within("run")
        if job.process != 1:  # it has left its loop before this save
            run.within("save")
        run.leave()
        job.within("run").exchange("beginning", lambda: b"")

    in_all(3, act)


@pytest.mark.parametrize(
    ("processes", "slice_s", "period_s"), [(2, 1.0, 10.0), (1000, 1.0, 10.0), (8000, 8.0, 10.0), (100_000, 37.5, 37.5)]
)
def test_large_jobs_poll_less_often(processes: int, slice_s: float, period_s: float) -> None:
    found = rendezvous.Rendezvous(CountedValues(waits=True).of(1), "x", 1, processes, "meeting", 300.0, None)
    assert (found._slice_s, found._period_s) == (slice_s, period_s)


def test_keys_of_past_meetings_go_with_next_exchange() -> None:
    values, processes = CountedValues(waits=True), PACK + 2
    barrier = threading.Barrier(processes)
    left: list[set[str]] = []

    def act(job: ManyProcesses) -> None:
        for _ in range(3):
            job.exchange("meeting", lambda: value_of(job.process, 4 * SMALL_BYTES))
            barrier.wait()
            if job.process == 0:
                left.append({key.split("/")[1] for key in values.stored()})
            barrier.wait()

    jobs = [ManyProcesses(values.of(number), number, processes, LIMIT_S) for number in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(act, jobs))
    assert left == [{"1"}, {"2"}, {"3"}]
