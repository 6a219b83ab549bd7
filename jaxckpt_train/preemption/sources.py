"""Sources of preemption notices: signals, a file, a time limit, schedulers, and objects of the user's configuration."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import math
import numbers
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np

from jaxckpt_train._validation import flag, refuse, seconds, shown
from jaxckpt_train.pending import call_within
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.files import file_exists
from jaxckpt_train.store.process_identity import command_name, is_in_pod, slurm_job

POLL_S = 1.0  # of the notice file and of the time limit
DEFAULT_LEFT_TIMEOUT_S = 10.0  # the default limit of a source's `left` method
LEAST_S = 1.0
IGNORED_S = 30.0
CHECK_S = 1.0  # how often a notice checks whether its handlers were replaced
_SHELLS = ("ash", "bash", "busybox", "dash", "ksh", "sh", "zsh")
_SHOWN = 300  # characters of the output of `scontrol`
_ENDING_S = 1.0  # to end `scontrol` and to log that
_NOT_REQUEUED = "Slurm job %s is not requeued: scontrol %s; submit it again"
_UNKNOWN = (  # after `scontrol` was killed, as Slurm may have received the request
    "Slurm job %s may not be requeued: scontrol %s; look for the job with squeue, and submit it again if it is not "
    "listed"
)
_STOPPING = (signal.SIGTERM, signal.SIGINT)  # they ask a process to stop, whatever handles them
_log = logging.getLogger("jaxckpt_train")
_notices: weakref.WeakSet[SignalNotice] = weakref.WeakSet()
_forking = threading.local()  # the signals that were blocked before


@dataclasses.dataclass(frozen=True)
class Notice:
    """A request to shut down.

    Attributes:
        reason: who requests it, and why; for the log and the history.
        asked_at: when the request may have come, in seconds of `time.monotonic()`; the grace period counts from there.
            None: when the loop notices it.
        leave_by: when the machine ends, in seconds of `time.monotonic()`: nothing is waited for after that. None:
            unknown.

    Raises:
        SettingsError: the reason is not text, or a time is not a number.
    """

    reason: str
    asked_at: float | None = None
    leave_by: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            refuse("Notice.reason", "text", self.reason)
        for name in ("asked_at", "leave_by"):
            found: object = getattr(self, name)
            if found is not None and (not isinstance(found, numbers.Real) or found != found):
                refuse(f"Notice.{name}", "seconds of time.monotonic(), or None", found)


class NoticeSource(Protocol):
    """An object that knows when this job has to shut down. `CheckpointCallback(notices=[...])` takes any such object.

    A source belongs to one callback. Each process of a job has its own; a notice in one process affects all of them.

    A source may have another method, `left(step)`. It is called in the primary after the job has shut down on any
    request and released the run directory, with the committed step (None: there is none). The sources are called in
    order. Each call may take `left_timeout_s` seconds, an attribute of the source (ten seconds without it), limited by
    the rest of the grace period, but at least one second. After that it is not waited for.
    """

    def start(self) -> None:
        """Start looking for notices, for example on a thread. Called when the callback is entered; must not block."""

    def stop(self) -> None:
        """Stop looking. May be called without `start`, repeatedly, and in a forked child, which has no thread."""

    def notice(self) -> Notice | str | None:
        """The request to shut down, or only its reason, if there is one; from then on always.

        Called at every training step: it must take about a microsecond, must not wait and must not raise.
        """


class FileNotice:
    """A file that requests a shutdown by its existence; checked at most once a second.

    A disk that does not answer delays the loop by one second, once.
    """

    def __init__(self, path: str | os.PathLike[str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path, self._monotonic = path, monotonic
        self._next = -1.0
        self._found = self._is_looking = False
        self._looks, self._hint = 0, ""

    def notice(self) -> Notice | None:
        """The request, if the file exists."""
        now = self._monotonic()
        if not self._found and now >= self._next and not self._is_looking:
            self._next, self._is_looking = now + POLL_S, True
            call_within(self._look, POLL_S)
        return Notice(f"notice file {self._path}{self._hint}") if self._found else None

    def _look(self) -> None:
        try:
            found, self._looks = file_exists(LocalBackend(), os.fspath(self._path)), self._looks + 1
            if found and self._looks == 1:  # without this hint, each start would end at once
                self._hint = ", which existed when this job started: remove it before the job is started again"
            self._found = found
        finally:
            self._is_looking = False


class TimeNotice:
    """A limit of the run's wall-clock time; the job has to shut down `leave_early_s()` seconds earlier, at `end`."""

    def __init__(
        self, max_run_time_s: float, monotonic: Callable[[], float], leave_early_s: Callable[[], float]
    ) -> None:
        self._monotonic, self._leave_early_s = monotonic, leave_early_s
        self._limit_s, self._began_at = max_run_time_s, monotonic()
        self._is_up = False
        self._measure()

    def notice(self) -> Notice | None:
        """The request, if the time is up."""
        now = self._monotonic()
        if not self._is_up and now >= self._next:
            self._measure()
        self._is_up = self._is_up or now >= self.end
        return Notice(f"the time limit of {self._limit_s:g} s", asked_at=self.end) if self._is_up else None

    def _measure(self) -> None:
        self.end = self._began_at + max(0.0, self._limit_s - self._leave_early_s())
        self._next = min(self._monotonic() + POLL_S, self.end)


