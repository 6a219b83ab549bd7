"""A rendezvous: one operation in which all processes of a job take part, through a shared key-value store.

The primary, process 0, collects a value from every other process and publishes the result. An error in one process is
published too: every process then raises an error of the same class, so that all of them take the same decision.

Keys of a rendezvous, below its folder:
    from/N, large/N/M   the value or error of a process, with a key of its own if it is large
    count, here         how many have contributed; set by the last one, or after an error, to wake process 0
    said                the result or error that process 0 publishes
    alive/N             the number of heartbeats of a process
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from jaxckpt_train import errors
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, OtherProcessError, StorageError
from jaxckpt_train.store.threads import Latch, interruptible
from jaxckpt_train.store.timeouts import call_with_timeout

# Errors that can be rebuilt from a message alone; every other error becomes an OtherProcessError.
_REBUILDABLE = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind not in (errors.Preempted, StorageError)
}
_ATTRIBUTES = ("differences", "leaves")
REPORT_S = 30.0  # between two log lines that name the missing processes
SMALL_BYTES = 512
PACK = 32  # large values that are read together: one answer of the store must stay below 2 GiB
_HERE, _APART = b"=", b">"
LEAVING_S = 3.0
SLICE_S = 1.0  # how soon a waiting process notices an interrupt or a lost process
POLL_S = 0.5  # limit of one look: a call without a limit does not return while process 0, which serves it, is stopped
GLANCE_S = 0.1  # the same, for a value that the next look may find as well
PERIOD_S = 10.0  # between two heartbeats
ASKING_PER_S = 1000  # polls of the store per second that very many waiting processes share
MOST_SHOWN = 8
MOST_LABEL_BYTES = 200
_DONE, _FAILED = b"+", b"-"
_PARTICULAR = re.compile(r"\S*/\S*|\d+")  # paths and numbers may differ: the code that compares them reports it better
_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")


class KeyValues(Protocol):
    """A key-value store of a job. A key is text with `/` in it and has one writer. Any thread may call.

    A call that gets no answer in about the given time raises CheckpointError.
    """

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key, whether or not it has one."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait for the value of a key; None: there was none for `timeout_s` seconds. 0: do not wait."""

    def find(self, folder: str) -> Mapping[str, bytes]:
        """Return the values of all keys below `folder/`, by the rest of their names."""

    def increment(self, key: str) -> int:
        """Add one to the count of a key, which starts at 0, and return it. No key is both counted and set."""

    def delete(self, folder: str) -> None:
        """Delete all keys below `folder/`."""


