"""Saves in the background, and what happens to them at the end of the process.

`start_save` runs a save on its own thread and returns a `PendingSave`. `SaveFuture` holds its outcome without locks
that an interrupt could leave acquired. The last part of the module finishes unawaited saves at the end of the process,
and makes sure that a failed save does not end as success.
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
from jaxckpt_train.store.threads import POLL_S, Latch, Mailbox

# A disk that does not answer for this time is not waited for at the end of a script or of a run.
LAST_PATIENCE_S = 600.0
SLICE_S = 0.1  # the longest delay until a waiting thread sees a signal or a request to stop
_LAST_LINES_S = 0.2  # for an abandoned thread whose save has ended: it may still use the disk, or just end
# Each of these collections changes in a single operation of the interpreter, so no interrupt leaves a lock acquired.
under_way: set[Save] = set()
given_up: dict[threading.Thread, int] = {}  # abandoned threads, with the exit code of the process
_given_up_saves: dict[Save, int] = {}  # abandoned saves whose outcome the user has not seen, with the exit code
_late: set[Save] = set()  # saves that failed or were abandoned at the very end, whose outcome the user has not seen
_threads: set[weakref.ref[threading.Thread]] = set()  # a WeakSet changes in several operations
_code: int | None = None  # the exit code of the process, as far as it is known
# Whether exit functions may run after this module's wait: those that were registered before it was imported. If an exit
# function imports this module, that is true for all, since Python then calls no newly registered function. At that time
# the main thread counts as ended.
_is_over = threading.current_thread() is threading.main_thread() and not threading.main_thread().is_alive()
T = TypeVar("T")
_FINISHED = "FINISHED"  # the name of this state in `concurrent.futures`
_log = logging.getLogger("jaxckpt_train")


class PendingSave(Generic[T]):
    """A save whose state is copied and whose bytes are being written.

    Attributes:
        subject: the name of what is saved, for messages.
        tracker: measures its progress.
        staged: a future that is done when the caller may change the values that it saved.
        committed: a future that is done when the checkpoint is durable. Its result is the metadata of the checkpoint.
    """

    def __init__(self, subject: str, work: Callable[[], T], tracker: ProgressTracker | None = None) -> None:
        self.subject = subject
        self.tracker = tracker or ProgressTracker()
        self.staged: Future[None] = Future()
        self.staged.set_result(None)
        self._outcome = SaveFuture[T](self.mark_reported)
        self.committed: Future[T] = self._outcome
        self._ended = Latch()
        self._is_done = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._is_on_caller = False
        self._work = deque([work])  # the thread that pops it runs it or cancels it
        # The new thread waits for a message. If it worked at once, it would hold the GIL and delay its creator by the
        # switch interval of 5 ms.
        self._go = Mailbox[None]()

    def _start(self) -> None:
        self._thread = thread = threading.Thread(target=self._run, name="jaxckpt-save", daemon=True)
        begin(self, thread)
        try:
            thread.start()
        except RuntimeError as error:
            # Python 3.12 starts no threads after the end of the main thread, and a system may run out of threads.
            if threading.main_thread().is_alive():
                _log.warning(
                    "saving %s: cannot start a thread (%s), so the call waits for the whole save; raise the limits of "
                    "this process (`ulimit -u`, memory)",
                    self.subject,
                    error,
                )
            self._is_on_caller = True
        self._go.put(None)
        if self._is_on_caller:
            self._run()

    def _cancel(self, error: BaseException) -> bool:
        """Cancel the save if its thread has not started it, and return whether it was cancelled."""
        try:
            self._work.pop()
        except IndexError:
            return False
        try:
            self.mark_reported()
            self.committed.set_exception(error)
        finally:  # even after another interrupt, nothing must wait for this save
            self._is_done = True
            self._ended.open()
        return True

    def _run(self) -> None:
        with contextlib.suppress(queue.Empty):  # an interrupt may have prevented the message
            self._go.get(POLL_S)
        try:
            work = [self._work.pop()]
        except IndexError:
            return  # cancelled
        try:
            result = self._work_once(work)
        except BaseException as error:  # the thread ends here; wait() raises the error
            self.committed.set_exception(self._as_raised(error))
            if self._is_on_caller and isinstance(error, KeyboardInterrupt | SystemExit):  # it is meant for the caller
                self.mark_reported()
                raise
        else:
            self.committed.set_result(result)
            seen(self)
        finally:
            self._ended.open()

    def _work_once(self, work: list[Callable[[], T]]) -> T:
        """Run the work. When this returns, nothing holds the saved state any more."""
        try:
            return work.pop()()
        finally:
            self._is_done = True

    def _as_raised(self, error: BaseException) -> BaseException:
        """Return the error to raise in `wait`: never one that would end a process, a task or a loop normally."""
        free_frames(error)  # its frames hold the whole state for as long as the error lives
        if is_success(error) or isinstance(error, StopIteration | StopAsyncIteration):
            failed = CheckpointError(f"saving {self.subject}: a call in the background raised {_shown(error)}")
            failed.__cause__ = error
            return failed
        with contextlib.suppress(Exception):  # an error may refuse notes, for example as a frozen dataclass
            error.add_note(f"while saving {self.subject} in the background")
        return error

    def done(self) -> bool:
        """Return whether the save has committed or failed. Takes no lock, which an interrupt could leave acquired."""
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait until the checkpoint is committed.

        Args:
            timeout_s: the time limit in seconds. None: no limit, as long as the save makes progress, such as a few MiB
                in ten minutes.

        Returns:
            The result of `committed`.

        Raises:
            CheckpointTimeoutError: the time limit was exceeded, or there was no progress for ten minutes. The save
                continues.
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
        until: Callable[[], bool] | None = None,
    ) -> BaseException | None:
        """Wait, and return the error if the save failed; the error then counts as seen.

        Args:
            timeout_s: the time limit in seconds. None: no limit.
            patience_s: how many seconds to wait without progress, such as another few MiB. None: no limit.
            until: ends the wait once it returns true. None: nothing ends it.

        Raises:
            CheckpointTimeoutError: the save has neither committed nor failed in time, and continues; or it belongs to a
                parent of this process.
        """
        time_limit("timeout_s", timeout_s)
        if self.is_of_parent() and not self._ended.is_open():
            raise CheckpointTimeoutError(
                f"saving {self.subject}: process {self._process} runs this save, and this process, {os.getpid()}, is a "
                "fork of it; wait for the save in that process"
            )
        reason = self.wait_for(self._ended, timeout_s, patience_s, until)
        if reason is not None:
            raise CheckpointTimeoutError(f"saving {self.subject}: {reason}; the save continues")
        self.mark_reported()
        return self.committed.exception()

    def outcome_at_exit(self) -> BaseException | None:
        """Wait like `outcome` at the end of the process, and abandon a save that makes no progress."""
        try:
            return self.outcome(patience_s=LAST_PATIENCE_S)
        except CheckpointTimeoutError as error:
            self.give_up(1)
            return error

    def wait_at_exit(self) -> BaseException | None:
        """Wait like `outcome_at_exit`, but let the caller decide whether the error counts as seen."""
        if self.wait_for(self._ended, None, LAST_PATIENCE_S) is not None:
            self.give_up(1)
            return self.stall_error()
        return self._outcome.error()

    def is_of_parent(self) -> bool:
        """Return whether this process is a fork of the one that runs the save. That process reports the error."""
        return os.getpid() != self._process

    def wait_for(
        self,
        latch: Latch,
        timeout_s: float | None,
        patience_s: float | None,
        until: Callable[[], bool] | None = None,
    ) -> str | None:
        """Wait for a latch of this save with the limits of `outcome`; return why it was not opened, or None."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            started = time.monotonic()
            patience_left_s = math.inf if patience_s is None else patience_s - self.tracker.waited_s
            if latch.wait(max(0.0, min(SLICE_S, end_s - started, patience_left_s))):
                return None
            self.tracker.waited(time.monotonic() - started)
            if until is not None and until():
                return "not committed when the job was asked to stop"
            if end_s <= time.monotonic():
                return f"not committed after {timeout_s:.3g} s" if timeout_s else "not committed yet"
            if patience_s is not None and self.tracker.waited_s >= patience_s:
                return self._stall_text()

    def _stall_text(self) -> str:
        return f"no progress for {self.tracker.waited_s:.3g} s; does its disk still answer?"

    def stall_error(self) -> CheckpointTimeoutError:
        """Return the error for a save that has made no progress for too long."""
        return CheckpointTimeoutError(f"saving {self.subject}: {self._stall_text()}; the save continues")

    def give_up(self, exit_code: int) -> None:
        """Do not wait for the save at the end of the process.

        The process then ends with this exit code, unless the save has committed by then or its error was seen. The next
        owner of the directory removes what the save has written.
        """
        if self._thread is not None:
            give_up(self, self._thread, exit_code)

    def wait_until_ended(self) -> None:
        """Wait until the save has committed, failed, or stopped making progress. The error does not count as seen.

        The save's callbacks are not waited for, because one of them may wait for the caller.
        """
        if not (self._is_done or self.is_of_parent() or threading.current_thread() is self._thread):
            self.wait_for(self._ended, None, LAST_PATIENCE_S, self.done)

    def mark_reported(self) -> None:
        """Mark the outcome as seen, so that it is not reported again at exit."""
        seen(self)


