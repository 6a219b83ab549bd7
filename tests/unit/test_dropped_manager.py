"""A manager that is dropped without close(): collecting it waits for no disk, and releases the lock."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend
from tests.support.locks import is_owned
from tests.support.runs import made_run, save_steps, segment_of, step_path

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have been started since the fixture was made."""
    threads, start = list[threading.Thread](), threading.Thread.start

    def record(thread: threading.Thread) -> None:
        threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", record)
    return threads


def dropped(manager: list[jct.StepManager]) -> None:
    """Drop the last reference on this thread."""
    manager.clear()
    gc.collect()


def test_collecting_dropped_manager_waits_for_no_disk(tmp_path: Path) -> None:
    backend = HoldingBackend("swap_record", "is_released")
    managers = [jct.StepManager(tmp_path, backend=backend)]
    save_steps(managers[0], 1)
    before = set(threading.enumerate())
    dropped(managers)
    assert backend.reached.wait(60)
    assert is_owned(tmp_path)
    (releasing,) = [each for each in set(threading.enumerate()) - before if each.name == "jaxckpt-retention"]
    backend.go.set()
    releasing.join(60)
    assert not is_owned(tmp_path)
    assert backend.threads == ["jaxckpt-retention"]


def test_collecting_a_manager_waits_for_no_scrubber(tmp_path: Path) -> None:
    reading, go = threading.Event(), threading.Event()

    class Slow(HoldingBackend):
        def open(self, directory: str, name: str, *, direct: object) -> object:
            if threading.current_thread().name == "jaxckpt-scrub" and name.endswith(segment_of(Path()).name):
                reading.set()
                assert go.wait(60)
            return super().open(directory, name, direct=direct)

    run, backend = made_run(tmp_path, 1), Slow("swap_record", "is_released")
    backend.go.set()
    settings = jct.StoreSettings(scrub_bytes_per_s=1 << 30)
    managers = [jct.StepManager(run, backend=backend, settings=settings)]
    managers[0].own()
    assert reading.wait(60)
    dropped(managers)
    assert is_owned(run), "the release is requested, but not waited for"
    go.set()
    with jct.StepManager(run) as manager:
        manager.own()
    assert backend.threads == ["jaxckpt-retention"]
    assert step_path(run, 1).exists()


def test_dropped_manager_releases_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else, if the process ended right after that, another machine would have to wait until the lock expires."""
    monkeypatch.setattr("jaxckpt_train.run.retention._MOMENT_S", 60.0)
    managers = [jct.StepManager(tmp_path)]
    save_steps(managers[0], 1)
    dropped(managers)
    assert not is_owned(tmp_path)
    with jct.StepManager(tmp_path) as other:
        save_steps(other, 2)


def test_manager_without_lock_is_collected_without_threads(tmp_path: Path, started: list[threading.Thread]) -> None:
    run = made_run(tmp_path, 1)
    closed = [jct.StepManager(run)]
    closed[0].own()
    closed[0].close()
    readers = [jct.StepManager(run)]
    assert readers[0].steps == [1]
    assert "jaxckpt-heartbeat" in [thread.name for thread in started]
    started.clear()
    dropped(closed)
    dropped(readers)
    assert started == []