class WatchedSources:
    """The sources of one run, asked and notified in their order."""

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._sources = tuple(sources)
        self._limits_s = [_limit_s(source) for source in self._sources]
        self._failing = set[int]()  # indices of sources whose failure was logged
        self._process: int | None = None

    def start(self) -> None:
        """Start all sources; if one raises, stop all of them."""
        self._process = os.getpid()
        try:
            for source in self._sources:
                source.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all sources; log the errors of those that raise."""
        for source in self._sources:
            try:
                source.stop()
            except Exception:  # noqa: BLE001  # an error of a user's source must not break the end of a run
                _log.warning("%s: stopping it failed", type(source).__name__, exc_info=True)

    def notices(self) -> Iterator[Notice]:
        """The requests of all sources so far."""
        for place, source in enumerate(self._sources):
            try:
                found = _checked_notice(source, source.notice())
            except Exception:  # noqa: BLE001  # an error of a user's source does not stop the training
                if place not in self._failing:
                    self._failing.add(place)
                    text = "%s: asking it for a notice failed; it is asked again, and further failures are not logged"
                    _log.warning(text, type(source).__name__, exc_info=True)
                continue
            if found is not None:
                yield found

    def notify(self, step: int | None, left_s: float) -> None:
        """Call `left` of the sources in order, as `NoticeSource` says.

        The order matters: after Slurm was asked to requeue the job, it may end the rest of it.
        """
        if os.getpid() != self._process:  # a forked child, or never started
            return
        ends_at = time.monotonic() + left_s
        both = zip(self._sources, self._limits_s, strict=True)
        notified = [(source, limit_s) for source, limit_s in both if getattr(source, "left", None) is not None]
        for place, (source, limit_s) in enumerate(notified):
            reserved_s = LEAST_S * (len(notified) - place - 1)
            timeout_s = max(LEAST_S, min(limit_s, ends_at - time.monotonic() - reserved_s))
            if not call_within(functools.partial(_call_left, source, step), timeout_s):
                text = "%s: its left() method has not finished after %.3g s, and is not waited for any longer"
                _log.warning(text, type(source).__name__, timeout_s)


def _checked_notice(source: NoticeSource, found: object) -> Notice | None:
    if found is None or isinstance(found, Notice):
        return found
    if isinstance(found, (bool, np.bool_)):  # not in the protocol, but refusing True would lose a save
        return Notice(type(source).__name__) if found else None
    if not isinstance(found, str):
        refuse(f"{type(source).__name__}.notice()", "a Notice, its reason as text, or None", found)
    return Notice(found)


def _limit_s(source: NoticeSource) -> float:
    """The time limit of a source's `left` method."""
    limit_s = getattr(source, "left_timeout_s", None)
    return DEFAULT_LEFT_TIMEOUT_S if limit_s is None else seconds(f"{type(source).__name__}.left_timeout_s", limit_s)


def _call_left(source: Any, step: int | None) -> None:
    try:
        source.left(step)
    except Exception:  # noqa: BLE001  # an error of a user's source must not end the thread with a traceback
        _log.warning("%s: its left() method failed", type(source).__name__, exc_info=True)