def start_save(
    subject: str,
    work: Callable[[], T],
    *,
    tracker: ProgressTracker | None = None,
    on_start: Callable[[PendingSave[T] | None], None] | None = None,
    undo: Callable[[BaseException], None] | None = None,
) -> PendingSave[T]:
    """Start a save on its own thread, or run it on the calling thread if no thread can be started.

    At the very end of a process, when nothing else waits for the save, this function waits for it.

    Args:
        subject: the name of what is saved, for messages.
        work: runs the save.
        tracker: measures the progress of `work`.
        on_start: called with the save before it starts, so that no interrupt loses it; and with None if it did not
            start. None: nothing is called.
        undo: called with the error if the save did not start. None: nothing is called.
    """
    pending: PendingSave[T] | None = None
    try:
        pending = PendingSave(subject, work, tracker)
        if on_start is not None:
            on_start(pending)
        pending._start()
    except BaseException as error:
        if pending is None or pending._cancel(error):
            if on_start is not None:
                on_start(None)
            if undo is not None:
                undo(error)
        raise
    if must_wait_here():
        finish_here(pending)
    return pending


def wait_for_saves_of(path: str) -> None:
    """Wait for this process's own saves to a path before it is read."""
    for save in list(under_way):
        if save.subject == path and isinstance(save, PendingSave):
            save.wait_until_ended()


