"""A save that fails in the background: its error is raised once, and the committed steps stay as they are."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.threads import paused_collection
from tests.support.fake_backends import HoldingBackend, RefusingBackend
from tests.support.runs import flip_a_payload_byte, made_run, save_steps, state_of, step_of, step_path


def failing(directory: Path, step: int, code: int = errno.EIO) -> jct.StepManager:
    return jct.StepManager(directory, backend=RefusingBackend("create", f"step-{step:010d}", code, 1))


def test_failure_is_raised_once(tmp_path: Path) -> None:
    manager = failing(tmp_path, 2)
    save_steps(manager, 1)
    manager.save(2, {"state": state_of(2)})
    with pytest.raises(jct.StorageError, match="refused to create"):
        manager.wait()
    manager.wait()
    manager.check()
    save_steps(manager, 2)
    manager.close()
    assert manager.steps == [1, 2]


def test_failure_is_raised_by_next_decision(tmp_path: Path) -> None:
    backend = HoldingBackend("create", "step-0000000001")

    class FailsMeanwhile:
        """Lets the previous save fail before it decides."""

        def should_save(self, step: object, previous: object, *, context: object) -> bool:
            if backend.reached.is_set():
                backend.go.set()
                assert manager._save_slot.pending is not None
                manager._save_slot.pending._ended.wait(60)
            return True

    manager = jct.StepManager(tmp_path, backend=backend, save_decision_policy=FailsMeanwhile())
    create = backend.create

    def refuse(path: str, *, direct: object) -> object:
        create(path, direct=direct)
        raise jct.StorageError(errno.EIO, "refused to create", path)

    backend.create = refuse  # type: ignore[method-assign, assignment]
    manager.save(1, {"state": state_of(1)})
    assert backend.reached.wait(60)
    with pytest.raises(jct.StorageError, match="refused to create"):
        manager.save(2, {"state": state_of(2)})
    manager.close()
    assert manager.steps == []


def test_a_failure_is_in_the_history(tmp_path: Path) -> None:
    manager = failing(tmp_path, 1)
    manager.save(1, {"state": state_of(1)})
    with pytest.raises(jct.StorageError):
        manager.wait()
    _, event = manager.history.events()
    assert (event["event"], event["step"], event["ok"]) == ("save", 1, False)
    assert "refused to create" in event["error"]
    manager.close()


def test_a_failure_does_not_let_retention_run(tmp_path: Path) -> None:
    made_run(tmp_path, 1)
    backend = RefusingBackend("rename", "step-0000000002", errno.EIO, 1)
    manager = jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1), backend=backend)
    manager.save(2, {"state": state_of(2)})
    with pytest.raises(jct.StorageError, match="refused to rename"):
        manager.close()
    assert step_of(jct.StepManager(tmp_path).restore()) == 1


def test_loop_error_outranks_save_error(tmp_path: Path) -> None:
    manager = failing(tmp_path, 1)
    with pytest.raises(ValueError, match="the loop's own error") as caught, manager:
        manager.save(1, {"state": state_of(1)})
        raise ValueError("the loop's own error")
    assert "also failed" in caught.value.__notes__[0]
    assert "refused to create" in caught.value.__notes__[0]
    with jct.StepManager(tmp_path) as other:
        other.own()  # the directory is free again


def test_error_of_loop_still_drains_save(tmp_path: Path) -> None:
    backend = HoldingBackend("none", "")
    with pytest.raises(ValueError, match="own"), jct.StepManager(tmp_path, backend=backend) as manager:
        manager.save(1, {"state": state_of(1)})
        raise ValueError("own")
    assert jct.StepManager(tmp_path).latest == 1


def test_interrupt_while_state_streams_does_not_lose_save(tmp_path: Path) -> None:
    """The manager still knows the save, waits for it in `close`, and frees its directory only then."""
    state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    backend = HoldingBackend("create", "p00000-s000")
    settings = jct.StoreSettings(snapshot="stream", staging_bytes=1 << 20)
    manager = jct.StepManager(tmp_path / "run", settings=settings, backend=backend)  # type: ignore[arg-type]

    def interrupt() -> None:
        assert backend.reached.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        manager.save(5, {"state": state}, force=True)
    helper.join()
    assert manager.is_saving_in_progress()
    backend.go.set()
    manager.close()
    assert jct.StepManager(tmp_path / "run").latest == 5


def test_interrupted_close_keeps_lock_until_save_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another job could take the directory and remove the attempt that is still being written."""
    backend = HoldingBackend("create", "p00000-s000")
    manager = jct.StepManager(tmp_path / "run", backend=backend)
    pending = manager.save(5, {"state": state_of(5)}).pending
    assert pending is not None
    wait, waiting = manager.wait, threading.Event()
    monkeypatch.setattr(manager, "wait", lambda: (waiting.set(), wait()))

    def interrupt() -> None:
        assert backend.reached.wait(60)
        assert waiting.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with paused_collection(), pytest.raises(KeyboardInterrupt):
        manager.close()
    helper.join()
    with pytest.raises(jct.DirectoryLockedError, match="this process"):
        jct.StepManager(tmp_path / "run").own()
    backend.go.set()
    pending.wait()
    with jct.StepManager(tmp_path / "run") as other:
        other.own()
        assert other.steps == [5]