class Rendezvous:
    """One rendezvous, from the viewpoint of one process.

    Args:
        folder: of the keys of this rendezvous.
        doing: what the processes do here, for messages.
        timeout_s: seconds without a sign of life after which a process counts as lost.
        moved: returns another value whenever this process has made progress; None: its work is quick.
        on_progress: called whenever a process that is waited for has made progress.
        left: folders of the keys by which processes announce that they have left a coordinator above this rendezvous.
    """

    def __init__(
        self,
        values: KeyValues,
        folder: str,
        process: int,
        processes: int,
        doing: str,
        timeout_s: float,
        moved: Callable[[], object] | None,
        on_progress: Callable[[], object] | None = None,
        left: Sequence[str] = (),
    ) -> None:
        self.folder, self._left = folder, left
        self._values, self._process, self._processes = values, process, processes
        self._doing, self._timeout_s, self._moved, self._on_progress = doing, timeout_s, moved, on_progress
        least_s, most_s = processes / ASKING_PER_S, timeout_s / 8
        self._period_s = min(max(PERIOD_S, least_s), most_s)
        self._slice_s = max(SLICE_S, min(least_s, most_s)) if process else SLICE_S  # of one wait
        # Process 0 detects silent processes first, and reports them to the others.
        self._limit_s = timeout_s + (2 * self._period_s if process else 0.0)
        self._contributions = Contributions(values, folder, processes)
        label = _PARTICULAR.sub("...", doing).encode(errors="replace")[:MOST_LABEL_BYTES]
        self._label = len(label).to_bytes(2, "big") + label
        self._heartbeat_count = 0
        # Found while this process works: the encoded error of another process, and that one is lost.
        self._failed: bytes | None = None
        self._lost: CheckpointTimeoutError | None = None

    def lead(self, act: Callable[[], bytes]) -> bytes:
        """In process 0: run `act` and publish its result or error to the others."""
        said = f"{self.folder}/said"
        with self._heartbeats():
            try:
                result = act()
            except BaseException as error:
                if self._failed is None:  # a process that failed may have removed what this one was reading
                    with contextlib.suppress(CheckpointError):
                        self._note_failure(self._contributions.look())
                failure = self._failure_behind(error)
                encoded = self._failed if failure is not None else None
                with _notifying(failure or error):
                    self._values.set(said, _FAILED + (encoded or encode_error(failure or error, self._process)))
                self._let_others_leave()
                if failure is not None:
                    try:
                        raise failure from None
                    finally:
                        del failure  # its traceback refers to this frame, and to those of the load or save
                raise
            self._values.set(said, _DONE + self._label + result)
            self._contributions.forget()
            return result

    def has_failed_elsewhere(self) -> bool:
        """Return whether another process has failed or is lost, while this one works; known some seconds later."""
        return self._failed is not None or self._lost is not None

    def _failure_behind(self, error: BaseException) -> CheckpointError | None:
        """Return the error of another process, because of which the work of this one ended; None: there is none."""
        if not isinstance(error, CheckpointError):
            return None
        return self._lost if self._failed is None else decode_error(self._failed, self._doing)

    def _note_failure(self, found: Mapping[int, bytes | None]) -> None:
        for _, value in sorted(found.items()):
            if self._failed is None and value is not None and value[:1] == _FAILED:
                self._failed = value[1:]

    def collect(self) -> Iterator[bytes]:
        """In process 0, within `act`: wait for the values of the other processes, and yield them in order."""
        silence = self._silence_timer()
        while self._values.get(f"{self.folder}/here", SLICE_S) is None:
            if not silence.is_check_due():
                continue
            self._send_heartbeat()
            left = [number for folder in self._left for number in by_process(self._values.find(folder))]
            arrived = dict.fromkeys(self._contributions.look(), b"")  # a process may have contributed before it left
            if len(arrived) == self._processes - 1:
                break  # a process was lost right after it had given its value, before it could wake this one
            self._record_signs(silence, by_process(self._values.find(f"{self.folder}/alive")) | arrived)
            self._raise_if_left(set(left) - arrived.keys())
            self._check_missing(silence, arrived)
        found = self._contributions.look()
        self._note_failure(found)
        if self._failed is not None:
            raise decode_error(self._failed, self._doing)
        for process, value in enumerate(self._contributions.of(found), 1):
            yield self._strip_label(value[1:], process)

    def join(self, give: Callable[[], bytes]) -> bytes:
        """In every other process: contribute the result of `give`, and return what process 0 publishes."""
        with self._heartbeats():
            try:
                value = give()
            except BaseException as error:
                failure = self._failure_behind(error)
                with _notifying(failure or error):
                    self._contribute(_FAILED + encode_error(error, self._process), is_error=True)
                if failure is not None:
                    try:
                        raise failure from None
                    finally:
                        del failure  # its traceback refers to this frame, and to those of the load or save
                raise
        self._contribute(_DONE + self._label + value)
        return self.receive()

    def receive(self) -> bytes:
        """Wait for the result that process 0 publishes."""
        silence = self._silence_timer()
        while (published := self._values.get(f"{self.folder}/said", self._slice_s)) is None:
            if silence.is_check_due():
                if any(self._values.get(f"{folder}/0", GLANCE_S) is not None for folder in self._left):
                    published = self._values.get(f"{self.folder}/said", POLL_S)  # it may have published before it left
                    if published is not None:
                        break
                    self._raise_if_left({0})
                self._record_signs(silence, self._sign_of_primary())
                self._check_missing(silence, {})
        if published[:1] == _FAILED:
            raise decode_error(published[1:], self._doing)
        return self._strip_label(published[1:], 0)

    def _sign_of_primary(self) -> dict[int, bytes]:
        sign = self._values.get(f"{self.folder}/alive/0", POLL_S)
        return {} if sign is None else {0: sign}

    def _strip_label(self, value: bytes, process: int) -> bytes:
        """Return the value of another process, if that process does the same as this one but for numbers and paths."""
        size = int.from_bytes(value[:2], "big") + 2
        if value[:size] != self._label:
            raise OtherProcessError(
                f"process {process} is at {value[2:size].decode(errors='replace')!r}, but process {self._process} is "
                f"at {self._doing!r}: expected all processes to do the same, in the same order, each from one thread"
            )
        return value[size:]

    def _record_signs(self, silence: SilenceTimer, signs: Mapping[int, bytes]) -> None:
        if silence.record(signs) and self._on_progress is not None:
            self._on_progress()

    def _silence_timer(self) -> SilenceTimer:
        others = (0,) if self._process else range(1, self._processes)
        return SilenceTimer(others, self._limit_s, self._period_s, self._slice_s)

    def _let_others_leave(self) -> None:
        """Wait a moment for processes that are still working: what they write is removed next."""
        if self._moved is None:
            return
        end, wait_s = time.monotonic() + LEAVING_S, 0.1 if self._processes <= ASKING_PER_S else SLICE_S
        with contextlib.suppress(CheckpointError):
            while len(self._values.find(f"{self.folder}/from")) < self._processes - 1 and time.monotonic() < end:
                self._values.get(f"{self.folder}/never", wait_s)

    def _check_missing(self, silence: SilenceTimer, arrived: Mapping[int, bytes]) -> None:
        """Raise if a process is lost; otherwise log from time to time which processes are missing."""
        self._raise_if_lost(silence, arrived)
        if silence.should_report():
            missing = self._describe([number for number in silence.numbers if number not in arrived])
            _log.warning("%s: still waiting for %s, after %.0f s", self._doing, missing, silence.waited_s)

    def _raise_if_left(self, missing: Collection[int]) -> None:
        if missing:
            raise OtherProcessError(
                f"{self._doing}: {self._describe(sorted(missing))} left: its CheckpointCallback or StepManager was "
                "closed, probably after an error; see its log"
            )

    def _raise_if_lost(self, silence: SilenceTimer, arrived: Mapping[int, bytes]) -> None:
        lost = silence.find_lost(arrived)
        if lost:
            raise self._lost_error(lost, arrived=any(number in silence.signs for number in lost))

    def _lost_error(self, lost: Sequence[int], *, arrived: bool) -> CheckpointTimeoutError:
        what = "made no progress" if arrived else "did not arrive"
        error = CheckpointTimeoutError(
            f"{self._doing}: {self._describe(lost)} {what} for {self._timeout_s:.3g} s; see its log"
        )
        error.lost = tuple(lost)
        return error

    def _describe(self, numbers: Sequence[int]) -> str:
        shown = ", ".join(map(str, numbers[:MOST_SHOWN]))
        more = f" and {len(numbers) - MOST_SHOWN} more" if len(numbers) > MOST_SHOWN else ""
        return f"process{'' if len(numbers) == 1 else 'es'} {shown}{more} of {self._processes}"

    def _contribute(self, value: bytes, *, is_error: bool = False) -> None:
        """Contribute a value, and wake process 0 if it is the last value or an error."""
        self._call_store(lambda: self._contributions.give(self._process, value, listed=is_error))
        count = self._call_store(lambda: self._values.increment(f"{self.folder}/count"))
        if count == self._processes - 1 or is_error:
            self._call_store(lambda: self._values.set(f"{self.folder}/here", b"1"))

    def _call_store(self, call: Callable[[], T]) -> T:
        """Make a call that the store answers at once, unless process 0, which runs the store, is stopped."""
        end = time.monotonic() + self._limit_s

        def look() -> None:
            if time.monotonic() >= end:
                raise self._lost_error((0,), arrived=True)

        with interruptible(look):
            return call_with_timeout(self._doing, call)

    def _send_heartbeat(self) -> None:
        self._heartbeat_count += 1
        self._values.set(f"{self.folder}/alive/{self._process}", str(self._heartbeat_count).encode())

    @contextlib.contextmanager
    def _heartbeats(self) -> Iterator[None]:
        """Send heartbeats from another thread within, as long as this process makes progress."""
        if self._moved is None:
            yield
            return
        ended = Latch()
        arguments = self._moved, ended
        threading.Thread(target=self._send_heartbeats, args=arguments, name="jaxckpt-alive", daemon=True).start()
        try:
            yield
        finally:
            ended.open()

    def _send_heartbeats(self, moved: Callable[[], object], ended: Latch) -> None:
        before: object = self  # a value that `moved` never returns
        silence = self._silence_timer()
        try:
            while not ended.is_open():
                if (now := moved()) != before:
                    before = now
                    self._send_heartbeat()
                self._watch_others(silence)
                while not silence.is_check_due() and not ended.wait(min(SLICE_S, self._period_s / 4)):
                    pass
        except CheckpointTimeoutError as error:
            self._lost = error
        except CheckpointError as error:  # end of a thread; a process that waits for this one finds out by itself
            _log.warning("%s: the other processes do not receive the heartbeats of this one: %s", self._doing, error)

    def _watch_others(self, silence: SilenceTimer) -> None:
        """Watch the other processes while this one works: it may wait for one of them by other means."""
        arrived: dict[int, bytes] = {}
        if self._process:
            published = self._values.get(f"{self.folder}/said", POLL_S)
            if published is not None:
                self._note_failure({0: published})
            signs = self._sign_of_primary()
        else:
            found = self._contributions.look()
            self._note_failure(found)
            arrived = dict.fromkeys(found, b"")
            signs = by_process(self._values.find(f"{self.folder}/alive")) | arrived
        silence.record(signs)
        self._raise_if_lost(silence, arrived)


