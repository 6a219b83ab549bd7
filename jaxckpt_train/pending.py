"""Saves in the background: `PendingSave`, the one save of a run (`SaveSlot`), and what the end of the process does."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, Literal, TypeVar, cast

from jaxckpt_train._validation import one_of, shown, time_limit
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, free_frames, is_success
from jaxckpt_train.exit_code import INTERRUPTED, code_of, end_process
from jaxckpt_train.policies.context import CheckpointInfo, positive_seconds
from jaxckpt_train.store.threads import POLL_S, Latch, check_interrupt

# A disk that does not answer for this time is not waited for at the end of a script or of a run.
LAST_PATIENCE_S = 600.0
SLICE_S = 0.1  # the longest delay until a waiting thread sees a signal or a request to stop
ENDS_WITHIN_S = 60.0  # in a job, after the end of the save in the primary: by then all processes know the outcome
_LAST_LINES_S = 0.2  # for an abandoned thread whose save has ended: it may still use the disk, or just end
_FAILED = "failed, and the program did not wait for it:"
# The saves that run, and those that failed without an error that anybody saw. It changes in single operations of the
# interpreter, so no interrupt leaves a lock acquired.
under_way: set[PendingSave[Any]] = set()
_is_finished = False  # whether `finish` was called
_child: int | None = None  # the child of `multiprocessing` whose end calls `finish`
T = TypeVar("T")
_log = logging.getLogger("jaxckpt_train")


class PendingSave(Generic[T]):
    """A save whose state is copied and whose bytes are being written.

    Attributes:
        subject: the name of what is saved, for messages.
        tracker: measures its progress.
        staged: a future that is done when the caller may change the values that it saved. It is done from the start:
            the call that returns this object has waited for that.
        committed: a future that is done when the checkpoint is durable. Its result is the metadata of the checkpoint.
    """

    def __init__(self, subject: str, work: Callable[[], T], tracker: ProgressTracker | None = None) -> None:
        self.subject = subject
        self.tracker = tracker or ProgressTracker()
        self.staged: Future[None] = Future()
        self.staged.set_result(None)
        self.committed: Future[T] = _SaveFuture(self)
        self._ended = Latch()
        self._is_done = False
        self._process = os.getpid()
        self._thread: SaveThread | None = None
        self._work = deque([work])  # the thread that pops it runs it or cancels it
        self._exit_code: int | None = None  # of a save that was given up
        # If the new thread worked at once, it would hold the GIL and delay its creator by the switch interval of 5 ms.
        self._go = Latch()

    def _start(self) -> None:
        _finish_at_end_of_child()
        self._thread = thread = SaveThread(self)
        if not must_wait_here():  # otherwise a thread that keeps saving would delay the end for ever
            under_way.add(self)
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
            self._run(on_caller=True)
            return
        self._go.open()

    def _cancel(self, error: BaseException) -> bool:
        """Cancel the save if its thread has not started it; return whether it was cancelled."""
        try:
            self._work.pop()
        except IndexError:
            return False
        try:
            under_way.discard(self)
            self.committed.set_exception(error)
        finally:  # even after another interrupt, nothing must wait for this save
            self._is_done = True
            self._ended.open()
        return True

    def _run(self, *, on_caller: bool = False) -> None:
        if not on_caller:
            self._go.wait(POLL_S)  # an interrupt may have prevented the message
        try:
            work = [self._work.pop()]
        except IndexError:
            return  # cancelled
        try:
            try:
                result = work.pop()()  # nothing here holds the saved state afterwards
            finally:
                self._is_done = True
        except BaseException as error:  # the thread ends here; wait() raises the error
            self.committed.set_exception(self._as_raised(error))
            if on_caller and isinstance(error, KeyboardInterrupt | SystemExit):  # it is meant for the caller
                under_way.discard(self)
                raise
        else:
            self.committed.set_result(result)
            under_way.discard(self)
        finally:
            self._ended.open()

    def _as_raised(self, error: BaseException) -> BaseException:
        """Return the error to raise in `wait`: never one that would end a process, a task or a loop normally."""
        free_frames(error)  # its frames hold the whole state for as long as the error lives
        if is_success(error) or isinstance(error, StopIteration | StopAsyncIteration):
            failed = CheckpointError(f"saving {self.subject}: a call in the background raised {shown(error)}")
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
        self, timeout_s: float | None = None, patience_s: float | None = None, until: Callable[[], bool] | None = None
    ) -> BaseException | None:
        """Wait, and return the error if the save failed; the error then counts as seen.

        `patience_s` limits the seconds without progress, such as another few MiB; `until` ends the wait once true.

        Raises:
            CheckpointTimeoutError: the save continues; or it belongs to a parent of this process.
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
        return self.committed.exception()

    def wait_until_ended(self) -> None:
        """Wait until the save has committed or failed; an error does not count as seen."""
        self._ended.wait()

    def error(self) -> BaseException | None:
        """Return the error so far. It does not count as seen."""
        return self.committed._exception

    def is_of_parent(self) -> bool:
        """Return whether this process is a fork of the one that runs the save, which reports the error."""
        return os.getpid() != self._process

    def wait_for(
        self, latch: Latch, timeout_s: float | None, patience_s: float | None, until: Callable[[], bool] | None = None
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
                return self.stall_text()

    def stall_text(self) -> str:
        """The text of an error."""
        return f"no progress for {self.tracker.waited_s:.3g} s; does its disk still answer?"

    def give_up(self, exit_code: int) -> None:
        """Do not wait for the save at the end of the process; unless it has committed, that ends with this code."""
        self._exit_code = exit_code


class SaveThread(threading.Thread):
    """The thread of a save. It is a daemon that `finish` waits for, up to a limit.

    The interpreter would wait for ever for another thread whose disk does not answer, also after a grace period
    (test_abandoned_save_fails_process_unless_it_commits).
    """

    def __init__(self, save: PendingSave[Any]) -> None:
        super().__init__(target=save._run, name="jaxckpt-save", daemon=True)
        self.save = save


def start_save(
    subject: str,
    work: Callable[[], T],
    *,
    tracker: ProgressTracker | None = None,
    on_start: Callable[[PendingSave[T] | None], None] | None = None,
    undo: Callable[[BaseException], None] | None = None,
) -> PendingSave[T]:
    """Run `work` on a thread of its own, or on the calling thread if no thread can be started.

    At the very end of a process, when nothing else waits for the save, this function waits for it. `on_start` is called
    with the save before it starts, so that no interrupt loses it. If it does not start, `on_start` is called with None,
    and `undo` with the error.
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
        _finish({pending})
    return pending


def wait_for_saves_of(path: str) -> None:
    """Wait for this process's own saves to a path, but not for their callbacks, which may wait for the caller."""
    for save in list(under_way):
        if save.subject == path and not (save.done() or threading.current_thread() is save._thread):
            save.wait_for(save._ended, None, LAST_PATIENCE_S, save.done)


def call_within(call: Callable[[], object], timeout_s: float) -> bool:
    """Call a function that may use a disk that does not answer; return False if it continues after the time limit.

    An error of `interruptible` ends the wait.
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
        check_interrupt()
        if time.monotonic() >= end_s:
            return False
    return True


class _SaveFuture(Future[T]):
    """A future that knows when its error was seen, and that never waits for a lock.

    A KeyboardInterrupt in `concurrent.futures.wait` may leave the lock of the future or that of an event acquired, and
    a save that waits for it would never end (tests/unit/test_save_outcome.py). So the thread that sets the outcome
    waits for the first lock only briefly, and lets other threads set the events.
    """

    def __init__(self, save: PendingSave[T]) -> None:
        super().__init__()
        self._save = save
        self._settled = Latch()
        self._calls: list[deque[Callable[[Future[T]], object]]] = []  # the thread that pops a function calls it
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {id(self):#x} state={'finished' if self.done() else 'running'}>"

    def done(self) -> bool:
        return self._settled.is_open()

    def running(self) -> bool:
        return not self.done()

    def cancel(self) -> bool:
        return False  # a save cannot be cancelled

    def cancelled(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> T:
        error = self.exception(timeout)
        if error is None:
            return cast("T", self._result)
        try:
            raise error
        finally:
            del error, self  # the error would hold this frame, and this frame the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._settled.wait(timeout):
            raise TimeoutError
        under_way.discard(self._save)
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        call = deque([fn])
        self._calls.append(call)
        if self.done():
            self._take_and_call(call)

    def set_result(self, result: T) -> None:
        self._result = result
        self._settle()

    def set_exception(self, exception: BaseException | None) -> None:
        self._exception = exception
        self._settle()

    def _settle(self) -> None:
        self._settled.open()
        condition = self._condition  # held only briefly, unless an interrupt has left it acquired for ever
        is_taken = condition.acquire(timeout=POLL_S)
        self._state, waiters = "FINISHED", list(self._waiters)
        if is_taken:
            condition.release()
        else:
            self._condition = threading.Condition()  # for later waiters
        for waiter in waiters:
            notify = waiter.add_result if self._exception is None else waiter.add_exception
            try:
                threading.Thread(target=notify, args=(self,), name="jaxckpt-note", daemon=True).start()
            except RuntimeError:  # the system cannot start another thread
                notify(self)
        for call in self._calls:  # this includes functions that are added during the loop
            self._take_and_call(call)

    def _take_and_call(self, call: deque[Callable[[Future[T]], object]]) -> None:
        try:
            fn = call.pop()
        except IndexError:
            return
        try:
            fn(self)
        except Exception:  # noqa: BLE001  # like any future: log errors, and let interrupts pass
            _log.exception("a callback of a save's `committed` failed")


class ProgressTracker:
    """Measures how long a save has been waited for since its last progress. It can be called as a progress function.

    Only time that a thread was awake and waited counts. `is_excused` returns whether the save currently waits for
    something else than the disk, such as devices.
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


class SaveSlot:
    """At most one save in progress, and what the next save does about it. `StepManager` documents the arguments."""

    def __init__(
        self, if_busy: Literal["wait", "skip"], stall_timeout_s: float, if_stalled: Literal["skip", "raise"]
    ) -> None:
        one_of("wait", "skip")("StepManager.if_busy", if_busy)
        one_of("skip", "raise")("StepManager.if_stalled", if_stalled)
        self._if_busy, self._if_stalled = if_busy, if_stalled
        self._stall_timeout_s = positive_seconds("StepManager.stall_timeout_s", stall_timeout_s)
        self.is_asked_to_leave: Callable[[], bool] = lambda: False  # then a save must not wait for the slot
        self.is_time_up: Callable[[], bool] = lambda: False  # then unfinished work is given up
        self.pending: PendingSave[Any] | None = None  # until its outcome was reported
        self.info: CheckpointInfo | None = None  # its step, as policies see it
        self.given_up: PendingSave[Any] | None = None
        self._kept: list[BaseException] | None = None
        self._waits = 0
        self._skipped_at = math.inf  # the last time that this save caused a step to be skipped
        self._was_warned_of = self._is_without_state = False  # its failure was reported when the step was skipped

    def begun(self, pending: PendingSave[Any] | None) -> None:
        """Store a save that is about to start; None: it did not start."""
        self.pending, self._skipped_at = pending, math.inf
        self._was_warned_of = self._is_without_state = False

    def is_running(self) -> bool:
        """Whether the save has neither committed nor failed."""
        return self.pending is not None and not self.pending.done()

    def has_unreported_outcome(self) -> bool:
        """Whether a save has ended whose outcome was not reported yet."""
        return self.pending is not None and self.pending.done()

    def running_info(self) -> tuple[CheckpointInfo, ...]:
        """The running save as policies see it; empty if none is running."""
        return (self.info,) if self.info is not None and self.is_running() else ()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call a function once the last save has committed or failed, on its thread; or now, if there is none."""
        last = self.pending or self.given_up
        if last is None:
            call()
        else:
            last.committed.add_done_callback(lambda _: call())

    def check(self) -> None:
        """If the save has failed, raise its error, once."""
        if self.has_unreported_outcome():
            self._raise_or_keep(self.settle())

    def report_outcome(self, *, is_raised: bool = False) -> None:
        """In a job, when the save has ended in the primary: wait for its end here, and raise its error.

        With `is_raised`, this or another error is already being raised, so that none is raised here.
        """
        try:
            error = self.settle(ENDS_WITHIN_S)
        except CheckpointTimeoutError as late:
            error, self.pending = late, None
        if not is_raised:
            self._raise_or_keep(error)

    def _raise_or_keep(self, error: BaseException | None) -> None:
        if error is None:
            return
        if self._kept is None:
            raise error
        self._kept.append(error)

    @contextlib.contextmanager
    def deferring_errors(self) -> Iterator[None]:
        """Collect errors of failed saves within the context, and raise the first at its end."""
        if self._kept is not None:
            yield
            return
        kept = self._kept = list[BaseException]()
        try:
            yield
        except BaseException:
            for error in kept:
                _log.error("the previous save failed", exc_info=error)  # not the error that is raised here
            raise
        finally:
            self._kept = None
        if kept:
            raise kept[0]

    def settle(
        self,
        timeout_s: float | None = None,
        patience_s: float = LAST_PATIENCE_S,
        until: Callable[[], bool] | None = None,
    ) -> BaseException | None:
        """Wait as `PendingSave.outcome`, and free the slot; return the error if the save failed."""
        pending = self.pending
        if pending is None:
            return None
        error = pending.outcome(timeout_s, patience_s, until)
        if self.pending is not pending:  # another thread has started the next save
            return error
        self.pending = None
        return None if self._is_without_state else error

    def wait_until_ended(self) -> None:
        """Wait until the running save has ended, its time is up, or it makes no progress; report nothing."""
        if (pending := self.pending) is not None:
            pending.wait_for(pending._ended, None, LAST_PATIENCE_S, self.is_time_up)

    def wait_until_free(self, step: int, force: bool, timeout_s: float | None) -> str | None:
        """Wait until the slot is free for the save of `step`; if the step is skipped instead, return the reason."""
        pending = self.pending
        if pending is None or pending.done():
            self.check()  # it may have failed since the last check
            return None
        if self._if_busy == "skip" and not force:
            self._count_since_last_skip(pending.tracker)
            if pending.tracker.waited_s >= self._stall_timeout_s:
                stalled = f"saving {pending.subject}: {pending.stall_text()}; the save continues"
                return self._skipped(step, force, CheckpointTimeoutError(stalled))
            why = f"skipped: {pending.subject} is still in progress, and if_busy is 'skip'"
            _log.info("step %d: %s", step, why)
            return why
        self._waits += 1
        level = logging.DEBUG if self._waits & (self._waits - 1) else logging.INFO  # the 1st, 2nd, 4th, 8th ... wait
        text = "the save of step %d waits, because %s is still in progress (wait %d of this process)"
        _log.log(level, text, step, pending.subject, self._waits)
        try:
            error = self.settle(timeout_s, self.patience_s(force), self.is_asked_to_leave)
        except CheckpointTimeoutError as stalled_error:
            if self.is_asked_to_leave():
                return f"skipped: {stalled_error}"
            return self._skipped(step, force, stalled_error)
        self._raise_or_keep(error)
        return None

    def _count_since_last_skip(self, tracker: ProgressTracker) -> None:
        # After a suspension of the whole job, the save has until the next step to make progress.
        now = time.monotonic()
        tracker.waited(max(0.0, now - max(self._skipped_at, tracker.moved_at)), at_most=self._stall_timeout_s / 2)
        self._skipped_at = now

    def patience_s(self, force: bool) -> float:
        """Seconds without progress after which a running save is no longer waited for."""
        return LAST_PATIENCE_S if force else self._stall_timeout_s

    def not_taken(self, step: int, force: bool, timeout_s: float | None, stalled: CheckpointTimeoutError) -> str:
        """The state of a save could not be taken in time: return why the step is skipped, or raise `stalled`."""
        self._is_without_state = True
        if timeout_s is None and self.is_asked_to_leave():  # with a timeout, the caller is the shutdown: raise instead
            _log.warning("step %d is skipped: %s", step, stalled)
            return f"skipped: {stalled}"
        return self._skipped(step, force, stalled)

    def _skipped(self, step: int, force: bool, stalled: CheckpointTimeoutError) -> str:
        if force or self._if_stalled == "raise":
            raise stalled
        level = logging.INFO if self._was_warned_of else logging.WARNING  # warn once for each stalled save
        _log.log(level, "step %d is skipped: %s", step, stalled)
        self._was_warned_of = True
        return f"skipped: {stalled}"

    def leave_to_parent(self) -> None:
        """Do not wait for a save that belongs to the parent of this forked process."""
        if self.pending is not None and self.pending.is_of_parent():
            self.pending, self.given_up = None, self.pending

    def give_up(self, exit_code: int) -> None:
        """Stop waiting for the save, also at the end of the process, which then exits with this code."""
        if self.pending is not None:
            self.pending.give_up(exit_code)
            self.pending, self.given_up = None, self.pending


def process_is_ending() -> bool:
    """Return whether nothing waits for a save that starts now, because the end of the process has waited already."""
    util = sys.modules.get("multiprocessing.util")
    return _is_finished or (util is not None and _is_child() and bool(util.is_exiting()))


def must_wait_here() -> bool:
    """Return whether a save that this thread starts must wait for itself, since nothing else waits for it any more."""
    # The end of the process waits for the saves that the thread of another save starts before that save ends.
    return process_is_ending() and not isinstance(threading.current_thread(), SaveThread)


def finish_at_exit() -> None:
    """Finish all saves at the end of the process, unless the last finalizer of a child does (since Python 3.13)."""
    if sys.version_info < (3, 13) or _child != os.getpid():
        finish()


def finish() -> None:
    """Finish all saves that the script did not wait for, at the end of the process. A failure must not end as success.

    If a save failed or was abandoned, it ends the process: after the exit functions that were registered after the
    import of this package, and without those registered before.
    """
    global _is_finished
    _is_finished = True
    _finish(under_way)


def _finish(saves: set[PendingSave[Any]]) -> None:
    code = INTERRUPTED  # holds for an interrupt at any of the following lines
    try:
        code = _wait_for_all(saves)
    except BaseException as stop:  # noqa: BLE001  # raised by a signal handler: the process has to stop now
        code = code_of(stop)
        for save in [save for save in list(saves) if save._exit_code is None]:
            if not save.done():
                reason = f"was abandoned at the end of the process ({type(stop).__name__})"
                _report(save, f"{reason}; its files are not a checkpoint, and the next save removes them")
            elif (error := save.committed.exception()) is not None:
                _report(save, _FAILED, error)
    finally:
        if code:
            end_process(code, in_child=_is_child())


def _wait_for_all(saves: set[PendingSave[Any]]) -> int:
    """Wait for the saves and their threads, report those that failed, and return the exit code; 0: all is well."""
    codes = {0}
    while left := [save for save in list(saves) if save._exit_code is None]:  # a save's thread may start another one
        for save in left:
            try:
                error = save.outcome(patience_s=LAST_PATIENCE_S)
            except CheckpointTimeoutError as stalled:
                save.give_up(1)
                error = stalled
            saves.discard(save)
            if error is not None:
                codes.add(1)
                _report(save, _FAILED, error)
    for save in list(saves):  # these were given up
        codes.add(save._exit_code or 0)
        if save.done() and (error := save.committed.exception()) is not None:
            _report(save, _FAILED, error)
    for thread in [thread for thread in threading.enumerate() if isinstance(thread, SaveThread)]:
        if (given_up := thread.save._exit_code) is not None:
            thread.join(0 if codes > {0} else _LAST_LINES_S)
            codes |= {given_up} if thread.is_alive() else set()
        else:
            while thread.is_alive():  # if it freed JAX arrays during the shutdown, it would abort the process
                thread.join(SLICE_S)
    return max(codes)


def _report(save: PendingSave[Any], what: str, error: BaseException | None = None) -> None:
    with contextlib.suppress(ValueError, OSError):  # raised if the stream is closed
        print(f"jaxckpt_train: saving {save.subject} {what}", file=sys.stderr)
        if error is not None:
            traceback.print_exception(error)


def _is_child() -> bool:
    """Return whether this is a child of `multiprocessing`."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _finish_at_end_of_child() -> None:
    # Children by fork and forkserver do not call the exit functions of their parent, and before Python 3.13 none.
    global _child
    if _child != os.getpid() and _is_child():
        from multiprocessing import util

        util.Finalize(None, finish, exitpriority=-(1 << 30))  # the last; harmless in a child started by spawn
        _child = os.getpid()


os.register_at_fork(after_in_child=under_way.clear)  # these saves are of the parent