@pytest.mark.parametrize("snapshot", ["auto", "host", "stream", "device"])
def test_saves_work_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Any) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    settings = jct.StoreSettings(snapshot=snapshot)
    assert jct.save_async(tmp_path / "c", {"w": jnp.arange(3)}, settings=settings).done()
    assert jct.load(tmp_path / "c")["w"].tolist() == [0, 1, 2]
    with jct.StepManager(tmp_path / "run", preservation_policy=jct.LatestN(1), settings=settings) as manager:
        for step in (1, 2):
            manager.save(step, {"state": {"w": jnp.arange(step)}})
    assert jct.StepManager(tmp_path / "run").steps == [2]
    assert not list((tmp_path / "run").glob(".step-*"))


class Label(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("reason", "written"), [("notice \udcff", r"notice \udcff"), (Label("mine"), "mine"), (Path("a/b"), "a/b")]
)
def test_no_reason_fails_a_save(tmp_path: Path, reason: Any, written: str) -> None:
    with jct.StepManager(tmp_path) as manager:
        manager.save(1, {"state": state_of(1)}, reason=reason)
        manager.wait()
        assert manager.history.events()[-1]["reason"] == written
    assert jct.StepManager(tmp_path).steps == [1]


def test_invalid_unicode_metric_names_are_refused(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        with pytest.raises(jct.SettingsError, match="expected names of valid Unicode"):
            manager.save(1, {"state": state_of(1)}, metrics={"loss \udcff": 1.0})
        manager.save(1, {"state": state_of(1)}, metrics={"loss": 1.0})
        manager.wait()
        with pytest.raises(jct.SettingsError, match="expected names of valid Unicode"):
            manager.attach_metrics(1, {"loss \udcff": 1.0})
        assert manager.metadata(1).metrics == {"loss": 1.0}


class TakesNothingBack(LocalBackend):
    """While `is_failing`: refuses to sync the run directory and to rename steps."""

    def __init__(self, run: Path) -> None:
        self._run, self.is_failing = str(run), False

    def sync(self, path: str) -> None:
        if self.is_failing and path == self._run:
            raise StorageError(errno.EIO, "refused", path)
        super().sync(path)

    def rename(self, source: str, target: str) -> None:
        if self.is_failing and source.rpartition("/")[2].startswith("step-"):
            raise StorageError(errno.EIO, "refused", source)
        super().rename(source, target)


@pytest.mark.parametrize("back_to", [None, 10])
def test_irrevocable_failed_save_is_never_resumed(tmp_path: Path, back_to: int | None) -> None:
    backend = TakesNothingBack(tmp_path)
    with jct.StepManager(tmp_path, backend=backend) as steps:
        save_steps(steps, 10, 20)
        backend.is_failing = True
        with pytest.raises(StorageError) as failed:
            save_steps(steps, 30)
        assert any("could not be removed from" in note for note in failed.value.__notes__)
        backend.is_failing = False
        steps.restore(step=back_to)
        save_steps(steps, 15 if back_to else 25)
    with jct.StepManager(tmp_path) as later:
        assert later.latest == step_of(later.restore()) == (15 if back_to else 25)
        save_steps(later, 30)  # the failed save of this number does not count
    with jct.StepManager(tmp_path) as last:
        assert last.latest == step_of(last.restore()) == 30


def test_step_of_irrevocable_failure_is_saved_again(tmp_path: Path) -> None:
    backend = TakesNothingBack(tmp_path)
    with jct.StepManager(tmp_path, backend=backend) as steps:
        save_steps(steps, 10)
        backend.is_failing = True
        with pytest.raises(StorageError):
            steps.save(20, {"state": state_of(0)})
            steps.wait()
        backend.is_failing = False
        save_steps(steps, 20)
    with jct.StepManager(tmp_path) as later:
        assert step_of(later.restore()) == 20


def test_repeated_save_counts_as_step(tmp_path: Path) -> None:
    backend = TakesNothingBack(tmp_path)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2), backend=backend) as steps:
        save_steps(steps, 10)
        backend.is_failing = True
        with pytest.raises(StorageError):
            save_steps(steps, 20)
        backend.is_failing = False
        shutil.rmtree(step_path(tmp_path, 20))  # by hand
        save_steps(steps, 20, 30)
        assert (steps.is_committed(20), steps.steps) == (True, [20, 30])
        flip_a_payload_byte(step_path(tmp_path, 30))
        assert step_of(steps.restore()) == 20