@contextlib.contextmanager
def _notifying(error: BaseException) -> Iterator[None]:
    """Add a note to an error of which the other processes cannot be notified within."""
    try:
        yield
    except CheckpointError as second:
        error.add_note(f"and the other processes could not be notified: {second}")


class SilenceTimer:
    """Measures how long processes have given no sign of life. Only time in which this process was awake counts.

    Attributes:
        numbers: the processes that are waited for.
        signs: the latest sign of life of each.
        waited_s: seconds of waiting so far.
    """

    def __init__(self, numbers: Sequence[int], limit_s: float, period_s: float, slice_s: float) -> None:
        self.numbers, self.signs, self.waited_s = numbers, dict[int, bytes](), 0.0
        self._limit_s, self._period_s, self._slice_s = limit_s, period_s, slice_s
        self._heard_at = dict.fromkeys(numbers, 0.0)
        self._at, self._next_look_s, self._next_report_s = time.monotonic(), period_s, min(REPORT_S, limit_s / 4)

    def is_check_due(self) -> bool:
        """Count the time since the last call; return whether it is time to look for signs of life."""
        now = time.monotonic()
        self.waited_s += min(now - self._at, 2 * self._slice_s)
        self._at = now
        if self.waited_s < self._next_look_s:
            return False
        self._next_look_s = self.waited_s + self._period_s
        return True

    def record(self, signs: Mapping[int, bytes]) -> bool:
        """Record the present signs of life; return whether one of them is new."""
        new = [number for number, sign in signs.items() if self.signs.get(number) != sign]
        for number in new:
            self.signs[number], self._heard_at[number] = signs[number], self.waited_s
        return bool(new)

    def find_lost(self, arrived: Mapping[int, bytes]) -> list[int]:
        """Return the processes that are missing and have been silent for too long."""
        missing = (number for number in self.numbers if number not in arrived)
        return [number for number in missing if self.waited_s - self._heard_at[number] >= self._limit_s]

    def should_report(self) -> bool:
        """Return whether it is time to log which processes are missing."""
        if self.waited_s < self._next_report_s:
            return False
        self._next_report_s = self.waited_s + REPORT_S
        return True


