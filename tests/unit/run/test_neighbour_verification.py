"""After a step is set aside, its neighbours are verified in the background, and no others; then the thread ends."""

from __future__ import annotations

import errno
import gc
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.run import scrubber
from jaxckpt_train.store import verify
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.locks import remove_lock
from tests.support.runs import flip_a_payload_byte, number_of, save_steps, state_of, step_path

pytestmark = pytest.mark.timeout(120)

THREAD = "jaxckpt-scrub"


class ReadBackend(LocalBackend):
    """Records which steps are read, and by which thread; `before_open` is called before each file is opened."""

    def __init__(self, before_open: Callable[[str, str], None] = lambda directory, name: None) -> None:
        self._before_open = before_open
        self._opened: list[tuple[str, int, str]] = []

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        found = re.search(r"step-(\d+)", directory)
        if found is not None:
            self._opened.append((threading.current_thread().name, int(found[1]), name))
            self._before_open(directory, name)
        return super().open(directory, name, direct=direct)

    def opened(self, name: str, *, in_background: bool) -> list[int]:
        """The steps of which this file was read, in order: by the background thread, or by other threads."""
        return [step for thread, step, file in self._opened if file == name and (thread == THREAD) == in_background]

    @property
    def verified(self) -> set[int]:
        return {step for thread, step, _ in self._opened if thread == THREAD}


def parts_of(step: int) -> dict[str, Any]:
    return {"state": state_of(step), "extra": {"v": np.arange(3000.0) + step}}


def made(run: Path, *steps: int) -> Path:
    """A run whose steps hold two checkpointables."""
    with jct.StepManager(run) as manager:
        for step in steps:
            manager.save(step, parts_of(step))
            manager.wait()
    return run


def damage_extra(step: Path) -> None:
    """Damage a checkpointable that a restore of the state alone does not read."""
    path = step / "extra" / "p00000-s000.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def when_done(manager: jct.StepManager) -> None:
    """Wait until the background thread ends."""
    thread = manager._run._scrubber._thread
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


STATE: dict[str, Any] = {"state": None}


def restored(run: Path, backend: LocalBackend, targets: dict[str, Any] | None = STATE, **settings: Any) -> list[int]:
    """The steps that an owner has set aside after a restore and the verification of the neighbours."""
    with jct.StepManager(run, backend=backend, settings=jct.StoreSettings(**settings)) as manager:
        manager.own()
        manager.restore(targets)
        when_done(manager)
        found = manager.damaged
    assert threads() == []
    return found


def test_damaged_neighbour_is_set_aside_unasked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, backend = made(tmp_path, 1, 2, 3, 4, 5), ReadBackend()
    flip_a_payload_byte(step_path(run, 5))
    damage_extra(step_path(run, 4))
    assert restored(run, backend) == [4, 5]
    assert backend.opened("extra/p00000-s000.safetensors", in_background=False) == []
    assert backend.verified == {3, 4}, "the neighbour of step 5, the neighbour of step 4, and no other step"
    assert "step 4 is set aside" in caplog.text
    reader = jct.StepManager(run)
    assert (reader.steps, reader.damaged) == ([1, 2, 3], [4, 5])
    assert [event["step"] for event in reader.history.events() if event["event"] == "set_aside"] == [5, 4]


def test_a_healthy_neighbour_is_read_once_and_stays(tmp_path: Path) -> None:
    run, backend = made(tmp_path, 1, 2, 3), ReadBackend()
    flip_a_payload_byte(step_path(run, 3))
    assert restored(run, backend) == [3]
    assert backend.verified == {2}
    for part in ("state", "extra"):
        assert backend.opened(f"{part}/p00000-s000.safetensors", in_background=True) == [2]


def test_damage_of_unverified_restore_is_found(tmp_path: Path) -> None:
    run, backend = made(tmp_path, 1, 2, 3, 4), ReadBackend()
    (step_path(run, 4) / "state" / "p00000-s000.safetensors").unlink()
    damage_extra(step_path(run, 3))
    assert restored(run, backend, None, verify_on_load=False) == [3, 4]
    assert backend.verified == {2, 3}


def test_unreadable_step_is_a_neighbour_too(tmp_path: Path) -> None:
    def refuse(directory: str, name: str) -> None:
        if number_of(directory) == 4 and name.startswith("state") and threading.current_thread().name != THREAD:
            raise StorageError(errno.EIO, "refused", name)

    run, backend = made(tmp_path, 1, 2, 3, 4), ReadBackend(refuse)
    flip_a_payload_byte(step_path(run, 3))
    assert restored(run, backend, None) == [3]
    assert backend.verified == {2, 4}


def test_neighbours_are_those_by_order_of_saves(tmp_path: Path) -> None:
    """Steps that a roll-back left behind are neighbours too."""
    run, backend = made(tmp_path, 1, 2, 3), ReadBackend()
    with jct.StepManager(run) as manager:
        manager.restore(step=1)
        manager.save(10, parts_of(10))
    for step in (3, 10):
        flip_a_payload_byte(step_path(run, step))
    assert restored(run, backend, None) == [3, 10]
    assert backend.verified == {2, 3}


def test_damage_is_followed_until_a_step_is_whole(tmp_path: Path) -> None:
    run, backend = made(tmp_path, 1, 2, 3, 4, 5), ReadBackend()
    flip_a_payload_byte(step_path(run, 5))
    for step in (2, 3, 4):
        damage_extra(step_path(run, step))
    assert restored(run, backend) == [2, 3, 4, 5]
    assert backend.verified == {1, 2, 3, 4}