class SignalHandler:
    """Reports a signal to the notices of this process, and calls the handler that the user had installed before.

    A handler can outlive its notices: another handler may be installed above it and call or restore it, or a notice was
    never stopped. It then behaves as if it were not installed, so that it does not swallow a SIGTERM that has to end
    the process. It keeps only weak references to the notices.

    Python does not know handlers that were installed in C, and takes those that are newer than itself for the default.
    They are not called, and the default action is restored instead of them.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._before = signal.getsignal(number) or signal.SIG_DFL
        self._notices: tuple[weakref.ref[SignalNotice], ...] = ()
        self._ignores_until = -math.inf

    def add(self, notice: SignalNotice) -> None:
        """Report signals to this notice, too; install the handler if it is not. Only the main thread can do that."""
        self._ignores_until = -math.inf
        self._notices = (*self._notices, weakref.ref(notice))
        if not self._is_installed():
            signal.signal(self._number, self)

    def remove(self, notice: SignalNotice, *, ignores: bool = False) -> None:
        """Report no more signals to this notice. After the last one, restore the user's handler or the default action.

        If another handler is installed above this one, it stays. With `ignores`, a signal that would end the process is
        ignored instead, for half a minute and while the interpreter ends: launchers may send more signals to a process
        that shuts down on request, and they must not change its exit code.
        """
        self._notices = tuple(each for each in self._notices if each() not in (None, notice))
        if self._notices:
            return
        if ignores and self._before in (signal.SIG_DFL, signal.default_int_handler):
            self._ignores_until = time.monotonic() + IGNORED_S
            atexit.register(self._ignore)
        elif self._is_installed() and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._before)  # other threads cannot do that

    def _is_installed(self) -> bool:
        installed: object = signal.getsignal(self._number)
        return installed is self

    def _ignore(self) -> None:
        if self._is_installed() and time.monotonic() < self._ignores_until:
            signal.signal(self._number, signal.SIG_IGN)  # the interpreter would restore the default action

    def is_live(self) -> bool:
        """Whether it reports to any notice."""
        return any(each() is not None for each in self._notices)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python on the main thread, or by a handler installed above."""
        if time.monotonic() < self._ignores_until:
            return
        notices = [notice for each in self._notices if (notice := each()) is not None]
        for notice in notices:
            notice.receive(number)
        if callable(self._before) and not (notices and self._before is signal.default_int_handler):
            self._before(number, frame)
        elif not notices:
            self._act_by_default()

    def _act_by_default(self) -> None:
        here = signal.signal(self._number, self._before)
        try:
            signal.raise_signal(self._number)  # this may end the process
        finally:
            signal.signal(self._number, here)


def _hold_signals() -> None:
    """Block the watched signals during a fork: the child has no handler yet, and would lose them."""
    numbers = {number for notice in list(_notices) for number in notice.watched()}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers) if numbers else None


def _let_signals_come() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_in_child() -> None:
    """Restore the handlers in a forked child, such as a pool worker: it has no save, so signals end it as usual."""
    for notice in list(_notices):
        notice.restore()
    _let_signals_come()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_restore_in_child)


