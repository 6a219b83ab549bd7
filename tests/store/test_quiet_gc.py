"""The quiet collector: on again however the moment ends, left as the user had it, and on in a forked child."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from jaxckpt_train.store import quiet_gc
from jaxckpt_train.store.quiet_gc import paused_collection

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.me = self


def made_cycles(count: int) -> int:
    """How many of some cycles were collected by the time the last is made."""
    return count - sum(reference() is not None for reference in [weakref.ref(Cycle()) for _ in range(count)])


def test_nothing_is_collected_within_and_all_is_afterwards() -> None:
    most = 20 * gc.get_threshold()[0]
    with paused_collection():
        assert not gc.isenabled()
        assert made_cycles(most) == 0
    assert gc.isenabled()
    assert made_cycles(most) > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_it_is_on_again_after_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), paused_collection():
        assert not gc.isenabled()
        raise error
    assert gc.isenabled()
    with paused_collection():
        assert not gc.isenabled(), "and can be paused again"


def test_a_pause_within_a_pause_does_not_end_the_outer_one() -> None:
    with paused_collection():
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        with pytest.raises(ValueError, match="inner"), paused_collection():
            raise ValueError("inner")
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_who_had_it_off_keeps_it_off(fails: bool) -> None:
    gc.disable()
    if fails:
        with pytest.raises(ValueError, match="within"), paused_collection():
            raise ValueError("within")
    with paused_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("ends_first", ["first", "second"])
def test_of_two_threads_the_one_that_paused_ends_the_pause(ends_first: str) -> None:
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
            assert not gc.isenabled()
    assert gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


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
    assert gc.isenabled()
    assert not quiet_gc._pausing.locked()


FORKED = """
import gc, os, sys, warnings
from jaxckpt_train.store.quiet_gc import paused_collection
warnings.simplefilter("ignore")

def child():
    assert gc.isenabled() is (sys.argv[1] != "off"), gc.isenabled()
    with paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled() is (sys.argv[1] != "off"), gc.isenabled()

def forked():
    number = os.fork()
    if number == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

if sys.argv[1] == "paused":
    with paused_collection():
        status = forked()
        assert not gc.isenabled()
else:
    if sys.argv[1] == "off":
        gc.disable()
    status = forked()
assert gc.isenabled() is (sys.argv[1] != "off")
sys.exit(status)
"""


@pytest.mark.parametrize("parent", ["paused", "on", "off"])
def test_a_forked_child_has_it_as_the_user_wants_it(run_python: Any, parent: str) -> None:
    run_python(FORKED, parent, check=True, timeout_s=60)