def test_restored_step_stays_without_intact_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, backend = made(tmp_path, 1, 2, 3), ReadBackend()
    flip_a_payload_byte(step_path(run, 3))
    for step in (1, 2):
        damage_extra(step_path(run, step))
    assert restored(run, backend) == [3]
    assert jct.StepManager(run).steps == [1, 2]
    assert "step 2 is damaged" in caplog.text
    assert "step 1 is damaged" in caplog.text


@pytest.mark.parametrize("steps", [(1,), (1, 2)])
def test_undamaged_run_starts_no_thread(tmp_path: Path, steps: tuple[int, ...]) -> None:
    run, backend = made(tmp_path, *steps), ReadBackend()
    with jct.StepManager(run, backend=backend) as manager:
        manager.own()
        manager.restore()
        assert manager._run._scrubber._thread is None
        assert backend.verified == set()


def test_a_run_with_one_step_has_no_neighbours(tmp_path: Path) -> None:
    run, backend = made(tmp_path, 1), ReadBackend()
    flip_a_payload_byte(step_path(run, 1))
    with jct.StepManager(run, backend=backend) as manager:
        manager.own()
        with pytest.raises(jct.CorruptCheckpointError):
            manager.restore()
        assert manager._run._scrubber._thread is None
        manager._run.set_aside(manager._run.entries()[0], "torn")
        when_done(manager)
        assert (manager.steps, manager.damaged) == ([], [1])
    assert backend.verified == set()


def test_reader_verifies_only_after_becoming_owner(tmp_path: Path) -> None:
    run, backend = made(tmp_path, 1, 2, 3, 4), ReadBackend()
    flip_a_payload_byte(step_path(run, 4))
    damage_extra(step_path(run, 3))
    with jct.StepManager(run, backend=backend) as manager:
        manager.restore(STATE)
        assert manager._run._scrubber._thread is None
        assert manager.damaged == []
        save_steps(manager, 5)
        when_done(manager)
        assert (manager.steps, manager.damaged) == ([1, 2, 5], [3, 4])
    assert backend.verified <= {2, 3, 5}
    assert threads() == []


def test_later_damage_starts_verification_again(tmp_path: Path) -> None:
    run, backend = made(tmp_path, *range(1, 8)), ReadBackend()
    with jct.StepManager(run, backend=backend) as manager:
        manager.own()
        for step, looked_at in ((7, {6}), (4, {3, 5, 6})):
            manager._run.set_aside(next(each for each in manager._run.entries() if each.step == step), "torn")
            when_done(manager)
            assert backend.verified == looked_at
        assert manager.damaged == [4, 7]


def test_full_scrub_starts_with_neighbours(tmp_path: Path) -> None:
    run, order, several = made(tmp_path, *range(1, 8)), list[int](), threading.Event()

    def note(directory: str, name: str) -> None:
        if threading.current_thread().name == THREAD and name.startswith("extra"):
            order.append(number_of(directory))
            if len(order) >= 3:
                several.set()

    flip_a_payload_byte(step_path(run, 7))
    settings = jct.StoreSettings(scrub_bytes_per_s=1 << 40)
    with jct.StepManager(run, backend=ReadBackend(note), settings=settings) as manager:
        manager.restore(STATE)
        manager._run.set_aside(next(each for each in manager._run.entries() if each.step == 3), "torn")
        manager.own()
        assert several.wait(60)
    assert order[:3] == [6, 4, 2]


class Held:
    """Holds the thread at the step of this number, until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self._step = step
        self.reading, self.go = threading.Event(), threading.Event()
        monkeypatch.setattr(scrubber, "first_damage", self)

    def __call__(self, backend: Any, directory: str, pace: Any, intact: Any) -> str | None:
        def held(nbytes: int) -> None:
            if number_of(directory) == self._step:
                self.reading.set()
                assert self.go.wait(60)
            pace(nbytes)

        return verify.first_damage(backend, directory, held, intact)


def test_neighbour_deleted_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, held = made(tmp_path, 1, 2, 3), Held(monkeypatch, 2)
    flip_a_payload_byte(step_path(run, 3))
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as manager:
        manager.own()
        manager.restore(STATE)
        assert held.reading.wait(60)
        save_steps(manager, 4)
        manager._run._deleter.wait(60)
        assert not step_path(run, 2).exists(), "neither saves nor retention wait for the verification"
        held.go.set()
        when_done(manager)
        assert (manager.steps, manager.damaged) == ([4], [3])
    assert "step 2 is damaged" not in caplog.text
    assert "not verified" not in caplog.text


def test_former_owner_sets_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, held = made(tmp_path, 1, 2, 3), Held(monkeypatch, 2)
    flip_a_payload_byte(step_path(run, 3))
    damage_extra(step_path(run, 2))
    with jct.StepManager(run) as manager:
        manager.own()
        manager.restore(STATE)
        assert held.reading.wait(60)
        remove_lock(run)
        with jct.StepManager(run) as other:
            other.own()
            held.go.set()
            when_done(manager)
            assert jct.StepManager(run).damaged == [3]


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_slow_verification_ends_with_its_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setattr(scrubber, "NEIGHBOURS_BYTES_PER_S", 1)
    run = made(tmp_path, 1, 2, 3)
    flip_a_payload_byte(step_path(run, 3))
    manager = jct.StepManager(run)
    manager.own()
    started = time.monotonic()
    monkeypatch.setattr(logging.getLogger("jaxckpt_train"), "disabled", True)  # pytest keeps log records, with frames
    manager.restore(STATE)
    (thread,) = threads()
    if ends == "closed":
        manager.close()
        assert not thread.is_alive()
    del manager
    while thread.is_alive() and time.monotonic() < started + 60:
        gc.collect()
        thread.join(0.1)
    assert not thread.is_alive()
    assert time.monotonic() - started < 30
    with jct.StepManager(run) as other:
        other.own()


def test_default_rate_is_modest(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        assert manager._run._scrubber._rate == 64 << 20