class SignalNotice:
    """Notices signals by handlers that set a flag, and call the handlers that the user had installed before.

    A second signal changes nothing, so it cannot kill the save that the first one has caused.
    """

    def __init__(self, names: Sequence[str], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.received: Notice | None = None
        self._monotonic = monotonic
        # SIGIOT and SIGABRT have one number.
        self._numbers = list(dict.fromkeys(int(signal.Signals[name]) for name in names))
        self._handlers: dict[int, SignalHandler] = {}
        self._next_check, self._replaced = -math.inf, set[int]()
        _notices.add(self)

    def install(self) -> None:
        """Install the handlers. Only the main thread can do that; on another thread, log a warning."""
        if threading.current_thread() is not threading.main_thread():
            _log.warning("signals are not watched: only the main thread can install handlers; use notice_file instead")
            return
        for number in self._numbers:
            if signal.getsignal(number) is None and number not in _STOPPING:
                text = "%s is not watched: its handler is not one of Python and could not be restored; use notice_file"
                _log.warning(text, signal.Signals(number).name)
                continue
            installed: object = signal.getsignal(number)
            handler = installed if isinstance(installed, SignalHandler) else SignalHandler(number)
            self._handlers[number] = handler
            handler.add(self)

    def receive(self, number: int) -> None:
        """Note a signal; called by a handler."""
        if self.received is None:
            self.received = Notice(f"signal {signal.Signals(number).name}", asked_at=self._monotonic())

    def watched(self) -> list[int]:
        """The signals that have a handler now."""
        return list(self._handlers)

    def restore(self, *, leaving: bool = False) -> None:
        """Restore the previous handlers; a handler that has another one above it passes its signals on.

        If the process is `leaving` on request, more signals of any kind may follow: Slurm sends SIGUSR1, then SIGTERM.
        """
        for handler in self._handlers.values():
            handler.remove(self, ignores=leaving)
        self._handlers.clear()

    def notice(self) -> Notice | None:
        """The first signal; None: no signal was received."""
        if self.received is None and self._monotonic() >= self._next_check:
            self._warn_if_replaced()
        return self.received

    def _warn_if_replaced(self) -> None:
        """Warn once for each signal whose handler was replaced."""
        self._next_check = self._monotonic() + CHECK_S
        for number in self._handlers.keys() - self._replaced:
            other: object = signal.getsignal(number)
            if not isinstance(other, SignalHandler):  # which calls the one below it
                self._replaced.add(number)
                text = (
                    "%s: its handler was replaced by %s, so this signal may not request a shutdown any more. Install "
                    "your handler before the CheckpointCallback is entered, which then calls it, or use notice_file"
                )
                _log.warning(text, signal.Signals(number).name, repr(other))


class KubernetesNotice:
    """Checks whether the SIGTERM of Kubernetes can reach this process. The signal itself is watched like any other.

    Kubernetes sends it only to process 1 of the container. A shell does not forward it: the pod would be killed at the
    end of its grace period without a save.
    """

    def start(self) -> None:
        """Log a warning for each problem."""
        if not is_in_pod():
            _log.warning("KubernetesNotice: expected a Kubernetes pod, found no KUBERNETES_SERVICE_HOST")
        first = command_name(1)
        if first in _SHELLS:
            text = "process 1 of this container is a shell (%s), which does not forward SIGTERM: use `exec python ...`"
            _log.warning("KubernetesNotice: " + text, first)

    def stop(self) -> None:
        """Do nothing."""

    def notice(self) -> Notice | None:
        """Return None: the signal is watched separately."""
        return None


class SlurmNotice:
    """Requeues the Slurm job after it has shut down on request. The request itself is the signal of `sbatch --signal`.

    The primary calls `scontrol requeue Incomplete <job>` when the last step is committed and the run directory is
    released. "Incomplete" excludes a job that Slurm is already ending, for example after `scancel`. A job preempted
    with PreemptMode=REQUEUE is requeued by Slurm itself. The job must be started by `sbatch` and allow requeueing
    (`--requeue`). After the call, Slurm ends the rest of the job.

    Args:
        requeue: whether to requeue; False: only log the facts of the job.
        timeout_s: the seconds that `scontrol` may take; it is killed then. The job does not wait for it beyond the
            grace period.

    Raises:
        SettingsError: an argument is wrong.

    Sources: slurm.schedmd.com/scontrol.html and slurm.schedmd.com/sbatch.html
    """

    def __init__(self, requeue: bool = True, timeout_s: float = 10.0) -> None:
        self._requeue = flag("SlurmNotice: requeue", requeue)
        self._timeout_s = seconds("SlurmNotice: timeout_s", timeout_s)
        self.left_timeout_s = self._timeout_s + _ENDING_S

    def start(self) -> None:
        """Log which job this is."""
        job = slurm_job()
        if job is None:
            _log.warning("SlurmNotice: expected a Slurm job, found no SLURM_JOB_ID: nothing will be requeued")
        else:
            _log.info("Slurm job %s, requeued %d times", job.id, job.restarts)

    def stop(self) -> None:
        """Do nothing."""

    def notice(self) -> Notice | None:
        """Return None: signals are watched separately."""
        return None

    def left(self, step: int | None) -> None:
        """Requeue the job; log a warning if that fails."""
        job = slurm_job()
        if job is None or not self._requeue:
            return
        try:
            done = subprocess.run(
                ["scontrol", "requeue", "Incomplete", job.id],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self._timeout_s,
                start_new_session=True,  # shields it from signals to this job
                check=False,
            )
        except OSError as error:
            _log.warning(_NOT_REQUEUED, job.id, f"was not started: {error}")
            return
        except subprocess.TimeoutExpired:
            _log.warning(_UNKNOWN, job.id, f"timed out after {self._timeout_s:g} seconds")
            return
        if done.returncode == 0:
            begins = "starts from scratch, as no step is saved" if step is None else f"continues from step {step}"
            _log.warning("Slurm was asked to requeue job %s, which %s", job.id, begins)
            return
        said = shown(done.stdout[: _SHOWN + 1].decode(errors="replace").strip(), _SHOWN)
        problem = f"exited with {done.returncode}: {said}"
        _log.warning(_UNKNOWN if done.returncode < 0 else _NOT_REQUEUED, job.id, problem)
