"""Worker threads: results, errors, interrupts, and priorities."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jaxckpt_train.store.threads import NICENESS, Workers, interruptible, paused_collection, shared_workers

BUSY = bytes(16 << 20)  # hashing it takes a while, in which other threads run


def test_every_item_is_worked_on_once() -> None:
    done: list[int] = []
    Workers(3, "test").run_all(done.append, range(1000))
    assert sorted(done) == list(range(1000))


def test_nothing_to_do_is_done_at_once() -> None:
    Workers(1, "test").run_all(pytest.fail, [])


def test_single_item_uses_caller_except_on_main_thread() -> None:
    seen: list[threading.Thread] = []

    def run_one() -> None:
        Workers(1, "test").run_all(lambda _: seen.append(threading.current_thread()), [0])

    run_one()
    thread = threading.Thread(target=run_one)
    thread.start()
    thread.join()
    assert threading.main_thread() not in seen
    assert seen[1:] == [thread]


def test_all_threads_work_at_once() -> None:
    together = threading.Barrier(4)
    Workers(4, "test").run_all(lambda _: together.wait(10), range(8))  # type: ignore[arg-type]


@pytest.mark.parametrize("granted", [0, 1])
def test_refused_threads_are_requested_again_later(monkeypatch: pytest.MonkeyPatch, granted: int) -> None:
    """Threads are refused while the interpreter exits, or in a container with a limit on processes."""
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
    workers.run_all(lambda _: together.wait(10), range(3))  # type: ignore[arg-type]
    assert sum(thread.name.startswith(f"refused-{granted}-") for thread in threading.enumerate()) == 3


@pytest.mark.parametrize("error", [ValueError("first"), KeyboardInterrupt("first"), SystemExit("first")])
def test_first_error_is_raised_and_stops_new_items(error: BaseException) -> None:
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


RunItems = Callable[[Workers, Callable[[Any], object], Sequence[object]], object]


def exhaust(workers: Workers, work: Callable[[Any], object], items: Sequence[object]) -> None:
    """Run the items by `run_each`, and take all results."""
    for _ in workers.run_each(work, items):
        pass


both_ways = pytest.mark.parametrize("run", [Workers.run_all, exhaust], ids=["run_all", "run_each"])


@both_ways
def test_error_is_raised_after_running_items_have_ended(run: RunItems) -> None:
    failed, ended, together = threading.Event(), list[str](), threading.Barrier(2)

    def work(item: str) -> None:
        together.wait(30)
        if item == "fails":
            failed.set()
            raise ValueError("one of two")
        assert failed.wait(30)
        hashlib.sha256(BUSY)
        ended.append(item)

    with pytest.raises(ValueError, match="one of two"):
        run(Workers(2, "test"), work, ["fails", "goes on"])
    assert ended == ["goes on"]


@both_ways
def test_interrupt_waits_for_running_items(run: RunItems) -> None:
    """Otherwise the caller would close files that a thread still writes to."""
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
        # A collection could run callbacks (Hypothesis has one), and an interrupt during a callback is lost.
        with pytest.raises(KeyboardInterrupt, match="by hand"), paused_collection():
            run(Workers(1, "test"), work, range(5000))
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == ended
    assert 0 < len(ended) < 5000


def test_each_result_comes_once() -> None:
    assert sorted(Workers(3, "test").run_each(lambda item: item * 2, range(1000))) == list(range(0, 2000, 2))
    assert list(Workers(1, "test").run_each(str, [])) == []
    assert list(Workers(1, "test").run_each(lambda item: None, [1, 2])) == [None, None]


def test_results_come_while_other_items_run() -> None:
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
def test_results_before_the_first_error_are_delivered(error: BaseException) -> None:
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


def test_giving_up_releases_waiting_items() -> None:
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


class Running:
    """Work whose second item ends some time after the consumer leaves."""

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


def test_closing_early_waits_for_running_items() -> None:
    work, workers = Running(), Workers(1, "test")
    with contextlib.closing(workers.run_each(work, range(50))) as results:
        for _ in results:
            work.leave()
            break
    assert work.begun == work.ended == [0, 1]
    assert list(workers.run_each(str, [7])) == ["7"]
    assert work.begun == [0, 1]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_consumer_error_waits_for_running_items(error: type[BaseException]) -> None:
    work = Running()
    with pytest.raises(error), contextlib.closing(Workers(1, "test").run_each(work, range(50))) as results:
        for _ in results:
            work.leave()
            raise error
    assert work.begun == work.ended == [0, 1]


@pytest.mark.timeout(60)
def test_interrupt_right_after_last_result_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker of the last result is delivered only once."""
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
    """An object that supports weak references."""


def test_workers_keep_no_reference_to_results() -> None:
    """The consumer frees memory by dropping a result, and other items may wait for that memory."""
    seen = 0
    for result in Workers(2, "test").run_each(lambda _: Result(), range(50)):
        reference = weakref.ref(result)
        del result
        assert reference() is None
        seen += 1
    assert seen == 50


def test_untaken_results_are_dropped_while_items_run() -> None:
    """An item may wait for memory held by a result that the consumer never takes."""
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


@pytest.mark.skipif(sys.platform != "linux", reason="on other systems a priority applies to the whole process")
def test_polite_threads_run_at_low_priority() -> None:
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


@pytest.mark.parametrize("is_threadless", [False, True])
def test_interrupt_check_ends_the_work(is_threadless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, found = Workers(2, "test"), list[int]()
    if is_threadless:
        monkeypatch.setattr(pool, "_start_missing", lambda: False)

    def check() -> None:
        if found:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), interruptible(check):
        for result in pool.run_each(abs, range(100)):
            found.append(result)
    assert len(found) == 1
    with interruptible(check):
        pool.run_all(found.append, range(3))  # writes are not interrupted
    assert len(found) == 4