class Contributions:
    """The values that the processes contribute to one rendezvous.

    Small values are listed together. Large ones have keys of their own, which process 0 reads in packs, once.
    """

    def __init__(self, values: KeyValues, folder: str, processes: int) -> None:
        self._values, self._folder, self._processes = values, folder, processes

    def give(self, process: int, value: bytes, *, listed: bool = False) -> None:
        """Contribute the value of a process; `listed`: process 0 sees it at its next look, however large it is."""
        is_small = listed or len(value) <= SMALL_BYTES
        if not is_small:
            self._values.set(f"{self._folder}/large/{process // PACK}/{process}", value)
        self._values.set(f"{self._folder}/from/{process}", _HERE + value if is_small else _APART)

    def look(self) -> dict[int, bytes | None]:
        """Return the values so far by process, None for a large one."""
        listed = by_process(self._values.find(f"{self._folder}/from"))
        return {process: None if each[:1] == _APART else each[1:] for process, each in listed.items()}

    def of(self, found: Mapping[int, bytes | None]) -> Iterator[bytes]:
        """Yield all values in the order of the processes; `found` must have all. A value is held until it is taken."""
        large: dict[int, bytes] = {}
        for process in range(1, self._processes):
            value = found[process]
            if value is None and process not in large:
                folder = f"{self._folder}/large/{process // PACK}"
                large.update(by_process(self._values.find(folder)))
                self._values.delete(folder)
            yield large.pop(process) if value is None else value

    def forget(self) -> None:
        """Delete the values."""
        self._values.delete(f"{self._folder}/from")
        self._values.delete(f"{self._folder}/large")