def call_after(pending: PendingSave[T] | None, call: Callable[[], None]) -> None:
    """Call a function once the save has committed or failed, on its thread.

    Call it at once if there is no running save.
    """
    if pending is None:
        call()
    else:
        pending.committed.add_done_callback(lambda _: call())


def call_within(call: Callable[[], object], timeout_s: float, progress: Callable[[int], object] | None = None) -> bool:
    """Call a function that may use a disk that does not answer.

    Return False if it did not end in time; it then continues.

    `progress` is called with 0 during the wait. An error that it raises ends the wait.
    """
    done = Latch()

    def work() -> None:
        try:
            call()
        finally:
            done.open()

    try:
        threading.Thread(target=work, name="jaxckpt-note", daemon=True).start()
    except RuntimeError:  # the system cannot start another thread
        work()
    end_s = time.monotonic() + timeout_s
    while not done.wait(max(0.0, min(SLICE_S, end_s - time.monotonic()))):
        if progress is not None:
            progress(0)
        if time.monotonic() >= end_s:
            return False
    return True


class SaveFuture(Future[T]):
    """A future that reports when its error was seen, and that never waits for a lock.

    `concurrent.futures.wait` and `as_completed` acquire the lock of the future, and then wait for an event that has a
    lock as well. A KeyboardInterrupt may leave either acquired. So the thread that sets the outcome waits for the first
    lock only briefly, and lets another thread set the events.

    Args:
        seen: called when somebody has received the error, or learned that there is none.
    """

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self._seen = seen
        self._settled = Latch()
        self._calls: list[deque[Callable[[Future[T]], object]]] = []  # the thread that pops a function calls it
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def __repr__(self) -> str:
        """Return the usual representation of a future."""
        return f"<{type(self).__name__} at {id(self):#x} state={'finished' if self.done() else 'running'}>"

    def done(self) -> bool:
        """Return whether the save has committed or failed."""
        return self._settled.is_open()

    def running(self) -> bool:
        """Return whether the save is still running."""
        return not self.done()

    def cancelled(self) -> bool:
        """Return False: a save cannot be cancelled."""
        return False

    def cancel(self) -> bool:
        """Return False: a save cannot be cancelled."""
        return False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, or raise the error of the save."""
        error = self.exception(timeout)
        if error is None:
            return cast("T", self._result)
        try:
            raise error
        finally:
            del error, self  # the error would hold this frame, and this frame the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome and return the error, or None."""
        if not self._settled.wait(timeout):
            raise TimeoutError
        self._seen()
        return self._exception

    def error(self) -> BaseException | None:
        """Return the error so far, without marking it as seen."""
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function with this future once it is done."""
        call = deque([fn])
        self._calls.append(call)
        if self.done():
            self._take_and_call(call)

    def set_result(self, result: T) -> None:
        """Set the result."""
        self._result = result
        self._settle()

    def set_exception(self, exception: BaseException | None) -> None:
        """Set the error."""
        self._exception = exception
        self._settle()

    def _settle(self) -> None:
        self._settled.open()
        for waiter in self._publish():
            notify = waiter.add_result if self._exception is None else waiter.add_exception
            try:
                threading.Thread(target=notify, args=(self,), name="jaxckpt-note", daemon=True).start()
            except RuntimeError:  # the system cannot start another thread
                notify(self)
        for call in self._calls:  # this includes functions that are added during the loop
            self._take_and_call(call)

    def _publish(self) -> list[Any]:
        """Mark the future as done for `concurrent.futures.wait`, and return the waiters to notify.

        Waiters hold the lock only briefly. A lock that is held for longer was left acquired by an interrupt and is
        never released.
        """
        condition = self._condition
        is_taken = condition.acquire(timeout=POLL_S)
        self._state, waiters = _FINISHED, list(self._waiters)
        if is_taken:
            condition.release()
        else:
            self._condition = threading.Condition()  # for later waiters
        return waiters

    def _take_and_call(self, call: deque[Callable[[Future[T]], object]]) -> None:
        try:
            fn = call.pop()
        except IndexError:
            return
        try:
            fn(self)
        except BaseException as error:  # like any future: log errors, and let interrupts pass
            if not isinstance(error, Exception):
                raise
            _log.exception("a callback of a save's `committed` failed")


class ProgressTracker:
    """Measures how long a save has been waited for since its last progress. It can be called as a progress function.

    Only time that a thread was awake and waited counts. The time during which the whole process was stopped does not.

    Args:
        is_excused: returns whether the save currently waits for something else than the disk, such as devices. None: it
            never does.
    """

    def __init__(self, is_excused: Callable[[], bool] | None = None) -> None:
        self._excused = is_excused
        self.waited_s, self.moved_at = 0.0, time.monotonic()

    def __call__(self, done: int = 0) -> None:
        """Record progress."""
        self.waited_s, self.moved_at = 0.0, time.monotonic()

    def sign(self) -> float:
        """Return a number that changes with each progress, and while the save does not wait for the disk."""
        return time.monotonic() if self._is_excused() else self.moved_at

    def _is_excused(self) -> bool:
        return self._excused is not None and self._excused()

    def waited(self, seconds: float, at_most: float = POLL_S) -> None:
        """Record a wait. Only `at_most` seconds of it count, since a longer wait means that the process was stopped."""
        if not self._is_excused():
            self.waited_s += min(seconds, at_most)


def _shown(error: BaseException) -> str:
    """Return the representation of an error, or its type if that fails, as with a deleted array inside."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001  # otherwise the error of the save would be lost
        return type(error).__name__


