"""The pause of the garbage collector ends in every case and keeps the settings of the user."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import threading
import weakref
from collections.abc import Iterator

import pytest

from jaxckpt_train.store import threads
from jaxckpt_train.store.threads import paused_collection
from tests.support.interrupts import interrupt_at

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    before = gc.get_threshold()
    assert gc.isenabled()
    assert before[0]
    yield
    gc.enable()
    assert gc.get_threshold() == before


def is_on() -> bool:
    """Return whether automatic collection is enabled now."""
    return gc.isenabled() and gc.get_threshold()[0] > 0


class Cycle:
    def __init__(self) -> None:
        self.me = self


def made_cycles(count: int) -> int:
    """Make reference cycles and return how many of them were collected meanwhile."""
    return count - sum(reference() is not None for reference in [weakref.ref(Cycle()) for _ in range(count)])


def test_collection_is_paused_only_within_the_block() -> None:
    most = 20 * gc.get_threshold()[0]
    with paused_collection():
        assert not is_on()
        assert made_cycles(most) == 0
    assert is_on()
    assert made_cycles(most) > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_collector_is_on_again_after_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), paused_collection():
        assert not is_on()
        raise error
    assert is_on()
    with paused_collection():
        assert not is_on(), "it can be paused again"


def test_pause_within_pause_does_not_end_outer_one() -> None:
    with paused_collection():
        with paused_collection():
            assert not is_on()
        assert not is_on()
        with pytest.raises(ValueError, match="inner"), paused_collection():
            raise ValueError("inner")
        assert not is_on()
    assert is_on()


@pytest.mark.parametrize("fails", [False, True])
def test_disabled_collector_stays_disabled(fails: bool) -> None:
    gc.disable()
    if fails:
        with pytest.raises(ValueError, match="within"), paused_collection():
            raise ValueError("within")
    with paused_collection():
        assert not is_on()
    assert not is_on()


def test_changes_during_the_pause_are_kept() -> None:
    with paused_collection():
        gc.disable()
    assert not gc.isenabled()
    gc.enable()
    before = gc.get_threshold()
    with paused_collection():
        gc.set_threshold(123)
    assert gc.get_threshold()[0] == 123
    gc.set_threshold(*before)


@pytest.mark.parametrize("ends_first", ["first", "second"])
def test_pause_ends_with_the_thread_that_began_it(ends_first: str) -> None:
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        with paused_collection():
            entered.set()
            leave.wait(30)
        left.set()

    thread = threading.Thread(target=other)
    with paused_collection():
        thread.start()
        assert entered.wait(30)
        if ends_first == "second":
            leave.set()
            assert left.wait(30)
            assert not is_on()
    assert is_on()
    leave.set()
    thread.join()
    assert is_on()


def test_many_threads_leave_the_collector_on() -> None:
    def work() -> None:
        for _ in range(500):
            with paused_collection(), paused_collection():
                pass

    running = [threading.Thread(target=work) for _ in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert is_on()
    assert threads._current() is None


PAUSE = inspect.unwrap(paused_collection)


def test_interrupt_anywhere_does_not_leave_collector_off() -> None:
    for number in itertools.count(1):
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupt_at(number, PAUSE, threads._Pause.begin, threads._Pause.end, threads._restore_threshold) as seen,
            paused_collection(),
        ):
            pass
        with paused_collection():
            assert not is_on()
        assert is_on()
        if seen[0] < number:
            break
    assert number > 10


def test_threshold_of_zero_that_user_set_stays() -> None:
    before = gc.get_threshold()
    with paused_collection():
        pass
    gc.set_threshold(0, *before[1:])
    try:
        with paused_collection():
            pass
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
