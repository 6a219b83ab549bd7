"""A save under way in the background: its futures, its errors, and who waits for it.

The outcome of a save as a future: no lock that an interrupt may leave taken keeps the save's thread from ending.

The saves that nobody has waited for yet: the end of the process finishes them, and a failure is no success.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar, cast

from jaxckpt_train._validation import time_limit
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, free_frames, is_success
from jaxckpt_train.exit_code import INTERRUPTED, call_at_end_of_child, code_of, end_with, is_child_over
from jaxckpt_train.store.threads import LOOK_S, Latch, Mailbox

_SLICE_S = 0.1  # how soon a signal is seen by who waits for a thread
_LAST_LINES_S = 0.2  # for a thread that was given up, whose save has ended: it may have to ask a disk, or only to end
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
T = TypeVar("T")
_FINISHED = "FINISHED"  # as `concurrent.futures` calls it
_log = logging.getLogger("jaxckpt_train")
# A disk that does not answer for so long is not waited for at the end of a script, or of a run.
LAST_PATIENCE_S = 600.0
SLICE_S = 0.1  # how soon a request to leave is seen by who waits


class Save(Protocol):
    """What is known here of a save under way."""

    subject: str
    committed: Future[Any]

    def last_outcome(self) -> BaseException | None:
        """Wait for it as long as it gets any further; why it has not committed, which counts as seen then."""

    def wait_to_the_end(self) -> BaseException | None:
        """As `last_outcome`, but whether the outcome is seen is left to its caller."""


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


class SaveFuture(Future[T]):
    """A future that says when its error was seen, so that it need not be told again. Nothing here waits for a lock.

    `concurrent.futures.wait` and `as_completed` take that of the future, and wait for an event that has one too. A
    KeyboardInterrupt may leave either taken. So who sets the outcome waits for the first for a moment at most, and lets
    another thread set the events.

    Args:
        seen: called when somebody was handed the error, or that there is none.
    """

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self._seen = seen
        self._settled = Latch()
        self._calls: list[deque[Callable[[Future[T]], object]]] = []  # whoever takes one out of its deque calls it
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def __repr__(self) -> str:
        """As of any future."""
        return f"<{type(self).__name__} at {id(self):#x} state={'finished' if self.done() else 'running'}>"

    def done(self) -> bool:
        """As of any future."""
        return self._settled.is_open()

    def running(self) -> bool:
        """As of any future."""
        return not self.done()

    def cancelled(self) -> bool:
        """It never is."""
        return False

    def cancel(self) -> bool:
        """It cannot be."""
        return False

    def result(self, timeout: float | None = None) -> T:
        """As of any future."""
        error = self.exception(timeout)
        if error is None:
            return cast("T", self._result)
        try:
            raise error
        finally:
            del error, self  # of which the error would hold this frame, and this frame the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any future."""
        if not self._settled.wait(timeout):
            raise TimeoutError
        self._seen()
        return self._exception

    def error(self) -> BaseException | None:
        """What it has failed with by now, which does not count as seen."""
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """As of any future."""
        call = deque([fn])
        self._calls.append(call)
        if self.done():
            self._take_and_call(call)

    def set_result(self, result: T) -> None:
        """As of any future."""
        self._result = result
        self._settle()

    def set_exception(self, exception: BaseException | None) -> None:
        """As of any future."""
        self._exception = exception
        self._settle()

    def _settle(self) -> None:
        self._settled.open()
        for waiter in self._publish():
            tell = waiter.add_result if self._exception is None else waiter.add_exception
            try:
                threading.Thread(target=tell, args=(self,), name="jaxckpt-note", daemon=True).start()
            except RuntimeError:  # the system has no thread for it
                tell(self)
        for call in self._calls:  # also what is added meanwhile
            self._take_and_call(call)

    def _publish(self) -> list[Any]:
        """Say that it is done where `concurrent.futures.wait` looks; who waits there and has to be told.

        Its lock is held for as long as it looks: whoever holds it for longer was interrupted, and never gives it back.
        """
        condition = self._condition
        is_taken = condition.acquire(timeout=LOOK_S)
        self._state, waiters = _FINISHED, list(self._waiters)
        if is_taken:
            condition.release()
        else:
            self._condition = threading.Condition()  # for those who look from now on
        return waiters

    def _take_and_call(self, call: deque[Callable[[Future[T]], object]]) -> None:
        try:
            fn = call.pop()
        except IndexError:
            return
        try:
            fn(self)
        except BaseException as error:  # as any future does, which tells of errors, and lets interrupts pass
            if not isinstance(error, Exception):
                raise
            _log.exception("a callback of a save's `committed` failed")