class Save(Protocol):
    """The interface of a running save that the end of the process needs."""

    subject: str
    committed: Future[Any]

    def outcome_at_exit(self) -> BaseException | None:
        """Wait as long as the save makes progress; return its error, which then counts as seen."""

    def wait_at_exit(self) -> BaseException | None:
        """Wait like `outcome_at_exit`, but let the caller decide whether the error counts as seen."""


def begin(save: Save, thread: threading.Thread) -> None:
    """Register a save before its thread starts."""
    call_at_end_of_child(finish)
    if not must_wait_here():  # otherwise a thread that keeps saving would delay the end for ever
        under_way.add(save)
    _threads.add(weakref.ref(thread, _threads.discard))


def seen(save: Save) -> None:
    """Unregister a save that has committed, or whose error the user has seen."""
    under_way.discard(save)
    _given_up_saves.pop(save, None)
    if save in _late:
        _late.discard(save)
        if not _late:
            end_with(_code)


def give_up(save: Save, thread: threading.Thread, exit_code: int) -> None:
    """Do not wait for the save at the end, and exit with this code unless it has committed by then."""
    under_way.discard(save)
    _given_up_saves[save] = given_up[thread] = exit_code


def is_over() -> bool:
    """Return whether the process may be so close to its end that nothing waits for a save that starts now."""
    return _is_over or is_child_over()


