"""Worker threads: order, errors, interrupts, forks, and work while the interpreter exits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import sys
import threading
import weakref
from typing import Any

import pytest

from jaxckpt_train.store.threads import NICENESS, Workers, paused_collection, shared_workers

BUSY = bytes(16 << 20)  # hashing it takes a while, in which other threads run


def test_every_item_is_worked_on_once() -> None:
    done: list[int] = []
    Workers(3, "test").run_all(done.append, range(1000))
    assert sorted(done) == list(range(1000))


def test_nothing_to_do_is_done_at_once() -> None:
    Workers(1, "test").run_all(pytest.fail, [])


def test_a_single_item_needs_no_other_thread_but_where_signals_are_handled() -> None:
    seen: list[threading.Thread] = []

    def run_one() -> None:
        Workers(1, "test").run_all(lambda _: seen.append(threading.current_thread()), [0])

    run_one()
    thread = threading.Thread(target=run_one)
    thread.start()
    thread.join()
    assert threading.main_thread() not in seen
    assert seen[1:] == [thread]


def test_as_many_items_run_at_once_as_there_are_threads() -> None:
    together = threading.Barrier(4)
    Workers(4, "test").run_all(lambda _: together.wait(10), range(8))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("granted", [0, 1])
def test_refused_threads_make_it_slower_and_are_asked_for_again(monkeypatch: pytest.MonkeyPatch, granted: int) -> None:
    """As at the end of the interpreter, or in a container with too few processes."""
    start, started = threading.Thread.start, list[str]()

    def refuse(self: threading.Thread) -> None:
        if len(started) >= granted:
            raise RuntimeError("can't start new thread")
        started.append(self.name)
        start(self)

    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        workers = Workers(3, f"refused-{granted}")
        workers.run_all(done.append, range(100))
        assert sorted(done) == list(range(100))
        with contextlib.closing(workers.run_each(lambda item: item, range(100))) as results:
            assert sorted(results) == list(range(100))
    assert len(started) == granted
    together = threading.Barrier(3)
    workers.run_all(lambda _: together.wait(10), range(3))  # type: ignore[arg-type, return-value]
    assert sum(thread.name.startswith(f"refused-{granted}-") for thread in threading.enumerate()) == 3


@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt("first"), SystemExit("first")])
def test_the_first_error_is_raised_and_nothing_begins_after_it(error: BaseException) -> None:
    workers, begun = Workers(1, "test"), list[int]()

    def work(item: int) -> None:
        begun.append(item)
        if item >= 3:
            raise error if item == 3 else ValueError("second")

    with pytest.raises(type(error), match="first"):
        workers.run_all(work, range(100))
    assert begun == [0, 1, 2, 3]
    workers.run_all(begun.append, [4, 5])
    assert begun == [0, 1, 2, 3, 4, 5]


def test_items_that_run_already_end_before_the_error_is_raised() -> None:
    failed, ended = threading.Event(), list[str]()

    def work(item: str) -> None:
        if item == "fails":
            together.wait()
            failed.set()
            raise ValueError("one of two")
        together.wait()
        failed.wait()
        ended.append(item)

    together = threading.Barrier(2)
    with pytest.raises(ValueError, match="one of two"):
        Workers(2, "test").run_all(work, ["fails", "goes on"])
    assert ended == ["goes on"]


def test_an_interrupt_waits_for_what_runs_and_begins_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the caller would close files that a thread still writes to."""
    handled, ended = queue.SimpleQueue[None](), list[int]()

    def interrupt(*_: Any) -> None:
        handled.put(None)
        raise KeyboardInterrupt("by hand")

    def work(item: int) -> None:
        if item == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            handled.get()
        for _ in range(1000):
            pass
        ended.append(item)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        # A collection would run callbacks of others (Hypothesis has one), and an interrupt that lands there is lost.
        with pytest.raises(KeyboardInterrupt, match="by hand"), paused_collection():
            Workers(1, "test").run_all(work, range(5000))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended[0] == 0
    assert len(ended) < 5000


def test_each_result_comes_once() -> None:
    assert sorted(Workers(3, "test").run_each(lambda item: item * 2, range(1000))) == list(range(0, 2000, 2))
    assert list(Workers(1, "test").run_each(str, [])) == []
    assert list(Workers(1, "test").run_each(lambda item: None, [1, 2])) == [None, None]


def test_results_come_while_others_are_worked_on() -> None:
    go, results = threading.Event(), list[int]()

    def work(item: int) -> int:
        if item == 1:
            assert go.wait(30), "the first result came only after the second"
        return item

    for result in Workers(1, "test").run_each(work, [0, 1]):
        results.append(result)
        go.set()
    assert results == [0, 1]