class ProgressTracker:
    """How long somebody has waited for a save that got no further; told of numbers of bytes, as a progress.

    Only time that somebody was awake and waited counts: a job that is stopped and goes on has not waited.

    Args:
        is_excused: whether it waits for something else than a disk now, such as for what devices are computing.
    """

    def __init__(self, is_excused: Callable[[], bool] = lambda: False) -> None:
        self._is_excused = is_excused
        self.waited_s, self.moved_at = 0.0, time.monotonic()

    def __call__(self, done: int = 0) -> None:
        """It got further."""
        self.waited_s, self.moved_at = 0.0, time.monotonic()

    def sign(self) -> float:
        """Another number whenever it has got further, or waits for something else than a disk."""
        return time.monotonic() if self._is_excused() else self.moved_at

    def waited(self, seconds: float, at_most: float = LOOK_S) -> None:
        """Somebody has waited for so long; what is more than `at_most` was a stop."""
        if not self._is_excused():
            self.waited_s += min(seconds, at_most)


class PendingSave(Generic[T]):
    """A save whose state is taken and whose bytes are on their way to the storage.

    Attributes:
        subject: what is being saved, for messages.
        movement: when it last got any further.
        staged: done when the caller may do anything with what it saved.
        committed: done when the checkpoint exists, durably; its result is the checkpoint's metadata.
    """

    def __init__(self, subject: str, work: Callable[[], T], movement: ProgressTracker | None = None) -> None:
        self.subject = subject
        self.movement = movement or ProgressTracker()
        self.staged: Future[None] = Future()
        self.staged.set_result(None)
        self._outcome = SaveFuture[T](self.mark_reported)
        self.committed: Future[T] = self._outcome
        self._ended = Latch()
        self._is_done = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._is_on_caller = False
        self._work = deque([work])  # whoever takes it out does it, or sees to it that nobody does
        # A new thread that works at once keeps its maker from going on for a switch interval, 5 ms: this one waits.
        self._go = Mailbox[None]()

    def _start(self) -> None:
        self._thread = thread = threading.Thread(target=self._run, name="jaxckpt-save", daemon=True)
        begin(self, thread)
        try:
            thread.start()
        except RuntimeError as error:
            # Python 3.12 starts no threads once the main thread has ended; a system may have none left at any time.
            if threading.main_thread().is_alive():
                _log.warning(
                    "saving %s: no thread could be started for it (%s), so the call waits for the whole save; raise "
                    "the limits of this process (`ulimit -u`, memory)",
                    self.subject,
                    error,
                )
            self._is_on_caller = True
        self._go.put(None)
        if self._is_on_caller:
            self._run()

    def _take_back(self, error: BaseException) -> bool:
        """See to it that nothing is done and nobody waits, if its thread has not begun."""
        try:
            self._work.pop()
        except IndexError:
            return False
        try:
            self.mark_reported()
            self.committed.set_exception(error)
        finally:  # whatever else interrupts: nobody must wait for it
            self._is_done = True
            self._ended.open()
        return True

    def _run(self) -> None:
        with contextlib.suppress(queue.Empty):  # an interrupt may have come before it was told
            self._go.get(LOOK_S)
        try:
            work = [self._work.pop()]
        except IndexError:
            return  # taken back
        try:
            result = self._work_once(work)
        except BaseException as error:  # a thread's edge: raised to the user by wait()
            self.committed.set_exception(self._as_told(error))
            if self._is_on_caller and isinstance(error, KeyboardInterrupt | SystemExit):  # it is meant for the caller
                self.mark_reported()
                raise
        else:
            self.committed.set_result(result)
            seen(self)
        finally:
            self._ended.open()

    def _work_once(self, work: list[Callable[[], T]]) -> T:
        """Do the work; when this returns, nothing holds the saved state any more."""
        try:
            return work.pop()()
        finally:
            self._is_done = True

    def _as_told(self, error: BaseException) -> BaseException:
        """What is raised to who waits: not what would end a process, a task or a loop as if all were well."""
        free_frames(error)  # of the whole state, as long as someone keeps the error
        if is_success(error) or isinstance(error, StopIteration | StopAsyncIteration):
            failed = CheckpointError(f"saving {self.subject}: what it called in the background raised {_shown(error)}")
            failed.__cause__ = error
            return failed
        with contextlib.suppress(Exception):  # of one that takes no note, as a frozen dataclass
            error.add_note(f"while saving {self.subject} in the background")
        return error

    def done(self) -> bool:
        """Whether it has committed or failed. Takes no lock, which an interrupt could leave taken."""
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait until the checkpoint is committed.

        Args:
            timeout_s: seconds; None: no limit while it gets any further, as by another few MiB in ten minutes.

        Returns:
            What `committed` holds.

        Raises:
            CheckpointTimeoutError: not committed in time, or no further for ten minutes; the save goes on.
            Exception: the original error of the save, if it failed.
        """
        error = self.outcome(timeout_s, LAST_PATIENCE_S if timeout_s is None else None)
        if error is not None:
            raise error
        return self.committed.result()

    def outcome(
        self,
        timeout_s: float | None = None,
        patience_s: float | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> BaseException | None:
        """Wait, and return the error if it failed; the error then counts as seen.

        Args:
            timeout_s: seconds to wait; None: no limit.
            patience_s: seconds to wait for it to get any further, as by another few MiB; None: no limit.
            until: ends the wait once it is true.

        Raises:
            CheckpointTimeoutError: neither committed nor failed in time, and the save goes on; or it is the save of a
                parent of this process.
        """
        time_limit("timeout_s", timeout_s)
        if self.is_of_parent() and not self._ended.is_open():
            raise CheckpointTimeoutError(
                f"saving {self.subject}: is done by process {self._process}, of which this one, {os.getpid()}, is a "
                "fork; wait for it there"
            )
        why_not = self.wait_for(self._ended, timeout_s, patience_s, until)
        if why_not is not None:
            raise CheckpointTimeoutError(f"saving {self.subject}: {why_not}; it goes on")
        self.mark_reported()
        return self.committed.exception()

    def last_outcome(self) -> BaseException | None:
        """As `outcome`, at the end of the process; a save that does not get any further is given up."""
        try:
            return self.outcome(patience_s=LAST_PATIENCE_S)
        except CheckpointTimeoutError as error:
            self.give_up(1)
            return error

    def wait_to_the_end(self) -> BaseException | None:
        """As `last_outcome`; whether the outcome counts as seen is left to who called for the save."""
        if self.wait_for(self._ended, None, LAST_PATIENCE_S) is not None:
            self.give_up(1)
            return self.no_further()
        return self._outcome.error()

    def is_of_parent(self) -> bool:
        """Whether this process is a fork of the one that does it: who does it waits for it, and tells of it."""
        return os.getpid() != self._process

    def wait_for(
        self,
        latch: Latch,
        timeout_s: float | None,
        patience_s: float | None,
        until: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Wait for what this save opens, limited as in `outcome`; why it was not opened, or None."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            started = time.monotonic()
            patience_left_s = math.inf if patience_s is None else patience_s - self.movement.waited_s
            if latch.wait(max(0.0, min(SLICE_S, end_s - started, patience_left_s))):
                return None
            self.movement.waited(time.monotonic() - started)
            if until():
                return "asked to leave meanwhile"
            if end_s <= time.monotonic():
                return f"not committed after {timeout_s:.3g} s" if timeout_s else "not committed yet"
            if patience_s is not None and self.movement.waited_s >= patience_s:
                return self._no_further()

    def _no_further(self) -> str:
        return f"no further for {self.movement.waited_s:.3g} s; does its disk still answer?"

    def no_further(self) -> CheckpointTimeoutError:
        """What to say of it when it has not got any further for too long."""
        return CheckpointTimeoutError(f"saving {self.subject}: {self._no_further()}; it goes on")

    def give_up(self, exit_code: int) -> None:
        """See to it that the end of this process does not wait for it.

        Unless it has committed by then, or somebody has seen why not, the process ends with this exit code. What was
        written of it is removed by the next owner of the directory.
        """
        if self._thread is not None:
            give_up(self, self._thread, exit_code)

    def wait_until_ended(self) -> None:
        """Wait until it has committed or failed, or gets no further; the outcome is left to who asks for it.

        Its callbacks are not waited for: one of them may wait for the caller.
        """
        if not (self._is_done or self.is_of_parent() or threading.current_thread() is self._thread):
            self.wait_for(self._ended, None, LAST_PATIENCE_S, self.done)

    def mark_reported(self) -> None:
        """Say that the user has seen the outcome, so that it need not be told again at exit."""
        seen(self)


def _shown(error: BaseException) -> str:
    """What it says; one that holds what cannot be shown, as a deleted array, at least what it is."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001  # a thread's edge: nobody would be told of any of it
        return type(error).__name__


