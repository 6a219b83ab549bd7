"""The saves that nobody has waited for yet: the end of the process finishes them, and a failure is no success."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from jaxckpt_train.exit_code import INTERRUPTED, call_at_end_of_child, code_of, end_with, is_child_over

if TYPE_CHECKING:
    from concurrent.futures import Future

_SLICE_S = 0.1  # how soon a signal is seen by who waits for a thread
_LAST_LINES_S = 0.2  # for a thread that was given up, whose save has ended: it may have to ask a disk, or only to end


class Save(Protocol):
    """What is known here of a save under way."""

    subject: str
    committed: Future[Any]

    def last_outcome(self) -> BaseException | None:
        """Wait for it as long as it gets any further; why it has not committed, which counts as seen then."""

    def wait_to_the_end(self) -> BaseException | None:
        """As `last_outcome`, but whether the outcome is seen is left to its caller."""


# Each change is one operation of the interpreter's own, so no lock could be left taken.
under_way: set[Save] = set()
given_up: dict[threading.Thread, int] = {}  # with the exit code of the process that does not wait for them
_given_up_saves: dict[Save, int] = {}  # the same, by those whose outcome nobody has seen
_late: set[Save] = set()  # those that failed, or were left, at the very end, and whose outcome nobody has seen
_threads: set[weakref.ref[threading.Thread]] = set()  # a WeakSet is no set of the interpreter's own
_code: int | None = None  # of the process, as far as it is known
# Whether exit functions may run that come after the wait: those registered before this was imported do, and all do if
# one of them imports it, since Python calls none that is registered then. It counts the main thread as ended by then.
_is_over = threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive()


def begin(save: Save, thread: threading.Thread) -> None:
    """Take note of a save before its thread starts."""
    call_at_end_of_child(finish)
    if not waits_for_itself():  # else a thread that saves again and again would hold up the end for ever
        under_way.add(save)
    _threads.add(weakref.ref(thread, _threads.discard))


def seen(save: Save) -> None:
    """It has committed, or somebody has seen why not: it need not be told at the end."""
    under_way.discard(save)
    _given_up_saves.pop(save, None)
    if save in _late:
        _late.discard(save)
        if not _late:
            end_with(_code)


def give_up(save: Save, thread: threading.Thread, exit_code: int) -> None:
    """Do not wait for it at the end, and end with this code unless it has committed by then."""
    under_way.discard(save)
    _given_up_saves[save] = given_up[thread] = exit_code


def is_over() -> bool:
    """Whether the end of the process may have come so far that nobody waits for a save that begins now."""
    return _is_over or is_child_over()


def _forget_saves() -> None:
    """A forked child does not wait for the saves of its parent, and does not end with their code."""
    global _code
    _code = None
    under_way.clear()
    given_up.clear()
    _given_up_saves.clear()
    _late.clear()
    _threads.clear()


def waits_for_itself() -> bool:
    """Whether what this thread begins now has to be waited for by itself: nobody else does at the end of the process.

    Those who wait at the end wait for what the thread of a save begins, before that save has ended.
    """
    return is_over() and weakref.ref(threading.current_thread()) not in _threads


def finish_late(save: Save) -> None:
    """Wait for one that begins when nobody else does any more. It may fail where its caller sees that, or does not."""
    try:
        why_not = save.wait_to_the_end()
    except BaseException as stop:  # of a signal handler: somebody wants to leave now
        end_with(code_of(stop))
        _tell_left(save, type(stop).__name__)
        _late.add(save)  # after it was told: it may commit all the same, or be waited for again
        raise
    if why_not is not None:
        _tell(f"saving {save.subject} failed:", why_not)
        _late.add(save)
        end_with(1)


def finish() -> None:
    """Finish what is under way when the script ends without having waited; a failure must not end as success."""
    global _is_over, _code
    _is_over = True
    code: int | None = INTERRUPTED  # wherever an interrupt lands
    try:
        code = _wait_for_all()
    except BaseException as stop:  # noqa: BLE001  # of a signal handler: somebody wants to leave now
        code = code_of(stop)
        _give_up_all(code, type(stop).__name__)
    finally:
        if code is not None:
            _code = code
            end_with(code)


def _wait_for_all() -> int | None:
    codes: set[int] = set()
    while left := list(under_way):  # what a save's own thread begins comes before that save has ended
        for save in left:
            error = save.last_outcome()
            if error is not None:
                codes.add(1)
                _tell_failed(save, error)
    codes |= _codes_of_given_up()
    for thread in _known_threads():
        if thread in given_up:
            if thread.is_alive():  # else it has ended, or was never started
                thread.join(0 if codes else _LAST_LINES_S)
            codes |= {given_up[thread]} if thread.is_alive() else set()
            continue
        while thread.is_alive():  # else it has ended, or its start was interrupted
            thread.join(_SLICE_S)  # one that still frees JAX arrays while the interpreter goes would abort the process
    return max(codes, default=None)


def _codes_of_given_up() -> set[int]:
    """The exit codes of saves that were given up and have not committed all the same."""
    codes = set()
    for save, code in list(_given_up_saves.items()):
        if not save.committed.done():
            codes.add(code)
        elif (error := save.committed.exception()) is not None:
            codes.add(code)
            _tell_failed(save, error)
    return codes


def _give_up_all(code: int, reason: str) -> None:
    for thread in _known_threads():  # also one that still frees, or deletes, after its save
        given_up[thread] = code
    _given_up_saves.update(dict.fromkeys(list(_given_up_saves), code))
    left = list(under_way)
    under_way.clear()  # before any of it is told: nobody waits again if that is interrupted too
    for save in left:
        _tell_left(save, reason)


def _known_threads() -> list[threading.Thread]:
    return [thread for each in list(_threads) if (thread := each()) is not None]


def _tell_left(save: Save, reason: str) -> None:
    """Tell of one that is not waited for any more."""
    if not save.committed.done():
        _tell(
            f"saving {save.subject} was given up at the end ({reason}); what is there of it is no checkpoint, "
            "and goes when this is saved again"
        )
    elif (error := save.committed.exception()) is not None:
        _tell_failed(save, error)


def _tell_failed(save: Save, error: BaseException) -> None:
    _tell(f"saving {save.subject} failed, and nobody asked for it:", error)


def _tell(message: str, error: BaseException | None = None) -> None:
    with contextlib.suppress(ValueError, OSError):  # of a stream that is closed
        print(f"jaxckpt_train: {message}", file=sys.stderr)
        if error is not None:
            traceback.print_exception(error)


# Twice: an interrupt that was held up by an exit function in C ends the next one before its first line.
atexit.register(finish)
atexit.register(finish)
os.register_at_fork(after_in_child=_forget_saves)