def must_wait_here() -> bool:
    """Return whether a save that this thread starts must wait for itself, because nothing else waits for it any more.

    The wait at the end of the process includes the saves that the thread of another save starts before that save ends.
    """
    return is_over() and weakref.ref(threading.current_thread()) not in _threads


def finish_here(save: Save) -> None:
    """Wait for a save that starts when nothing else waits for it any more. Its caller may or may not see its error."""
    try:
        error = save.wait_at_exit()
    except BaseException as stop:  # raised by a signal handler: the process has to stop now
        end_with(code_of(stop))
        _report_abandoned(save, type(stop).__name__)
        _late.add(save)  # after the report, since the save may still commit, or be waited for again
        raise
    if error is not None:
        _report(f"saving {save.subject} failed:", error)
        _late.add(save)
        end_with(1)


def finish() -> None:
    """Finish all saves that the script did not wait for. A failure must not end as success."""
    global _is_over, _code
    _is_over = True
    code: int | None = INTERRUPTED  # holds for an interrupt at any of the following lines
    try:
        code = _wait_for_all()
    except BaseException as stop:  # noqa: BLE001  # raised by a signal handler: the process has to stop now
        code = code_of(stop)
        _give_up_all(code, type(stop).__name__)
    finally:
        if code is not None:
            _code = code
            end_with(code)


def _forget_saves() -> None:
    """Forget the saves of the parent in a forked child."""
    global _code
    _code = None
    under_way.clear()
    given_up.clear()
    _given_up_saves.clear()
    _late.clear()
    _threads.clear()


def _wait_for_all() -> int | None:
    codes: set[int] = set()
    while left := list(under_way):  # the thread of a save may start another one before that save ends
        for save in left:
            error = save.outcome_at_exit()
            if error is not None:
                codes.add(1)
                _report_failed(save, error)
    codes |= _codes_of_given_up()
    for thread in _known_threads():
        if thread in given_up:
            if thread.is_alive():  # it may also have ended, or never been started
                thread.join(0 if codes else _LAST_LINES_S)
            codes |= {given_up[thread]} if thread.is_alive() else set()
            continue
        # A thread that still frees JAX arrays while the interpreter shuts down would abort the process.
        while thread.is_alive():
            thread.join(SLICE_S)
    return max(codes, default=None)


def _codes_of_given_up() -> set[int]:
    """Return the exit codes of abandoned saves that have not committed in spite of that."""
    codes = set()
    for save, code in list(_given_up_saves.items()):
        if not save.committed.done():
            codes.add(code)
        elif (error := save.committed.exception()) is not None:
            codes.add(code)
            _report_failed(save, error)
    return codes


def _give_up_all(code: int, reason: str) -> None:
    for thread in _known_threads():  # also a thread that still frees memory or deletes files after its save
        given_up[thread] = code
    _given_up_saves.update(dict.fromkeys(list(_given_up_saves), code))
    left = list(under_way)
    under_way.clear()  # before the reports, so that nothing waits again if they are interrupted too
    for save in left:
        _report_abandoned(save, reason)


def _known_threads() -> list[threading.Thread]:
    return [thread for each in list(_threads) if (thread := each()) is not None]


def _report_abandoned(save: Save, reason: str) -> None:
    """Report a save that is no longer waited for."""
    if not save.committed.done():
        _report(
            f"saving {save.subject} was abandoned at the end of the process ({reason}); its files are not a "
            "checkpoint, and the next save removes them"
        )
    elif (error := save.committed.exception()) is not None:
        _report_failed(save, error)


def _report_failed(save: Save, error: BaseException) -> None:
    _report(f"saving {save.subject} failed, and the program did not wait for it:", error)


def _report(message: str, error: BaseException | None = None) -> None:
    with contextlib.suppress(ValueError, OSError):  # raised if the stream is closed
        print(f"jaxckpt_train: {message}", file=sys.stderr)
        if error is not None:
            traceback.print_exception(error)


# Register it twice: an interrupt that an exit function in C has delayed ends the next exit function at its first line.
atexit.register(finish)
atexit.register(finish)
os.register_at_fork(after_in_child=_forget_saves)