def start_save(
    subject: str,
    work: Callable[[], T],
    *,
    movement: ProgressTracker | None = None,
    begun: Callable[[PendingSave[T] | None], None] = lambda pending: None,
    undo: Callable[[BaseException], None] = lambda error: None,
) -> PendingSave[T]:
    """Start a save on a thread of its own, or do it on the calling thread if no thread can be started.

    At the very end of a process, when nobody else would wait for it, it is waited for here.

    Args:
        subject: what is being saved, for messages.
        work: the save.
        movement: is told by the work when it gets further.
        begun: told of the save before it begins, so that no interrupt loses it; and of None if it did not begin.
        undo: called with what was raised if it did not begin.
    """
    pending: PendingSave[T] | None = None
    try:
        pending = PendingSave(subject, work, movement)
        begun(pending)
        pending._start()
    except BaseException as error:
        if pending is None or pending._take_back(error):
            begun(None)
            undo(error)
        raise
    if waits_for_itself():
        finish_late(pending)
    return pending


def wait_for_saves_of(path: str) -> None:
    """Wait for this process's own saves to a path before it is read."""
    for save in list(under_way):
        if save.subject == path and isinstance(save, PendingSave):
            save.wait_until_ended()


def call_within(
    call: Callable[[], object], timeout_s: float, progress: Callable[[int], object] = lambda done: None
) -> bool:
    """Call what may ask a disk that does not answer; False: it is not done after so many seconds, and goes on.

    `progress` is called with 0 now and then; what it raises ends the wait.
    """
    done = Latch()

    def work() -> None:
        try:
            call()
        finally:
            done.open()

    try:
        threading.Thread(target=work, name="jaxckpt-note", daemon=True).start()
    except RuntimeError:  # the system has no thread for it
        work()
    end_s = time.monotonic() + timeout_s
    while not done.wait(max(0.0, min(SLICE_S, end_s - time.monotonic()))):
        progress(0)
        if time.monotonic() >= end_s:
            return False
    return True


def call_after(pending: PendingSave[T] | None, call: Callable[[], None]) -> None:
    """Call it once the save has committed or failed, on its thread; at once if it has already, or there is none."""
    if pending is None:
        call()
    else:
        pending.committed.add_done_callback(lambda _: call())