def by_process(found: Mapping[str, bytes]) -> dict[int, bytes]:
    """Replace the names of keys, which are process numbers, by integers."""
    return {int(name): value for name, value in found.items()}


class _ErrorMessage(msgspec.Struct):
    process: int
    kind: str
    text: str
    errno: int | None = None
    filename: str | None = None
    more: dict[str, tuple[str, ...]] = {}


def encode_error(error: BaseException, process: int) -> bytes:
    """Encode an error of this process for the other processes."""
    try:
        text = str(error).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001  # a value in the error cannot be shown; the others must still get the error
        text = "cannot be shown"
    more = {name: tuple(map(str, getattr(error, name))) for name in _ATTRIBUTES if hasattr(error, name)}
    message = _ErrorMessage(process, type(error).__name__, text, more=more)
    if isinstance(error, StorageError):
        message.errno, message.text = error.errno, str(error.strerror)
        message.filename = None if error.filename is None else str(error.filename)
    return msgspec.json.encode(message)


def decode_error(data: bytes, doing: str, who: str | None = None) -> CheckpointError:
    """Rebuild the error that a process met while `doing` this; `who` names it, None: by its number."""
    message = msgspec.json.decode(data, type=_ErrorMessage)
    where = f"{who or f'process {message.process}'}, {doing}"
    if message.kind == StorageError.__name__ and message.errno is not None:
        return StorageError(message.errno, f"{where}: {message.text}", message.filename)
    kind = _REBUILDABLE.get(message.kind)
    if kind is None:
        return OtherProcessError(f"{where}: {message.kind}: {message.text}")
    error = kind(f"{where}: {message.text}")
    for name, value in message.more.items():
        setattr(error, name, value)
    return error