class Misreports(LocalBackend):
    """Reports the rename of one step as failed but performs it, as network file systems may."""

    def __init__(self, *, fails_afterwards: bool) -> None:
        self._fails_afterwards, self.is_failing = fails_afterwards, False

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        if target.endswith("/step-0000000030"):
            self.is_failing = self._fails_afterwards
            raise StorageError(errno.EIO, "reported as failed", source)

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        if self.is_failing:
            raise StorageError(errno.EIO, "cannot be read", f"{directory}/{name}")
        return super().open(directory, name, direct=direct)


@pytest.mark.parametrize("fails_afterwards", [False, True])
def test_denied_publish_is_never_resumed(tmp_path: Path, fails_afterwards: bool) -> None:
    backend = Misreports(fails_afterwards=fails_afterwards)
    with jct.StepManager(tmp_path, backend=backend) as steps:
        save_steps(steps, 10, 20)
        with pytest.raises(StorageError, match="reported as failed"):
            save_steps(steps, 30)
        backend.is_failing = False
        assert step_of(steps.restore(step=10)) == 10
        save_steps(steps, 15)
    with jct.StepManager(tmp_path) as later:
        assert not later.is_committed(30)
    flip_a_payload_byte(step_path(tmp_path, 15))
    with jct.StepManager(tmp_path) as later:
        assert step_of(later.restore()) == 10


def test_foreign_directory_is_not_taken_for_save(tmp_path: Path) -> None:
    made_run(tmp_path / "run", 10)
    made_run(tmp_path / "other", 20)
    backend = HoldingBackend("rename", "/run/step-0000000020")
    with jct.StepManager(tmp_path / "run", backend=backend) as steps:
        steps.save(20, {"state": state_of(0)})
        assert backend.reached.wait(60)
        shutil.copytree(step_path(tmp_path / "other", 20), step_path(tmp_path / "run", 20))
        backend.go.set()
        with pytest.raises(jct.CheckpointExistsError):
            steps.wait()
        save_steps(steps, 30)
    flip_a_payload_byte(step_path(tmp_path / "run", 30))
    assert step_of(jct.StepManager(tmp_path / "run").restore()) == 20


@pytest.fixture
def no_space_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the first call of an `os` function on a file of an attempt fail with ENOSPC, as NFS does."""

    def arm(name: str) -> None:
        real, armed = getattr(os, name), [True]

        def refuses(descriptor: int, *arguments: Any) -> Any:
            path = f"/proc/self/fd/{descriptor}"
            if armed[0] and os.path.isfile(path) and ".tmp-" in os.readlink(path):
                armed[0] = False
                if name == "close":
                    real(descriptor)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, *arguments)

        monkeypatch.setattr(os, name, refuses)

    return arm


LATE = jct.StoreSettings(direct_io=False)


@pytest.mark.parametrize("call", ["fdatasync", "fsync", "close"])
def test_full_disk_at_close_leaves_no_attempt(tmp_path: Path, no_space_at: Callable[[str], None], call: str) -> None:
    with jct.StepManager(tmp_path, settings=LATE) as manager:
        save_steps(manager, 1)
        no_space_at(call)
        with pytest.raises(StorageError) as full:
            save_steps(manager, 2)
        assert full.value.errno == errno.ENOSPC
        assert [name for name in os.listdir(tmp_path) if ".tmp-" in name] == []
        save_steps(manager, 2)
        assert manager.steps == [1, 2]


class Clinging(LocalBackend):
    """Refuses to remove attempts for a number of tries."""

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def remove(self, path: str) -> None:
        if self.tries and ".tmp-" in path.rpartition("/")[2]:
            self.tries -= 1
            raise StorageError(errno.EBUSY, "cannot remove", path)
        super().remove(path)


@pytest.mark.parametrize("call", ["fdatasync", "close"])
@pytest.mark.parametrize("tries", [1, 2, 1000])
def test_stuck_attempt_is_removed_later(
    tmp_path: Path, no_space_at: Callable[[str], None], call: str, tries: int
) -> None:
    disk = Clinging(tries)

    def attempts() -> int:
        assert manager._run._deleter.wait(60)
        return sum(".tmp-" in name for name in os.listdir(tmp_path))

    with jct.StepManager(tmp_path, settings=LATE, backend=disk) as manager:
        save_steps(manager, 1)
        no_space_at(call)
        with pytest.raises(StorageError) as full:
            save_steps(manager, 2)
        assert full.value.errno == errno.ENOSPC
        assert attempts() == (0 if tries == 1 else 1)
        save_steps(manager, 3)
        assert attempts() == (1 if tries == 1000 else 0)
    with jct.StepManager(tmp_path) as manager:
        save_steps(manager, 4)
        assert attempts() == 0
