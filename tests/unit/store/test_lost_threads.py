"""Threads stuck in a call to an unresponsive disk are replaced, limited in number, and block nobody else."""

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
from jaxckpt_train.store import threads, timeouts
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.threads import Workers
from jaxckpt_train.store.verify import verify
from tests.support.checkpoints import commit, load

pytestmark = pytest.mark.timeout(120)
RESPONSE_S = 60.0


class DeadDisk:
    """Work whose items begin, but do not end until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[int] = []

    def __call__(self, item: int) -> int:
        self.begun.append(item)
        assert self.go.wait(RESPONSE_S)
        return item


@pytest.fixture
def disk() -> Iterator[DeadDisk]:
    made = DeadDisk()
    yield made
    made.go.set()


@contextlib.contextmanager
def impatience(give_up_s: float = 0.1) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "GIVE_UP_S", give_up_s)
        for module in (timeouts, threads):
            patch.setattr(module, "POLL_S", 0.05)
        patch.setattr(threads, "MOMENT_S", 0.05)
        yield


def threads_of(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(name)]


def time_out(pool: Workers, disk: DeadDisk, items: int = 5) -> None:
    with impatience(), pytest.raises(CheckpointTimeoutError, match="no progress for"):
        list(pool.run_each(disk, range(items)))


def test_stuck_threads_are_replaced_and_end_later(disk: DeadDisk) -> None:
    pool = Workers(2, "test-place")
    lost = threads_of("test-place")
    time_out(pool, disk)
    assert sorted(disk.begun) == [0, 1]
    assert sorted(pool.run_each(abs, range(50))) == list(range(50))
    together = threading.Barrier(2)
    list(pool.run_each(lambda item: together.wait(30) if item else 0, range(3)))  # the last two run together
    disk.go.set()
    for each in lost:
        each.join(30)
        assert not each.is_alive()
    assert len(threads_of("test-place")) == 2
    list(pool.run_each(lambda _: together.wait(30), range(2)))


def test_stuck_disk_uses_bounded_threads(disk: DeadDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_LOST_THREADS", 5)
    pool, counts = Workers(3, "test-bound"), list[int]()
    for _ in range(10):
        time_out(pool, disk)
        counts.append(len(threads_of("test-bound")))
    assert counts == [6, 7, 8, 8, 8, 8, 8, 8, 8, 8]
    assert len(disk.begun) == 8
    started = threads_of("test-bound")
    disk.go.set()
    assert sorted(pool.run_each(abs, range(50))) == list(range(50))
    end_s = time.monotonic() + 30
    while len(threads_of("test-bound")) > 3 and time.monotonic() < end_s:
        for each in started:  # including those that were replaced
            each.join(0.01)
    assert len(threads_of("test-bound")) == 3


def test_interrupt_on_stuck_disk_frees_other_callers(disk: DeadDisk) -> None:
    """Callers that wait for the same threads at that moment go on too."""
    pool, found, reached = Workers(1, "test-parallel"), list[int](), threading.Event()

    def work(item: int) -> int:
        if item == 0:
            return item
        reached.set()
        return disk(item)

    parallel = threading.Thread(target=lambda: found.extend(pool.run_each(abs, range(20))), daemon=True)
    each = pool.run_each(work, range(3))
    with impatience(RESPONSE_S), pytest.raises(KeyboardInterrupt), contextlib.closing(each) as results:
        next(results)
        assert reached.wait(30)
        parallel.start()
        raise KeyboardInterrupt
    parallel.join(30)
    assert sorted(found) == list(range(20))


class HalfDeadBackend(LocalBackend):
    """Reads of segments below a directory named "dead" block until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source = super().open(directory, name, direct=direct)
        read_into = source.read_into

        def waiting(offset: int, data: np.ndarray, needed: int) -> None:
            assert self.go.wait(RESPONSE_S)
            read_into(offset, data, needed)

        if "/dead/" in directory and name.endswith(".safetensors"):
            source.read_into = waiting  # type: ignore[method-assign]
        return source


ARRAYS = {f"x{number}": np.arange(300_000) + number for number in range(20)}
SETTINGS = StoreSettings(io_threads=3, segment_bytes=4 << 20, read_budget_bytes=16 << 20)


def test_loads_from_a_healthy_disk_go_on(tmp_path: Path) -> None:
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


def test_second_interrupt_takes_no_threads_from_others(disk: DeadDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MOMENT_S", RESPONSE_S)
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
