"""A disk that stops responding at any one call: restores, loads and listings raise after a limited time."""

from __future__ import annotations

import errno
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.reader import polling
from tests.support.same_trees import assert_same

pytestmark = pytest.mark.timeout(240)

STATE = {"w": np.arange(50_000, dtype=np.float32), "b": np.ones(3)}
OTHER = jct.JsonValue({"epoch": 3})
LONGEST_S = 60.0


class StoppingBackend:
    """Counts calls and reads; those with a number of `stop` or more return only when `go` is set."""

    def __init__(self) -> None:
        self._inner = LocalBackend()
        self.calls, self.stop = 0, -1
        self.go = threading.Event()
        self._lock = threading.Lock()

    def count(self) -> None:
        with self._lock:
            self.calls += 1
            is_stopped = 0 <= self.stop < self.calls
        if is_stopped:
            assert self.go.wait(LONGEST_S)

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)

        def call(*args: Any, **more: Any) -> Any:
            self.count()
            made = inner(*args, **more)
            return StoppingSource(self, made) if name == "open" else made

        return call


class StoppingSource:
    """An open file of a `StoppingBackend`."""

    def __init__(self, disk: StoppingBackend, inner: Any) -> None:
        self._disk, self._inner = disk, inner
        self.size, self.alignment = inner.size, inner.alignment

    def read_into(self, offset: int, data: np.ndarray, needed: int) -> None:
        self._disk.count()
        self._inner.read_into(offset, data, needed)

    def close(self) -> None:
        self._disk.count()
        self._inner.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", 0.02)
    monkeypatch.setattr("jaxckpt_train.store.timeouts.POLL_S", 0.02)
    monkeypatch.setattr("jaxckpt_train.store.threads.POLL_S", 0.02)
    monkeypatch.setattr("jaxckpt_train.store.threads.MOMENT_S", 0.02)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stopping") / "run"
    with jct.StepManager(made) as manager:
        for step in (1, 2):
            manager.save(step, {"state": STATE, "more": OTHER})
            manager.wait()
    return made


