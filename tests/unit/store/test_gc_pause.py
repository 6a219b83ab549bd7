"""The quiet collector: on again however the moment ends, left as the user had it, and on in a forked child."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import threading
import weakref
from collections.abc import Iterator

import pytest

from jaxckpt_train.store import threads as quiet_gc
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
    """Whether Python collects by itself now."""
    return gc.isenabled() and gc.get_threshold()[0] > 0


class Cycle:
    def __init__(self) -> None:
        self.me = self


def made_cycles(count: int) -> int:
    """How many of some cycles were collected by the time the last is made."""
    return count - sum(reference() is not None for reference in [weakref.ref(Cycle()) for _ in range(count)])


def test_nothing_is_collected_within_and_all_is_afterwards() -> None:
    most = 20 * gc.get_threshold()[0]
    with paused_collection():
        assert not is_on()
        assert made_cycles(most) == 0
    assert is_on()
    assert made_cycles(most) > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_it_is_on_again_after_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), paused_collection():
        assert not is_on()
        raise error
    assert is_on()
    with paused_collection():
        assert not is_on(), "and can be paused again"


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
def test_who_had_it_off_keeps_it_off(fails: bool) -> None:
    gc.disable()
    if fails:
        with pytest.raises(ValueError, match="within"), paused_collection():
            raise ValueError("within")
    with paused_collection():
        assert not is_on()
    assert not is_on()


def test_who_switches_it_off_or_sets_it_otherwise_meanwhile_finds_it_so() -> None:
    with paused_collection():
        gc.disable()
    assert not gc.isenabled()
    gc.enable()
    before = gc.get_threshold()
    with paused_collection():
        gc.set_threshold(123)
    assert gc.get_threshold()[0] == 123
    gc.set_threshold(0)
    with paused_collection():
        pass
    assert gc.get_threshold()[0] == 0
    gc.set_threshold(*before)


@pytest.mark.parametrize("ends_first", ["first", "second"])
def test_of_two_threads_one_that_paused_ends_pause(ends_first: str) -> None:
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


def test_many_threads_leave_it_on() -> None:
    def work() -> None:
        for _ in range(500):
            with paused_collection(), paused_collection():
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_on()
    assert quiet_gc._current() is None


PAUSE = inspect.unwrap(paused_collection)


def test_interrupt_anywhere_leaves_it_on_after_next_moment() -> None:
    for number in itertools.count(1):
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupt_at(
                number, PAUSE, quiet_gc._Pause.begin, quiet_gc._Pause.end, quiet_gc._restore_threshold
            ) as seen,
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
