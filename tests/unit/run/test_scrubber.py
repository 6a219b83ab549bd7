"""The scrubber: it finds damage during training, keeps to its rate, is off by default, and leaves no thread."""

from __future__ import annotations

import errno
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.run import scrubber
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.run.scrubber import Scrubber
from jaxckpt_train.store import verify
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import RefusingBackend
from tests.support.runs import (
    START,
    flip_a_payload_byte,
    folder_of,
    made_run,
    number_of,
    save_steps,
    step_of,
    step_path,
)

pytestmark = pytest.mark.timeout(120)

FAST = jct.StoreSettings(scrub_bytes_per_s=1 << 40)


def scrubbing() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "jaxckpt-scrub"}


class Seen:
    """Records each verification as (step, whether the step is intact); `until` waits for a condition."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bool]] = []
        self.changed = threading.Condition()

    def __call__(self, backend: Any, directory: str, pace: Any, intact: Any) -> str | None:
        problem = verify.first_damage(backend, directory, pace, intact)
        with self.changed:
            self.found.append((number_of(directory), problem is None))
            self.changed.notify_all()
        return problem

    def until(self, done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, 60)

    def until_all(self, *steps: int) -> None:
        self.until(lambda: {step for step, _ in self.found} >= set(steps))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made = Seen()
    monkeypatch.setattr(scrubber, "first_damage", made)
    return made


def test_scrubber_is_off_by_default(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 1)
        assert not scrubbing()


def test_every_step_is_verified_again_and_again(tmp_path: Path, seen: Seen) -> None:
    with jct.StepManager(made_run(tmp_path, 1, 2), settings=FAST) as manager:
        manager.own()
        seen.until_all(1, 2)
        save_steps(manager, 3)
        seen.until_all(1, 2, 3)
        seen.found.clear()
        seen.until(lambda: len(seen.found) >= 6)
        assert manager.steps == [1, 2, 3]
    assert {whole for _, whole in seen.found} == {True}
    assert not scrubbing()


def test_a_reader_does_not_scrub(tmp_path: Path) -> None:
    with jct.StepManager(made_run(tmp_path, 1), settings=FAST) as manager:
        assert step_of(manager.restore()) == 1
        assert not scrubbing()


def test_damage_is_set_aside_during_training(tmp_path: Path, caplog: pytest.LogCaptureFixture, seen: Seen) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    flip_a_payload_byte(step_path(run, 2))
    with jct.StepManager(run, settings=FAST) as manager:
        manager.own()
        seen.until(lambda: manager.damaged == [2])
        save_steps(manager, 4)
        assert manager.steps == [1, 3, 4]
        seen.found.clear()
        seen.until(lambda: len(seen.found) > 10)
        assert 2 not in {step for step, _ in seen.found}, "a step that is set aside is not verified again"
        events = [event for event in manager.history.events() if event["event"] == "set_aside"]
        assert [event["step"] for event in events] == [2]
    assert step_path(run, 2).exists()
    assert "step 2 is set aside" in caplog.text
    assert jct.StepManager(run).damaged == [2]


def test_nothing_is_set_aside_without_intact_step(tmp_path: Path, caplog: pytest.LogCaptureFixture, seen: Seen) -> None:
    run = made_run(tmp_path, 1, 2)
    for step in (1, 2):
        flip_a_payload_byte(step_path(run, step))
    with jct.StepManager(run, settings=FAST) as manager:
        manager.own()
        seen.until(lambda: len(seen.found) > 12)
        assert (manager.steps, manager.damaged) == ([1, 2], [])
        assert caplog.text.count("is damaged") == 2
        save_steps(manager, 3)
        seen.until(lambda: manager.damaged == [1, 2])
    assert jct.StepManager(run).steps == [3]


def test_transient_read_error_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    false_reports, reads = ["not really damaged"], []

    def wrong_once(backend: Any, directory: str, pace: Any, intact: Any) -> str | None:
        reads.append(directory)
        return false_reports.pop() if false_reports else verify.first_damage(backend, directory, pace)

    monkeypatch.setattr(scrubber, "first_damage", wrong_once)
    with jct.StepManager(made_run(tmp_path, 1, 2), settings=FAST) as manager:
        manager.own()
        while len(reads) < 8:
            assert scrubbing()
        assert (manager.steps, manager.damaged) == ([1, 2], [])


def entries_of(*steps: int) -> list[Entry]:
    return [Entry(f"step-{n:010d}", n, 0, n, START, None, temporary=False) for n in steps]


def test_neighbours_of_a_damaged_step_are_verified_next() -> None:
    entries = entries_of(*range(1, 8))
    scrub = Scrubber(LocalBackend(), "/nowhere", 1, lambda: None)
    order = []
    for _ in range(3):
        entry = scrub._next(entries)
        assert entry is not None
        scrub._verified[entry.name] = None
        order.append(entry.step)
    assert order == [7, 6, 5]  # the newest first
    scrub._judge(entries[2], "torn", entries)
    found = [scrub._next(entries), scrub._next(entries)]
    assert [entry.step for entry in found if entry is not None] == [4, 2]
    entry = scrub._next(entries)
    assert entry is not None
    assert entry.step == 4, "the newest step that was never verified"


def test_least_recently_verified_step_is_next() -> None:
    entries = entries_of(1, 2, 3)
    scrub = Scrubber(LocalBackend(), "/nowhere", 1, lambda: None)
    scrub._verified = dict.fromkeys(entry.name for entry in (entries[1], entries[0], entries[2]))
    entry = scrub._next(entries)
    assert entry is not None
    assert entry.step == 2
    assert scrub._next(entries[2:]) == entries[2]
    assert list(scrub._verified) == [entries[2].name]
    assert scrub._next([]) is None


def test_scrubber_keeps_to_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], list[float]()

    class Clock:
        def wait(self, timeout: float) -> bool:
            waited.append(timeout)
            now[0] += timeout
            return False

    monkeypatch.setattr(scrubber.time, "monotonic", lambda: now[0])
    scrub = Scrubber(LocalBackend(), "/nowhere", 1000, lambda: None)
    scrub._stop, scrub._due_s = Clock(), 100.0  # type: ignore[assignment]
    for _ in range(50):
        scrub._pace(500)
    assert now[0] - 100.0 == pytest.approx(25.0)
    now[0] += 3600  # an idle hour gives no credit
    scrub._pace(10_000)
    assert waited[-1] >= 9.0


def test_all_that_is_read_is_paced(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"w": list(range(9)), "x": np.ones(3_000_000)})
    paced: list[int] = []
    assert verify.first_damage(LocalBackend(), str(tmp_path / "c"), paced.append) is None
    assert sum(paced) >= 24_000_000
    assert max(paced) <= 4 << 20


class WritesItsOwn:
    """Saves a plain file of ten MiB."""

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            (directory.path / "data.bin").write_bytes(bytes(10 << 20))

        return write()

    async def load(self, directory: Any) -> Any: ...


def test_plain_files_and_manifest_are_paced(tmp_path: Path) -> None:
    """An error of the pacing function ends the read before the next block."""
    parts = {"own": WritesItsOwn(), "state": {str(n): "x" * 1000 for n in range(300)}}
    jct.save_checkpointables(tmp_path / "c", parts)
    path = str(folder_of(tmp_path / "c"))
    manifest_bytes = (folder_of(tmp_path / "c") / "manifest.json").stat().st_size
    assert manifest_bytes > 300_000
    paced = list[int]()
    assert verify.first_damage(LocalBackend(), path, paced.append) is None
    assert paced[0] == manifest_bytes
    assert sorted(paced[1:]) == [2 << 20, 4 << 20, 4 << 20]

    class EndedError(Exception):
        pass

    events = list[tuple[str, int]]()

    class Watched(LocalBackend):
        def open(self, directory: str, name: str, **options: Any) -> Any:
            source = super().open(directory, name, **options)
            read_into = source.read_into

            def watched(offset: int, data: np.ndarray, needed: int) -> None:
                events.append((name, needed))
                read_into(offset, data, needed)

            source.read_into = watched  # type: ignore[method-assign]
            return source

    def pace(nbytes: int) -> None:
        events.append(("paced", nbytes))
        if len([each for each, _ in events if each == "paced"]) == 3:
            raise EndedError

    with pytest.raises(EndedError):
        verify.first_damage(Watched(), path, pace)
    assert [event for event in events if event[0] in ("paced", "manifest.json", "own/data.bin")] == [
        ("paced", manifest_bytes),
        ("manifest.json", manifest_bytes),
        ("paced", 4 << 20),
        ("own/data.bin", 4 << 20),
        ("paced", 4 << 20),
    ]


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_slow_scrubber_ends_with_its_manager(tmp_path: Path, ends: str) -> None:
    manager = jct.StepManager(made_run(tmp_path, 1), settings=jct.StoreSettings(scrub_bytes_per_s=1))
    manager.own()
    (thread,) = scrubbing()
    started = time.monotonic()
    if ends == "closed":
        manager.close()
    del manager
    while thread.is_alive() and time.monotonic() < started + 60:
        gc.collect()
        thread.join(0.1)
    assert not thread.is_alive()
    assert time.monotonic() - started < 30
    with jct.StepManager(tmp_path) as other:
        other.own()


def test_a_disk_that_refuses_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture, seen: Seen) -> None:
    run = made_run(tmp_path, 1, 2)
    backend = RefusingBackend("open", f"{step_path(run, 2).name}/state", errno.EIO, times=1)
    with jct.StepManager(run, settings=FAST, backend=backend) as manager:
        manager.own()
        seen.until_all(1, 2)
    assert "step 2 was not verified" in caplog.text
    assert jct.StepManager(run).steps == [1, 2]


def test_step_removed_by_hand_blocks_no_other(tmp_path: Path, seen: Seen) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    with jct.StepManager(run, settings=FAST) as manager:
        manager.own()
        seen.until_all(1, 2, 3)
        step_path(run, 2).rename(run / "moved")
        flip_a_payload_byte(step_path(run, 1))
        seen.until(lambda: manager.damaged == [1])


def test_one_failure_does_not_end_scrubber(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads = []

    def failing(backend: Any, directory: str, pace: Any, intact: Any) -> str | None:
        reads.append(directory)
        if number_of(directory) == 2:
            raise MemoryError("no memory now")
        return seen(backend, directory, pace, intact)

    monkeypatch.setattr(scrubber, "first_damage", failing)
    with jct.StepManager(made_run(tmp_path, 1, 2), settings=FAST) as manager:
        manager.own()
        seen.until(lambda: len(seen.found) > 5)
        assert manager.damaged == []
    assert sum(number_of(directory) == 2 for directory in reads) > 3
    assert caplog.text.count("step 2 was not verified: no memory now") == 1


def test_close_waits_briefly_for_stuck_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, reached = threading.Event(), threading.Event()

    def stuck(backend: Any, directory: str, pace: Any, intact: Any) -> str | None:
        reached.set()
        go.wait(60)
        return None

    monkeypatch.setattr(scrubber, "first_damage", stuck)
    monkeypatch.setattr(scrubber, "JOIN_S", 0.05)
    manager = jct.StepManager(made_run(tmp_path, 1), settings=FAST)
    manager.own()
    assert reached.wait(60)
    try:
        manager.close()
        with jct.StepManager(tmp_path) as next_one:
            next_one.own()
    finally:
        go.set()
