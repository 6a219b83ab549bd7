"""Threads that wait for a disk which does not answer: others work in their place, there are few, nobody waits."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import threads as workers
from jaxckpt_train.store import timeouts as answers
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.threads import Workers
from jaxckpt_train.store.verify import verify
from tests.support.checkpoints import commit, load

pytestmark = pytest.mark.timeout(120)
ANSWER_S = 60.0


class DeadDisk:
    """Work whose items begin, and do not end until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[int] = []

    def __call__(self, item: int) -> int:
        self.begun.append(item)
        assert self.go.wait(ANSWER_S)
        return item


@pytest.fixture
def disk() -> Iterator[DeadDisk]:
    made = DeadDisk()
    yield made
    made.go.set()


@contextlib.contextmanager
def impatience(give_up_s: float = 0.1) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (answers, workers):
            patch.setattr(module, "GIVE_UP_S", give_up_s)
            patch.setattr(module, "POLL_S", 0.05)
        patch.setattr(workers, "MOMENT_S", 0.05)
        yield


def threads_of(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(name)]


def given_up(pool: Workers, disk: DeadDisk, items: int = 5) -> None:
    with impatience(), pytest.raises(CheckpointTimeoutError, match="no progress for"):
        list(pool.run_each(disk, range(items)))


def test_others_take_their_place_and_they_end_when_the_disk_answers(disk: DeadDisk) -> None:
    pool = Workers(2, "test-place")
    lost = threads_of("test-place")
    given_up(pool, disk)
    assert sorted(disk.begun) == [0, 1]
    assert sorted(pool.run_each(abs, range(50))) == list(range(50))
    together = threading.Barrier(2)
    list(pool.run_each(lambda item: together.wait(30) if item else 0, range(3)))  # one first, and then both at once
    disk.go.set()
    for each in lost:
        each.join(30)
        assert not each.is_alive()
    assert len(threads_of("test-place")) == 2
    list(pool.run_each(lambda _: together.wait(30), range(2)))


def test_stuck_disk_uses_bounded_threads(disk: DeadDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_LOST_THREADS", 5)
    pool, there = Workers(3, "test-bound"), list[int]()
    for _ in range(10):
        given_up(pool, disk)
        there.append(len(threads_of("test-bound")))
    assert there == [6, 7, 8, 8, 8, 8, 8, 8, 8, 8]
    assert len(disk.begun) == 8
    threads = threads_of("test-bound")
    disk.go.set()
    assert sorted(pool.run_each(abs, range(50))) == list(range(50))
    end_s = time.monotonic() + 30
    while len(threads_of("test-bound")) > 3 and time.monotonic() < end_s:
        for each in threads:  # whichever of them were replaced
            each.join(0.01)
    assert len(threads_of("test-bound")) == 3


def test_who_leaves_such_disk_lets_others_go_on(disk: DeadDisk) -> None:
    """Also those who wait for the same threads at that moment."""
    pool, found, reached = Workers(1, "test-parallel"), list[int](), threading.Event()

    def work(item: int) -> int:
        if item == 0:
            return item
        reached.set()
        return disk(item)

    parallel = threading.Thread(target=lambda: found.extend(pool.run_each(abs, range(20))), daemon=True)
    each = pool.run_each(work, range(3))
    with impatience(ANSWER_S), pytest.raises(KeyboardInterrupt), contextlib.closing(each) as results:
        next(results)
        assert reached.wait(30)
        parallel.start()
        raise KeyboardInterrupt
    parallel.join(30)
    assert sorted(found) == list(range(20))


class HalfDeadBackend(LocalBackend):
    """Reads of segments below a directory called "dead" do not answer until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source = super().open(directory, name, direct=direct)
        read_into = source.read_into

        def waiting(offset: int, data: np.ndarray, needed: int) -> None:
            assert self.go.wait(ANSWER_S)
            read_into(offset, data, needed)

        if "/dead/" in directory and name.endswith(".safetensors"):
            source.read_into = waiting  # type: ignore[method-assign]
        return source


ARRAYS = {f"x{number}": np.arange(300_000) + number for number in range(20)}
SETTINGS = StoreSettings(io_threads=3, segment_bytes=4 << 20, read_budget_bytes=16 << 20)


def test_loads_from_a_disk_that_answers_go_on(tmp_path: Path) -> None:
    backend = HalfDeadBackend()
    for place in ("dead", "alive"):
        commit(backend, str(tmp_path / place / "c"), ARRAYS, SETTINGS)
    try:
        for use in (load, verify):
            for _ in range(2):
                with impatience(), pytest.raises(CheckpointTimeoutError):
                    use(backend, str(tmp_path / "dead" / "c"), SETTINGS)
                found = load(backend, str(tmp_path / "alive" / "c"), SETTINGS)
                assert all(np.array_equal(found[name][0], array) for name, array in ARRAYS.items())
                assert verify(backend, str(tmp_path / "alive" / "c"), SETTINGS).ok
    finally:
        backend.go.set()
    found = load(backend, str(tmp_path / "dead" / "c"), SETTINGS)
    assert all(np.array_equal(found[name][0], array) for name, array in ARRAYS.items())


def test_a_second_interrupt_while_the_first_is_obeyed_takes_no_threads_from_others(
    disk: DeadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MOMENT_S", ANSWER_S)
    pool = Workers(2, "test-twice")

    def interrupt_soon() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(pool.run_each(disk, range(5), moved=interrupt_soon, give_up=interrupt_soon))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with impatience(5.0):
        assert sorted(pool.run_each(abs, range(50))) == list(range(50))
    assert len(threads_of("test-twice")) == 4
