"""The outcome of a save as a future: the save ends regardless of waiting threads and interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest

from jaxckpt_train import pending
from jaxckpt_train.pending import PendingSave, start_save

pytestmark = pytest.mark.timeout(60)
Ask = Callable[[futures.Future[Any]], object]


@contextlib.contextmanager
def interrupted_on_return(function: Any) -> Iterator[None]:
    """Raise KeyboardInterrupt once, as the function returns: a lock that it has acquired stays acquired."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "return":
            raise KeyboardInterrupt  # which ends the tracing
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt, TimeoutError):
            yield
    finally:
        sys.settrace(before)


def assert_ends(save: PendingSave[Any], go: threading.Event) -> None:
    go.set()
    assert save._ended.wait(20)
    assert save.wait(20) is True
    assert save._thread is not None
    save._thread.join(20)
    assert not save._thread.is_alive()
    seen_done = []
    waiting = threading.Thread(target=lambda: seen_done.extend(futures.wait([save.committed], 20).done), daemon=True)
    waiting.start()
    waiting.join(20)
    assert seen_done == [save.committed]


ASKING: list[Ask] = [
    lambda future: future.done(),
    lambda future: future.running(),
    lambda future: future.cancelled(),
    lambda future: future.cancel(),
    lambda future: future.result(0.001),
    lambda future: future.exception(0.001),
    lambda future: future.add_done_callback(repr),
    repr,
]


@pytest.mark.parametrize("ask", ASKING)
def test_interrupted_query_does_not_stop_the_save(ask: Ask) -> None:
    go = threading.Event()
    save = start_save("x", go.wait)
    with interrupted_on_return(threading.Condition.__enter__):
        ask(save.committed)
    assert_ends(save, go)


@pytest.mark.parametrize("function", [futures._base._AcquireFutures.__enter__, threading.Condition.__enter__])
@pytest.mark.parametrize(
    "ask", [lambda future: futures.wait([future], 0.001), lambda future: list(futures.as_completed([future], 0.001))]
)
def test_interrupted_wait_for_several_ends_no_save(ask: Ask, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "POLL_S", 0.01)  # how long it waits for a lock that is never released
    go = threading.Event()
    save = start_save("x", go.wait)
    with interrupted_on_return(function):
        ask(save.committed)
    assert_ends(save, go)


def once_waited_for(save: PendingSave[Any], call: Callable[[], object]) -> None:
    """Call it once a thread waits for the save by a function of `concurrent.futures`."""
    pause = threading.Event()

    def work() -> None:
        while not save.committed._waiters:
            pause.wait(0.01)
        call()

    threading.Thread(target=work, daemon=True).start()


WAITING = pytest.mark.parametrize("return_when", ["FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED"])


@WAITING
def test_wait_for_several_returns(return_when: str) -> None:
    gos = [threading.Event() for _ in range(3)]
    saves = [start_save("x", go.wait) for go in gos]
    once_waited_for(saves[2], lambda: [go.set() for go in gos[: 1 if return_when == "FIRST_COMPLETED" else 3]])
    done, not_done = futures.wait([save.committed for save in saves], 30, return_when)
    assert (len(done), len(not_done)) == ((1, 2) if return_when == "FIRST_COMPLETED" else (3, 0))
    for go in gos:
        go.set()
    assert {each.result(30) for each in futures.as_completed([save.committed for save in saves], 30)} == {True}


def test_wait_for_first_error_returns() -> None:
    go, never = threading.Event(), threading.Event()
    failing, other = start_save("x", lambda: 1 / (0 if go.wait() else 1)), start_save("y", never.wait)
    once_waited_for(failing, go.set)
    done, _ = futures.wait([failing.committed, other.committed], 30, "FIRST_EXCEPTION")
    assert done == {failing.committed}
    assert isinstance(failing.outcome(30), ZeroDivisionError)
    assert_ends(other, never)


def test_wait_returns_without_a_free_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "jaxckpt-note":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    go = threading.Event()
    save = start_save("x", go.wait)
    once_waited_for(save, go.set)
    assert list(futures.as_completed([save.committed], 30)) == [save.committed]


@pytest.mark.parametrize(("divisor", "expected"), [(1, 1.0), (0, ZeroDivisionError)])
def test_a_coroutine_may_wait_for_it(divisor: int, expected: Any) -> None:
    go = threading.Event()

    async def wait() -> object:
        save = start_save("x", lambda: go.wait() / divisor)
        wrapped = asyncio.wrap_future(save.committed)
        go.set()
        (found,) = await asyncio.gather(wrapped, return_exceptions=True)
        return found

    found = asyncio.run(wait())
    assert found == expected or isinstance(found, expected)


def test_callbacks_are_called_once_in_order(caplog: pytest.LogCaptureFixture) -> None:
    go, called = threading.Event(), list[object]()
    save = start_save("x", go.wait)

    def note(name: str) -> Callable[[futures.Future[bool]], None]:
        return lambda future: called.append((name, future.result(0), threading.current_thread().name))

    save.committed.add_done_callback(note("first"))
    save.committed.add_done_callback(lambda _: 1 / 0)
    save.committed.add_done_callback(lambda future: future.add_done_callback(note("inner")))
    save.committed.add_done_callback(note("last"))
    assert not called
    with caplog.at_level(logging.ERROR, "jaxckpt_train"):
        assert_ends(save, go)
    assert called == [(name, True, "jaxckpt-save") for name in ("first", "inner", "last")]
    assert "ZeroDivisionError" in caplog.text
    save.committed.add_done_callback(note("late"))
    assert called[3:] == [("late", True, threading.current_thread().name)]
