"""A save under way: its futures, its errors, and the end of the script."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train import pending as pending_module
from jaxckpt_train.pending import PendingSave, SaveSlot, start_save

T = TypeVar("T")


def under_way() -> set[pending_module.Save]:
    return pending_module.under_way


def started(work: Callable[[], T]) -> PendingSave[T]:
    return start_save("x", work)


def test_wait_returns_the_result_of_the_work() -> None:
    release = threading.Event()

    def work() -> str:
        release.wait()
        return threading.current_thread().name

    save = started(work)
    assert not save.done()
    assert save.staged.done()
    assert save in under_way()
    with pytest.raises(jct.CheckpointTimeoutError, match=r"saving x: .*after 0.01 s"):
        save.wait(timeout_s=0.01)
    with pytest.raises(jct.CheckpointTimeoutError, match=r"saving x: .*after 0.01 s"):
        save.outcome(timeout_s=0.01)
    assert save in under_way()
    release.set()
    assert save.wait() == "jaxckpt-save"
    assert save.outcome() is None
    assert save.done()


def failing(error: BaseException) -> PendingSave[None]:
    def work() -> None:
        raise error

    return started(work)


@pytest.mark.parametrize(
    "error", [ValueError("broken"), TimeoutError("of its own"), KeyboardInterrupt(), OSError(28, "full")]
)
def test_wait_raises_original_error_with_a_note(error: BaseException) -> None:
    save = failing(error)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            save.wait(timeout_s=60)
        assert caught.value is error
    (note,) = error.__notes__
    assert "saving x" in note
    assert save not in under_way()


@pytest.mark.parametrize(
    "ending", [SystemExit(0), SystemExit(), SystemExit(256), GeneratorExit(), StopIteration(3), StopAsyncIteration()]
)
def test_system_exit_of_work_is_raised_as_error(ending: BaseException) -> None:
    save = failing(ending)
    with pytest.raises(jct.CheckpointError, match=r"saving x: .*raised") as caught:
        save.wait(timeout_s=60)
    assert caught.value.__cause__ is ending
    assert save.committed.exception() is caught.value


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


def test_error_that_takes_no_note_is_raised_anyway() -> None:
    error = FrozenError(3)
    assert failing(error).outcome(timeout_s=60) is error


class UnshownError(StopIteration):
    """An error that cannot be shown, like one that holds a donated array."""

    def __repr__(self) -> str:
        raise RuntimeError("Array has been deleted")


class UnnotedError(Exception):
    def add_note(self, note: str, /) -> None:
        raise RuntimeError(note)


def test_unprintable_error_is_reported() -> None:
    error = UnshownError()
    outcome = failing(error).outcome(timeout_s=60)
    assert re.search("saving x: .*UnshownError", str(outcome))
    assert outcome is not None
    assert outcome.__cause__ is error
    unnoted = UnnotedError()
    assert failing(unnoted).outcome(timeout_s=60) is unnoted


def test_unretrieved_error_stays_registered_until_retrieved() -> None:
    error = ValueError("broken")
    save = failing(error)
    assert save._ended.wait(60)
    assert save in under_way()
    assert save.outcome() is error
    assert save not in under_way()


@pytest.mark.parametrize("ask", ["exception", "result"])
def test_error_is_retrieved_through_the_future(ask: str) -> None:
    error = ValueError("broken")
    save = failing(error)
    if ask == "exception":
        assert save.committed.exception(60) is error
    else:
        with pytest.raises(ValueError, match="broken") as caught:
            save.committed.result(60)
        assert caught.value is error
    assert save not in under_way()


def test_timed_out_wait_does_not_retrieve_the_error() -> None:
    go = threading.Event()

    def work() -> None:
        go.wait(60)
        raise ValueError("broken")

    save = started(work)
    with pytest.raises(TimeoutError):
        save.committed.result(0.01)
    go.set()
    assert save._ended.wait(60)
    assert save in under_way()
    assert save.outcome() is not None


def test_failed_save_holds_no_reference_to_state() -> None:
    class State:
        pass

    def inner(state: State) -> None:
        parts = [state]
        try:
            raise ValueError("first")
        except ValueError as error:
            raise OSError(28, f"{len(parts)} part") from error

    state = State()
    reference = weakref.ref(state)
    save = started(functools.partial(inner, state))
    del state
    assert isinstance(save.outcome(60), OSError)
    assert reference() is None


def test_committed_save_needs_no_retrieval() -> None:
    save = started(lambda: 3)
    assert save.committed.result(60) == 3
    for thread in threading.enumerate():
        if thread.name == "jaxckpt-save" and thread.is_alive():
            thread.join()  # it forgets the save right after it sets the result
    assert save not in under_way()


class Held:
    """Writes its files once `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            (await directory.await_creation() / "file").write_text("x")
            assert self.go.wait(60)

        return write()

    async def load(self, directory: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("reads", ["load", "load_checkpointables", "metadata", "verify"])
@pytest.mark.parametrize("before", [False, True])
def test_reads_wait_for_save_of_same_path(tmp_path: Path, reads: str, before: bool) -> None:
    held, path = Held(), tmp_path / "c"
    if before:
        jct.save(path, {"w": np.zeros(2)})
    both = {"state": {"w": np.ones(3)}, "held": held}
    pending = jct.save_checkpointables_async(path, both, overwrite=before)
    other = jct.save_async(tmp_path / "other", {"w": np.zeros(1)})
    timer = threading.Timer(0.3, held.go.set)
    timer.start()
    if reads == "load":
        assert jct.load(path)["w"].tolist() == [1, 1, 1]
    elif reads == "load_checkpointables":
        assert jct.load_checkpointables(path, {"state": {"w": np.zeros(3)}})["state"]["w"].tolist() == [1, 1, 1]
    elif reads == "metadata":
        assert jct.metadata(path).checkpointables["state"].bytes == 24
    else:
        assert jct.verify(path).ok
    assert pending.done()
    timer.join()
    other.wait()


def test_load_does_not_raise_failed_save(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"w": np.zeros(2)})

    class Fails(Held):
        async def save(self, directory: Any) -> Any:
            async def write() -> None:
                raise OSError("a disk")

            return write()

    pending = jct.save_checkpointables_async(tmp_path / "c", {"state": Fails()}, overwrite=True)
    assert jct.load(tmp_path / "c")["w"].tolist() == [0, 0]
    with pytest.raises(OSError, match="a disk"):
        pending.wait()


@pytest.mark.parametrize("read", [jct.load, jct.metadata, jct.verify])
def test_callback_may_wait_for_another_thread_that_reads(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    held, found = Held(), list[Any]()
    with ThreadPoolExecutor(1) as others:
        pending = jct.save_checkpointables_async(tmp_path / "c", {"state": {"w": np.zeros(2)}, "held": held})
        pending.committed.add_done_callback(lambda _: found.append(others.submit(read, tmp_path / "c").result(60)))
        held.go.set()
        pending.wait()
    assert len(found) == 1


def test_waits_are_logged_at_growing_distances(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "jaxckpt_train")
    slot = SaveSlot("wait", 60.0, "skip")
    monkeypatch.setattr(slot, "settle", lambda *_: None)
    go = threading.Event()
    slot.begun(start_save("step 1", go.wait))
    for step in range(2, 13):
        slot.wait_until_free(step, False, None)
    go.set()
    waits = [record.args for record in caplog.records if "waits" in record.msg]
    assert [args[0] for args in waits if isinstance(args, tuple)] == [2, 3, 5, 9]