@pytest.fixture(scope="module")
def set_aside(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `run` whose first step is set aside as damaged, although it is intact."""
    made = Path(shutil.copytree(run, tmp_path_factory.mktemp("set_aside") / "run"))
    with jct.StepManager(made) as manager:
        manager.own()
        manager._run.set_aside(manager._run.entries()[0], "it was damaged once")
    return made


def restore(manager: jct.StepManager) -> Any:
    restored = manager.restore({"state": None, "more": None})
    return restored["state"]


READERS: dict[str, Callable[[jct.StepManager], Any]] = {
    "restore": restore,
    "restore one": lambda manager: manager.restore({"state": STATE})["state"],
    "steps": lambda manager: manager.steps,
    "metadata": lambda manager: manager.metadata().step,
    "is_committed": lambda manager: manager.is_committed(2),
}


def stopped_at_each_call(
    run: Path, use: Callable[[jct.StepManager], Any], **more: Any
) -> Iterator[tuple[int, str | None]]:
    """For each call: its number, and the timeout error if the call does not return; None if no error was raised."""
    for number in range(1000):
        disk = StoppingBackend()
        manager = jct.StepManager(run, backend=disk, **more)
        disk.stop = number
        try:
            use(manager)
        except jct.CheckpointTimeoutError as error:
            yield number, str(error)
        else:
            if disk.calls <= number:
                return
            yield number, None
        finally:
            disk.go.set()
            manager.close()
    raise AssertionError("too many calls")


@pytest.mark.parametrize("use", READERS.values(), ids=READERS)
def test_reads_of_hung_disk_time_out(
    run: Path, use: Callable[[jct.StepManager], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = dict(stopped_at_each_call(run, use))
    assert len(ended) > 2
    late = {number: text for number, text in ended.items() if text is not None}
    assert len(late) >= len(ended) - 2, "closing a file is not waited for"
    assert all("no progress" in text for text in late.values()), late
    # The disk responds again, but the machine may be busy.
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", LONGEST_S)
    assert_same(restore(jct.StepManager(run)), jct.load(run / "step-0000000002"))
    gc.collect()


def test_fresh_start_on_hung_disk_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StoppingBackend()
    manager = jct.StepManager(tmp_path, backend=disk)  # type: ignore[arg-type]
    with monkeypatch.context() as patient:
        patient.setattr("jaxckpt_train.store.threads.GIVE_UP_S", LONGEST_S)
        manager.own()
        manager.check_fresh()
    disk.stop = disk.calls
    try:
        with pytest.raises(jct.CheckpointTimeoutError, match="no progress for"):
            manager.check_fresh()
    finally:
        disk.go.set()
        manager.close()


def test_metadata_of_damaged_step_times_out(run: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "run"))
    (damaged / "step-0000000002" / "manifest.json").write_text("{")

    def use(manager: jct.StepManager) -> None:
        with pytest.raises(jct.CorruptCheckpointError):
            manager.metadata(2)

    ended = dict(stopped_at_each_call(damaged, use))
    assert sum(text is None for text in ended.values()) <= 2, "closing a file is not waited for"


class BreakingBackend(StoppingBackend):
    """Fails to open files of these names, in this order, and then returns from no call."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = list(names)

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        if self._names and name.endswith(self._names[0]):
            self._names.pop(0)
            self.stop = self.stop if self._names else self.calls
            raise jct.StorageError(errno.EIO, "the connection broke", directory)
        return self.__getattr__("open")(directory, name, direct=direct)


def test_disk_that_fails_then_hangs_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restored = BreakingBackend("safetensors", "safetensors")  # a failed read is repeated
    loaded = BreakingBackend("safetensors", "COMMIT")
    monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _: loaded)
    try:
        with pytest.raises(jct.CheckpointTimeoutError, match="no progress for"):
            jct.StepManager(run, backend=restored).restore({"state": STATE})  # type: ignore[arg-type]
        with pytest.raises(jct.CheckpointTimeoutError, match="no progress for"):
            jct.load(run / "step-0000000002", STATE)
    finally:
        restored.go.set()
        loaded.go.set()


class LeaveError(Exception):
    """What the progress function raises after a request to leave."""


Progress = Callable[[int], None]


def metadata_within(manager: jct.StepManager, progress: Progress) -> jct.CheckpointMetadata:
    with polling(progress):
        return manager.metadata()


WITH_PROGRESS: dict[str, Callable[[jct.StepManager, Progress], Any]] = {
    "restore": lambda manager, progress: manager.restore({"state": None, "more": None}, progress=progress),
    "restore a set-aside step": lambda manager, progress: manager.restore({"more": None}, 1, progress=progress),
    "metadata": metadata_within,
}


@pytest.mark.parametrize("use", WITH_PROGRESS.values(), ids=WITH_PROGRESS)
def test_shutdown_request_ends_any_hung_read(
    set_aside: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[jct.StepManager, Progress], Any]
) -> None:
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", LONGEST_S)
    ended = 0
    for number in range(1000):
        disk = StoppingBackend()
        disk.stop = number

        def progress(done: int, disk: StoppingBackend = disk) -> None:
            if done == 0 and disk.calls > disk.stop:
                raise LeaveError

        try:
            use(jct.StepManager(set_aside, backend=disk), progress)  # type: ignore[arg-type]
        except LeaveError:
            ended += 1
        finally:
            disk.go.set()
        if disk.calls <= number:
            break
    assert number > 10
    assert ended >= number - 5, "only closing a file is not waited for"


def test_progress_error_ends_hung_load(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", LONGEST_S)
    for number in range(6):
        disk = StoppingBackend()
        disk.stop = number
        monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _, disk=disk: disk)

        def progress(done: int, disk: StoppingBackend = disk) -> None:
            if done == 0 and disk.calls > disk.stop:
                raise LeaveError

        try:
            with pytest.raises(LeaveError):
                jct.load_checkpointables(run / "step-0000000002", progress=progress)
        finally:
            disk.go.set()