@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt("first")])
def test_results_before_the_first_error_come_and_then_it_is_raised(error: BaseException) -> None:
    begun, results = list[int](), list[int]()

    def work(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise error
        return item

    workers = Workers(1, "test")
    with pytest.raises(type(error), match="first"):
        for result in workers.run_each(work, range(100)):
            results.append(result)
    assert (results, begun) == ([0, 1, 2], [0, 1, 2, 3])
    assert list(workers.run_each(str, [7])) == ["7"]


def test_giving_up_sets_free_what_the_running_items_wait_for() -> None:
    waits, free, ended = threading.Event(), threading.Event(), list[int]()

    def work(item: int) -> int:
        if item == 1:
            waits.set()
            assert free.wait(30), "not set free"
            ended.append(item)
        return item

    with contextlib.closing(Workers(2, "test").run_each(work, [0, 1, 2], give_up=free.set)) as results:
        next(results)
        assert waits.wait(30)
    assert ended == [1]


def test_error_is_raised_after_running_items_have_ended() -> None:
    ended, together = list[str](), threading.Barrier(2)

    def work(item: str) -> None:
        together.wait(30)
        if item == "fails":
            raise ValueError("one of two")
        hashlib.sha256(BUSY)
        ended.append(item)

    with pytest.raises(ValueError, match="one of two"):
        list(Workers(2, "test").run_each(work, ["fails", "goes on"]))
    assert ended == ["goes on"]


class Running:
    """Work whose second item runs until the consumer is about to leave, and some time longer."""

    def __init__(self) -> None:
        self.begun, self.ended = list[int](), list[int]()
        self.second_runs, self.leaving = threading.Event(), threading.Event()

    def __call__(self, item: int) -> int:
        self.begun.append(item)
        if item == 1:
            self.second_runs.set()
            assert self.leaving.wait(30)
            hashlib.sha256(BUSY)
        self.ended.append(item)
        return item

    def leave(self) -> None:
        assert self.second_runs.wait(30)
        self.leaving.set()


def test_closing_early_waits_for_what_runs_and_begins_nothing_more() -> None:
    work, workers = Running(), Workers(1, "test")
    with contextlib.closing(workers.run_each(work, range(50))) as results:
        for _ in results:
            work.leave()
            break
    assert work.begun == work.ended == [0, 1]
    assert list(workers.run_each(str, [7])) == ["7"]
    assert work.begun == [0, 1]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_error_of_consumer_waits_for_what_runs_too(error: type[BaseException]) -> None:
    work = Running()
    with pytest.raises(error), contextlib.closing(Workers(1, "test").run_each(work, range(50))) as results:
        for _ in results:
            work.leave()
            raise error
    assert work.begun == work.ended == [0, 1]


def test_an_interrupt_while_waiting_for_a_result_waits_for_what_runs() -> None:
    handled, begun, ended = queue.SimpleQueue[None](), list[int](), list[int]()

    def interrupt(*_: Any) -> None:
        handled.put(None)
        raise KeyboardInterrupt("by hand")

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            handled.get()
        hashlib.sha256(BUSY)
        ended.append(item)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        # A collection would run callbacks of others (Hypothesis has one), and an interrupt that lands there is lost.
        with pytest.raises(KeyboardInterrupt, match="by hand"), paused_collection():
            list(Workers(1, "test").run_each(work, range(5000)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == ended
    assert 0 < len(ended) < 5000


@pytest.mark.timeout(60)
def test_interrupt_right_after_last_result_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What says that there are no more results comes only once."""
    take = Workers._next

    def interrupted(self: Workers, results: Any, moved: Any) -> Any:
        found = take(self, results, moved)
        if found is None:
            raise KeyboardInterrupt("by hand")
        return found

    monkeypatch.setattr(Workers, "_next", interrupted)
    found = list[int]()
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        found.extend(Workers(2, "test").run_each(abs, range(5)))
    assert sorted(found) == list(range(5))


class Result:
    """Something whose death shows."""


def test_a_result_is_the_consumer_s_alone() -> None:
    """Dropping it frees memory that other items may wait for."""
    seen = 0
    for result in Workers(2, "test").run_each(lambda _: Result(), range(50)):
        reference = weakref.ref(result)
        del result
        assert reference() is None
        seen += 1
    assert seen == 50


def test_results_that_nobody_takes_are_dropped_while_items_still_run() -> None:
    """An item may wait for memory that a result holds which the consumer will never see."""
    references, freed, second_waits = list[Any](), threading.Event(), threading.Event()

    def work(item: int) -> Result | None:
        if item == 1:
            result = Result()
            references.append(weakref.finalize(result, freed.set))
            return result
        if item == 2:
            second_waits.set()
            assert freed.wait(30)
        return None

    with contextlib.closing(Workers(1, "test").run_each(work, range(3))) as results:
        assert next(results) is None
        assert second_waits.wait(30)
    assert freed.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is the whole process's")
def test_polite_threads_let_others_go_first() -> None:
    def niceness(_: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    usual = niceness(0)
    if usual >= NICENESS:
        pytest.skip("these tests run at a low priority themselves")
    assert list(shared_workers(2, "test-usual").run_each(niceness, range(4))) == [usual] * 4
    assert list(shared_workers(2, "test-polite", polite=True).run_each(niceness, range(4))) == [NICENESS] * 4
    assert niceness(0) == usual


def test_workers_are_shared_by_purpose() -> None:
    one = shared_workers(2, "test-purpose")
    assert shared_workers(2, "test-purpose") is one
    assert shared_workers(3, "test-purpose") is not one
